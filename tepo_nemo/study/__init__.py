"""Experiments x seeds, and a report that compares them."""
