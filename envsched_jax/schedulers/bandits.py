"""Baselines that choose among environments: SEC, DUMP and SCALER. All rewards are read per environment."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from envsched_jax.belief import history
from envsched_jax.schedulers import common, tally
from envsched_jax.select import quota, sample
from envsched_jax.types import Batch, Graph, Key, Outcome, Scheduler, SchedulerState

ARM, TASK = 0, 1  # streams of random numbers within one call of select
FLAT = 1e-6  # a slope of difficulty up to this is none: sums in float32
OTHERS = 20.0  # how far behind the active environments the others stand, beyond any distance in levels


class Learning(NamedTuple):
    """What SEC remembers."""

    q: jax.Array  # f32[E], believed size of an advantage


class Window(NamedTuple):
    """What DUMP remembers: a ring of the last sizes of advantages."""

    size: jax.Array  # f32[E, W]
    rollouts: jax.Array  # i32[E], pulls of the arm, never discounted; slot of the next entry modulo W


class Ladder(NamedTuple):
    """What SCALER remembers of every environment. Counts start anew when an environment is replaced."""

    active: jax.Array  # bool[E], in the active set
    resting: jax.Array  # bool[E], replaced at the last step
    difficulty: jax.Array  # f32[E], in [0, levels]
    visits: jax.Array  # i32[E]
    trail: jax.Array  # f32[E, W], difficulty at the last W visits, the newest last
    zeros: jax.Array  # i32[E], visits in a row with accuracy 0
    tops: jax.Array  # i32[E], visits in a row at the highest difficulty


def sec(*, batch_size: int, group_size: int, rate: float = 0.5, temperature: float = 0.4) -> Scheduler:
    """Returns SEC, the self-evolving curriculum (arXiv 2505.14970), with environments as its categories.

    Every slot of a batch draws an environment in proportion to ``exp(Q / temperature)`` among those with tasks left,
    then one of its tasks evenly. ``Q <- (1 - rate) Q + rate * mean |A|`` over the valid rollouts of the environment,
    see ``tally.absolute_advantage``. As in the authors' code an environment without a row in the batch is updated
    towards 0. Where rows failed altogether nothing was measured, and Q stays. The authors' temperature is 1.0 for
    Countdown, 0.4 for mathematics and 0.2 for two-dimensional categories; this is the middle one. ``value`` is Q.

    Raises:
      ValueError: for sizes below 1, a rate outside [0, 1] or a temperature that is not positive.
    """
    common.check_sizes(batch_size, group_size)
    if not 0.0 <= rate <= 1.0 or temperature <= 0.0:
        raise ValueError(f"rate must lie in [0, 1] and temperature be positive, got {rate} and {temperature}")

    def init(graph: Graph) -> SchedulerState:
        return common.init(graph, Learning(jnp.zeros(graph.globals.env_mask.shape[0], jnp.float32)))

    def select(key: Key, graph: Graph, state: SchedulerState) -> Batch:
        return _draw_arms(key, graph, state.memory.q, temperature, batch_size)

    def observe(graph: Graph, state: SchedulerState, outcome: Outcome) -> SchedulerState:
        q = state.memory.q
        size, valid = tally.absolute_advantage(outcome)
        total, count = _per_env(graph, outcome, size.sum(axis=1), q), _per_env(graph, outcome, valid.sum(axis=1), q)
        failed = (_per_env(graph, outcome, history.present(outcome), q) > 0.0) & (count == 0.0)
        moved = (1.0 - rate) * q + rate * total / jnp.maximum(count, 1.0)
        memory = Learning(jnp.where(failed | ~valid.any(), q, moved))
        return common.observe(graph, state, outcome, gamma=1.0)._replace(memory=memory)

    return Scheduler(init, select, observe)


def dump_ucb(*, batch_size: int, group_size: int, window: int = 300, temperature: float = 0.1) -> Scheduler:
    """Returns DUMP (arXiv 2504.09710), with environments as its distributions.

    Every slot of a batch draws an environment in proportion to ``exp(UCB / temperature)`` among those with tasks
    left, then one of its tasks evenly. ``UCB = mean |A| + sqrt(2 ln(N + 1) / (n + 1))``: the mean is over the last
    ``window`` valid rollouts of the environment (0 before the first), n counts all its valid rollouts and N those of
    all environments, never discounted. ``value`` is the UCB.

    Raises:
      ValueError: for sizes or a window below 1, or a temperature that is not positive.
    """
    common.check_sizes(batch_size, group_size)
    if window < 1 or temperature <= 0.0:
        raise ValueError(f"window and temperature must be positive, got {window} and {temperature}")

    def init(graph: Graph) -> SchedulerState:
        num_envs = graph.globals.env_mask.shape[0]
        return common.init(graph, Window(jnp.zeros((num_envs, window), jnp.float32), jnp.zeros(num_envs, jnp.int32)))

    def select(key: Key, graph: Graph, state: SchedulerState) -> Batch:
        return _draw_arms(key, graph, upper_bound(state.memory), temperature, batch_size)

    def observe(graph: Graph, state: SchedulerState, outcome: Outcome) -> SchedulerState:
        size, valid = tally.absolute_advantage(outcome)
        node = jnp.where(history.present(outcome), outcome.node, 0)
        env = jnp.broadcast_to(graph.nodes.env[node][:, None], size.shape)
        memory = _push(state.memory, env.ravel(), size.ravel(), valid.ravel())
        return common.observe(graph, state, outcome, gamma=1.0)._replace(memory=memory)

    return Scheduler(init, select, observe)


def upper_bound(memory: Window) -> jax.Array:
    """Returns DUMP's upper confidence bound of every environment, f32[E]."""
    n = memory.rollouts.astype(jnp.float32)
    mean = memory.size.sum(axis=1) / jnp.clip(n, 1.0, memory.size.shape[1])
    return mean + jnp.sqrt(2.0 * jnp.log(n.sum() + 1.0) / (n + 1.0))


