"""Rollout engines that run inside the training process."""
