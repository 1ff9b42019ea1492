"""The host layer: TEPO on NeMo-Aligner's and NeMo's own Megatron classes."""
