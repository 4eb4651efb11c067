"""``envsched`` for pools of a million tasks: a belief kept up to date, and a choice among candidates.

The belief is that of ``belief='diffusion'``, the same up to rounding (``belief.incremental``). A step looks at
``candidates`` tasks instead of all: half of them are a *shortlist* of the best ones met so far, which is carried along,
scored anew and challenged by fresh tasks at every step; a quarter are drawn evenly over tasks, a quarter evenly over
environments, from which the explore picks come. A pool with no more tasks than that is looked at as a whole, and then
the picks are those of ``envsched``.

What still grows with the pool is the discount of the records, a few sums per task, and every ``refresh`` steps a round
of diffusion over all.
"""

import functools
import math
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp

from envsched_jax.belief import history, incremental
from envsched_jax.schedulers import common
from envsched_jax.schedulers.envsched import EXPLOIT, EXPLORE, TIE, Settings, allocate, blending, most_lent
from envsched_jax.select import quota, sample, value
from envsched_jax.types import Batch, Belief, Edges, Graph, Key, Outcome, Scheduler, SchedulerState

SWEEP = 0x51EE9  # root of the draws of tasks that challenge the shortlist: of the step only, since observing has no key
STRIDE = 7919  # a prime: the first shortlist is spread over the pool
FRESH, SPREAD, FILL = 2, 3, 4  # streams within one call of select, beside EXPLORE and EXPLOIT


class Roster(NamedTuple):
    """Who there is, by environment; depends on the graph alone."""

    member: jax.Array  # i32[N], eligible nodes by environment, then uid; the others last
    start: jax.Array  # i32[E], where each environment's begin
    tasks: jax.Array  # i32[E], eligible ones
    known: jax.Array  # i32[E], environments with eligible tasks, first
    cell: jax.Array  # f32[E, P], eligible tasks of each environment and pattern


class Memory(NamedTuple):
    """What the recipe remembers beside the history."""

    belief: incremental.State
    roster: Roster
    env_visits: jax.Array  # f32[E], discounted visits over the belief's scale
    pattern_visits: jax.Array  # f32[P]
    shortlist: jax.Array  # i32[M], distinct while the pool is larger


def envsched_incremental(*, candidates: int = 8192, refresh: int = 256, **settings: Any) -> Scheduler:
    """Returns the scheduler.

    ``schedulers.grow`` takes up a changed graph, also one of the same size: it works routes and sums out anew.

    Args:
      candidates: C, tasks that a step looks at, at least 8 and 4 times the batch.
      refresh: steps between two times that all sums are worked out anew.
      **settings: as for ``envsched``; ``belief`` is 'diffusion', ``select`` is 'sample', ``cost`` is 'none' and
        ``rounds`` 1 or 2.

    Raises:
      ValueError: a setting is out of range or not among these.
      TypeError: an unknown keyword.
    """
    resolved = Settings(**{"belief": "diffusion"} | settings)
    for name, expected in (("belief", "diffusion"), ("select", "sample"), ("cost", "none")):
        if getattr(resolved, name) != expected:
            raise ValueError(f"{name} must be {expected!r} here, got {getattr(resolved, name)!r}")
    if resolved.value == "environment":
        raise ValueError("value must be 'p_informative' or 'variance' here: 'environment' needs a look at every task")
    if resolved.rounds not in (1, 2):
        raise ValueError(f"rounds must be 1 or 2 here, got {resolved.rounds}")
    if candidates < max(8, 4 * resolved.batch_size):
        raise ValueError(f"candidates must be at least 8 and 4 times the batch, got {candidates}")
    if resolved.gamma == 0.0:
        raise ValueError("gamma must be above 0 here: sums are kept divided by its powers")
    if refresh < 1:
        raise ValueError(f"refresh must be at least 1, got {refresh}")

    def init(graph: Graph) -> SchedulerState:
        return common.init(graph, _memory(resolved, graph, candidates))

    return Scheduler(
        init=init,
        select=functools.partial(pick, resolved, candidates),
        observe=functools.partial(_observe, resolved, candidates, refresh),
    )


