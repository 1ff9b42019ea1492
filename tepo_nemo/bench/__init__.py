"""Benchmarks: ours beside other implementations, in one run on one machine."""
