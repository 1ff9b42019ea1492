"""The training loop. It knows the host only through the `Policy` protocol and the rollout protocol."""
