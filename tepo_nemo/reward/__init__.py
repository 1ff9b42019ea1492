"""Grading of responses: a reward is a value with a status, and a failure is never a zero."""
