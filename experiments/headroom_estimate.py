"""The figures of a log: shares as they were, the ceiling, and what beliefs would have picked, each with an interval."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from envsched_jax.pool import PoolError, Record
from experiments import headroom_ceiling as ceilings
from experiments import headroom_replay as replays
from experiments.headroom_log import ONE_ENVIRONMENT, Log
from experiments.headroom_replay import ARMS, Picks, Plan

STRETCHES, FEWEST_GROUPS = 12, 100  # stretches of time in which pass rates are taken as fixed, and groups of each
SHARES = (0.05, 0.1, 0.25, 0.5)  # of the pool, for the ceiling by how choosy one is
FEWEST_REPEATS = 1.5  # groups per task, for the ceiling of rewards that are not all or nothing
RESAMPLES, MOST_NUMBERS = 1000, 2e7  # of the bootstrap over tasks
UNIFORM = "uniform"
NORMAL = 1.959964

Figures = dict[str, Any]


def interval(hit: np.ndarray, task: np.ndarray) -> Figures:
    """Returns a share and its 95 % interval: Wilson's, with as many groups as they are worth, for a task's are alike.

    Args:
      hit: bool[g].
      task: i64[g].
    """
    if not len(hit):
        return {"mean": math.nan, "ci": [math.nan, math.nan], "groups": 0}
    n, p = len(hit), float(hit.mean())
    tasks, which = np.unique(task, return_inverse=True)
    spread = np.square(np.bincount(which, hit - p)).sum() / n**2
    worth = len(tasks) if spread <= 0 else min(p * (1 - p) / spread, n)
    middle = (p + NORMAL**2 / (2 * worth)) / (1 + NORMAL**2 / worth)
    half = NORMAL / (1 + NORMAL**2 / worth) * math.sqrt(p * (1 - p) / worth + NORMAL**2 / (4 * worth**2))
    return {"mean": p, "ci": [max(middle - half, 0.0), min(middle + half, 1.0)], "groups": n}


def as_it_was(log: Log) -> Figures:
    """Returns what share of the groups was informative, and what the others were, but for groups of one rollout."""
    at = log.size > 1
    hit, task = log.informative[at], log.task[at]
    level = (log.hits / log.size)[at]
    still = ~hit
    environments = np.array(log.env)[task]
    found: Figures = {
        "informative": interval(hit, task),
        "never_passes": float((still & (level <= 0)).mean()) if len(hit) else math.nan,
        "always_passes": float((still & (level >= 1)).mean()) if len(hit) else math.nan,
        "equal_between": float((still & (level > 0) & (level < 1)).mean()) if len(hit) else math.nan,
        "environments": {},
    }
    for name in sorted(set(log.env)):
        inside = environments == name
        found["environments"][name] = {
            **interval(hit[inside], task[inside]),
            "tasks": int(sum(env == name for env in log.env)),
            "never_passes": float((still & (level <= 0))[inside].mean()) if inside.any() else math.nan,
            "always_passes": float((still & (level >= 1))[inside].mean()) if inside.any() else math.nan,
        }
    return found


# ------------------------------------------------------------------------------------------------ ceiling


def _records_of(log: Log, inside: np.ndarray, pool_size: int) -> ceilings.Counts:
    """The records of the tasks within a stretch: rollouts and passes, or groups and informative ones."""
    size, hits = (log.size, log.hits) if log.binary else (np.ones_like(log.size), log.informative)
    trials, found = (np.bincount(log.task[inside], x[inside], len(log.tasks)).round() for x in (size, hits))
    seen = trials > 0
    return ceilings.counts(trials[seen], found[seen], pool_size - int(seen.sum()))


def _stretches(log: Log) -> list[np.ndarray]:
    """Returns groups of stretches of time, bool[g] each: about one pass over the tasks, evenly spread over the log.

    In a longer one a task's groups would be of several policies, and tasks would look more alike than they are, and
    more often mixed.
    """
    enough = 0.9 * max(FEWEST_GROUPS, len(np.unique(log.task)))
    block, count = np.zeros(log.steps, np.int64), 0.0
    for step, groups in enumerate(np.bincount(log.step, minlength=log.steps)):
        block[step:] += count >= enough
        count = groups + (0.0 if count >= enough else count)
    whole = np.arange(max(int(block[-1]) + (count >= enough), 1))  # what is left at the end is too short
    chosen = whole[np.linspace(0, len(whole) - 1, min(STRETCHES, len(whole))).round().astype(int)]
    return [block[log.step] == number for number in chosen]


def ceiling(log: Log, shares: Sequence[float], pool_size: int, rng: np.random.Generator) -> list[Figures] | None:
    """Returns what groups of the best share of the tasks would be informative, one by one of `shares`.

    Where rewards are not all or nothing, what repeats of a task say of being informative is used instead of its pass
    rate; None if there are too few. Beside each figure stands what was `seen` of all groups that it rests on.

    Args:
      log: groups of one rollout count here too.
      shares: of the pool, in (0, 1].
      pool_size: tasks to choose from; those without a rollout are taken for tasks like the others.
      rng: of the draws.
    """
    scored = np.ones(len(log.task), bool) if log.binary else log.size > 1
    if not log.binary and scored.sum() < FEWEST_REPEATS * max(len(np.unique(log.task[scored])), 1):
        return None
    value = ceilings.mixed(log.group_size) if log.binary else ceilings.rate()
    stretches = _stretches(log) if log.binary else [scored]
    best = []
    for inside in stretches:
        drawn = ceilings.spread(_records_of(log, inside, pool_size), rng)
        best.append([ceilings.best(drawn.tasks, value, share) for share in shares])
    draws = np.average(np.array(best), axis=0, weights=[inside.sum() for inside in stretches])  # [shares, R]
    ends = np.quantile(draws, (0.025, 0.975), axis=1).T
    used = np.any(stretches, axis=0) & (log.size == log.group_size)
    seen = interval(log.informative[used], log.task[used])
    return [
        {"share": share, "mean": float(row.mean()), "ci": end.tolist(), "seen": seen}
        for share, row, end in zip(shares, draws, ends, strict=True)
    ]


# ------------------------------------------------------------------------------------------------ replay


def _resampled(hit: np.ndarray, task: np.ndarray, weight: np.ndarray, times: np.ndarray) -> np.ndarray:
    """Weighted share of informative groups in every resample of the tasks, f64[R]."""
    picked, found = (np.bincount(task, x, times.shape[1]) for x in (weight, weight * hit))
    total = times @ picked
    return np.where(total > 0, times @ found / np.where(total > 0, total, 1.0), np.nan)


def _spread(mean: float, draws: np.ndarray) -> Figures:
    known = draws[np.isfinite(draws)]
    ends = np.quantile(known, (0.025, 0.975)).tolist() if len(known) else [math.nan, math.nan]
    return {"mean": mean, "ci": ends}


def scores(log: Log, what: Plan, picks: Mapping[str, Picks], pool_size: int, rng: np.random.Generator) -> Figures:
    """Returns what arms would have reached in replay, beside uniform selection; intervals by bootstrap over tasks."""
    groups, hit = len(log.task), log.informative.astype(np.float64)
    count = int(min(RESAMPLES, max(50, MOST_NUMBERS // len(log.tasks))))
    times = rng.multinomial(len(log.tasks), np.full(len(log.tasks), 1 / len(log.tasks)), size=count).astype(np.float64)
    weight = {arm: replays.weights(picked.among, groups) for arm, picked in picks.items()}
    weight[UNIFORM] = replays.uniform_weights(what, picks[ARMS[0]].among, groups)
    resampled = {arm: _resampled(hit, log.task, w, times) for arm, w in weight.items()}
    share = {arm: float(hit @ w / max(w.sum(), 1)) for arm, w in weight.items()}
    base = share[UNIFORM]
    found: Figures = {}
    for arm in (UNIFORM, *picks):
        with np.errstate(divide="ignore", invalid="ignore"):
            needed = _spread(base / share[arm] if share[arm] > 0 else math.nan, resampled[UNIFORM] / resampled[arm])
        found[arm] = {
            "informative": _spread(share[arm], resampled[arm]),
            "rollouts_needed": needed,
            "gain": _spread(share[arm] - base, resampled[arm] - resampled[UNIFORM]),
        }
    first, without = ARMS[:2]
    found["graph_gain"] = _spread(share[first] - share[without], resampled[first] - resampled[without])
    free = replays.weights(picks[first].free, groups)
    found["free"] = {
        "picks": int(picks[first].free_picks.sum()),
        "supported": float(free.sum() / max(picks[first].free_picks.sum(), 1)),
        "supported_uniform": float((what.ahead >= 0).sum(axis=1).mean() / pool_size),
        "informative": _spread(
            float(hit @ free / free.sum()) if free.sum() else math.nan, _resampled(hit, log.task, free, times)
        ),
    }
    return found


# ------------------------------------------------------------------------------------------------ all of it


def with_pool(log: Log, pool: Sequence[Record] | None) -> Log:
    """Returns the log with the pool's environments where it names none of its own.

    Raises:
      PoolError: the pool lacks a task of the log.
    """
    if pool is None:
        return log
    env = {record.task_id: record.env_id for record in pool}
    missing = [task for task in log.tasks if task not in env]
    if missing:
        names = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise PoolError(f"field 'task_id': {len(missing)} tasks of the log have no record: {names}")
    if set(log.env) != {ONE_ENVIRONMENT}:
        return log
    return replace(log, env=tuple(env[task] for task in log.tasks))


def estimate(
    log: Log, pool: Sequence[Record] | None, *, window: int | None = None, batch: int | None = None, seed: int = 0
) -> Figures:
    """Returns all figures of a log; see `experiments.headroom` for what they mean.

    Args:
      log: as read.
      pool: the records for the graph; without, it knows ids and environments only.
      window: steps from which a replayed batch is picked.
      batch: tasks per step; by default those of the log.
      seed: of all draws.
    """
    rng = np.random.default_rng(seed)
    log = with_pool(log, pool)
    pool_size = len(log.tasks) if pool is None else len(pool)
    timed = log if log.stepped else replays.shuffled(log, rng)
    batch = max(1, round(len(timed.task) / timed.steps)) if batch is None else batch
    found: Figures = {
        "rollouts": int(log.size.sum()),
        "groups": len(log.task),
        "single": int((log.size == 1).sum()),
        "group_size": log.group_size,
        "tasks": len(log.tasks),
        "pool": pool_size,
        "environments": len(set(log.env)),
        "steps": log.steps if log.stepped else None,
        "steps_joined": log.joined,
        "batch": batch,
        "binary": log.binary,
        "repeats": float((log.size > 1).sum() / max(len(np.unique(log.task[log.size > 1])), 1)),
        "graph_from": "ids and environments" if pool is None else "the pool",
        "as_it_was": as_it_was(log),
        "ceiling": None,
        "ceiling_of_all": None,
        "ceiling_by_share": None,
        "replay": None,
    }
    if not log.group_size:
        return found
    what, picks = None, {}
    if log.informative.any():
        graph, node, capacity = replays.build(log, pool)
        what = replays.plan(timed, node, capacity, window, batch)
        if what is not None:
            picks = {arm: replays.follow(arm, graph, what, log.group_size, seed) for arm in ARMS}
    counts = replays.summary(picks, what) if what is not None else None
    wanted = [min(batch / pool_size, 1.0), counts["selectivity"] if counts else 1.0, 1.0, *SHARES]
    best = ceiling(log, wanted, pool_size, rng)
    if best is not None:
        found |= {"ceiling": best[0], "ceiling_of_all": best[2], "ceiling_by_share": best[3:]}
    if what is not None and counts is not None:
        reached = scores(timed, what, picks, pool_size, rng)
        found["replay"] = {**counts, "window": what.window, "ceiling": best and best[1], **reached}
    return found
