"""One arm on recorded outcomes: all steps as one scan, all seeds as one program, and the score of its beliefs."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from envsched_jax import graph as graphs
from envsched_jax import schedulers
from envsched_jax.types import Belief, Graph, Outcome, Scheduler, SchedulerState, is_valid
from experiments import metrics, recorded
from experiments.recorded import Recorded, Tables

SPLITS = ("never", "once", "more", "unseen_env", "unseen_group")
RANKED = ("spearman_variance", "spearman_mean", "auc_mixed", "top_quarter")
WHOLE = ("mae_variance", "mae_mean", "ece", "nll")
SMALLEST_SPLIT = 8  # tasks; a rank correlation of fewer says nothing

Believe = Callable[[Graph, SchedulerState], Belief]


class Trace(NamedTuple):
    """What one arm did, and believed before it picked: R seeds, S steps."""

    node: jax.Array  # i32[R, S, B]
    mask: jax.Array  # bool[R, S, B]
    live: jax.Array  # i32[R, S], groups whose valid rewards differ
    rollouts: jax.Array  # i32[R, S]
    belief: Belief | None  # f32[R, S, N] each


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
      group_size: G.
      oracle: what `state.truth` holds: `held_back`, `recorded` (all trials of the checkpoint) or None (zeros).
    """

    def step(carry: tuple[jax.Array, SchedulerState], index: jax.Array) -> tuple[Any, Trace]:
        root, state = carry
        key_draw = jax.random.fold_in(jax.random.fold_in(root, 0), index)
        key_select = jax.random.fold_in(jax.random.fold_in(root, 1), index)
        checkpoint = index * table.reward.shape[0] // steps
        if oracle == "held_back":
            known = recorded.held_back_variance(key_draw, graph.nodes.uid, table, checkpoint, group_size)
            state = state._replace(truth=known)
        elif oracle == "recorded":
            state = state._replace(truth=table.variance[checkpoint])
        belief = believe(graph, state) if believe else None
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
        row = Trace(batch.node, batch.mask, live.sum(), valid.sum(), belief)
        return (root, scheduler.observe(graph, state, outcome)), row

    def one(seed: jax.Array) -> Trace:
        carry = (jax.random.key(seed), scheduler.init(graph))
        return jax.lax.scan(step, carry, jnp.arange(steps))[1]

    return jax.lax.map(one, seeds)


def evaluation_steps(steps: int, checkpoints: int, evaluations: int) -> list[int]:
    """Steps before which beliefs are scored.

    These are first steps of a checkpoint, where everything observed comes from earlier checkpoints and the scheduler
    has not yet seen a trial that the truth is made of. Where there is but one checkpoint they are evenly spaced, and
    the truth of a visited task contains trials that the scheduler has seen.
    """
    place = np.arange(steps) * checkpoints // steps
    first = [s for s in range(1, steps) if place[s] != place[s - 1]] or list(range(1, steps))
    chosen = np.linspace(0, len(first) - 1, min(evaluations, len(first))).round().astype(int)
    return [first[i] for i in chosen]


def visits_before(node: np.ndarray, mask: np.ndarray, step: int, tasks: int) -> np.ndarray:
    """Times each task was picked in the steps before `step`: i64[T]; node and mask are [S, B]."""
    return np.bincount(node[:step][mask[:step]], minlength=tasks)


def splits(visits: np.ndarray, env: np.ndarray, scenario: np.ndarray) -> dict[str, np.ndarray]:
    """Which tasks belong to each split: bool[T] each.

    `unseen_env` and `unseen_group` are tasks of environments (scenarios, where known) none of whose tasks was picked.
    """
    group = np.where(scenario >= 0, scenario, 0)
    seen_env = np.bincount(env, visits)[env] > 0
    seen_group = np.bincount(group, np.where(scenario >= 0, visits, 0))[group] > 0
    return {
        "never": visits == 0,
        "once": visits == 1,
        "more": visits > 1,
        "unseen_env": ~seen_env,
        "unseen_group": (scenario >= 0) & ~seen_group,
    }


