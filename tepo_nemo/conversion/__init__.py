"""Weights between Hugging Face folders and NeMo checkpoints, both ways, without loss (see README.md)."""
