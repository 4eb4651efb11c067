"""What rolling out a task is worth: what it is believed to teach, plus what is not known about it."""

import jax
import jax.numpy as jnp

from envsched_jax.types import Belief, Graph, History

LARGEST_VARIANCE = 0.25  # of a reward in [0, 1]; the scale of coverage beside variances


def visit_counts(history: History, step: jax.Array, group_size: int, gamma: float | jax.Array) -> jax.Array:
    """Returns how often each task was rolled out, discounted, f32[N].

    Valid rollouts per group size, ``n / G``, but at least ``gamma ** (age of the last visit)``, the discounted count
    of that visit alone: a task whose rollouts all failed does not stay new for ever.
    """
    age = jnp.maximum(step - 1 - history.last_step, 0).astype(jnp.float32)
    last = jnp.where(history.visits > 0, gamma**age, 0.0)
    return jnp.maximum(history.n / group_size, last)


def novelty(count: jax.Array) -> jax.Array:
    """Returns ``u = 1 / sqrt(1 + count)``."""
    return jax.lax.rsqrt(1.0 + count)


def combine(
    graph: Graph, belief: Belief, counts: jax.Array, *, target: str, coverage: tuple[float, float, float]
) -> jax.Array:
    """Returns the value of every task, f32[N], positive.

    ``target + scale (l_env u(environment) + l_pat u(pattern) + l_task u(task))`` with the counts of an environment or
    pattern summed over its tasks. ``target='p_informative'`` has scale 1, ``'variance'`` scale 1/4, the largest
    variance of a reward in [0, 1], so that the same ``coverage`` means the same beside both.

    Args:
      graph: gives environment and pattern of every task.
      belief: f32[N] per field.
      counts: discounted visits, f32[N], see ``visit_counts``.
      target: 'p_informative' or 'variance'.
      coverage: ``(l_env, l_pat, l_task)``.
    """
    if target not in ("p_informative", "variance"):
        raise ValueError(f"value must be 'p_informative' or 'variance', got {target!r}")
    nodes = graph.nodes
    per_env = jax.ops.segment_sum(counts, nodes.env, graph.globals.env_mask.shape[0])
    per_pattern = jax.ops.segment_sum(counts, nodes.pattern, graph.globals.pattern_mask.shape[0])
    l_env, l_pattern, l_task = coverage
    unknown = (
        l_env * novelty(per_env)[nodes.env] + l_pattern * novelty(per_pattern)[nodes.pattern] + l_task * novelty(counts)
    )
    if target == "variance":
        return belief.variance + LARGEST_VARIANCE * unknown
    return belief.p_informative + unknown
