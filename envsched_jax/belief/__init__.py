"""From recorded outcomes to a belief about every task: own record, environment, neighbours along the graph."""

from envsched_jax.belief import cost, diffusion, environment, history, informative, partial

__all__ = ["cost", "diffusion", "environment", "history", "informative", "partial"]
