"""Pools over several devices and hosts: place the arrays, then call the same jitted functions.

Rows of nodes are spread over the devices, edges by slot: each device holds some of the ``2K`` slots of every node.
The compiler does the rest. Counted, not measured: a round of propagation of F channels sends each device the statistics
of all nodes (``4 N F`` bytes) and adds up the partial sums over slots (as many bytes again), while edges, ``8 * 2K``
bytes per node and by far the most, never move. With F = 7, K = 16 and a million tasks that is 56 MB per round beside
256 MB of edges, 32 MB on each of 8 devices. Sorts of the selection gather ``12 N`` bytes on every device.

Draws depend on the task, not on where its row lies, so every process finds the same batch, up to sums in another order.
"""

from typing import Any, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

Tree = TypeVar("Tree")
AXIS = "nodes"  # of the mesh


def mesh(devices: list[jax.Device] | None = None) -> Mesh:
    """Returns a mesh of one axis over these devices, all devices of all processes by default."""
    return Mesh(np.asarray(jax.devices() if devices is None else devices), (AXIS,))


def place(tree: Tree, over: Mesh, nodes: int) -> Tree:
    """Returns a graph or a scheduler's state with rows spread over the mesh, values unchanged.

    A leaf whose first axis counts nodes or edges (a multiple of nodes) is split along it, or along the second where
    that counts nodes; everything else is on every device. All processes must hold the same values.

    Args:
      tree: a graph, a ``SchedulerState``, or any pytree of their arrays.
      over: from ``mesh``.
      nodes: N of the graph.

    Raises:
      ValueError: N is not a multiple of the number of devices.
    """
    if nodes % over.size:
        raise ValueError(f"nodes: {nodes} rows over {over.size} devices: expected a multiple; give build a capacity")
    return jax.tree.map(lambda leaf: _put(leaf, over, nodes), tree)


def _put(leaf: Any, over: Mesh, nodes: int) -> jax.Array:
    if leaf.shape[:1] == (nodes,) or (leaf.ndim and leaf.shape[0] > nodes and leaf.shape[0] % nodes == 0):
        spec = PartitionSpec(AXIS)
    elif leaf.shape[1:2] == (nodes,):
        spec = PartitionSpec(None, AXIS)
    else:
        spec = PartitionSpec()
    host = np.asarray(leaf)
    return jax.make_array_from_callback(leaf.shape, NamedSharding(over, spec), lambda index: host[index])
