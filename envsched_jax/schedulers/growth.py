"""Carrying a scheduler's state over to a graph with room for more tasks or environments."""

import jax

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
