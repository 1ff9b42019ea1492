"""Rollouts from servers that speak OpenAI's completions protocol; see README.md in this folder."""
