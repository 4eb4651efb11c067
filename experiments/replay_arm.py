"""One arm on recorded outcomes: all steps as one scan, all seeds as one program, then the scores of every seed."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from envsched_jax import graph as graphs
from envsched_jax import schedulers
from envsched_jax.types import Belief, Graph, Outcome, Scheduler, SchedulerState, is_valid
from experiments import metrics, recorded, replay_score
from experiments.recorded import Recorded, Tables

Believe = Callable[[Graph, SchedulerState], Belief]


class Trace(NamedTuple):
    """What one arm did, and believed: R seeds, S steps."""

    node: jax.Array  # i32[R, S, B]
    mask: jax.Array  # bool[R, S, B]
    live: jax.Array  # bool[R, S, B], the valid rewards of the group differ
    rollouts: jax.Array  # i32[R, S, B], valid ones
    predicted: jax.Array  # f32[R, S, B], P(informative) of each pick; NaN where the recipe has no belief
    belief: Belief | None  # f32[R, L, N] each, before the picks of each of the L scored steps


class Pool(NamedTuple):
    """One data set made ready: N nodes on the device, T tasks in node order on the host."""

    graph: Graph
    table: Tables
    pooled: np.ndarray  # f64[C, T, K]
    env: np.ndarray  # i64[T]
    scenario: np.ndarray  # i64[T], -1 where the record has no group_id
    members: list[tuple[int, ...]]
    record: np.ndarray  # i64[T], place of each task's record in the data set


def simulate(
    seeds: jax.Array,
    graph: Graph,
    table: Tables,
    *,
    scheduler: Scheduler,
    believe: Believe | None,
    steps: int,
    scored: Sequence[int],
    group_size: int,
    oracle: str | None,
) -> Trace:
    """Replays one arm, for every seed from the same empty state.

    Args:
      seeds: i32[R].
      graph: the pool's graph.
      table: outcomes by node.
      scheduler: the arm.
      believe: the arm's belief, None where it has none.
      steps: S; step s meets checkpoint `s * C // S`.
      scored: the L steps whose beliefs are kept, ascending.
      group_size: G.
      oracle: what `state.truth` holds: `held_back`, `recorded` (all trials of the checkpoint) or None (zeros).
    """
    slots = jnp.full(steps, len(scored)).at[jnp.asarray(scored)].set(jnp.arange(len(scored)))  # L: not kept

    def keep(kept: Belief, state: SchedulerState, slot: jax.Array) -> Belief:
        belief = believe(graph, state) if believe else kept
        return jax.tree.map(lambda rows, row: rows.at[slot].set(row), kept, belief)

    def step(carry: tuple[jax.Array, SchedulerState, Belief | None], index: jax.Array) -> tuple[Any, Trace]:
        root, state, kept = carry
        key_draw = jax.random.fold_in(jax.random.fold_in(root, 0), index)
        key_select = jax.random.fold_in(jax.random.fold_in(root, 1), index)
        checkpoint = index * table.reward.shape[0] // steps
        if oracle == "held_back":
            known = recorded.held_back_variance(key_draw, graph.nodes.uid, table, checkpoint, group_size)
            state = state._replace(truth=known)
        elif oracle == "recorded":
            state = state._replace(truth=table.variance[checkpoint])
        if kept is not None:
            slot = slots[index]
            kept = jax.lax.cond(slot < len(scored), keep, lambda kept, *_: kept, kept, state, slot)
        batch = scheduler.select(key_select, graph, state)
        reward, status = recorded.draw(
            key_draw,
            graph.nodes.uid[batch.node],
            table.reward[checkpoint, batch.node],
            table.there[checkpoint, batch.node] & batch.mask[:, None],
            group_size,
        )
        outcome = Outcome(
            node=batch.node,
            explore=batch.explore,
            reward=reward,
            status=status,
            tokens=jnp.ones_like(reward),  # recorded costs are not comparable between models: each rollout costs 1
            seconds=jnp.ones_like(reward),
            age=jnp.zeros_like(batch.node),
        )
        valid = is_valid(status)
        live = jnp.where(valid, reward, -jnp.inf).max(axis=1) > jnp.where(valid, reward, jnp.inf).min(axis=1)
        row = Trace(batch.node, batch.mask, live, valid.sum(axis=1), batch.p_informative, None)
        return (root, scheduler.observe(graph, state, outcome), kept), row

    def one(seed: jax.Array) -> Trace:
        nothing = jnp.zeros((len(scored), graph.nodes.mask.shape[0]), jnp.float32)
        kept = Belief(nothing, nothing, nothing, nothing) if believe else None
        (_, _, kept), trace = jax.lax.scan(step, (jax.random.key(seed), scheduler.init(graph), kept), jnp.arange(steps))
        return trace._replace(belief=kept)

    return jax.lax.map(one, seeds)


# ------------------------------------------------------------------------------------------------ one arm


def prepare(data: Recorded, *, group_size: int, cohort: int, graph: Mapping[str, Any]) -> Pool:
    """Builds the graph and the tables of a data set."""
    built, index = graphs.build(data.records, **graph)
    pooled, members = recorded.checkpoints(data.reward, group_size, cohort=cohort)
    names = [data.records[i].group_id for i in index.record]
    ids = {name: i for i, name in enumerate(sorted({n for n in names if n is not None}))}
    return Pool(
        graph=built,
        table=recorded.tables(pooled, index.record, built.nodes.mask.shape[0], group_size),
        pooled=pooled[:, index.record],
        env=np.asarray(built.nodes.env)[: len(names)].astype(np.int64),
        scenario=np.array([ids.get(n, -1) for n in names]),
        members=members,
        record=index.record,
    )


def run_arm(
    pool: Pool,
    *,
    recipe: str,
    options: Mapping[str, Any],
    oracle: str | None,
    seeds: int,
    steps: int,
    evaluations: int,
    batch_size: int,
    group_size: int,
    rewired: bool = False,
) -> dict[str, Any]:
    """Replays one arm and scores its beliefs; ``rewired`` has its edges lead to random tasks.

    Returns:
      Per seed: `live_per_1k`, `envs_touched`, `gini_visits`, `live` (cumulative, [R, S]), `rollouts` (total),
      `degenerate`; `rows`, the scored evaluations as `(seed, step, scalars)`; `reliability`, sums over all of them.
    """
    options = {"batch_size": batch_size, "group_size": group_size, **options}
    if rewired:
        pool = pool._replace(graph=graphs.rewire(jax.random.key(0), pool.graph))
    scored = replay_score.evaluation_steps(steps, len(pool.pooled), evaluations)
    program = jax.jit(
        partial(
            simulate,
            scheduler=schedulers.make(recipe, **options),
            believe=schedulers.belief_fn(recipe, **options),
            steps=steps,
            scored=scored,
            group_size=group_size,
            oracle=oracle,
        )
    )
    trace = jax.tree.map(np.asarray, program(jnp.arange(seeds), pool.graph, pool.table))
    live, rollouts = trace.live.sum(axis=2), trace.rollouts.sum(axis=2)
    node, mask = np.asarray(trace.node), np.asarray(trace.mask)
    visits = [replay_score.visits_before(node[r], mask[r], steps, len(pool.env)) for r in range(seeds)]
    rows, reliability = _score_beliefs(pool, trace, scored, group_size)
    for seed, step, row in rows:
        row |= {"live": float(live[seed, :step].sum()), "rollouts": float(rollouts[seed, :step].sum())}
    full = trace.mask & (trace.rollouts == group_size)
    return {
        "live_per_1k": (1000 * live.sum(axis=1) / np.maximum(rollouts.sum(axis=1), 1)).tolist(),
        "envs_touched": [len(np.unique(pool.env[v > 0])) for v in visits],
        "gini_visits": [metrics.gini(v) for v in visits],
        "live": np.cumsum(live, axis=1).tolist(),
        "rollouts": rollouts.sum(axis=1).tolist(),
        "degenerate": [replay_score.degenerate(*seed) for seed in zip(trace.predicted, trace.live, full, strict=True)],
        "reliability": None if reliability is None else reliability.tolist(),
        "rows": rows,
    }


def _score_beliefs(
    pool: Pool, trace: Trace, scored: Sequence[int], group_size: int
) -> tuple[list[tuple[int, int, dict[str, float]]], np.ndarray | None]:
    """Scores per seed and scored step, and a row for the end of the run; and the sums of all reliability diagrams."""
    node, mask = np.asarray(trace.node), np.asarray(trace.mask)
    (seeds, steps), tasks = node.shape[:2], len(pool.env)
    rows: list[tuple[int, int, dict[str, float]]] = []
    reliability = None
    for place, step in enumerate(scored):
        real = replay_score.truth(pool.pooled[step * len(pool.pooled) // steps], group_size)
        for seed in range(seeds):
            values: dict[str, float] = {}
            if trace.belief is not None:
                belief = Belief(*(leaf[seed, place, :tasks] for leaf in trace.belief))
                visits = replay_score.visits_before(node[seed], mask[seed], step, tasks)
                values = replay_score.score(belief, real, replay_score.splits(visits, pool.env, pool.scenario))
                sums = replay_score.reliability(belief, real)
                reliability = sums if reliability is None else reliability + sums
            rows.append((seed, step, values))
    return rows + [(seed, steps, {}) for seed in range(seeds)], reliability
