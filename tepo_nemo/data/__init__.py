"""Prompt sets: loading, their order over epochs, and the embedded tasks with their tokenizer."""
