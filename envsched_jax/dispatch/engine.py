"""A scheduler that runs for one pool: picks by name, outcomes by name, pools that change. No tickets, no files."""

import functools
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from envsched_jax import schedulers
from envsched_jax.dispatch.tickets import DispatchError
from envsched_jax.graph import Index, extend, retire, retired
from envsched_jax.pool.records import PoolError, Record, parse_record, to_object
from envsched_jax.types import Batch, Graph, Key, Outcome, Scheduler, SchedulerState, Status

LONGEST_PAUSE = 100  # steps without outcomes that are gone through one by one; beyond, the past is forgotten anyway


class Pick(NamedTuple):
    """A task to be proposed, and what was believed of it."""

    task_id: str
    env_id: str
    explore: bool
    mean: float | None  # of rewards scaled to [0, 1]
    variance: float | None
    p_informative: float | None


class Row(NamedTuple):
    """The outcome of one group."""

    task_id: str
    explore: bool
    rewards: tuple[float | None, ...]  # scaled to [0, 1]
    status: tuple[int, ...]
    tokens: tuple[float, ...]
    seconds: tuple[float, ...]
    age: int  # policy versions


class Change(NamedTuple):
    """How the pool of a saved state differs from this one, task ids each."""

    added: tuple[str, ...]
    removed: tuple[str, ...]
    edited: tuple[str, ...]


NOTHING = Change((), (), ())


class Grown(NamedTuple):
    """A pool with more tasks, worked out and not yet in force."""

    records: tuple[Record, ...]  # the new ones
    graph: Graph
    names: Index


class _Programs(NamedTuple):
    """The compiled functions of a scheduler."""

    init: Callable[..., SchedulerState]
    select: Callable[..., Batch]
    observe: Callable[..., SchedulerState]
    owed: Callable[..., jax.Array]


