"""Carrying a scheduler's state over to a graph with room for more tasks or environments, or of another pool."""

from typing import Any

import jax
import numpy as np

from envsched_jax.schedulers import incremental
from envsched_jax.types import Graph, Scheduler, SchedulerState


def grow(state: SchedulerState, graph: Graph, scheduler: Scheduler) -> SchedulerState:
    """Returns the state of an earlier, smaller graph as a state of ``graph``.

    Old rows keep their values exactly, new ones have those of ``scheduler.init(graph)``. This holds for all leaves,
    also those of ``memory``, whose axes count nodes or environments; leaves of other sizes stay. The rows of nodes and
    environments that ``graph.extend`` keeps are old rows. Within a bucket nothing grows, and the state is returned as
    it is. What ``envsched_incremental`` remembers of a graph is worked out anew from the history, always: call this
    after every change of the graph. Pure: for a state per seed, map over ``state``.

    Args:
      state: made by this scheduler for a graph of fewer or as many nodes and environments.
      graph: the larger graph, in which old tasks and environments have their old numbers.
      scheduler: gives the values of new rows.

    Raises:
      ValueError: the graph is smaller, the state is of another scheduler, or a leaf has an axis that counts neither
        nodes nor environments and yet depends on the graph's size.
    """
    fresh = scheduler.init(graph)
    structures = {str(jax.tree.structure(tree)) for tree in (state, fresh)}
    if len(structures) > 1:
        raise ValueError("state: its memory is of another scheduler: expected the one that made it")
    sizes = {
        (state.truth.shape[0], fresh.truth.shape[0]),
        (state.quota_carry.shape[0], fresh.quota_carry.shape[0]),
    }
    for old, new in sizes:
        if new < old:
            raise ValueError(f"graph: room for {new} nodes or environments: expected at least {old}, as in the state")

    def widen(path: tuple, old: jax.Array, new: jax.Array) -> jax.Array:
        if old.shape == new.shape:
            return old
        pairs = set(zip(old.shape, new.shape, strict=False)) - {(n, n) for n in old.shape}
        if old.ndim != new.ndim or not pairs <= sizes:
            raise ValueError(
                f"state{jax.tree_util.keystr(path)}: shape {old.shape} becomes {new.shape}: "
                "expected axes that count nodes or environments"
            )
        return new.at[tuple(slice(0, n) for n in old.shape)].set(old)

    if isinstance(state.memory, incremental.Memory):
        wide = jax.tree_util.tree_map_with_path(widen, state._replace(memory=()), fresh._replace(memory=()))
        return incremental.rebuild(graph, wide, state.memory, fresh.memory)
    return jax.tree_util.tree_map_with_path(widen, state, fresh)


def transfer(
    state: SchedulerState,
    graph: Graph,
    scheduler: Scheduler,
    node: np.ndarray,
    env: np.ndarray,
    sizes: tuple[int, int],
) -> SchedulerState:
    """Returns the state of one graph as a state of another, row by row.

    Rows that have a new number keep their values exactly, all others have those of ``scheduler.init(graph)``. Leaves
    without an axis of nodes or environments stay. For pools of different tasks; within a bucket and for additions
    ``grow`` is enough.

    Args:
      state: made by this scheduler.
      graph: the new graph.
      scheduler: gives the values of new rows.
      node: i64[n], the new number of every task of the old graph, -1 if it has none.
      env: i64[e], of every environment.
      sizes: N and E of the old graph.

    Raises:
      ValueError: a leaf of ``state`` has other axes than one of ``scheduler.init``.
    """
    fresh = scheduler.init(graph)
    num_nodes, num_envs = fresh.truth.shape[0], fresh.quota_carry.shape[0]
    wider = [
        jax.eval_shape(scheduler.init, _resized(graph, num_nodes + more[0], num_envs + more[1]))
        for more in ((1, 0), (0, 1))
    ]

    def move(path: tuple, old: jax.Array, new: jax.Array, more_nodes: Any, more_envs: Any) -> jax.Array:
        source, target = [], []
        for axis, (before, now) in enumerate(zip(old.shape, new.shape, strict=True)):
            number, size = np.arange(before), now
            if more_nodes.shape[axis] != now:
                number, size = node, sizes[0]
            elif more_envs.shape[axis] != now:
                number, size = env, sizes[1]
            if before != size:
                raise ValueError(f"state{jax.tree_util.keystr(path)}: axis {axis} has {before}: expected {size}")
            source.append(np.flatnonzero(number >= 0))
            target.append(number[number >= 0])
        return new.at[np.ix_(*target)].set(old[np.ix_(*source)]) if old.ndim else old

    if isinstance(state.memory, incremental.Memory):
        bare = [tree._replace(memory=()) for tree in (state, fresh, *wider)]
        moved = jax.tree_util.tree_map_with_path(move, *bare)
        return incremental.rebuild(graph, moved, fresh.memory, fresh.memory)
    return jax.tree_util.tree_map_with_path(move, state, fresh, *wider)


def _resized(graph: Any, num_nodes: int, num_envs: int) -> Any:
    """Returns the shapes of the same graph with other numbers of nodes and environments."""
    slots = graph.senders.shape[0] // graph.nodes.mask.shape[0]

    def first(size: int, tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct((size, *x.shape[1:]), x.dtype), tree)

    return graph._replace(
        nodes=first(num_nodes, graph.nodes),
        edges=first(slots * num_nodes, graph.edges),
        senders=first(slots * num_nodes, graph.senders),
        receivers=first(slots * num_nodes, graph.receivers),
        globals=graph.globals._replace(env_mask=first(num_envs, graph.globals.env_mask)),
    )
