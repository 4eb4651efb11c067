"""What a belief would have picked from a log, knowing only its past.

The belief follows the log: at step s it has seen all groups that were rolled out before, as many rollouts as the run
had spent. Then it picks a batch twice:

* *among the candidates*, the groups that were logged in the window [s, s + W): all of these picks can be scored;
* *freely* among all tasks: only the picks that happen to be candidates can be scored, and how many these are is told.

A pick is scored by its logged group. Picks are not fed back, so no logged group is ever seen before it is picked, and
none is picked by what is known of its own luck. Uniform selection needs no luck: it is the mean of the candidates.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from configs import replay as replay_config
from envsched_jax import graph as graphs
from envsched_jax import schedulers
from envsched_jax.pool import Record
from envsched_jax.types import Graph, Outcome, Scheduler, SchedulerState, Status
from experiments.headroom_log import Log

DECISIONS = 120  # most steps at which batches are picked
FEWEST_STEPS = 6  # a log with fewer has no past to speak of
MOST_WINDOW = 8  # steps; later groups are rolled out by another policy than the one that is chosen for
PSEUDO_STEPS = 40  # of a log without steps
SHIPPED = "envsched_as_shipped"
ARMS = ("envsched", "envsched_no_graph", SHIPPED)


class Plan(NamedTuple):
    """What the belief sees and what it may pick: S steps of at most M groups, D decisions, N nodes."""

    node: np.ndarray  # i32[S, M]
    reward: np.ndarray  # f32[S, M, most]
    status: np.ndarray  # i8[S, M, most]
    decision: np.ndarray  # i32[S], place of the step among the decisions, -1 where none is taken
    ahead: np.ndarray  # i32[D, N], the group by which a pick of this node is scored, -1 where it is no candidate
    batch: int
    window: int


class Picks(NamedTuple):
    """What one arm picked, as logged groups; -1 where a pick has none."""

    among: np.ndarray  # i64[D, B]
    free: np.ndarray  # i64[D, B]
    free_picks: np.ndarray  # i64[D], picks, with or without a logged group


def shuffled(log: Log, rng: np.random.Generator) -> Log:
    """Returns a log without steps in random order, as if of one policy that was asked batch by batch."""
    order = rng.permutation(len(log.task))
    step = np.arange(len(order)) * min(PSEUDO_STEPS, len(order)) // len(order)
    return replace(log, task=log.task[order], size=log.size[order], reward=log.reward[order], step=step)


def plan(log: Log, node: np.ndarray, capacity: int, window: int | None, batch: int) -> Plan | None:
    """Lays a log out for the device; None where it is too short, or the pool too small for a choice.

    Args:
      log: in order of time.
      node: i64[T], of each task.
      capacity: N.
      window: W; None is up to `MOST_WINDOW`, a quarter of the log, and as many batches as the log has tasks for.
      batch: B.
    """
    per_step = np.bincount(log.step, minlength=log.steps)
    window = min(MOST_WINDOW, log.steps // 4, len(log.tasks) // batch) if window is None else window
    if log.steps < max(FEWEST_STEPS, window + 1) or window < 2:
        return None
    slots = int(per_step.max())
    place = np.concatenate([np.arange(n) for n in per_step])  # groups are sorted by step
    rewards = np.zeros((log.steps, slots, log.reward.shape[1]), np.float32)
    there = np.zeros(rewards.shape, bool)
    rewards[log.step, place] = np.nan_to_num(log.reward)
    there[log.step, place] = ~np.isnan(log.reward)
    nodes = np.zeros((log.steps, slots), np.int32)
    nodes[log.step, place] = node[log.task]
    taken = np.arange(1, log.steps - window + 1)
    taken = taken[np.linspace(0, len(taken) - 1, min(DECISIONS, len(taken))).round().astype(int)]
    decision = np.full(log.steps, -1, np.int32)
    decision[taken] = np.arange(len(taken))
    ahead = np.full((len(taken), capacity), -1, np.int32)
    scored = np.flatnonzero(log.size > 1)
    for row, step in zip(ahead, taken, strict=True):
        inside = scored[np.searchsorted(log.step[scored], step) : np.searchsorted(log.step[scored], step + window)]
        row[node[log.task[inside[::-1]]]] = inside[::-1]  # the first group of a task stands
    status = np.where(there, int(Status.OK), int(Status.ABSENT)).astype(np.int8)
    return Plan(nodes, rewards, status, decision, ahead, batch, window)


def settings(arm: str) -> tuple[str, dict[str, Any]]:
    """Returns recipe and settings of an arm: those by which replays rank, or the recipe's own defaults."""
    if arm == SHIPPED:
        return "envsched", {}
    options = replay_config.get_config().variants[arm].to_dict()
    return options.pop("recipe"), options


