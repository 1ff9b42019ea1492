"""TEPO and the methods it is compared with, as a plugin for NVIDIA NeMo-Aligner."""

__version__ = "0.1.0"