class Engine:
    """The scheduler, its state, and the graph of its pool.

    Attributes:
      batch_size: of the scheduler.
      seed: of the draws.
      index: of the graph.
      state: the scheduler's.
    """

    def __init__(
        self,
        records: Sequence[Record],
        graph: Graph,
        index: Index,
        scheduler: Scheduler,
        group_size: int,
        seed: int,
        graph_seed: int,
    ) -> None:
        """See ``Dispatcher``."""
        by_id = {record.task_id: record for record in records}
        self._first = [by_id[task_id] for _, task_id in sorted(zip(index.record.tolist(), index.task_ids, strict=True))]
        self._first_graph = graph, index
        self._first_fingerprints = {record.task_id: _fingerprint(record) for record in self._first}
        self.group_size, self.seed, self._scheduler, self._graph_seed = group_size, seed, scheduler, graph_seed
        self._begin()
        self._base = [self.fingerprints[task_id] for task_id in index.task_ids]
        self._programs = _programs(scheduler)
        self.state = self._programs.init(graph)
        shape = jax.eval_shape(scheduler.select, jax.random.key(0), graph, self.state).node.shape
        self.batch_size = shape[0]

    def eligible(self) -> np.ndarray:
        """Returns which tasks are in the pool and not retired, bool[N]."""
        return self._mask.copy()

    def environments(self) -> list[str]:
        """Returns the environments that have eligible tasks."""
        return [self.index.env_ids[i] for i in np.unique(self._env[self._mask])]

    def without(self, mask: np.ndarray, tasks: Iterable[str], envs: Iterable[str] = ()) -> np.ndarray:
        """Returns the mask, bool[N], less some tasks and all tasks of some environments."""
        mask = mask.copy()
        mask[[self.index.node_of(task_id) for task_id in tasks if task_id in self.fingerprints]] = False
        out = np.zeros(self.index.env_capacity, bool)
        out[: len(self.index.env_ids)] = np.isin(self.index.env_ids, list(envs))
        return mask & ~out[self._env]

    def rather(self, mask: np.ndarray, tasks: Iterable[str]) -> np.ndarray:
        """Returns the mask, bool[N], less some tasks, but whole in environments where less than a batch would be left.

        So quotas can be met, and an environment with few tasks is not emptied.
        """
        less = self.without(mask, tasks)
        left = np.bincount(self._env, less, self.index.env_capacity)
        return np.where(left[self._env] < self.batch_size, mask, less)

    def pick(self, state: SchedulerState, draw: int, mask: np.ndarray, counted: Sequence[str]) -> list[Pick]:
        """Returns the next batch.

        Args:
          state: the scheduler's.
          draw: number of the call; no two draws share random numbers.
          mask: bool[N], tasks that may be picked.
          counted: a task of every group that is under way or not in the state yet; quotas count it as delivered.
        """
        known = [task_id for task_id in counted if task_id in self.fingerprints]
        if known:
            rows = [Row(t, False, (0.0,), (int(Status.OK),), (0.0,), (0.0,), 0) for t in known]
            state = state._replace(quota_carry=self._programs.owed(self.graph, state, self._outcome(rows)))
        key = jax.random.fold_in(jax.random.key(self.seed), draw)
        batch = jax.device_get(self._programs.select(key, self.graph, jnp.asarray(mask), state))
        return _interleave([self._pick(batch, i) for i in np.flatnonzero(batch.mask).tolist()])

    def oldest(self, envs: Iterable[str], mask: np.ndarray, seen: Mapping[str, int]) -> list[Pick]:
        """Returns a task of each of some environments that have one, the longest unseen, without a belief."""
        number, found = {env_id: i for i, env_id in enumerate(self.index.env_ids)}, []
        for env_id in envs:
            tasks = [self.index.task_ids[node] for node in np.flatnonzero(mask & (self._env == number[env_id]))]
            if tasks:
                task_id = min(tasks, key=lambda t: (seen.get(t, -1), t))
                found.append(Pick(task_id, env_id, True, None, None, None))
        return found

    def fold(self, state: SchedulerState, rows: Sequence[Row], steps: int) -> SchedulerState:
        """Returns the state ``steps`` policy versions later, with these outcomes entered at the last of them.

        Tasks that are no longer in the pool are left out.
        """
        nothing = self._outcome([])
        for _ in range(min(steps - 1, LONGEST_PAUSE)):
            state = self._programs.observe(self.graph, state, nothing)
        return self._programs.observe(
            self.graph, state, self._outcome([r for r in rows if r.task_id in self.fingerprints])
        )

    def shares(self) -> dict[str, float]:
        """Returns the share of groups that the recipe means every environment to get; empty if it has no such aim."""
        first = self.index.task_ids[0]
        row = Row(first, False, (0.0,), (int(Status.OK),), (0.0,), (0.0,), 0)
        state = self.state._replace(quota_carry=jnp.zeros_like(self.state.quota_carry))
        owed = np.asarray(self._programs.owed(self.graph, state, self._outcome([row]))).copy()  # share - delivered
        if not owed.any():
            return {}
        env = self._env[self.index.node_of(first)]
        owed[env] = 0.0
        owed[env] = max(0.0, 1.0 - owed.sum())
        return {env_id: float(owed[i]) for i, env_id in enumerate(self.index.env_ids)}

    def grown(self, records: Sequence[Record]) -> Grown:
        """Returns the pool with more tasks, changing nothing; raises DispatchError if they do not fit it."""
        try:
            graph, index = extend(self.graph, self.index, self.records, records, seed=self._graph_seed)
        except PoolError as error:
            raise DispatchError(f"add_tasks: {error}") from error
        return Grown(tuple(records), graph, index)

    def add(self, grown: Grown) -> None:
        """Lets more tasks be in the pool."""
        self._extend(grown)
        self.state = schedulers.grow(self.state, self.graph, self._scheduler)

    def retire(self, task_ids: Sequence[str]) -> None:
        """Takes tasks out of the choice; raises DispatchError if one is unknown."""
        self._retire(task_ids)
        self.state = schedulers.grow(self.state, self.graph, self._scheduler)

    def save(self) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
        """Returns what ``load`` needs: a JSON object and arrays by name."""
        leaves, _ = jax.tree_util.tree_flatten_with_path(jax.device_get(self.state))
        meta = {
            "base": self._base,
            "tasks": [[task_id, self.fingerprints[task_id]] for task_id in self.index.task_ids],
            "envs": list(self.index.env_ids),
            "retired": list(retired(self.graph, self.index)),
            "growth": self.growth,
            "capacity": [self.index.capacity, self.index.env_capacity],
        }
        return meta, {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}

    def load(self, meta: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> Change:
        """Takes up a saved state, matching tasks by id; what happened to this engine since it was made is undone.

        Changes attributes, and no value of one: a shallow copy of the engine stays as it is.

        Args:
          meta: the JSON object of ``save``.
          arrays: of ``save``.

        Returns:
          How the pools differ. Edited tasks keep their record, those that this pool lacks lose it, new ones start
          without. Tasks that the saved run had added are added here too.

        Raises:
          DispatchError: the state is of another scheduler or of other sizes.
        """
        old_ids = [task_id for task_id, _ in meta["tasks"]]
        exact = meta["base"] == self._base
        self._begin()
        groups = meta["growth"] if exact else [[obj for group in meta["growth"] for obj in group]]
        for group in groups:
            new = [parse_record(obj, "saved task") for obj in group if obj["task_id"] not in self.fingerprints]
            if new:
                self._extend(self.grown(new))
        exact &= tuple(old_ids) == self.index.task_ids
        exact &= meta["capacity"] == [self.index.capacity, self.index.env_capacity]
        self._retire([task_id for task_id in meta["retired"] if task_id in self.fingerprints])
        self.state = self._restore(arrays, None if exact else (old_ids, meta["envs"], meta["capacity"]))
        before, now = dict(meta["tasks"]), self.fingerprints
        return Change(
            added=tuple(t for t in self.index.task_ids if t not in before),
            removed=tuple(t for t in old_ids if t not in now),
            edited=tuple(t for t in old_ids if t in now and now[t] != before[t]),
        )

    @functools.cached_property
    def _mask(self) -> np.ndarray:
        return np.asarray(self.graph.nodes.mask)

    @functools.cached_property
    def _env(self) -> np.ndarray:
        return np.asarray(self.graph.nodes.env)

    def _set_graph(self, graph: Graph, index: Index) -> None:
        self.graph, self.index = graph, index
        for name in ("_mask", "_env"):
            self.__dict__.pop(name, None)

    def _begin(self) -> None:
        """Takes the pool that the engine was made with."""
        self._set_graph(*self._first_graph)
        self.records = self._first
        self.growth: list[list[dict[str, Any]]] = []  # what was added since, a call each
        self.fingerprints = self._first_fingerprints

    def _extend(self, grown: Grown) -> None:
        self._set_graph(grown.graph, grown.names)
        self.growth = [*self.growth, [to_object(record) for record in grown.records]]
        self.records = [*self.records, *grown.records]
        self.fingerprints = self.fingerprints | {record.task_id: _fingerprint(record) for record in grown.records}

    def _retire(self, task_ids: Sequence[str]) -> None:
        try:
            self._set_graph(retire(self.graph, self.index, task_ids), self.index)
        except PoolError as error:
            raise DispatchError(f"retire_tasks: {error}") from error

    def _restore(
        self, arrays: Mapping[str, np.ndarray], moved: tuple[Sequence[str], Sequence[str], Sequence[int]] | None
    ) -> SchedulerState:
        """Returns the state of some arrays; ``moved`` names tasks, environments and sizes where these are others."""
        like = jax.eval_shape(self._scheduler.init, self.graph)
        leaves, structure = jax.tree_util.tree_flatten_with_path(like)
        names = [jax.tree_util.keystr(path) for path, _ in leaves]
        if set(names) != set(arrays):
            other = sorted(set(names) ^ set(arrays))[0]
            raise DispatchError(f"state: {other}: expected the state of this scheduler, got that of another")
        for name, (_, leaf) in zip(names, leaves, strict=True):
            found = arrays[name]
            right = found.dtype == leaf.dtype and found.ndim == leaf.ndim
            if not right or (moved is None and found.shape != leaf.shape):
                raise DispatchError(
                    f"state: {name}: expected {leaf.dtype}{list(leaf.shape)}, got {found.dtype}{list(found.shape)}: "
                    "was it saved with other settings?"
                )
        state = jax.tree.unflatten(structure, [jnp.asarray(arrays[name]) for name in names])
        if moved is None:
            return state
        task_ids, env_ids, sizes = moved
        env_number = {env_id: i for i, env_id in enumerate(self.index.env_ids)}
        node = [self.index.node_of(t) if t in self.fingerprints else -1 for t in task_ids]
        env = [env_number.get(env_id, -1) for env_id in env_ids]
        return schedulers.transfer(
            state, self.graph, self._scheduler, np.array(node), np.array(env), (sizes[0], sizes[1])
        )

    def _pick(self, batch: Batch, i: int) -> Pick:
        def number(column: Any) -> float | None:
            return float(column[i]) if np.isfinite(column[i]) else None

        return Pick(
            self.index.task_ids[batch.node[i]],
            self.index.env_ids[self._env[batch.node[i]]],
            bool(batch.explore[i]),
            number(batch.predicted_mean),
            number(batch.predicted_variance),
            number(batch.p_informative),
        )

    def _outcome(self, rows: Sequence[Row]) -> Outcome:
        """Returns the rows as arrays of few different shapes, padded by ABSENT."""
        count = _twice(self.batch_size, len(rows))
        group = _twice(self.group_size, max((len(row.status) for row in rows), default=0))
        node, age = np.zeros(count, np.int32), np.zeros(count, np.int32)
        explore = np.zeros(count, bool)
        reward, tokens, seconds = (np.zeros((count, group), np.float32) for _ in range(3))
        status = np.full((count, group), Status.ABSENT, np.int8)
        for i, row in enumerate(rows):
            node[i], explore[i], age[i] = self.index.node_of(row.task_id), row.explore, row.age
            size = len(row.status)
            reward[i, :size] = [np.nan if value is None else value for value in row.rewards]
            status[i, :size], tokens[i, :size], seconds[i, :size] = row.status, row.tokens, row.seconds
        return Outcome(*map(jnp.asarray, (node, explore, reward, status, tokens, seconds, age)))


@functools.lru_cache(maxsize=16)
def _programs(scheduler: Scheduler) -> _Programs:
    """Returns the functions of a scheduler, so that a second dispatcher with it compiles nothing again."""

    def select(key: Key, graph: Any, mask: jax.Array, state: SchedulerState) -> Batch:
        return scheduler.select(key, graph._replace(nodes=graph.nodes._replace(mask=mask)), state)

    def owed(graph: Graph, state: SchedulerState, outcome: Outcome) -> jax.Array:
        # Only the quotas of the result are used, so the compiler leaves out everything else.
        return scheduler.observe(graph, state, outcome).quota_carry

    return _Programs(jax.jit(scheduler.init), jax.jit(select), jax.jit(scheduler.observe), jax.jit(owed))


def _twice(size: int, needed: int) -> int:
    """Returns ``size``, doubled as often as needed."""
    while size < needed:
        size *= 2
    return size


def _interleave(picks: Sequence[Pick]) -> list[Pick]:
    """Orders a batch so that every stretch of it has about the batch's mix of environments."""
    total, so_far, place = Counter(pick.env_id for pick in picks), Counter[str](), []
    for i, pick in enumerate(picks):
        place.append(((so_far[pick.env_id] + 0.5) / total[pick.env_id], i))
        so_far[pick.env_id] += 1
    return [picks[i] for _, i in sorted(place)]


def _fingerprint(record: Record) -> str:
    text = json.dumps(to_object(record), sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()
