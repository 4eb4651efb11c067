"""Environments as pure functions on one item; the rollout engine batches them."""
