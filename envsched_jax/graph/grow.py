"""Tasks that come and go while a run goes on: what is known of the others stays as it is.

``extend`` gives new tasks rows of their own and leaves the rows of old ones alone, so no old task has a new one as a
sender, and by averages a new task changes no belief until its record enters an environment's mean. The Gaussian field
solves for all tasks at once: from the next outcome on, new tasks hold their neighbours a little to the mean. ``retire``
only takes a task out of the choice. A full ``build(keep=...)`` lets old tasks borrow from new ones, at a time that the
user chooses.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from envsched_jax.graph import features, knn, neighbours, patterns
from envsched_jax.graph.build import (
    Index,
    assemble,
    blank,
    canonical,
    groups,
    node_rows,
    number,
    places,
    put,
)
from envsched_jax.pool.records import PoolError, Record, check_pool
from envsched_jax.types import EDGE_KINDS, Graph

_NAMED = 5  # task ids in one message


def extend(
    graph: Graph,
    index: Index,
    records: Sequence[Record],
    new_records: Sequence[Record],
    *,
    seed: int = 0,
    capacity: int | None = None,
    env_capacity: int | None = None,
) -> tuple[Graph, Index]:
    """Adds tasks to a graph, on the host.

    Old tasks keep their numbers and everything in their rows: edges, similarities, pattern, features, and whether they
    are retired. New ones come after them, as do new environments. Neighbours of a new task are the best among all, old,
    new and retired, the same that ``build`` of all records gives it. It joins the pattern with the nearest centre or
    founds one, see ``patterns.join``. New rows rest on the statistics (word and tool frequencies) of all records, old
    and new; old rows on those of their time.

    Features are extracted for all records; the search costs the new tasks' share of that of ``build``. While both
    capacities last all shapes stay, and nothing that was compiled for the graph is compiled again; beyond them
    ``schedulers.grow`` widens the scheduler's state. Arrays are placed anew: shard them as after ``build``.

    Args:
      graph: from ``build`` or ``extend``, perhaps with retired tasks.
      index: of that graph.
      records: those that ``index`` was made from, in the same order.
      new_records: tasks that the graph does not have, in any order; their environments may be new.
      seed: as given to ``build``.
      capacity: N; by default as it is if the tasks fit, else ``bucket`` of their number.
      env_capacity: E, likewise.

    Returns:
      The graph and its index, whose ``record`` counts in ``[*records, *new_records]``: the next call's ``records``.

    Raises:
      PoolError: a new task_id is in the graph already or comes twice, ``records`` are not those of ``index``, or
        embeddings differ in length or are missing where all old records have one.
      ValueError: a capacity is smaller than what is needed or than that of ``graph``.
    """
    together = [*records, *new_records]
    _check_records(index, records, new_records)
    check_pool(together, "records and new_records")
    slots, old_size = graph.senders.shape[0] // index.capacity, index.capacity
    k, num_patterns, old = slots // 2, graph.globals.pattern_mask.shape[0], len(index.task_ids)
    order = canonical(together)
    rows = features.extract([together[i] for i in order], graph.nodes.feature.shape[1], seed)
    first = np.argsort([i < len(records) for i in order], kind="stable")  # new tasks, then old ones
    order = [order[i] for i in first]
    rows = features.Features(*(x[first] for x in rows))
    tasks = [together[i] for i in order]
    grown = number(tasks, order, index, capacity, env_capacity)
    _check_capacity("capacity", grown.capacity, old_size)
    _check_capacity("env_capacity", grown.env_capacity, index.env_capacity)

    node, env, uid = places(tasks, grown)
    count = len(new_records)
    known = np.asarray(graph.nodes.pattern)[node[count:]]  # in the order of tasks
    joined = patterns.join(rows.execution[count:], known, rows.execution[:count], num_patterns)
    nodes = node_rows(grown.capacity, node, tasks, env, np.concatenate([joined, known]), rows.node)
    # All rows exist for now, also retired ones, which are valid senders.
    old_nodes = graph.nodes._replace(mask=jnp.ones_like(graph.nodes.mask))
    nodes = jax.tree.map(lambda new, kept: new.at[:old].set(kept[:old]), nodes, old_nodes)
    edges = senders, mask, table = blank(k, grown.capacity)
    senders[:, :old] = np.asarray(graph.senders).reshape(slots, old_size)[:, :old]
    mask[:, :old] = np.asarray(graph.edges.mask).reshape(slots, old_size)[:, :old]
    table[:, :old] = np.asarray(graph.edges.similarity).reshape(slots, old_size, len(EDGE_KINDS))[:, :old]
    if count:
        group, added = groups(tasks), node[:count]
        within, cross = _neighbours(neighbours.points(rows, env, uid, group, k), count, k, seed)
        similarity = neighbours.similarities_within(rows, group, within[0])
        put(edges, 0, added, node[within[0]], within[1], similarity)
        similarity = neighbours.similarities_cross(rows.execution, rows.reward, cross[0])
        put(edges, k, added, node[cross[0]], cross[1], similarity)
    out = assemble(nodes, senders, mask, table, grown.env_capacity, num_patterns)
    return retire(out, grown, retired(graph, index)), grown


def retire(graph: Graph, index: Index, task_ids: Iterable[str]) -> Graph:
    """Takes tasks out of the choice: no later batch has them, and quotas do not count them.

    A retired task keeps its edges and its record. What was learned of it is lent to its neighbours and enters its
    environment's mean as before, so beliefs about the others stay; the record fades like any other, and outcomes that
    are still under way are welcome. Tasks that are retired already stay so. Shapes stay: nothing compiles again.

    Args:
      graph: any graph with this index.
      index: tells the nodes by name.
      task_ids: which; none is fine.

    Raises:
      PoolError: a task_id is unknown.
    """
    return _with_mask(graph, graph.nodes.mask & ~jnp.asarray(_flags(graph, index, task_ids, "retire")))


def restore(graph: Graph, index: Index, task_ids: Iterable[str]) -> Graph:
    """Makes retired tasks eligible again; arguments and errors as for ``retire``. Others stay as they are."""
    return _with_mask(graph, graph.nodes.mask | jnp.asarray(_flags(graph, index, task_ids, "restore")))


def retired(graph: Graph, index: Index) -> tuple[str, ...]:
    """Returns the ids of the retired tasks, in node order."""
    mask = np.asarray(graph.nodes.mask)
    return tuple(task_id for node, task_id in enumerate(index.task_ids) if not mask[node])


def _neighbours(every: knn.Points, count: int, k: int, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns, within and cross, positions i64[K, count] of the first tasks' neighbours among all, and which exist."""
    start = jnp.zeros(-(-count // knn.BLOCK), jnp.int32)
    width = every.mask.shape[0]
    found = []
    for score in (knn.within_score, knn.cross_score):
        sender, valid = knn.nearest(score, every, start, neighbours.salt(seed), k=k, width=width)
        found.append((np.asarray(sender)[:count].T, np.asarray(valid)[:count].T))
    return found


def _check_records(index: Index, records: Sequence[Record], new_records: Sequence[Record]) -> None:
    if len(records) != len(index.task_ids):
        raise PoolError(f"records: {len(records)}: expected the {len(index.task_ids)} that the index was made from")
    for task_id, position in zip(index.task_ids, index.record, strict=True):
        if records[position].task_id != task_id:
            raise PoolError(
                f"records: number {position + 1} is {records[position].task_id!r}: expected {task_id!r}, "
                "the order that the index was made from"
            )
    bare = [r.task_id for r in new_records if r.embedding is None]
    if bare and all(r.embedding is not None for r in records):
        raise PoolError(f"new_records: {len(bare)} have no embedding, as all others do: {_names(bare)}")
    count = Counter((*index.task_ids, *(r.task_id for r in new_records)))
    twice = list(dict.fromkeys(r.task_id for r in new_records if count[r.task_id] > 1))
    if twice:
        raise PoolError(
            f"new_records: {len(twice)} of the task_ids are there already: {_names(twice)}: expected new ones; "
            "a retired task comes back by restore"
        )


def _check_capacity(name: str, size: int, old: int) -> None:
    if size < old:
        raise ValueError(f"{name}={size}: expected at least {old}, that of the graph")


def _flags(graph: Graph, index: Index, task_ids: Iterable[str], what: str) -> np.ndarray:
    """Returns bool[N], true for these tasks."""
    given = list(dict.fromkeys(task_ids))
    known = set(index.task_ids)
    unknown = [task_id for task_id in given if task_id not in known]
    if unknown:
        raise PoolError(f"{what}: {len(unknown)} of the task_ids are not in the graph: {_names(unknown)}")
    flags = np.zeros(graph.nodes.mask.shape[0], bool)
    flags[[index.node_of(task_id) for task_id in given]] = True
    return flags


def _with_mask(graph: Graph, mask: Any) -> Graph:
    return cast(Graph, cast(Any, graph)._replace(nodes=graph.nodes._replace(mask=mask)))


def _names(task_ids: Sequence[str]) -> str:
    more = ", ..." if len(task_ids) > _NAMED else ""
    return ", ".join(repr(task_id) for task_id in task_ids[:_NAMED]) + more
