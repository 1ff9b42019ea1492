"""Prompt sets: loading, their order over epochs, and the toy task with its tokenizer."""
