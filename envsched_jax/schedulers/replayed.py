"""Baselines from curricula of environments that replay what was measured: learnability (SFL) and prioritised replay."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from envsched_jax.belief import history
from envsched_jax.schedulers import common, tally
from envsched_jax.schedulers.baselines import epoch_score
from envsched_jax.select import sample
from envsched_jax.types import Batch, Graph, Key, Outcome, Scheduler, SchedulerState

MEASURED, FRESH, CHOICE = 0, 1, 2  # streams of random numbers within one call of select


class Scores(NamedTuple):
    """The score of each task when it was last measured."""

    score: jax.Array  # f32[N], 0 where never measured
    measured: jax.Array  # bool[N], at least one valid rollout so far


def learnability(*, batch_size: int, group_size: int, share: float = 0.5) -> Scheduler:
    """Returns sampling for learnability (SFL, arXiv 2408.15099): half measured p(1-p), half uniform.

    ``share`` of the batch, rounded down, are the tasks with the largest ``p(1-p)`` at their last visit, ties at
    random; the others go through the pool in shuffled epochs and are marked ``explore``. SFL measures random levels in
    a pass of its own before training and draws its half from the best 100 to 1,000; here there is no such pass, what is
    rolled out is what is known and charged, and the best are taken outright. A task without learnability (p of 0 or 1)
    gives its place to the uniform half. ``value`` is the last measured ``p(1-p)``.

    Raises:
      ValueError: for sizes below 1 or a share outside [0, 1].
    """
    common.check_sizes(batch_size, group_size)
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"share must lie in [0, 1], got {share}")
    count = math.floor(share * batch_size + 1e-6)

    def select(key: Key, graph: Graph, state: SchedulerState) -> Batch:
        nodes, score = graph.nodes, state.memory.score
        first, known = tally.largest(jax.random.fold_in(key, MEASURED), graph, score, nodes.mask & (score > 0.0), count)
        left = nodes.mask & ~jnp.zeros_like(nodes.mask).at[first].max(known)
        fresh = epoch_score(jax.random.fold_in(key, FRESH), graph, state)
        others, found = sample.draw(fresh, left, nodes.env, None, batch_size)
        slot = jnp.arange(batch_size)
        place = slot - known.sum()  # the measured ones come first, the uniform ones fill what is left
        measured = place < 0
        node = jnp.where(measured, jnp.pad(first, (0, batch_size - count)), others[jnp.maximum(place, 0)])
        mask = measured | found[jnp.maximum(place, 0)]
        return common.to_batch(node, mask, ~measured, score)

    def observe(graph: Graph, state: SchedulerState, outcome: Outcome) -> SchedulerState:
        n, passes = tally.per_task(outcome, state.memory.score.shape[0])
        rate = passes / jnp.maximum(n, 1.0)
        memory = _replace(state.memory, rate * (1.0 - rate), n > 0.0)
        return common.observe(graph, state, outcome, gamma=1.0)._replace(memory=memory)

    return Scheduler(_init, select, observe)


def plr(
    *,
    batch_size: int,
    group_size: int,
    replay: float = 0.8,
    staleness: float = 0.3,
    temperature: float = 0.3,
    capacity: int = 4000,
    fill: float = 0.5,
) -> Scheduler:
    """Returns prioritised level replay (arXiv 2010.03934; robust form 2110.02439) with the defaults of its mazes.

    A batch is either replayed or new. It is replayed with probability ``replay`` once ``fill`` of the buffer has been
    measured: drawn without replacement in proportion to ``(1 - staleness) rank^(-1/temperature) / Z + staleness
    age / Z'``, with ranks by score, the best first, and age in steps since the last visit. Otherwise it holds tasks
    that were never measured, the least visited first, at random (``explore``). If either kind runs out the other
    follows, so once all tasks are known every batch is replayed.

    The score is the positive value loss with the group's mean as the value, at the last visit: ``mean over the group
    of max(r - mean, 0)``; for passes and failures this is ``p(1-p)``. The pool is finite, so the buffer holds all
    measured tasks and ``capacity`` only sets when replay starts. That new levels give no gradient (the robust form) is
    up to the trainer; here all that is rolled out is trained on and charged. ``value`` is the replay probability.

    Raises:
      ValueError: for sizes or capacity below 1, a temperature that is not positive, or a share outside [0, 1].
    """
    common.check_sizes(batch_size, group_size)
    if capacity < 1 or temperature <= 0.0:
        raise ValueError(f"capacity and temperature must be positive, got {capacity} and {temperature}")
    if not all(0.0 <= x <= 1.0 for x in (replay, staleness, fill)):
        raise ValueError(f"replay, staleness and fill must lie in [0, 1], got {replay}, {staleness} and {fill}")

    def select(key: Key, graph: Graph, state: SchedulerState) -> Batch:
        nodes = graph.nodes
        known = nodes.mask & state.memory.measured
        stream = jax.random.fold_in(key, MEASURED)
        tie = sample.uniform(jax.random.fold_in(stream, 0), nodes.uid)
        weight = _replay_weights(tie, known, state, staleness, temperature)
        room = jnp.minimum(nodes.mask.sum(), capacity).astype(jnp.float32)
        ready = known.sum().astype(jnp.float32) >= fill * room
        replayed = ready & (jax.random.uniform(jax.random.fold_in(key, CHOICE), dtype=jnp.float32) < replay)

        again = jnp.log(jnp.maximum(weight, 1e-30)) + sample.gumbel(jax.random.fold_in(stream, 1), nodes.uid)
        fresh = epoch_score(jax.random.fold_in(key, FRESH), graph, state)
        score = jnp.where(known, _squash(again), _squash(fresh)) + jnp.where(known == replayed, 2.0, 0.0)
        node, mask = sample.draw(score, nodes.mask, nodes.env, None, batch_size)
        return common.to_batch(node, mask, ~known[node], weight)

    def observe(graph: Graph, state: SchedulerState, outcome: Outcome) -> SchedulerState:
        num_nodes = state.memory.score.shape[0]
        node, n, _ = tally.per_row(outcome)
        valid = history.counted(outcome)
        reward = jnp.where(valid, outcome.reward, 0.0)
        mean = reward.sum(axis=1) / jnp.maximum(n, 1.0)
        gain = jnp.where(valid, jnp.maximum(reward - mean[:, None], 0.0), 0.0).sum(axis=1)
        rollouts, _ = tally.per_task(outcome, num_nodes)
        total = jnp.zeros(num_nodes, jnp.float32).at[node].add(gain)
        memory = _replace(state.memory, total / jnp.maximum(rollouts, 1.0), rollouts > 0.0)
        return common.observe(graph, state, outcome, gamma=1.0)._replace(memory=memory)

    return Scheduler(_init, select, observe)


def _replay_weights(
    tie: jax.Array, known: jax.Array, state: SchedulerState, staleness: float, temperature: float
) -> jax.Array:
    """Returns the probability that a single replay draws each task, f32[N]; 0 where ``known`` is false."""
    index = jnp.arange(tie.shape[0], dtype=jnp.int32)
    order = jax.lax.sort((~known, -state.memory.score, tie, index), num_keys=3)[-1]
    rank = jnp.zeros_like(index).at[order].set(index + 1, unique_indices=True).astype(jnp.float32)
    by_score = jnp.where(known, rank ** (-1.0 / temperature), 0.0)
    age = jnp.maximum(state.step - 1 - state.history.last_step, 0)
    by_age = jnp.where(known, age, 0).astype(jnp.float32)
    by_age = jnp.where(by_age.sum() > 0.0, by_age, known.astype(jnp.float32))
    return (1.0 - staleness) * _normalised(by_score) + staleness * _normalised(by_age)


def _normalised(x: jax.Array) -> jax.Array:
    total = x.sum()
    return x / jnp.where(total > 0.0, total, 1.0)


def _squash(x: jax.Array) -> jax.Array:
    """Returns a number in (-1, 1) in the same order."""
    return x / (1.0 + jnp.abs(x))


def _init(graph: Graph) -> SchedulerState:
    num_nodes = graph.nodes.mask.shape[0]
    return common.init(graph, Scores(jnp.zeros(num_nodes, jnp.float32), jnp.zeros(num_nodes, bool)))


def _replace(memory: Scores, score: jax.Array, seen: jax.Array) -> Scores:
    return Scores(jnp.where(seen, score, memory.score), memory.measured | seen)
