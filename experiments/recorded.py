"""Recorded outcomes of real agents: loading them, making checkpoints of them, and drawing rollouts from them.

A data set is a folder with `tasks.jsonl` (pool records) and `outcomes.npz`:

* `task_ids`: str[T], the ids of the records, in any order;
* `models`: str[M], from weak to strong;
* `reward`: f[M, T, K], NaN where a trial does not exist.

Models ordered from weak to strong stand in for one policy that is being trained. What a *checkpoint* is, is decided by
`checkpoints`; what a rollout returns, by `draw`; what the oracle may see, by `held_back_variance`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from envsched_jax.pool import Record, read_jsonl
from envsched_jax.types import Key, Status
from experiments import metrics

TASKS = "tasks.jsonl"
OUTCOMES = "outcomes.npz"


class RecordedError(ValueError):
    """A data set is missing or broken; the message is one line that names the file."""


@dataclass(frozen=True)
class Recorded:
    """One data set: `reward[m, t]` belongs to `models[m]` and `records[t]`."""

    name: str
    records: list[Record]
    models: tuple[str, ...]
    reward: np.ndarray  # f64[M, T, K], NaN where there is no trial


def find_sets(data_dir: str | Path) -> list[Path]:
    """Folders of data sets: `data_dir` itself if it holds tasks, else those of its children that do, sorted.

    Raises:
      RecordedError: there is no such folder, or no data set in it.
    """
    root = Path(data_dir)
    if not root.is_dir():
        raise RecordedError(f"{root}: no such folder of recorded outcomes")
    if (root / TASKS).exists() or (root / OUTCOMES).exists():
        return [root]
    found = sorted(child.parent for child in root.glob(f"*/{TASKS}"))
    if not found:
        raise RecordedError(f"{root}: neither a data set ({TASKS}, {OUTCOMES}) nor a folder of data sets")
    return found


def load(folder: str | Path) -> Recorded:
    """Reads one data set; the outcomes are put in the order of the records.

    Raises:
      RecordedError: a file is missing or malformed, or tasks and outcomes do not belong together.
      PoolError: a record is malformed.
    """
    folder = Path(folder)
    for name in (TASKS, OUTCOMES):
        if not (folder / name).is_file():
            raise RecordedError(f"{folder / name}: file is missing")
    records = list(read_jsonl(folder / TASKS))
    where = folder / OUTCOMES
    try:
        with np.load(where, allow_pickle=False) as file:
            ids, models, reward = (file[name] for name in ("task_ids", "models", "reward"))
    except (KeyError, ValueError, OSError) as error:
        raise RecordedError(f"{where}: cannot be read as outcomes ({error})") from error
    if reward.shape[:2] != (len(models), len(ids)) or reward.ndim != 3 or reward.dtype.kind not in "fiu":
        raise RecordedError(
            f"{where}: reward must be numbers of shape [models {len(models)}, tasks {len(ids)}, trials], "
            f"got {reward.dtype} {list(reward.shape)}"
        )
    place = {str(name): i for i, name in enumerate(ids)}
    if len(place) < len(ids):
        raise RecordedError(f"{where}: a task_id stands twice")
    tasks = {record.task_id for record in records}
    for missing, what in ((tasks - place.keys(), "has no outcomes for"), (place.keys() - tasks, "has outcomes for")):
        if missing:
            names = ", ".join(sorted(missing)[:3]) + (", ..." if len(missing) > 3 else "")
            other = "" if what.startswith("has no") else f" that are not in {TASKS}"
            raise RecordedError(f"{where}: {what} {len(missing)} tasks{other}: {names}")
    order = [place[record.task_id] for record in records]
    reward = reward.astype(np.float64)[:, order]
    if np.isinf(reward).any() or np.isnan(reward).all():
        raise RecordedError(f"{where}: rewards must be finite, or NaN where there is no trial, and not all be NaN")
    return Recorded(folder.resolve().name, records, tuple(str(m) for m in models), reward)


def with_pool(data: Recorded, records: Sequence[Record], where: str) -> Recorded:
    """Returns the data set with other records of the same tasks, in the order of its own; `where` names them.

    Raises:
      RecordedError: the ids of the records are not those of the data set.
    """
    by_id = {record.task_id: record for record in records}
    ids = [record.task_id for record in data.records]
    for few, many, what in ((by_id, ids, "lacks"), (set(ids), by_id, "has")):
        odd = sorted(name for name in many if name not in few)
        if odd:
            names = ", ".join(odd[:3]) + (", ..." if len(odd) > 3 else "")
            end = "of data set" if what == "lacks" else "that are not in data set"
            raise RecordedError(f"pool {where}: {what} {len(odd)} tasks {end} {data.name}: {names}")
    return replace(data, records=[by_id[name] for name in ids])


# ------------------------------------------------------------------------------------------------ checkpoints


def checkpoints(
    reward: np.ndarray, group_size: int, *, cohort: int = 5, share: float = 0.9
) -> tuple[np.ndarray, list[tuple[int, ...]]]:
    """Pools neighbouring models into checkpoints that have enough trials of almost every task.

    From weak to strong, models join the open checkpoint until at least `share` of the tasks have `need` trials; then it
    is closed. `need` is G, so that one model with G trials of each task is a checkpoint of its own; where no model has
    a second trial of any task it is `cohort`: that many neighbours make a checkpoint of as many pseudo trials. Models
    left over at the end stand alone if they give G trials to `share` of the tasks, else they join the last checkpoint.

    Args:
      reward: f[M, T, K], NaN where there is no trial; models from weak to strong.
      group_size: G.
      cohort: models of a checkpoint where each model has at most one trial of a task.
      share: share of the tasks that must have enough trials, in (0, 1].

    Returns:
      `(pooled, members)`: f64[C, T, K'], trials first and NaN behind them, and the models of each checkpoint.
    """
    count = (~np.isnan(reward)).sum(axis=-1)  # [M, T]
    need = cohort if count.max() <= 1 else group_size
    members: list[tuple[int, ...]] = []
    open_: tuple[int, ...] = ()
    for model in range(len(reward)):
        open_ = (*open_, model)
        if (count[list(open_)].sum(axis=0) >= need).mean() >= share:
            members.append(open_)
            open_ = ()
    if open_:
        alone = (count[list(open_)].sum(axis=0) >= group_size).mean() >= share
        members = [*members, open_] if alone or not members else [*members[:-1], members[-1] + open_]
    trials = max(int(count[list(m)].sum(axis=0).max()) for m in members)
    pooled = np.full((len(members), reward.shape[1], trials), np.nan)
    for checkpoint, models in enumerate(members):
        flat = np.concatenate([reward[m] for m in models], axis=-1)
        first = np.argsort(np.isnan(flat), axis=-1, kind="stable")[:, :trials]
        found = np.take_along_axis(flat, first, axis=-1)
        pooled[checkpoint, :, : found.shape[1]] = found
    return pooled, members


class Tables(NamedTuple):
    """Outcomes by node, on the device. Nodes without a record (padding) have no trials."""

    reward: jax.Array  # f32[C, N, K], 0 where there is no trial
    there: jax.Array  # bool[C, N, K]
    variance: jax.Array  # f32[C, N], unbiased, of all trials at the checkpoint; 0 with fewer than two
    near: jax.Array  # f32[C, N, 3]: number, sum and sum of squares of the trials at the checkpoints beside it


def tables(pooled: np.ndarray, record: np.ndarray, capacity: int, group_size: int) -> Tables:
    """Puts pooled outcomes in the order of a graph's nodes.

    Args:
      pooled: f64[C, T, K], from `checkpoints`.
      record: i64[n], record of each node (`Index.record`).
      capacity: N >= n.
      group_size: G; the trials are padded to at least that many.
    """
    steps, _, trials = pooled.shape
    by_node = np.full((steps, capacity, max(trials, group_size)), np.nan)
    by_node[:, : len(record), :trials] = pooled[:, record]
    variance = metrics.moments(by_node)[2]
    there = ~np.isnan(by_node)
    value = np.where(there, by_node, 0)
    sums = np.stack([there.sum(-1), value.sum(-1), (value**2).sum(-1)], axis=-1)
    beside = np.zeros_like(sums, dtype=np.float64)
    beside[1:] += sums[:-1]
    beside[:-1] += sums[1:]
    return Tables(
        reward=jnp.asarray(value, jnp.float32),
        there=jnp.asarray(there),
        variance=jnp.asarray(np.nan_to_num(variance, nan=0.0), jnp.float32),
        near=jnp.asarray(beside, jnp.float32),
    )


# ------------------------------------------------------------------------------------------------ draws


def shuffle(key: Key, uid: jax.Array, there: jax.Array) -> jax.Array:
    """A random order of each task's trials, those that exist first: i32[n, K].

    The order depends on `(key, uid)` only: the group that a task would return is settled before anybody picks it, and
    is the same for every arm.

    Args:
      key: one per step.
      uid: u32[n].
      there: bool[n, K].
    """

    def one(uid: jax.Array, there: jax.Array) -> jax.Array:
        return jnp.argsort(jnp.where(there, jax.random.uniform(jax.random.fold_in(key, uid), there.shape), 2.0))

    return jax.vmap(one)(uid, there)


def draw(key: Key, uid: jax.Array, reward: jax.Array, there: jax.Array, group_size: int) -> tuple[jax.Array, jax.Array]:
    """Draws one group per task from its recorded trials, without replacement.

    Args:
      key: the step's key, the same as for `held_back_variance`.
      uid: u32[n].
      reward: f32[n, K].
      there: bool[n, K], which trials exist.
      group_size: G <= K.

    Returns:
      `(reward, status)`: f32[n, G] and i8[n, G]; a task with fewer than G trials gives those it has, the other slots
      are ABSENT.
    """
    first = shuffle(key, uid, there)[:, :group_size]
    found = jnp.take_along_axis(there, first, axis=1)
    status = jnp.where(found, int(Status.OK), int(Status.ABSENT)).astype(jnp.int8)
    return jnp.where(found, jnp.take_along_axis(reward, first, axis=1), 0.0), status


def held_back_variance(key: Key, uid: jax.Array, table: Tables, checkpoint: jax.Array, group_size: int) -> jax.Array:
    """What the oracle knows at a step: each task's reward variance in trials that this step would not draw.

    These are the task's trials at this checkpoint beyond the G that `draw` returns, and all of its trials at the two
    checkpoints beside it; their unbiased variance. With fewer than two such trials (a single checkpoint with hardly
    more than G trials) it is the variance of all the task's trials at the checkpoint. A task that cannot show two
    different rewards, for it has fewer than two trials here, gets 0.

    Args:
      key: the step's key, as for `draw`.
      uid: u32[N].
      table: outcomes by node.
      checkpoint: i32[].
      group_size: G.

    Returns:
      f32[N].
    """
    reward, there = table.reward[checkpoint], table.there[checkpoint]
    order = shuffle(key, uid, there)
    left = jnp.take_along_axis(there, order, axis=1)[:, group_size:]
    value = jnp.where(left, jnp.take_along_axis(reward, order, axis=1)[:, group_size:], 0.0)
    near = table.near[checkpoint]
    n = near[:, 0] + left.sum(axis=1).astype(jnp.float32)
    s1 = near[:, 1] + value.sum(axis=1)
    s2 = near[:, 2] + jnp.square(value).sum(axis=1)
    known = jnp.maximum(s2 - s1 * s1 / jnp.maximum(n, 1.0), 0.0) / jnp.maximum(n - 1.0, 1.0)
    variance = jnp.where(n >= 2, known, table.variance[checkpoint])
    return jnp.where(there.sum(axis=1) >= 2, variance, 0.0)
