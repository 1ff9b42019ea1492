"""Rollouts: what a generation backend is asked for and what it returns, and how tokens are drawn."""