def follow(arm: str, graph: Graph, what: Plan, group_size: int, seed: int) -> Picks:
    """Has one arm follow the log and pick at every decision."""
    recipe, options = settings(arm)
    scheduler = schedulers.make(recipe, batch_size=what.batch, group_size=group_size, **options)
    program = jax.jit(partial(_follow, scheduler=scheduler, batch=what.batch))
    rows = (what.node, what.reward, what.status, what.decision)
    found = program(jax.random.key(seed), graph, jnp.asarray(what.ahead), *map(jnp.asarray, rows))
    decided = what.decision >= 0
    among, free, picks = (np.asarray(leaf)[decided].astype(np.int64) for leaf in found)
    return Picks(among, free, picks)


def _follow(
    key: jax.Array,
    graph: Any,
    ahead: jax.Array,
    *rows: jax.Array,
    scheduler: Scheduler,
    batch: int,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    def choose(state: SchedulerState, key: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        there = graph._replace(nodes=graph.nodes._replace(mask=graph.nodes.mask & (row >= 0)))
        among, free = (scheduler.select(key, pool, state) for pool in (there, graph))
        groups = [jnp.where(picked.mask, row[picked.node], -1) for picked in (among, free)]
        return groups[0], groups[1], free.mask.sum()

    def nothing(*unused: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        none = jnp.full(batch, -1, jnp.int32)
        return none, none, jnp.zeros((), jnp.int32)

    def step(state: SchedulerState, row: tuple[jax.Array, ...]) -> tuple[SchedulerState, Any]:
        index, node, reward, status, decision = row
        picks = jax.lax.cond(
            decision >= 0, choose, nothing, state, jax.random.fold_in(key, index), ahead[jnp.maximum(decision, 0)]
        )
        ones = jnp.ones_like(reward)
        outcome = Outcome(
            node=node,
            explore=jnp.ones_like(node, bool),  # the log chose by no belief of ours
            reward=reward,
            status=status,
            tokens=ones,
            seconds=ones,
            age=jnp.zeros_like(node),
        )
        return scheduler.observe(graph, state, outcome), picks

    _, picks = jax.lax.scan(step, scheduler.init(graph), (jnp.arange(len(rows[0])), *rows))
    found: tuple[jax.Array, jax.Array, jax.Array] = picks
    return found


def records(log: Log, pool: Sequence[Record] | None) -> list[Record]:
    """Returns the records of the graph: the pool's, or plain ones that know ids and environments only."""
    if pool is not None:
        return list(pool)
    return [Record(task, env, " ".join(task.split("_")), ()) for task, env in zip(log.tasks, log.env, strict=True)]


def build(log: Log, pool: Sequence[Record] | None) -> tuple[Graph, np.ndarray, int]:
    """Returns the graph, the node of each task of the log, i64[T], and the capacity N."""
    graph, index = graphs.build(records(log, pool), **replay_config.get_config().graph.to_dict())
    return graph, np.array([index.node_of(task) for task in log.tasks]), graph.nodes.mask.shape[0]


# ------------------------------------------------------------------------------------------------ weights of groups


def weights(picked: np.ndarray, groups: int) -> np.ndarray:
    """Returns how often each logged group was picked, f64[g]."""
    return np.bincount(picked[picked >= 0], minlength=groups).astype(np.float64)


def uniform_weights(what: Plan, picked: np.ndarray, groups: int) -> np.ndarray:
    """Returns the weights of uniform selection: as many picks per decision as `picked` has, spread over candidates."""
    found = np.zeros(groups)
    for row, count in zip(what.ahead, (picked >= 0).sum(axis=1), strict=True):
        candidates = row[row >= 0]
        found[candidates] += count / max(len(candidates), 1)
    return found


def summary(picks: Mapping[str, Picks], what: Plan) -> dict[str, float]:
    """Returns counts that all arms share: decisions, candidates per decision and the share of them that is picked."""
    candidates = (what.ahead >= 0).sum(axis=1)
    taken = (next(iter(picks.values())).among >= 0).sum()
    return {
        "decisions": len(what.ahead),
        "candidates": float(candidates.mean()),
        "selectivity": float(taken / max(candidates.sum(), 1)),
    }