def _memory(settings: Settings, graph: Graph, candidates: int) -> Memory:
    kinds = jnp.asarray(settings.kind_weights, jnp.float32)
    ways = incremental.routes(
        graph, kind_weights=kinds, restart=settings.restart, mix=settings.mix, rounds=settings.rounds
    )
    who = roster(graph)
    num_nodes = graph.nodes.mask.shape[0]
    return Memory(
        belief=incremental.init(graph, ways),
        roster=who,
        env_visits=jnp.zeros(graph.globals.env_mask.shape[0], jnp.float32),
        pattern_visits=jnp.zeros(graph.globals.pattern_mask.shape[0], jnp.float32),
        shortlist=who.member[jnp.arange(min(candidates // 2, num_nodes)) * STRIDE % jnp.maximum(who.tasks.sum(), 1)],
    )


def roster(graph: Graph) -> Roster:
    """Returns who there is. Costs a sort of all nodes; once per graph."""
    nodes, num_envs = graph.nodes, graph.globals.env_mask.shape[0]
    tasks = quota.count_tasks(graph)
    env = jnp.where(nodes.mask, nodes.env, num_envs)
    return Roster(
        member=jnp.lexsort((nodes.uid, env)).astype(jnp.int32),
        start=(jnp.cumsum(tasks) - tasks).astype(jnp.int32),
        tasks=tasks,
        known=jnp.argsort(tasks == 0).astype(jnp.int32),
        cell=sample.count_cells(graph),
    )


def rebuild(graph: Graph, state: SchedulerState, old: Memory, fresh: Memory) -> SchedulerState:
    """Returns the state with all that depends on the graph worked out anew.

    Args:
      graph: changed.
      state: of its size, but for the memory, which is not looked at.
      old: the memory before the change.
      fresh: that of ``init`` for the graph.
    """

    def visits(before: jax.Array, now: jax.Array) -> jax.Array:
        return now.at[: before.shape[0]].set(old.belief.scale * before)

    memory = fresh._replace(
        belief=incremental.refresh(graph, fresh.belief, state.history),
        env_visits=visits(old.env_visits, fresh.env_visits),
        pattern_visits=visits(old.pattern_visits, fresh.pattern_visits),
    )
    return state._replace(memory=memory)


def lean(graph: Graph) -> Graph:
    """Returns the graph without its edges: 1,184 bytes per task less at K = 16.

    Only ``init`` and ``grow`` read edges. ``select`` and ``observe`` of this recipe do with the rest, and the memory of
    the recipe holds the routes, about 400 bytes per task.
    """
    nothing = jnp.zeros(0, jnp.int32)
    edges = Edges(graph.edges.similarity[:0], graph.edges.mask[:0])
    return cast(Graph, cast(Any, graph)._replace(edges=edges, senders=nothing, receivers=nothing))


# ---------------------------------------------------------------------------------------------- choosing


def draw_members(key: Key, who: Roster, count: int) -> jax.Array:
    """Returns tasks drawn evenly with replacement, i32[count]."""
    place = jax.random.uniform(key, (count,), jnp.float32) * who.tasks.sum().astype(jnp.float32)
    return who.member[_floor(place, who.tasks.sum())]


def draw_spread(key: Key, who: Roster, count: int) -> jax.Array:
    """Returns tasks drawn evenly over environments, then over their tasks, with replacement, i32[count]."""
    environments = (who.tasks > 0).sum(dtype=jnp.int32)
    which, inside = jax.random.uniform(key, (2, count), jnp.float32)
    env = who.known[_floor(which * environments.astype(jnp.float32), environments)]
    tasks = who.tasks[env]
    return who.member[who.start[env] + _floor(inside * tasks.astype(jnp.float32), tasks)]


def _floor(x: jax.Array, limit: jax.Array) -> jax.Array:
    return jnp.clip(x.astype(jnp.int32), 0, jnp.maximum(limit - 1, 0))


def distinct(node: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the nodes in ascending order, i32[C], and which are not a repeat of the one before, bool[C]."""
    node = jnp.sort(node)
    return node, jnp.concatenate([jnp.ones(1, bool), node[1:] != node[:-1]])


def predict(settings: Settings, graph: Graph, state: SchedulerState, node: jax.Array | slice = slice(None)) -> Belief:
    """Returns what the recipe believes of the tasks ``node``, i32[C], f32[C] per field; of all by default."""
    return incremental.believe(
        graph,
        state.memory.belief,
        state.history,
        node,
        nu=most_lent(settings),
        **blending(settings),
    )


def believe(
    graph: Graph,
    state: SchedulerState,
    node: jax.Array | slice = slice(None),
    *,
    candidates: int = 0,
    refresh: int = 0,
    **settings: Any,
) -> Belief:
    """``predict`` by the settings of ``envsched_incremental``; what is believed does not depend on the first two."""
    return predict(Settings(**{"belief": "diffusion"} | settings), graph, state, node)


def _worth(settings: Settings, graph: Graph, state: SchedulerState, node: jax.Array) -> tuple[jax.Array, Belief]:
    """Returns the value of some tasks, f32[C], and the belief behind it."""
    memory, nodes = state.memory, graph.nodes
    belief = predict(settings, graph, state, node)
    counts = value.visit_counts(history.rows(state.history, node), state.step, settings.group_size, settings.gamma)
    per_env, per_pattern = (memory.belief.scale * x for x in (memory.env_visits, memory.pattern_visits))
    unknown = value.bonus(per_env[nodes.env[node]], per_pattern[nodes.pattern[node]], counts, settings.coverage)
    return value.with_bonus(belief, unknown, target=settings.value), belief


def pick(settings: Settings, candidates: int, key: Key, graph: Graph, state: SchedulerState) -> Batch:
    """Returns the next batch: explore picks first, then the others."""
    memory, nodes = state.memory, graph.nodes
    num_nodes = nodes.mask.shape[0]
    whole = num_nodes <= candidates
    if whole:
        spread = others = jnp.arange(num_nodes, dtype=jnp.int32)
        first = fresh = jnp.ones(num_nodes, bool)
        log_weight = sample.stratified_log_weight(graph)
    else:
        spread, first = distinct(draw_spread(jax.random.fold_in(key, SPREAD), memory.roster, candidates // 4))
        members = draw_members(jax.random.fold_in(key, FRESH), memory.roster, candidates // 4)
        others, fresh = distinct(jnp.concatenate([memory.shortlist, members, spread]))
        # Environments are even already by how the candidates were drawn.
        log_weight = -jnp.log(jnp.maximum(memory.roster.cell[nodes.env[spread], nodes.pattern[spread]], 1.0))
    slots = allocate(settings, graph, state, memory.roster.tasks)
    explorers = math.ceil(settings.explore_share * settings.batch_size - 1e-6)
    score = log_weight + sample.gumbel(jax.random.fold_in(key, EXPLORE), nodes.uid[spread])
    place, mask = sample.draw(score, first & nodes.mask[spread], nodes.env[spread], slots, explorers, even=True)
    node = jnp.where(mask, spread[place], 0)

    worth, _ = _worth(settings, graph, state, others)
    taken = ((others[:, None] == node[None, :]) & mask[None, :]).any(axis=1)
    slots = slots.at[nodes.env[node]].add(-mask.astype(jnp.int32))
    score = sample.keys(jax.random.fold_in(key, EXPLOIT), nodes.uid[others], worth, settings.power)
    limit, rest = None if settings.quota == "none" else slots, settings.batch_size - explorers
    eligible = fresh & nodes.mask[others] & ~taken
    place, place_mask = sample.draw(score, eligible, nodes.env[others], limit, rest)
    node = jnp.concatenate([node, jnp.where(place_mask, others[place], 0)])
    mask = jnp.concatenate([mask, place_mask])
    if not whole:  # so many tasks were retired that the candidates do not fill the batch
        fill = functools.partial(_fill, jax.random.fold_in(key, FILL), graph)
        node, mask = jax.lax.cond(mask.all(), lambda *picks: picks, fill, node, mask)
    worth, belief = _worth(settings, graph, state, node)
    explore = jnp.arange(settings.batch_size) < explorers
    batch = common.to_batch(jnp.arange(settings.batch_size), mask, explore, worth, belief)
    return batch._replace(node=jnp.where(mask, node, 0))


def _fill(key: Key, graph: Graph, node: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the picks, i32[B] and bool[B], with tasks drawn from the whole pool in the slots that were left empty."""
    left = graph.nodes.mask & ~jnp.zeros_like(graph.nodes.mask).at[node].max(mask)
    score = sample.gumbel(key, graph.nodes.uid)
    drawn, drawn_mask = sample.draw(score, left, graph.nodes.env, None, mask.shape[0])
    empty = jnp.maximum(jnp.cumsum(~mask) - 1, 0)
    return jnp.where(mask, node, drawn[empty]), mask | drawn_mask[empty]


# ---------------------------------------------------------------------------------------------- observing


def _observe(
    settings: Settings, candidates: int, refresh: int, graph: Graph, state: SchedulerState, outcome: Outcome
) -> SchedulerState:
    following = common.observe(
        graph, state, outcome, gamma=settings.gamma, mode=settings.quota, weights=settings.quota_weights
    )
    memory: Memory = state.memory
    belief = incremental.update(graph, memory.belief, outcome, settings.gamma)
    node, _ = history.additions(outcome, settings.gamma)
    earlier = jnp.tril(node[:, None] == node[None, :], k=-1).any(axis=1)  # a task's change is counted once

    def counts(of: SchedulerState) -> jax.Array:
        return value.visit_counts(history.rows(of.history, node), of.step, settings.group_size, settings.gamma)

    more = jnp.where(earlier, 0.0, counts(following) - settings.gamma * counts(state)) / belief.scale
    memory = memory._replace(
        belief=belief,
        env_visits=memory.env_visits.at[graph.nodes.env[node]].add(more),
        pattern_visits=memory.pattern_visits.at[graph.nodes.pattern[node]].add(more),
    )
    due = (following.step % refresh == 0) | (belief.scale < incremental.SMALLEST_SCALE)
    memory = _refresh_if(due, settings, graph, following._replace(memory=memory))
    following = following._replace(memory=memory)
    return _challenge(settings, candidates, graph, following) if graph.nodes.mask.shape[0] > candidates else following


def _refresh_if(due: jax.Array, settings: Settings, graph: Graph, state: SchedulerState) -> Memory:
    """Returns the memory, with all sums worked out from the records where that is due."""
    memory: Memory = state.memory

    def anew(_: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        counts = value.visit_counts(state.history, state.step, settings.group_size, settings.gamma)
        per_env = jax.ops.segment_sum(counts, graph.nodes.env, memory.env_visits.shape[0])
        per_pattern = jax.ops.segment_sum(counts, graph.nodes.pattern, memory.pattern_visits.shape[0])
        return jnp.zeros((), bool), per_env, per_pattern

    carry = (due, memory.env_visits, memory.pattern_visits)
    _, per_env, per_pattern = jax.lax.while_loop(lambda carry: carry[0], anew, carry)
    return memory._replace(
        belief=incremental.refresh(graph, memory.belief, state.history, due),
        env_visits=per_env,
        pattern_visits=per_pattern,
    )


def _challenge(settings: Settings, candidates: int, graph: Graph, state: SchedulerState) -> SchedulerState:
    """Returns the state with the best of shortlist and fresh tasks as the shortlist."""
    memory: Memory = state.memory
    size = memory.shortlist.shape[0]
    key = jax.random.fold_in(jax.random.key(SWEEP), state.step)
    members = draw_members(jax.random.fold_in(key, FRESH), memory.roster, candidates // 2)
    node, first = distinct(jnp.concatenate([memory.shortlist, members]))
    worth, _ = _worth(settings, graph, state, node)
    worth = worth + TIE * sample.uniform(jax.random.fold_in(key, EXPLOIT), graph.nodes.uid[node])
    _, best = jax.lax.top_k(jnp.where(first & graph.nodes.mask[node], worth, -1.0), size)
    return state._replace(memory=memory._replace(shortlist=node[best]))
