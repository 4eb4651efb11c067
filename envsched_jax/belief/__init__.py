"""From recorded outcomes to a belief about every task: own record, environment, neighbours along the graph."""

from envsched_jax.belief import diffusion, environment, history, informative

__all__ = ["diffusion", "environment", "history", "informative"]
