"""From a belief to a batch: what a task is worth, how many an environment may have, and which are drawn."""

from envsched_jax.select import greedy, logdet, quota, sample, value

__all__ = ["greedy", "logdet", "quota", "sample", "value"]