def scaler(
    *,
    batch_size: int,
    group_size: int,
    active: int = 64,
    levels: int = 10,
    target: float = 0.5,
    gain: float = 2.0,
    window: int = 10,
    patience: int = 5,
) -> Scheduler:
    """Returns SCALER (arXiv 2601.04809): a difficulty controller per environment and a set of active environments.

    After a visit with accuracy ``acc``, ``d <- clip(d + clip(gain (acc - target), -1, 1), 0, levels)``. Up to
    ``active`` environments, and no more than the batch has slots, share the slots evenly: one task each where the set
    is as large as the batch, as in the paper. One is replaced by a random other when its difficulty did not rise over
    the last ``window`` visits (slope of least squares), or after ``patience`` visits in a row with accuracy 0, or as
    many at the highest difficulty. It rests for one step, keeps its difficulty, and starts its counts anew.

    The paper's environments generate tasks of any difficulty; those of a pool cannot. What stands in for the knob is
    the order of an environment's tasks by measured pass rate, ``(s + 1) / (n + 2)`` on all records, highest first and
    ties in random order, cut into ``levels + 1`` equal parts; the task is drawn from the part nearest to the rounded
    ``d``, the least visited first, as a generator would not repeat itself. The set is filled at random when a batch is
    selected, and environments enter it when they come back. A visit whose rollouts all failed leaves the controller as
    it is. ``value`` is minus the distance in levels, and 20 less outside the active set.

    Raises:
      ValueError: for sizes, active, levels, window or patience below 1.
    """
    common.check_sizes(batch_size, group_size)
    if min(active, levels, window, patience) < 1:
        raise ValueError(
            f"active, levels, window and patience must be at least 1, got {(active, levels, window, patience)}"
        )

    def init(graph: Graph) -> SchedulerState:
        num_envs = graph.globals.env_mask.shape[0]
        memory = Ladder(
            active=jnp.zeros(num_envs, bool),
            resting=jnp.zeros(num_envs, bool),
            difficulty=jnp.zeros(num_envs, jnp.float32),
            visits=jnp.zeros(num_envs, jnp.int32),
            trail=jnp.zeros((num_envs, window), jnp.float32),
            zeros=jnp.zeros(num_envs, jnp.int32),
            tops=jnp.zeros(num_envs, jnp.int32),
        )
        return common.init(graph, memory)

    def select(key: Key, graph: Graph, state: SchedulerState) -> Batch:
        nodes = graph.nodes
        slots = _active_slots(jax.random.fold_in(key, ARM), graph, state.memory, active, batch_size)
        tie = sample.uniform(jax.random.fold_in(key, TASK), nodes.uid)
        level = _level(graph, state, tie, levels)
        goal = jnp.floor(state.memory.difficulty + 0.5).astype(jnp.int32)[nodes.env]
        value = -jnp.abs(level - goal).astype(jnp.float32) - jnp.where(slots[nodes.env] > 0, 0.0, OTHERS)
        visits = state.history.visits.astype(jnp.float32)
        score = value - 0.5 * visits / (1.0 + visits) + tally.TIE * tie
        node, mask = sample.draw(score, nodes.mask, nodes.env, slots, batch_size)
        return common.to_batch(node, mask, jnp.zeros_like(mask), value)

    def observe(graph: Graph, state: SchedulerState, outcome: Outcome) -> SchedulerState:
        memory = state.memory
        passed, valid = tally.success(outcome)
        count = _per_env(graph, outcome, valid.sum(axis=1), memory.difficulty)
        total = _per_env(graph, outcome, passed.sum(axis=1), memory.difficulty)
        here = _per_env(graph, outcome, history.present(outcome), memory.difficulty) > 0.0
        climbed = _climb(memory, total / jnp.maximum(count, 1.0), count > 0.0, levels=levels, target=target, gain=gain)
        after = _replace_stuck(climbed, here, count > 0.0, patience)
        memory = jax.tree.map(lambda new, old: jnp.where(here.any(), new, old), after, memory)
        return common.observe(graph, state, outcome, gamma=1.0)._replace(memory=memory)

    return Scheduler(init, select, observe)


