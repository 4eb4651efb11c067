"""Baselines: shuffled epochs, even over environments, and the one that knows the truth."""

import jax
import jax.numpy as jnp

from envsched_jax.schedulers import common
from envsched_jax.select import quota, sample
from envsched_jax.types import Batch, Graph, Key, Outcome, Scheduler, SchedulerState

TIE = 1e-4  # size of the random part that breaks ties between equal truths


def epoch_score(key: Key, graph: Graph, state: SchedulerState) -> jax.Array:
    """Returns scores by which the least visited tasks come first and, among equals, a random one, f32[N]."""
    nodes = graph.nodes
    visits = state.history.visits
    fewest = jnp.where(nodes.mask, visits, jnp.iinfo(jnp.int32).max).min()
    return sample.uniform(key, nodes.uid) - jnp.maximum(visits - fewest, 0).astype(jnp.float32)


def uniform(*, batch_size: int, group_size: int) -> Scheduler:
    """Returns shuffled epochs: fewest visits first, in random order within.

    While no batch is in flight this is the same as shuffling the pool, going through it and shuffling anew, also
    when the batch does not divide the pool. Tasks that join later come first until they have caught up.
    """
    common.check_sizes(batch_size, group_size)

    def select(key: Key, graph: Graph, state: SchedulerState) -> Batch:
        node, mask = sample.draw(epoch_score(key, graph, state), graph.nodes.mask, graph.nodes.env, None, batch_size)
        return common.to_batch(node, mask, jnp.zeros_like(mask), jnp.ones_like(state.truth))

    def observe(graph: Graph, state: SchedulerState, outcome: Outcome) -> SchedulerState:
        return common.observe(graph, state, outcome, gamma=1.0)

    return Scheduler(common.init, select, observe)


def stratified(*, batch_size: int, group_size: int) -> Scheduler:
    """Returns the scheduler that is even over environments, with shuffled epochs inside each.

    Fractions of a slot are owed and carried over, so that all environments get the same over time.
    """
    common.check_sizes(batch_size, group_size)

    def select(key: Key, graph: Graph, state: SchedulerState) -> Batch:
        slots = quota.allocate(graph, state.quota_carry, batch_size=batch_size, mode="uniform")
        score = epoch_score(key, graph, state)
        node, mask = sample.draw(score, graph.nodes.mask, graph.nodes.env, slots, batch_size)
        return common.to_batch(node, mask, jnp.zeros_like(mask), jnp.ones_like(state.truth))

    def observe(graph: Graph, state: SchedulerState, outcome: Outcome) -> SchedulerState:
        return common.observe(graph, state, outcome, gamma=1.0, mode="uniform")

    return Scheduler(common.init, select, observe)


def oracle(*, batch_size: int, group_size: int, select: str = "sample", power: float = 8.0) -> Scheduler:
    """Returns the scheduler whose value is ``state.truth``, filled by an evaluator from fresh rollouts.

    ``select='sample'`` draws in proportion to ``truth ** power``, ``'argmax'`` takes the largest. What is not finite
    counts as 0.
    """
    common.check_sizes(batch_size, group_size)
    if select not in ("sample", "argmax"):
        raise ValueError(f"select must be one of sample, argmax, got {select!r}")

    def choose(key: Key, graph: Graph, state: SchedulerState) -> Batch:
        nodes = graph.nodes
        truth = jnp.where(jnp.isfinite(state.truth), state.truth, 0.0)
        if select == "sample":
            score = sample.keys(key, nodes.uid, truth, power)
        else:
            score = truth + TIE * sample.uniform(key, nodes.uid)
        node, mask = sample.draw(score, nodes.mask, nodes.env, None, batch_size)
        return common.to_batch(node, mask, jnp.zeros_like(mask), truth)

    def observe(graph: Graph, state: SchedulerState, outcome: Outcome) -> SchedulerState:
        return common.observe(graph, state, outcome, gamma=1.0)

    return Scheduler(common.init, choose, observe)
