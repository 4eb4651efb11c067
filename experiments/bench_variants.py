"""The ways to propagate that `experiments.bench_propagation` compares, and the synthetic graphs it compares them on.

A variant is a function from a `Problem` to a runner: a function without arguments that computes all rounds from the
start, waits, and returns f32[N, F]. Every runner computes the same thing by the fastest form of its library that we
know. Whatever depends on the graph only (conversion, compilation) is done before, and not timed.
"""

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jraph
import numpy as np
import scipy.sparse
from jax.experimental import sparse

from envsched_jax.belief import native
from envsched_jax.belief.propagate import diffuse, diffuse_edges, diffuse_native

Runner = Callable[[], Any]
ENVIRONMENT, DOMAIN = 100, 5000  # nodes of one environment and of one domain
IN_DOMAIN = 0.8  # share of cross edges that stay in the domain


class Problem(NamedTuple):
    """One graph and signal, in NumPy."""

    table: np.ndarray  # i32[K, N]
    weight: np.ndarray  # f32[K, N], sums to one per node
    signal: np.ndarray  # f32[N, F]
    restart: float
    rounds: int

    def edges(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Senders, receivers and weights, [K N], ordered by receiver."""
        slots, nodes = self.table.shape
        receivers = np.repeat(np.arange(nodes, dtype=np.int32), slots)
        return self.table.T.reshape(-1), receivers, self.weight.T.reshape(-1)

    def offsets(self) -> np.ndarray:
        """Where every receiver's edges start, i32[N + 1]."""
        slots, nodes = self.table.shape
        return np.arange(0, slots * nodes + 1, slots, dtype=np.int32)

    def arrays(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Table, weights and signal on the device."""
        return jnp.asarray(self.table), jnp.asarray(self.weight), jnp.asarray(self.signal)


def problem(
    *, nodes: int, k: int, relations: int, channels: int, order: str, restart: float, rounds: int, seed: int
) -> Problem:
    """A random graph: relation 0 within environments, the others mostly within domains.

    Args:
      nodes: N.
      k: neighbours per relation.
      relations: how many; the table has `relations * k` slots.
      channels: F.
      order: 'environment' numbers nodes by domain and environment, 'random' shuffles the numbers of the same graph.
      restart: share of the signal in every round.
      rounds: of propagation.
      seed: of everything random.

    Raises:
      ValueError: an unknown order.
    """
    if order not in ("environment", "random"):
        raise ValueError(f"unknown order {order!r}; there are: environment, random")
    rng = np.random.default_rng(seed)
    node = np.arange(nodes, dtype=np.int32)
    table = np.empty((relations * k, nodes), np.int32)
    for slot in range(relations * k):
        size = ENVIRONMENT if slot < k else DOMAIN
        near = np.minimum(node // size * size + rng.integers(0, size, nodes, np.int32), nodes - 1)
        far = rng.integers(0, nodes, nodes, np.int32)
        table[slot] = near if slot < k else np.where(rng.random(nodes) < IN_DOMAIN, near, far)
    weight = rng.random(table.shape, np.float32)
    weight /= weight.sum(axis=0)
    signal = rng.random((nodes, channels), np.float32)
    if order == "random":
        name = rng.permutation(nodes).astype(np.int32)
        place = np.argsort(name)
        table, weight, signal = name[table[:, place]], weight[:, place], signal[place]
    return Problem(np.ascontiguousarray(table), np.ascontiguousarray(weight), signal, restart, rounds)


def exact(p: Problem) -> np.ndarray:
    """The result in float64, [N, F], by scipy."""
    senders, _, weight = p.edges()
    matrix = scipy.sparse.csr_matrix((weight.astype(np.float64), senders, p.offsets()), (p.table.shape[1],) * 2)
    return _numpy_rounds(matrix, p.signal.astype(np.float64), p)


def _numpy_rounds(matrix: Any, signal: np.ndarray, p: Problem) -> np.ndarray:
    x, source = signal, p.restart * signal
    for _ in range(p.rounds):
        x = matrix @ x
        x *= 1.0 - p.restart
        x += source
    return x


# ------------------------------------------------------------------------------------------------ JAX


def _jitted(function: Callable[..., jax.Array], *arrays: jax.Array) -> Runner:
    run = jax.jit(function)
    return lambda: run(*arrays).block_until_ready()


def _gather(p: Problem, **how: Any) -> Runner:
    return _jitted(partial(diffuse, restart=p.restart, rounds=p.rounds, method="gather", **how), *p.arrays())


def _native(p: Problem) -> Runner:
    return _jitted(partial(diffuse_native, restart=p.restart, rounds=p.rounds), *p.arrays())


def _loop(p: Problem, along: Callable[..., jax.Array], *arrays: Any) -> Runner:
    def run(signal: jax.Array, *graph: Any) -> jax.Array:
        def step(_: int, x: jax.Array) -> jax.Array:
            return (1.0 - p.restart) * along(x, *graph) + p.restart * signal

        return jax.lax.fori_loop(0, p.rounds, step, signal)

    return _jitted(run, jnp.asarray(p.signal), *arrays)


def _jraph(p: Problem) -> Runner:
    def along(x: jax.Array, senders: jax.Array, receivers: jax.Array, weight: jax.Array) -> jax.Array:
        return jraph.segment_sum(weight[:, None] * x[senders], receivers, x.shape[0])

    return _loop(p, along, *map(jnp.asarray, p.edges()))


def _segment_sum(p: Problem) -> Runner:
    run = partial(diffuse_edges, restart=p.restart, rounds=p.rounds, receivers_sorted=True)
    return _jitted(run, *map(jnp.asarray, (*p.edges(), p.signal)))


def _bcoo(p: Problem) -> Runner:
    senders, receivers, weight = p.edges()
    index = jnp.asarray(np.stack([receivers, senders], axis=1))
    shape = (p.table.shape[1],) * 2
    return _loop(p, lambda x, a: a @ x, sparse.BCOO((jnp.asarray(weight), index), shape=shape))


def _bcsr(p: Problem) -> Runner:
    senders, _, weight = p.edges()
    parts = (jnp.asarray(weight), jnp.asarray(senders), jnp.asarray(p.offsets()))
    return _loop(p, lambda x, a: a @ x, sparse.BCSR(parts, shape=(p.table.shape[1],) * 2))


# ------------------------------------------------------------------------------------------------ others


def _scipy_csr(p: Problem) -> Runner:
    senders, _, weight = p.edges()
    matrix = scipy.sparse.csr_matrix((weight, senders, p.offsets()), (p.table.shape[1],) * 2)
    return lambda: _numpy_rounds(matrix, p.signal, p)


def _torch_rounds(p: Problem, along: Callable[[Any, Any], Any]) -> Runner:
    """Runs `along(x, restart * signal)`, which returns `(1 - restart) A x + restart * signal`."""
    import torch

    signal = torch.from_numpy(p.signal)
    source = p.restart * signal

    def run() -> np.ndarray:
        with torch.inference_mode():
            x = signal
            for _ in range(p.rounds):
                x = along(x, source)
            return x.numpy()

    return run


def _torch_csr(p: Problem) -> Runner:
    import torch

    senders, _, weight = p.edges()
    index = (torch.from_numpy(a) for a in (p.offsets(), senders, weight))
    matrix = torch.sparse_csr_tensor(*index, size=(p.table.shape[1],) * 2)
    return _torch_rounds(p, lambda x, source: torch.addmm(source, matrix, x, alpha=1.0 - p.restart))


def _torch_embedding_bag(p: Problem) -> Runner:
    import torch

    table = torch.from_numpy(np.ascontiguousarray(p.table.T))
    weight = torch.from_numpy(np.ascontiguousarray((1.0 - p.restart) * p.weight.T))
    bag = partial(torch.nn.functional.embedding_bag, mode="sum", per_sample_weights=weight)
    return _torch_rounds(p, lambda x, source: bag(table, x).add_(source))


def _pyg(p: Problem) -> Runner:
    import torch
    from torch_geometric.nn import MessagePassing

    class WeightedSum(MessagePassing):
        def forward(self, x: Any, edge_index: Any, weight: Any) -> Any:
            return self.propagate(edge_index, x=x, weight=weight)

        def message(self, x_j: Any, weight: Any) -> Any:
            return weight[:, None] * x_j

    senders, receivers, weight = p.edges()
    layer, edge_index = WeightedSum(aggr="add"), torch.from_numpy(np.stack([senders, receivers]).astype(np.int64))
    scaled = torch.from_numpy((1.0 - p.restart) * weight)
    return _torch_rounds(p, lambda x, source: layer(x, edge_index, scaled).add_(source))


VARIANTS: dict[str, Callable[[Problem], Runner]] = {
    "diffuse": _gather,
    "diffuse_bfloat16": partial(_gather, storage=jnp.bfloat16),
    "diffuse_native": _native,
    "jraph": _jraph,
    "segment_sum": _segment_sum,
    "bcoo": _bcoo,
    "bcsr": _bcsr,
    "scipy_csr": _scipy_csr,
    "torch_csr": _torch_csr,
    "torch_embedding_bag": _torch_embedding_bag,
    "pyg": _pyg,
}
_NEEDS = {"torch_csr": ("torch",), "torch_embedding_bag": ("torch",), "pyg": ("torch", "torch_geometric")}


def why_not(variant: str) -> str | None:
    """Why a variant cannot run here, None if it can.

    Raises:
      ValueError: there is no such variant.
    """
    if variant not in VARIANTS:
        raise ValueError(f"unknown variant {variant!r}; there are: {', '.join(VARIANTS)}")
    missing = [name for name in _NEEDS.get(variant, ()) if importlib.util.find_spec(name) is None]
    if missing:
        return f"{' and '.join(missing)} not installed"
    if variant == "diffuse_native":
        on_cpu = jax.default_backend() == "cpu"
        return (None if native.available() else native.failure()) if on_cpu else "the native kernel is for the CPU"
    return None