def _climb(memory: Ladder, accuracy: jax.Array, seen: jax.Array, *, levels: int, target: float, gain: float) -> Ladder:
    """Returns the controllers after a visit of the environments ``seen``."""
    difficulty = memory.difficulty
    moved = jnp.clip(difficulty + jnp.clip(gain * (accuracy - target), -1.0, 1.0), 0.0, levels)
    trail = jnp.concatenate([memory.trail[:, 1:], difficulty[:, None]], axis=1)
    return memory._replace(
        difficulty=jnp.where(seen, moved, difficulty),
        visits=memory.visits + seen.astype(jnp.int32),
        trail=jnp.where(seen[:, None], trail, memory.trail),
        zeros=jnp.where(seen, jnp.where(accuracy <= 0.0, memory.zeros + 1, 0), memory.zeros),
        tops=jnp.where(seen, jnp.where(difficulty >= levels, memory.tops + 1, 0), memory.tops),
    )


def _replace_stuck(memory: Ladder, here: jax.Array, seen: jax.Array, patience: int) -> Ladder:
    """Returns the memory with the environments ``here`` in the active set, and those without progress out of it."""
    window = memory.trail.shape[1]
    time = jnp.arange(window, dtype=jnp.float32) - (window - 1) / 2.0
    rise = ((memory.trail - memory.trail[:, :1]) * time[None, :]).sum(axis=1)  # same sign as the slope
    stuck = (memory.visits >= window) & (rise <= FLAT)
    leave = seen & (stuck | (memory.zeros >= patience) | (memory.tops >= patience))
    return Ladder(
        active=(memory.active | here) & ~leave,
        resting=leave,
        difficulty=memory.difficulty,
        visits=jnp.where(leave, 0, memory.visits),
        trail=jnp.where(leave[:, None], 0.0, memory.trail),
        zeros=jnp.where(leave, 0, memory.zeros),
        tops=jnp.where(leave, 0, memory.tops),
    )


