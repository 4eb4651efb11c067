"""Builds the dual-relation graph of a pool; the only module that imports jraph."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import cast

import jax
import jax.numpy as jnp
import jraph
import numpy as np

from envsched_jax.graph import features, knn, neighbours, patterns, static
from envsched_jax.pool.records import Record, check_pool
from envsched_jax.types import EDGE_KINDS, Edges, Globals, Graph, Key, Nodes

SEARCHES = ("auto", "exact", "approximate")
EXACT_LIMIT = 100_000  # tasks


@dataclass(frozen=True, eq=False)
class Index:
    """Tells nodes and environments by name.

    Attributes:
      task_ids: in node order.
      env_ids: in environment order.
      record: i64[n], the position of each node's record in the list that the graph was built from.
      capacity: N of the graph.
      env_capacity: E of the graph.
    """

    task_ids: tuple[str, ...]
    env_ids: tuple[str, ...]
    record: np.ndarray
    capacity: int = 0
    env_capacity: int = 0

    def node_of(self, task_id: str) -> int:
        """Returns the node of a task; raises KeyError if the graph has none."""
        return self._nodes[task_id]

    @cached_property
    def _nodes(self) -> dict[str, int]:
        return {task_id: node for node, task_id in enumerate(self.task_ids)}


def bucket(n: int) -> int:
    """Returns the capacity for n rows: at least n, at least 8, at most a quarter more than needed beyond 32."""
    step = max(8, 1 << max(0, n.bit_length() - 3))
    return max(1, -(-n // step)) * step


def build(
    records: Sequence[Record],
    *,
    k: int = 16,
    num_patterns: int = 32,
    feature_dim: int = 64,
    seed: int = 0,
    capacity: int | None = None,
    env_capacity: int | None = None,
    keep: Index | None = None,
    search: str = "auto",
) -> tuple[Graph, Index]:
    """Builds the graph of a pool, on the host.

    Nodes are numbered by domain, environment and task_id, environments by domain and env_id. Edge ``s * N + i`` is slot
    s of receiver i, best candidate first: slots 0..K-1 in its own environment (near-duplicates, then by the mean of all
    within similarities), slots K..2K-1 in other environments (by topology and reward). Slots without a candidate and
    padded rows hold the receiver itself under a false mask. Two graphs of the same set of records differ in numbering
    only, whatever their order, capacity or ``keep``.

    Args:
      records: the pool.
      k: neighbours per relation, K.
      num_patterns: P, the most interaction patterns.
      feature_dim: D, the size of the node features behind the similarity penalty.
      seed: of the projections, the patterns' starts and the breaking of ties.
      capacity: N; by default that of ``keep`` if the tasks fit, else ``bucket`` of their number.
      env_capacity: E, likewise.
      keep: the index of an earlier graph of a subset of these tasks: tasks and environments keep their numbers, new
        ones come after them. While both capacities last, nothing compiled for the earlier graph is compiled again.
        All rows are made anew, so beliefs about old tasks may change, and every task is eligible again: give
        ``retired(old_graph, keep)`` to ``retire``. ``extend`` leaves old rows and retired tasks as they are.
      search: of cross neighbours: ``exact``, whose time grows with the square of the tasks, ``approximate``, whose
        time grows with their number, or ``auto``, exact for up to ``EXACT_LIMIT`` tasks. On ``testing.synthetic_pool``
        99.6 % of the approximate neighbours of 50,000 tasks, 98.3 % of those of 200,000 and 98.0 % of those of
        1,000,000 are as good as the exact ones, see ``shortlist``. Within neighbours are always exact; their time grows
        with the sum of the squares of the environments' sizes.

    Returns:
      The graph, a ``jraph.GraphsTuple``, and its index.

    Raises:
      PoolError: the pool is empty, a task_id is there twice, or embeddings differ in length.
      ValueError: a capacity is too small, a size is not positive, a task of ``keep`` has no record, or an unknown
        search.
    """
    check_pool(records, "records")
    if min(k, num_patterns, feature_dim) < 1:
        raise ValueError(f"k={k}, num_patterns={num_patterns}, feature_dim={feature_dim}: expected at least 1 each")
    if search not in SEARCHES:
        raise ValueError(f"search={search!r}: expected one of {', '.join(SEARCHES)}")
    approximate = search == "approximate" or (search == "auto" and len(records) > EXACT_LIMIT)
    order = canonical(records)
    tasks = [records[i] for i in order]
    index = number(tasks, order, keep, capacity, env_capacity)
    size, envs = index.capacity, index.env_capacity
    node, env, uid = places(tasks, index)
    group, survey = groups(tasks), features.survey(tasks)
    edges = blank(k, size)

    def within(part: slice) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Writes the within edges of some tasks and returns those of their features that all tasks need at once."""
        rows = features.extract(tasks[part], feature_dim, seed, survey)
        every = neighbours.points(rows, env[part], uid[part], group[part], k)
        positions, valid = neighbours.within(every, env[part], k, seed)
        similarity = neighbours.similarities_within(rows, group[part], positions)
        put(edges, 0, node[part], node[part][positions], valid, similarity)
        return rows.execution, rows.reward, rows.node

    execution, reward, feature = map(np.concatenate, zip(*map(within, neighbours.parts(env)), strict=True))
    pattern = patterns.cluster(execution, uid, num_patterns, seed)
    positions, valid = neighbours.cross(execution, reward, env, uid, k, seed, approximate)
    put(edges, k, node, node[positions], valid, neighbours.similarities_cross(execution, reward, positions))
    nodes = node_rows(size, node, tasks, env, pattern, feature)
    return assemble(nodes, *edges, envs, num_patterns), index


