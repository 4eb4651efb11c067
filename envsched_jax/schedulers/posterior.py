"""Baselines with a Beta posterior per task: MoPPS and MaPP. They share nothing between tasks."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from envsched_jax.belief.informative import p_informative
from envsched_jax.schedulers import common, tally
from envsched_jax.select import sample
from envsched_jax.types import Batch, Belief, Graph, Key, Outcome, Scheduler, SchedulerState

CANDIDATES, DRAW = 0, 1  # streams of random numbers within one call of select


class Counts(NamedTuple):
    """A Beta posterior per task, as what it has beyond the prior, so that a row of zeros is a new task."""

    passes: jax.Array  # f32[N]
    failures: jax.Array  # f32[N]
    prior: jax.Array  # f32[2], pseudo-passes and pseudo-failures


def believe(graph: Graph, state: SchedulerState, *, group_size: int, **_: Any) -> Belief:
    """Returns the posterior of every task, f32[N] per field: mean, ``E p(1-p)``, ``E[1 - p^G - (1-p)^G]``."""
    alpha, beta = _parameters(state.memory)
    total = alpha + beta
    mean = alpha / total
    variance = mean * beta / (total + 1.0)
    informative = p_informative(mean, variance, group_size)
    return Belief(mean, variance, informative, state.memory.passes + state.memory.failures)


def mopps(
    *,
    batch_size: int,
    group_size: int,
    candidates: int = 16,
    discount: float = 1.0,
    prior: tuple[float, float] = (1.0, 1.0),
    target: float = 0.5,
) -> Scheduler:
    """Returns MoPPS (arXiv 2507.04632): Thompson sampling of pass rates, the nearest to ``target`` are picked.

    ``p ~ Beta(a, b)`` is drawn for ``candidates * batch_size`` random tasks and the B with the smallest
    ``(p - target)^2`` are taken. A task that came back with k valid rollouts and s passes is updated by
    ``a <- discount a + (1 - discount) a_0 + s``, ``b <- discount b + (1 - discount) b_0 + k - s``; no other task
    changes. Defaults are the authors' for MATH; for their other pools they have 8 candidates and discount 0.5. A reward
    between 0 and 1 counts as part of a pass; the age of an outcome is ignored. ``value`` is ``-(p - target)^2``.

    Raises:
      ValueError: for sizes or candidates below 1, a discount outside [0, 1] or a prior that is not positive.
    """
    _check(batch_size, group_size, discount, prior)
    if candidates < 1:
        raise ValueError(f"candidates must be at least 1, got {candidates}")

    def select(key: Key, graph: Graph, state: SchedulerState) -> Batch:
        nodes = graph.nodes
        score = sample.uniform(jax.random.fold_in(key, CANDIDATES), nodes.uid)
        count = min(candidates * batch_size, nodes.uid.shape[0])
        node, mask = sample.draw(score, nodes.mask, nodes.env, None, count)
        alpha, beta = (x[node] for x in _parameters(state.memory))
        rate = _thompson(jax.random.fold_in(key, DRAW), nodes.uid[node], alpha, beta)
        worth = jnp.where(mask, -jnp.square(rate - target), -jnp.inf)
        value = jnp.full(nodes.uid.shape, -jnp.inf, jnp.float32).at[node].max(worth)
        node, mask = sample.draw(value, value > -jnp.inf, nodes.env, None, batch_size)
        belief = believe(graph, state, group_size=group_size)
        return common.to_batch(node, mask, jnp.zeros_like(mask), value, belief)

    return Scheduler(_init(prior), select, _observe(discount))


def mapp(
    *, batch_size: int, group_size: int, discount: float = 0.5, prior: tuple[float, float] = (1.0, 1.0)
) -> Scheduler:
    """Returns the prompt selection of MaPP (arXiv 2609.34990): tasks are drawn in proportion to P(informative).

    The posterior is that of ``mopps``, forgetting half at each visit; the value is its
    ``E[1 - p^G - (1-p)^G] = 1 - [B(a+G, b) + B(a, b+G)] / B(a, b)``. The draw is without replacement from the whole
    pool. The authors' posterior advantages are no part of a scheduler.

    Raises:
      ValueError: for sizes below 1, a discount outside [0, 1] or a prior that is not positive.
    """
    _check(batch_size, group_size, discount, prior)

    def select(key: Key, graph: Graph, state: SchedulerState) -> Batch:
        nodes = graph.nodes
        belief = believe(graph, state, group_size=group_size)
        score = sample.keys(key, nodes.uid, belief.p_informative, 1.0)
        node, mask = sample.draw(score, nodes.mask, nodes.env, None, batch_size)
        return common.to_batch(node, mask, jnp.zeros_like(mask), belief.p_informative, belief)

    return Scheduler(_init(prior), select, _observe(discount))


def _init(prior: tuple[float, float]) -> Callable[[Graph], SchedulerState]:
    def init(graph: Graph) -> SchedulerState:
        num_nodes = graph.nodes.mask.shape[0]
        memory = Counts(
            jnp.zeros(num_nodes, jnp.float32), jnp.zeros(num_nodes, jnp.float32), jnp.asarray(prior, jnp.float32)
        )
        return common.init(graph, memory)

    return init


def _observe(discount: float) -> Callable[[Graph, SchedulerState, Outcome], SchedulerState]:
    def observe(graph: Graph, state: SchedulerState, outcome: Outcome) -> SchedulerState:
        memory = state.memory
        n, passes = tally.per_task(outcome, memory.passes.shape[0])
        memory = memory._replace(
            passes=jnp.where(n > 0.0, discount * memory.passes + passes, memory.passes),
            failures=jnp.where(n > 0.0, discount * memory.failures + (n - passes), memory.failures),
        )
        return common.observe(graph, state, outcome, gamma=1.0)._replace(memory=memory)

    return observe


def _parameters(memory: Counts) -> tuple[jax.Array, jax.Array]:
    return memory.passes + memory.prior[0], memory.failures + memory.prior[1]


def _thompson(key: Key, uid: jax.Array, alpha: jax.Array, beta: jax.Array) -> jax.Array:
    """Returns one draw from Beta(alpha, beta) per task; it depends on ``key``, uid and posterior only."""

    def one(uid: jax.Array, alpha: jax.Array, beta: jax.Array) -> jax.Array:
        return jax.random.beta(jax.random.fold_in(key, uid), alpha, beta, dtype=jnp.float32)

    return jax.vmap(one)(uid, alpha, beta)


def _check(batch_size: int, group_size: int, discount: float, prior: tuple[float, float]) -> None:
    common.check_sizes(batch_size, group_size)
    if not 0.0 <= discount <= 1.0:
        raise ValueError(f"discount must lie in [0, 1], got {discount}")
    if len(prior) != 2 or min(prior) <= 0.0:
        raise ValueError(f"prior must be two positive numbers, got {prior}")
