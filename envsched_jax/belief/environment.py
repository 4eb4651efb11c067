"""Environment means, and how a task's own record is weighed against what is borrowed from others."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from envsched_jax.belief.informative import p_informative
from envsched_jax.types import Belief, Graph, History


class Moments(NamedTuple):
    """Mean reward, within-task variance and share of informative groups; also used for weights and for sums."""

    mean: jax.Array
    variance: jax.Array
    informative: jax.Array


def sums(history: History) -> Moments:
    """Returns the sums behind a task's own moments, f32[N] each."""
    return Moments(history.s1, history.ssw, history.informative)


def counts(history: History) -> Moments:
    """Returns what the sums are divided by: rollouts, degrees of freedom and groups, f32[N] each."""
    return Moments(history.n, history.dof, history.groups)


def in_units(rollouts: float | jax.Array, group_size: int) -> Moments:
    """Returns a weight given in rollouts in the units of ``counts``: rollouts, degrees of freedom and groups."""
    return Moments(*(jnp.asarray(x, jnp.float32) for x in (rollouts, rollouts, rollouts / group_size)))


def means(graph: Graph, history: History, weight: Moments, prior: Moments) -> tuple[Moments, Moments]:
    """Returns the moments of every environment and the evidence behind them, each f32[E].

    The pool's moments are shrunk to ``prior``, those of an environment to the pool's, each time with ``weight``.
    Every rollout counts once, whichever task it belongs to.
    """
    num_envs = graph.globals.env_mask.shape[0]

    def per_env(x: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(x, graph.nodes.env, num_envs)

    return shrunk(Moments(*map(per_env, sums(history))), Moments(*map(per_env, counts(history))), weight, prior)


def shrunk(total: Moments, count: Moments, weight: Moments, prior: Moments) -> tuple[Moments, Moments]:
    """Returns what ``means`` does from the sums and counts of every environment, f32[E] each."""
    values = []
    for env_total, env_count, c, constant in zip(total, count, weight, prior, strict=True):
        pool = blend(env_total.sum(), env_count.sum(), c, constant)
        values.append(blend(env_total, env_count, c, pool))
    return Moments(*values), count


def blend(total: jax.Array, count: jax.Array, weight: jax.Array, value: jax.Array) -> jax.Array:
    """Returns ``(total + weight * value) / (count + weight)``, and ``value`` where nothing has any weight."""
    mass = count + weight
    return jnp.where(mass > 0.0, (total + weight * value) / jnp.where(mass > 0.0, mass, 1.0), value)


def to_belief(moments: Moments, evidence: jax.Array, group_size: int, informative: str) -> Belief:
    """Returns the belief with these moments.

    ``informative='beta'`` derives P(informative) from mean and variance, for binary rewards; ``'share'`` takes the
    believed share of informative groups itself, for any reward and for groups as large as those observed.
    """
    if informative not in ("beta", "share"):
        raise ValueError(f"informative must be 'beta' or 'share', got {informative!r}")
    if informative == "beta":
        p = p_informative(moments.mean, moments.variance, group_size)
    else:
        p = jnp.clip(moments.informative, 0.0, 1.0)
    return Belief(moments.mean, jnp.maximum(moments.variance, 0.0), p, evidence)


def believe(
    graph: Graph,
    history: History,
    *,
    own: bool,
    c: float | jax.Array,
    prior: Moments,
    group_size: int,
    informative: str,
) -> Belief:
    """Returns the belief without the graph: own records over environment means, or the means alone.

    With ``own`` a task's own sums are blended with its environment's mean at weight ``c`` (in rollouts); without, all
    tasks of an environment are believed alike.
    """
    weight = in_units(c, group_size)
    env_moments, env_counts = means(graph, history, weight, prior)
    moments = Moments(*(value[graph.nodes.env] for value in env_moments))
    if not own:
        return to_belief(moments, env_counts.mean[graph.nodes.env], group_size, informative)
    rows = zip(sums(history), counts(history), weight, moments, strict=True)
    posterior = Moments(*(blend(total, count, c_kind, value) for total, count, c_kind, value in rows))
    return to_belief(posterior, history.n, group_size, informative)
