"""Propagation along a table of neighbours: ``X_0 = S``, ``X_{l+1} = (1-a) A X_l + a S``.

``A`` is stored by slots: row k of a table ``[K, N]`` holds the neighbour in slot k of every node, beside its weight.
Every node then has the same number of gathers and no scatter is needed; unused slots have weight 0. Number nodes by
environment: neighbours then lie close together, which halves the time on large graphs. Personalised PageRank as in
"predict then propagate", Gasteiger et al. 2019. The reference in tests is the dense matrix in float64.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from envsched_jax.belief import native

CHUNK = 8  # slots summed before they are added to the total
METHODS = ("auto", "gather", "native")
WIDTH = 8  # channels that the native kernel takes at a time


def rows(x: jax.Array, index: jax.Array) -> jax.Array:
    """Returns ``x[index]`` for an index known to lie in ``0..len(x)-1``, without a pass that mends negative ones."""
    return x.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)


def propagate(table: jax.Array, weight: jax.Array, x: jax.Array) -> jax.Array:
    """Returns ``A x``, f32[N, F]: for each node the weighted sum over its neighbours. Gathers only, no scatter.

    Columns of some nodes, ``[K, C]`` of table and weight, give the sums of these, f32[C, F]. Every entry of ``table``
    must lie in ``0..N-1``; the graph's builder has checked that. Sums are taken in the precision of ``weight``,
    whatever ``x`` is stored in.
    """
    total = jnp.zeros((table.shape[1], x.shape[1]), weight.dtype)
    for start in range(0, table.shape[0], CHUNK):
        slots = range(start, min(start + CHUNK, table.shape[0]))
        total = total + sum(weight[k][:, None] * rows(x, table[k]).astype(weight.dtype) for k in slots)
    return total


def diffuse(
    table: jax.Array,
    weight: jax.Array,
    signal: jax.Array,
    *,
    restart: float | jax.Array,
    rounds: int,
    method: str = "auto",
    storage: DTypeLike | None = None,
) -> jax.Array:
    """Returns ``X_rounds``, f32[N, F], from the signal ``S``; put all channels into one call.

    Args:
      table: i32[K, N], the neighbour in slot k of every node, in ``0..N-1``.
      weight: f32[K, N], its weight, 0 where there is none.
      signal: f32[N, F].
      restart: ``a`` in [0, 1], the share of the signal in every round.
      rounds: how often records pass along an edge, static.
      method: 'gather' (XLA, on every platform), 'native' (C++ on the CPU, see ``diffuse_native``) or 'auto': 'gather',
        but on the CPU 'native' once ``native.load()`` has been called. Nothing is built behind your back.
      storage: dtype of the state between rounds, by default that of the signal. With bfloat16 a gather moves half the
        bytes, which pays on accelerators, and sums stay in float32. For weights >= 0 that sum to at most 1 per node
        the result is off by at most ``2^-8 max|S| sum_{l=0..rounds} (1-a)^l``, hence by ``2^-8 max|S| / a``.

    Raises:
      ValueError: an unknown method, or ``storage`` with the native one.
    """
    if method not in METHODS:
        raise ValueError(f"unknown method {method!r}; there are: {', '.join(METHODS)}")
    if method == "native" and storage is not None:
        raise ValueError("the native kernel keeps its state in float32: leave out storage")
    on_cpu = jax.default_backend() == "cpu"
    if method == "native" or (method == "auto" and storage is None and on_cpu and native.loaded()):
        return diffuse_native(table, weight, signal, restart=restart, rounds=rounds)
    return _repeat(partial(propagate, table, weight), signal, restart, rounds, storage)


def diffuse_edges(
    senders: jax.Array,
    receivers: jax.Array,
    weight: jax.Array,
    signal: jax.Array,
    *,
    restart: float | jax.Array,
    rounds: int,
    receivers_sorted: bool = False,
) -> jax.Array:
    """Returns what ``diffuse`` returns, f32[N, F], for a graph given by its edges: any number of neighbours per node.

    About 4 times slower than ``diffuse`` on a CPU, since sums are scattered; where degrees are nearly equal, a table
    padded with weight 0 is the better form.

    Args:
      senders: i32[E], in ``0..N-1``.
      receivers: i32[E], in ``0..N-1``.
      weight: f32[E], 0 for edges that only pad.
      signal: f32[N, F].
      restart: ``a`` in [0, 1].
      rounds: static.
      receivers_sorted: whether ``receivers`` never decrease, which is faster on large graphs.
    """

    def along(x: jax.Array) -> jax.Array:
        message = weight[:, None] * rows(x, senders)
        return jax.ops.segment_sum(message, receivers, x.shape[0], indices_are_sorted=receivers_sorted)

    return _repeat(along, signal, restart, rounds)


def diffuse_native(
    table: jax.Array, weight: jax.Array, signal: jax.Array, *, restart: float | jax.Array, rounds: int
) -> jax.Array:
    """Returns what ``diffuse`` returns, f32[N, F], by a C++ kernel on the CPU, built at the first call.

    May be jitted, batched (one after the other) and differentiated (derivatives are taken by gathers). Equal to the
    form by gathers but for rounding. Channels are padded to a multiple of 8, so 7 cost as much as 8.

    Raises:
      native.NativeError: the kernel cannot be built or loaded; the message says why.
      jax.errors.JaxRuntimeError: at the call or when the result is waited for, if the table names a node that does not
        exist.
    """
    native.load()
    return _native(table, weight, signal, jnp.asarray(restart, jnp.float32), rounds)


@partial(jax.custom_jvp, nondiff_argnums=(4,))
def _native(table: jax.Array, weight: jax.Array, signal: jax.Array, restart: jax.Array, rounds: int) -> jax.Array:
    channels = signal.shape[1]
    padded = jnp.pad(signal, ((0, 0), (0, -channels % WIDTH)))
    out = jax.ShapeDtypeStruct(padded.shape, padded.dtype)
    call = jax.ffi.ffi_call(native.TARGET, (out, out), vmap_method="sequential")  # the second is working space
    return call(table, weight, padded, restart, rounds=rounds)[0][:, :channels]


@_native.defjvp
def _native_jvp(
    rounds: int, primals: tuple[jax.Array, ...], tangents: tuple[jax.Array, ...]
) -> tuple[jax.Array, jax.Array]:
    def gather(table: jax.Array, weight: jax.Array, signal: jax.Array, restart: jax.Array) -> jax.Array:
        return _repeat(partial(propagate, table, weight), signal, restart, rounds)

    return jax.jvp(gather, primals, tangents)


def _repeat(
    along: Callable[[jax.Array], jax.Array],
    signal: jax.Array,
    restart: float | jax.Array,
    rounds: int,
    storage: DTypeLike | None = None,
) -> jax.Array:
    def step(_: int, x: jax.Array) -> jax.Array:
        return ((1.0 - restart) * along(x) + restart * signal).astype(x.dtype)

    # a loop, not unrolled rounds: else the compiler works out earlier rounds anew inside later ones (20 times slower)
    state = jax.lax.fori_loop(0, rounds, step, signal if storage is None else signal.astype(storage))
    return state.astype(signal.dtype)
