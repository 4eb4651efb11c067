"""What rolling out a task is worth: what it is believed to teach, and what is not known about it, per what it costs."""

import jax
import jax.numpy as jnp

from envsched_jax.types import Belief, Graph, History

LARGEST_VARIANCE = 0.25  # of a reward in [0, 1]; the scale of coverage beside variances
SMALLEST_SPREAD = 1e-3  # variance of the rewards of an environment below which its tasks are not told apart
LEAST_COST = 1e-2  # relative to the mean; a task is not believed to be cheaper than this


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


def coverage_bonus(graph: Graph, counts: jax.Array, coverage: tuple[float, float, float]) -> jax.Array:
    """Returns ``l_env u(environment) + l_pat u(pattern) + l_task u(task)``, f32[N].

    The counts (f32[N], see ``visit_counts``) of an environment or pattern are summed over its tasks; ``coverage`` is
    ``(l_env, l_pat, l_task)``.
    """
    nodes = graph.nodes
    per_env = jax.ops.segment_sum(counts, nodes.env, graph.globals.env_mask.shape[0])
    per_pattern = jax.ops.segment_sum(counts, nodes.pattern, graph.globals.pattern_mask.shape[0])
    return bonus(per_env[nodes.env], per_pattern[nodes.pattern], counts, coverage)


def bonus(
    per_env: jax.Array, per_pattern: jax.Array, per_task: jax.Array, coverage: tuple[float, float, float]
) -> jax.Array:
    """Returns the coverage bonus of some tasks, f32[C], by the visits to their environment, their pattern and them."""
    l_env, l_pattern, l_task = coverage
    return l_env * novelty(per_env) + l_pattern * novelty(per_pattern) + l_task * novelty(per_task)


def combine(
    graph: Graph, belief: Belief, counts: jax.Array, *, target: str, coverage: tuple[float, float, float]
) -> jax.Array:
    """Returns the value of every task, f32[N], positive: ``target + scale * coverage_bonus``.

    ``target='p_informative'`` has scale 1, ``'variance'`` scale 1/4, the largest variance of a reward in [0, 1], so
    that the same ``coverage`` means the same beside both. ``score`` gives the target that an optimiser asks for.

    Args:
      graph: gives environment and pattern of every task.
      belief: f32[N] per field.
      counts: discounted visits, f32[N], see ``visit_counts``.
      target: 'p_informative' or 'variance'.
      coverage: ``(l_env, l_pat, l_task)``.

    Raises:
      ValueError: for an unknown ``target``.
    """
    if target not in ("p_informative", "variance"):
        raise ValueError(f"value must be 'p_informative' or 'variance', got {target!r}")
    return with_bonus(belief, coverage_bonus(graph, counts, coverage), target=target)


def with_bonus(belief: Belief, unknown: jax.Array, *, target: str) -> jax.Array:
    """Returns the value of some tasks, f32[C], from what is believed of them and their coverage bonus."""
    if target == "variance":
        return belief.variance + LARGEST_VARIANCE * unknown
    return belief.p_informative + unknown


def score(graph: Graph, belief: Belief, *, std: str) -> jax.Array:
    """Returns what a group is expected to give an optimiser that divides by ``std``, f32[N], at least 0.

    With the advantage ``A = (r - mean of the group) / s`` a group moves the policy by ``sum_g A_g grad log p_g``, whose
    expected squared length grows with ``E[mean_g A_g^2] = E[sigma^2 / s^2]``, where ``sigma`` is the deviation within
    the group. What is left of the magnitude depends on ``s``, named as in ``train.advantages``; 'environment' is for
    trainers that normalise per environment:

    - 'group', ``s = sigma``: every group with a difference counts the same, ``P(sigma > 0)``.
    - 'environment', ``s`` the deviation of all rewards of the environment: ``E[sigma^2] / s_env^2``, with ``s_env^2``
      the mean variance within its eligible tasks plus the variance of their means (law of total variance), both as
      believed and every task alike. It is 1 on average where the tasks of an environment are equally hard.
    - 'none' and 'batch', ``s`` the same for all tasks: ``E[sigma^2]``, in units of 1/4, the largest of a reward in
      [0, 1].

    All are on the scale on which ``coverage_bonus`` is added as it is. For ``E[sigma]`` instead, halve the power of
    the draw.

    Args:
      graph: gives environment and mask of every task.
      belief: f32[N] per field.
      std: 'group', 'environment', 'batch' or 'none'.

    Raises:
      ValueError: for an unknown ``std``.
    """
    if std not in ("group", "environment", "batch", "none"):
        raise ValueError(f"std must be 'group', 'environment', 'batch' or 'none', got {std!r}")
    if std == "group":
        return belief.p_informative
    if std != "environment":
        return belief.variance / LARGEST_VARIANCE
    env, num_envs = graph.nodes.env, graph.globals.env_mask.shape[0]
    real = graph.nodes.mask.astype(jnp.float32)

    def average(x: jax.Array) -> jax.Array:
        tasks = jax.ops.segment_sum(real, env, num_envs)
        return jax.ops.segment_sum(real * x, env, num_envs) / jnp.maximum(tasks, 1.0)

    between = average(jnp.square(belief.mean - average(belief.mean)[env]))
    return belief.variance / jnp.maximum(average(belief.variance) + between, SMALLEST_SPREAD)[env]


def per_cost(value: jax.Array, cost: jax.Array, mask: jax.Array, *, alpha: float | jax.Array) -> jax.Array:
    """Returns ``value / (cost / mean cost) ** alpha``, f32[N]: a task of average cost keeps its value.

    0 leaves the value alone. 1 is value per cost, for the most value out of a budget. 1/2 is the optimal allocation of
    survey sampling (Neyman 1934): with ``value`` a standard deviation, drawing in proportion to ``value / sqrt(cost)``
    gives the least variance for what is spent.

    A cost below a hundredth of the mean counts as that, one that is not finite as the mean, and where no mean is above
    0, as when nobody reports costs, the value is returned as it is.

    Args:
      value: f32[N], at least 0.
      cost: f32[N], at least 0, in any unit, see ``belief.cost``.
      mask: bool[N], the tasks over which the mean is taken.
      alpha: from 0 to 1.
    """
    known = mask & jnp.isfinite(cost)
    mean = jnp.where(known, cost, 0.0).sum() / jnp.maximum(known.sum(), 1).astype(jnp.float32)
    usable = jnp.isfinite(cost) & (mean > 0.0)
    relative = jnp.where(usable, cost / jnp.where(mean > 0.0, mean, 1.0), 1.0)
    return value / jnp.maximum(relative, LEAST_COST) ** alpha
