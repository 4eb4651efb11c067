"""A model and its optimiser over a mesh ``(data, model)``: parameters split along both axes, groups along ``data``.

Every kernel lies split by its inputs over one axis and by its outputs over the other, as in fully sharded data
parallelism with tensor parallelism; XLA inserts the collectives.
"""

import re

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from envsched_jax.rollout.slots import Slots
from envsched_jax.types import PyTree

RULES = (
    (r"embedding$", P("model", "data")),
    (r"(q|k|v|gate|up)/kernel", P("data", "model")),
    (r"(o|down)/kernel", P("model", "data")),
    (r"head/kernel", P("data", "model")),
)
"""By what a parameter's path ends in, or an adapter's has in it; what no rule names is on every device."""


def make_mesh(data: int = 1, model: int = 1, devices: list[jax.Device] | None = None) -> Mesh:
    """Returns a mesh of ``data * model`` devices.

    Raises:
      ValueError: there are not so many devices.
    """
    have = jax.devices() if devices is None else devices
    if data < 1 or model < 1 or data * model > len(have):
        raise ValueError(f"mesh: {data} x {model} devices asked for, {len(have)} are here")
    grid = np.asarray(have[: data * model]).reshape(data, model)
    return Mesh(grid, ("data", "model"), axis_types=(AxisType.Auto, AxisType.Auto))


def of_parameters(mesh: Mesh, params: PyTree) -> PyTree:
    """Returns a sharding for every leaf by ``RULES``; an axis that does not divide a leaf's side is left out.

    Args:
      mesh: from `make_mesh`.
      params: arrays or their shapes: parameters, or a state of an optimiser that mirrors them.
    """

    def one(path: tuple, leaf: jax.Array) -> NamedSharding:
        name = "/".join(re.findall(r"\w+", jax.tree_util.keystr(path))).removesuffix("/value")
        axes = next((tuple(spec) for rule, spec in RULES if re.search(rule, name)), ())
        return _split(mesh, leaf, axes if len(axes) == leaf.ndim else (None,) * leaf.ndim)

    return jax.tree_util.tree_map_with_path(one, params)


def of_rows(mesh: Mesh, rows: PyTree) -> PyTree:
    """Returns a sharding for groups of rollouts: their first axis along ``data``."""
    return jax.tree.map(lambda leaf: NamedSharding(mesh, P("data", *[None] * (leaf.ndim - 1))), rows)


def place_slots(mesh: Mesh, slots: Slots) -> Slots:
    """Lays slots out by `of_slots`."""
    return jax.device_put(slots, of_slots(mesh, slots))


def of_slots(mesh: Mesh, slots: Slots) -> Slots:
    """Returns a sharding for slots of the decoder: sequences along ``data``, heads of their caches along ``model``."""

    def one(leaf: jax.Array) -> NamedSharding:
        return _split(mesh, leaf, ("data", "model", None, None) if leaf.ndim == 4 else ("data",))

    return jax.tree.map(one, slots)


def _split(mesh: Mesh, leaf: jax.Array, axes: tuple[str | None, ...]) -> NamedSharding:
    """Returns the sharding of a leaf along these axes, but for those that do not divide its side."""
    fits = (a if a and size % mesh.shape[a] == 0 else None for a, size in zip(axes, leaf.shape, strict=True))
    return NamedSharding(mesh, P(*fits))