def score(belief: Belief, reward: np.ndarray, where: Mapping[str, np.ndarray], group_size: int) -> dict[str, float]:
    """Compares a belief with the recorded trials of one checkpoint.

    Args:
      belief: f[T] each.
      reward: f64[T, K], NaN where there is no trial; tasks with fewer than two trials are left out.
      where: the splits, bool[T] each.
      group_size: G.

    Returns:
      `<metric>_<split>` for the ranked metrics, and the whole-pool ones under their own names. The truth of
      P(informative) is the exact share of informative groups among all groups of G trials.
    """
    count, mean, variance = metrics.moments(reward)
    believed_mean, believed_variance, believed_share = map(np.asarray, belief[:3])
    known = count >= 2
    values: dict[str, float] = {}
    for name, inside in where.items():
        at = inside & known
        if at.sum() < SMALLEST_SPLIT:
            values |= {f"{metric}_{name}": metrics.NOTHING for metric in RANKED}
            continue
        values[f"spearman_variance_{name}"] = metrics.spearman(believed_variance[at], variance[at])
        values[f"spearman_mean_{name}"] = metrics.spearman(believed_mean[at], mean[at])
        values[f"auc_mixed_{name}"] = metrics.auc(believed_share[at], variance[at] > 0)
        values[f"top_quarter_{name}"] = metrics.top_quarter(believed_variance[at], variance[at])
    share = metrics.p_informative(reward, group_size)
    full = ~np.isnan(share)
    values["mae_variance"] = metrics.mae(believed_variance[known], variance[known])
    values["mae_mean"] = metrics.mae(believed_mean[known], mean[known])
    values["ece"] = metrics.calibration_error(believed_share[full], share[full])
    values["nll"] = metrics.log_loss(believed_share[full], share[full])
    return values


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
) -> dict[str, Any]:
    """Replays one arm and scores its beliefs.

    Returns:
      Per seed: `live_per_1k`, `envs_touched`, `gini_visits`, `live` (cumulative, [R, S]), `rollouts` (total), and
      `rows`, the scored evaluations as `(seed, step, scalars)`.
    """
    options = {"batch_size": batch_size, "group_size": group_size, **options}
    program = jax.jit(
        partial(
            simulate,
            scheduler=schedulers.make(recipe, **options),
            believe=schedulers.belief_fn(recipe, **options),
            steps=steps,
            group_size=group_size,
            oracle=oracle,
        )
    )
    trace = jax.tree.map(np.asarray, program(jnp.arange(seeds), pool.graph, pool.table))
    tasks = len(pool.env)
    rows: list[tuple[int, int, dict[str, float]]] = []
    visits = np.zeros((seeds, tasks), np.int64)
    checkpoints = len(pool.pooled)
    for seed in range(seeds):
        node, mask = trace.node[seed], trace.mask[seed]
        visits[seed] = visits_before(node, mask, steps, tasks)
        for step in evaluation_steps(steps, checkpoints, evaluations):
            spent = trace.rollouts[seed, :step].sum()
            row = {"live": float(trace.live[seed, :step].sum()), "rollouts": float(spent)}
            if trace.belief is not None:
                belief = Belief(*(leaf[seed, step, :tasks] for leaf in trace.belief))
                where = splits(visits_before(node, mask, step, tasks), pool.env, pool.scenario)
                row |= score(belief, pool.pooled[step * checkpoints // steps], where, group_size)
            rows.append((seed, step, row))
    live, rollouts = trace.live.sum(axis=1), trace.rollouts.sum(axis=1)
    touched = [len(np.unique(pool.env[v > 0])) for v in visits]
    for seed in range(seeds):
        last = {"live": float(live[seed]), "rollouts": float(rollouts[seed]), "envs_touched": touched[seed]}
        rows.append((seed, steps, last))
    return {
        "live_per_1k": (1000 * live / np.maximum(rollouts, 1)).tolist(),
        "envs_touched": touched,
        "gini_visits": [metrics.gini(v) for v in visits],
        "live": np.cumsum(trace.live, axis=1).tolist(),
        "rollouts": rollouts.tolist(),
        "rows": rows,
    }