def _active_slots(key: Key, graph: Graph, memory: Ladder, active: int, batch_size: int) -> jax.Array:
    """Returns the slots of every environment, i32[E]: even over the active set, filled up at random."""
    num_envs = memory.active.shape[0]
    luck = sample.uniform(key, jnp.arange(num_envs, dtype=jnp.uint32))
    order = jnp.where(memory.active, 2.0, jnp.where(memory.resting, 0.0, 1.0)) + luck
    order = jnp.where(quota.count_tasks(graph) > 0, order, -jnp.inf)
    best, env = jax.lax.top_k(order, min(active, batch_size, num_envs))
    found = best > -jnp.inf
    count = jnp.maximum(found.sum(dtype=jnp.int32), 1)
    extra = jnp.arange(found.shape[0], dtype=jnp.int32) < batch_size % count
    share = batch_size // count + extra.astype(jnp.int32)
    return jnp.zeros(num_envs, jnp.int32).at[env].add(jnp.where(found, share, 0))


def _level(graph: Graph, state: SchedulerState, tie: jax.Array, levels: int) -> jax.Array:
    """Returns the level of every task within its environment, i32[N] in 0..levels, 0 for the easiest."""
    record, nodes = state.history, graph.nodes
    rate = (jnp.clip(record.s1, 0.0, record.n) + 1.0) / (record.n + 2.0)
    score = jnp.where(nodes.mask, rate + tally.TIE * tie, -jnp.inf)
    rank = sample.rank_in_environment(score, nodes.env)
    return rank * (levels + 1) // jnp.maximum(quota.count_tasks(graph)[nodes.env], 1)


def _draw_arms(key: Key, graph: Graph, value: jax.Array, temperature: float, batch_size: int) -> Batch:
    """Returns a batch whose slots draw environments by softmax one after the other, then tasks evenly."""
    nodes, tasks = graph.nodes, quota.count_tasks(graph)
    arm = jnp.arange(tasks.shape[0], dtype=jnp.uint32)
    key_arm, key_task = (jax.random.fold_in(key, stream) for stream in (ARM, TASK))

    def seat(left: jax.Array, slot: jax.Array) -> tuple[jax.Array, None]:
        score = value / temperature + sample.gumbel(jax.random.fold_in(key_arm, slot), arm)
        best = jnp.argmax(jnp.where(left > 0, score, -jnp.inf))
        return left.at[best].add(-(left > 0).any().astype(jnp.int32)), None

    left, _ = jax.lax.scan(seat, tasks, jnp.arange(batch_size))
    score = sample.uniform(key_task, nodes.uid)
    node, mask = sample.draw(score, nodes.mask, nodes.env, tasks - left, batch_size)
    return common.to_batch(node, mask, jnp.zeros_like(mask), value[nodes.env])


def _push(memory: Window, env: jax.Array, size: jax.Array, valid: jax.Array) -> Window:
    """Returns the window with the valid entries appended in order; the oldest make way."""
    num_envs, window = memory.size.shape
    member = (env[:, None] == jnp.arange(num_envs)[None, :]) & valid[:, None]
    new = member.sum(axis=0, dtype=jnp.int32)
    rank = jnp.take_along_axis(jnp.cumsum(member, axis=0, dtype=jnp.int32), env[:, None], axis=1)[:, 0] - 1
    kept = valid & (rank >= new[env] - window)  # a batch may bring more than the window holds
    row = jnp.where(kept, env, num_envs)
    slot = (memory.rollouts[env] + rank) % window
    return Window(memory.size.at[row, slot].set(size, mode="drop"), memory.rollouts + new)


def _per_env(graph: Graph, outcome: Outcome, x: jax.Array, like: jax.Array) -> jax.Array:
    """Returns the sum of a number per row over the rows of every environment, f32 of the length of ``like``."""
    real = history.present(outcome)
    env = graph.nodes.env[jnp.where(real, outcome.node, 0)]
    return jax.ops.segment_sum(jnp.where(real, x.astype(jnp.float32), 0.0), env, like.shape[0])
