"""Low-rank adapters: each kernel is its own plus a product of two thin matrices, and only these are trained.

Hu et al. 2021, LoRA. A kernel is put together before it is used, so everything else sees an ordinary model; that costs
the memory of one more copy of the adapted kernels.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from envsched_jax.types import Key

TARGETS = ("q", "k", "v", "o", "gate", "up", "down")
Adapters = dict[str, dict[str, jax.Array]]  # by the path of a kernel: a f32[in, rank], b f32[rank, out]


def adapters(key: Key, params: nnx.State, rank: int, targets: tuple[str, ...] = TARGETS) -> Adapters:
    """Returns adapters that change nothing yet: ``a`` is drawn, ``b`` is 0.

    Args:
      key: consumed.
      params: of ``nnx.split(model)``.
      rank: inner size, at least 1.
      targets: names of the layers that get one.

    Raises:
      ValueError: no kernel is named so, or the rank is below 1.
    """
    if rank < 1:
        raise ValueError(f"rank: expected at least 1, got {rank}")
    found: Adapters = {}
    for path, kernel in _kernels(params, targets):
        size, out = kernel.shape
        draw = jax.random.normal(jax.random.fold_in(key, len(found)), (size, rank), jnp.float32)
        found[path] = {"a": draw * size**-0.5, "b": jnp.zeros((rank, out), jnp.float32)}
    if not found:
        raise ValueError(f"targets: expected some of {', '.join(TARGETS)}, got {targets!r}")
    return found


def adapt(adapters: Adapters, params: nnx.State, scale: float = 1.0) -> nnx.State:
    """Returns parameters with ``kernel + scale a b`` for every kernel that has an adapter; ``params`` stays."""

    def one(path: tuple, value: jax.Array) -> jax.Array:
        thin = adapters.get(_name(path))
        if thin is None:
            return value
        return value + (scale * (thin["a"] @ thin["b"])).astype(value.dtype)

    return jax.tree_util.tree_map_with_path(one, params)


def _kernels(params: nnx.State, targets: tuple[str, ...]) -> list[tuple[str, jax.Array]]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    named = ((_name(path), value) for path, value in leaves)
    return [(name, value) for name, value in named if any(f"/{target}/kernel" in f"/{name}" for target in targets)]


def _name(path: tuple) -> str:
    """Returns a path such as ``blocks/0/q/kernel``."""
    keys = (getattr(entry, "key", getattr(entry, "name", getattr(entry, "idx", None))) for entry in path)
    return "/".join(str(key) for key in keys if key not in (None, "value", "raw_value"))