def rewire(key: Key, graph: Graph) -> Graph:
    """Returns the graph with random senders: the null model of "the graph helps".

    Every receiver keeps its number of edges and their similarities in each relation; its senders become different
    random tasks of the same relation (same environment, or another one). Draws depend on the key and the uids only.

    Args:
      key: consumed.
      graph: any graph of ``build``.
    """
    n = graph.nodes.mask.shape[0]
    padded = -(-n // knn.BLOCK) * knn.BLOCK
    slots = graph.senders.shape[0] // n
    width = max(padded, slots // 2)
    # A retired task keeps its edges and stays a candidate: its record is still lent.
    exists = graph.nodes.mask | graph.edges.mask.reshape(slots, n).any(axis=0)
    mask, env, uid = (jnp.pad(a, (0, width - n)) for a in (exists, graph.nodes.env, graph.nodes.uid))
    nothing = jnp.zeros((0, width), jnp.float32)
    every = knn.Points(mask, env, uid, jnp.full_like(env, -1), nothing, nothing, nothing, nothing)
    start = jnp.zeros(width // knn.BLOCK, jnp.int32)
    senders = []
    for salt, score in zip(jax.random.bits(key, (2,), jnp.uint32), (knn.any_within, knn.any_cross), strict=True):
        senders.append(knn.nearest(score, every, start, salt, k=slots // 2, width=width)[0][:n].T)
    table = jnp.where(graph.edges.mask, jnp.concatenate(senders).reshape(-1), graph.receivers)
    return cast(Graph, cast(jraph.GraphsTuple, graph)._replace(senders=table))


def task_uid(task_id: str) -> int:
    """Returns the u32 that stands for a task in all random draws: BLAKE2b of its name."""
    return int.from_bytes(hashlib.blake2b(task_id.encode(), digest_size=4).digest(), "little")


def canonical(records: Sequence[Record]) -> list[int]:
    """Orders records by environment (its first domain, then its name), then domain, then task_id."""
    first: dict[str, str] = {}
    for r in records:
        first[r.env_id] = min(first.get(r.env_id, r.domain or ""), r.domain or "")

    def place(i: int) -> tuple[str, str, str, str]:
        r = records[i]
        return first[r.env_id], r.env_id, r.domain or "", r.task_id

    return sorted(range(len(records)), key=place)


def number(
    tasks: Sequence[Record], order: Sequence[int], keep: Index | None, capacity: int | None, env_capacity: int | None
) -> Index:
    """Numbers tasks and environments: those of ``keep`` as they are, new ones after them. Capacities as for ``build``.

    Args:
      tasks: in canonical order.
      order: of each task, the position of its record.
      keep: an earlier index of some of these tasks.
      capacity: N, None for the default.
      env_capacity: E, None for the default.

    Raises:
      ValueError: a capacity is too small, or a task of ``keep`` has no record.
    """
    old_tasks, old_envs = (keep.task_ids, keep.env_ids) if keep else ((), ())
    position = {t.task_id: i for t, i in zip(tasks, order, strict=True)}
    lost = [task_id for task_id in old_tasks if task_id not in position]
    if lost:
        raise ValueError(f"keep: {len(lost)} of its tasks have no record, the first is {lost[0]!r}: expected them all")
    task_ids = tuple(dict.fromkeys((*old_tasks, *position)))
    env_ids = tuple(dict.fromkeys((*old_envs, *(t.env_id for t in tasks))))
    size = _capacity("capacity", capacity, len(tasks), "tasks", keep.capacity if keep else 0)
    envs = _capacity("env_capacity", env_capacity, len(env_ids), "environments", keep.env_capacity if keep else 0)
    return Index(task_ids, env_ids, np.array([position[t] for t in task_ids], np.int64), size, envs)


def places(tasks: Sequence[Record], index: Index) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns node i64[n], environment i32[n] and uid u32[n] of every task."""
    env_number = {env_id: i for i, env_id in enumerate(index.env_ids)}
    return (
        np.array([index.node_of(t.task_id) for t in tasks], np.int64),
        np.array([env_number[t.env_id] for t in tasks], np.int32),
        np.array([task_uid(t.task_id) for t in tasks], np.uint32),
    )


def groups(tasks: Sequence[Record]) -> np.ndarray:
    """Numbers the scenarios, i32[n]; -1 for a task of none."""
    found: dict[str, int] = {}
    ids = [-1 if t.group_id is None else found.setdefault(t.group_id, len(found)) for t in tasks]
    return np.array(ids, np.int32)


def blank(k: int, size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the edges of N padded rows: senders i32[2K, N], mask bool[2K, N] and similarities f32[2K, N, S]."""
    senders = np.tile(np.arange(size, dtype=np.int32), (2 * k, 1))
    return senders, np.zeros(senders.shape, bool), np.zeros((*senders.shape, len(EDGE_KINDS)), np.float32)


def put(
    edges: tuple[np.ndarray, np.ndarray, np.ndarray],
    first: int,
    node: np.ndarray,
    sender: np.ndarray,
    valid: np.ndarray,
    similarity: np.ndarray,
) -> None:
    """Writes the edges of some receivers into those of ``blank``.

    Args:
      edges: senders, mask and similarities, changed.
      first: slot of the first edge.
      node: i64[r], the receivers.
      sender: i64[s, r], the nodes that they have as neighbours in slots ``first .. first + s - 1``.
      valid: bool[s, r], which of these edges exist.
      similarity: f32[s, r, S].
    """
    slots = slice(first, first + len(sender))
    edges[0][slots, node] = np.where(valid, sender, node[None, :])
    edges[1][slots, node] = valid
    edges[2][slots, node] = np.where(valid[:, :, None], similarity, np.float32(0.0))


def node_rows(
    size: int, node: np.ndarray, tasks: Sequence[Record], env: np.ndarray, pattern: np.ndarray, feature: np.ndarray
) -> Nodes:
    """Returns the rows of N nodes, all tasks under a true mask and padding zero; arguments aligned by task."""

    def column(values: np.ndarray) -> jax.Array:
        out = np.zeros((size, *values.shape[1:]), values.dtype)
        out[node] = values
        return jnp.asarray(out)

    return Nodes(
        mask=column(np.ones(len(tasks), bool)),
        env=column(env),
        pattern=column(pattern),
        uid=column(np.array([task_uid(t.task_id) for t in tasks], np.uint32)),
        feature=column(feature),
        static=column(static.covariates(tasks)),
        checks=column(_checks(tasks)),
    )


def assemble(
    nodes: Nodes, senders: np.ndarray, mask: np.ndarray, table: np.ndarray, envs: int, num_patterns: int
) -> Graph:
    """Returns the ``jraph.GraphsTuple`` of these parts.

    Args:
      nodes: every task that exists under a true mask, also those that are to be retired.
      senders: i32[2K, N].
      mask: bool[2K, N], of the edges.
      table: f32[2K, N, S], the similarities.
      envs: E.
      num_patterns: P.

    Raises:
      ValueError: an edge leaves its relation, leads to padding or points outside of the nodes.
    """
    slots, size = senders.shape
    _validate(senders, mask, nodes, slots // 2)
    exists = np.asarray(nodes.mask)
    graph = jraph.GraphsTuple(
        nodes=nodes,
        edges=Edges(similarity=jnp.asarray(table.reshape(-1, len(EDGE_KINDS))), mask=jnp.asarray(mask.reshape(-1))),
        senders=jnp.asarray(senders.reshape(-1)),
        receivers=jnp.asarray(np.tile(np.arange(size, dtype=np.int32), slots)),
        globals=Globals(
            env_mask=jnp.asarray(np.isin(np.arange(envs), np.asarray(nodes.env)[exists])),
            pattern_mask=jnp.asarray(np.isin(np.arange(num_patterns), np.asarray(nodes.pattern)[exists])),
        ),
        n_node=jnp.asarray([size], dtype=jnp.int32),
        n_edge=jnp.asarray([slots * size], dtype=jnp.int32),
    )
    return cast(Graph, graph)


def _capacity(name: str, given: int | None, need: int, what: str, kept: int) -> int:
    if given is None:
        return kept if need <= kept else bucket(need)
    if given < need:
        raise ValueError(f"{name}={given}: expected room for {need} {what}")
    return given


def _checks(tasks: Sequence[Record]) -> np.ndarray:
    verifiers = (t.verifier for t in tasks)
    return np.array([max(v.n_checks or 1, 1) if v is not None and v.partial else 1 for v in verifiers], np.int32)


def _validate(senders: np.ndarray, mask: np.ndarray, nodes: Nodes, k: int) -> None:
    """Gathers from this table are not checked on the device, so it is checked here once."""
    receivers = np.arange(senders.shape[1])[None, :]
    env = np.asarray(nodes.env)
    same = env[senders] == env[receivers]
    relation = np.arange(2 * k)[:, None] < k
    ok = np.asarray(nodes.mask)[senders] & (senders != receivers) & (same == relation)
    if senders.min() < 0 or senders.max() >= senders.shape[1] or not ok[mask].all():
        raise ValueError("graph: an edge leaves its relation, leads to padding or points outside of the nodes")
