"""Nearest neighbours under any score, in blocks, with ties broken by a hash: among all nodes or on a shortlist."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

BLOCK = 256
WINDOW = 256 * BLOCK  # senders scored at once
NEAR = 0.95  # near-duplicates: text and tools both at least this similar


class Points(NamedTuple):
    """What the scores read; the last axis counts nodes, a multiple of ``BLOCK``, so that columns need no transpose."""

    mask: jax.Array  # bool[n]
    env: jax.Array  # i32[n]
    uid: jax.Array  # u32[n], tells nodes apart in the hash
    group: jax.Array  # i32[n], -1: of no group
    semantics: jax.Array  # f32[*, n], see Features
    tools: jax.Array  # f32[*, n]
    other: jax.Array  # f32[*, n], state and verifier
    shape: jax.Array  # f32[*, n], execution and reward


Score = Callable[[Points, Points], jax.Array]
Best = tuple[jax.Array, jax.Array, jax.Array]  # per receiver, best first: negative score, negative hash, sender


@partial(jax.jit, static_argnames=("score", "k", "width"))
def nearest(
    score: Score, points: Points, start: jax.Array, salt: jax.Array, *, k: int, width: int
) -> tuple[jax.Array, jax.Array]:
    """Finds the k best candidates of nodes: by score, ties by a hash of (receiver, sender), both downwards.

    Topology features tie massively, and ``top_k`` alone would make hubs of the first nodes. Scores take
    O(``BLOCK`` x ``WINDOW``) memory, some hundred MB: ``lax.map`` over blocks of receivers, each against one window of
    senders, which is scored in parts if it is wide.

    Args:
      score: (receivers, senders) to f32[r, c]; at least 0 for a candidate, negative for none.
      points: all nodes.
      start: i32[r / BLOCK], first sender of each block's window; windows must not run over the end. As many blocks of
        nodes as it has entries, from the first on, are receivers: all, or only some.
      salt: u32[], varies the hash.
      k: at most width.
      width: senders in a window.

    Returns:
      sender i32[r, k] and whether it is one, bool[r, k]; false slots come last and hold the receiver itself.
    """
    part = min(width, max(WINDOW, k))

    def block(args: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        first, window = args
        receiver, rows = first + jnp.arange(BLOCK), _slice(points, first, BLOCK)

        def senders(i: jax.Array) -> tuple[Points, jax.Array, jax.Array]:
            # The last part is moved back to end with the window: what it shares with the one before is not new.
            begin = window + jnp.minimum(i * part, width - part)
            sender = begin + jnp.arange(part)
            return _slice(points, begin, part), sender, sender >= window + i * part

        return _best(score, rows, receiver, senders, -(-width // part), salt, k)

    first = jnp.arange(start.shape[0], dtype=jnp.int32) * BLOCK
    sender, valid = lax.map(block, (first, start))
    return sender.reshape(-1, k), valid.reshape(-1, k)


@partial(jax.jit, static_argnames=("score", "k"))
def among(
    score: Score, points: Points, receivers: jax.Array, tiles: jax.Array, there: jax.Array, salt: jax.Array, *, k: int
) -> tuple[jax.Array, jax.Array]:
    """Finds the k best candidates like ``nearest``, but only among some tiles: runs of ``BLOCK`` nodes.

    Args:
      score: as for ``nearest``.
      points: all nodes.
      receivers: i32[b], the tiles whose nodes are receivers.
      tiles: i32[b, p], where each of them looks for senders; p times BLOCK is at least k.
      there: bool[b, p], which entries of ``tiles`` count; a tile must not count twice in a row.
      salt: u32[], varies the hash.
      k: neighbours.

    Returns:
      sender i32[b * BLOCK, k] and whether it is one, as for ``nearest``.
    """
    at_once = min(tiles.shape[1], max(WINDOW, k) // BLOCK + 1)
    parts = -(-tiles.shape[1] // at_once)
    fill = ((0, 0), (0, parts * at_once - tiles.shape[1]))
    count = points.mask.shape[0] // BLOCK
    columns = jax.tree.map(lambda a: a.reshape(*a.shape[:-1], count, BLOCK), points)

    def block(args: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        tile, near, counts = args
        rows = _slice(points, tile * BLOCK, BLOCK)

        def senders(i: jax.Array) -> tuple[Points, jax.Array, jax.Array]:
            cols = jax.tree.map(lambda a: a[..., near[i], :].reshape(*a.shape[:-2], at_once * BLOCK), columns)
            sender = near[i][:, None] * BLOCK + jnp.arange(BLOCK)[None, :]
            return cols, sender.reshape(-1), jnp.repeat(counts[i], BLOCK)

        return _best(score, rows, tile * BLOCK + jnp.arange(BLOCK), senders, parts, salt, k)

    shape = (tiles.shape[0], parts, at_once)
    args = receivers, jnp.pad(tiles, fill).reshape(shape), jnp.pad(there, fill).reshape(shape)
    sender, valid = lax.map(block, args)
    return sender.reshape(-1, k), valid.reshape(-1, k)


def within_score(rows: Points, cols: Points) -> jax.Array:
    """Scores candidates of the same environment: near-duplicates first, then the mean of all within similarities."""
    semantics = jnp.maximum(_dot(rows.semantics, cols.semantics), 0.0)
    tools = _dot(rows.tools, cols.tools)
    mean = (semantics + tools + _dot(rows.other, cols.other)) / 4
    twin = (rows.group[:, None] == cols.group[None, :]) & (rows.group >= 0)[:, None]
    twin = twin | ((semantics >= NEAR) & (tools >= NEAR))
    same = rows.env[:, None] == cols.env[None, :]
    return jnp.where(same, mean + jnp.where(twin, 2.0, 0.0), -1.0)


def cross_score(rows: Points, cols: Points) -> jax.Array:
    """Scores candidates of other environments by execution and reward topology."""
    other = rows.env[:, None] != cols.env[None, :]
    return jnp.where(other, _dot(rows.shape, cols.shape) / 2, -1.0)


def any_within(rows: Points, cols: Points) -> jax.Array:
    """Scores all candidates of the same environment alike."""
    return jnp.where(rows.env[:, None] == cols.env[None, :], 0.0, -1.0)


def any_cross(rows: Points, cols: Points) -> jax.Array:
    """Scores all candidates of other environments alike."""
    return jnp.where(rows.env[:, None] != cols.env[None, :], 0.0, -1.0)


def pair_hash(receiver: jax.Array, sender: jax.Array, salt: jax.Array) -> jax.Array:
    """Returns a hash in [0, 1) of ordered pairs of u32, with 24 bits; MurmurHash3's finaliser mixes them."""
    one = jnp.uint32
    x = (receiver ^ salt) * one(0x9E3779B1) + sender
    x = (x ^ (x >> one(16))) * one(0x85EBCA6B)
    x = (x ^ (x >> one(13))) * one(0xC2B2AE35)
    return ((x ^ (x >> one(16))) >> one(8)).astype(jnp.float32) * jnp.float32(2.0**-24)


def column(size: int, *parts: np.ndarray) -> jax.Array:
    """Returns arrays of n rows side by side, with the rows last and padded by zeros to ``size``."""
    shape = (size,) if parts[0].ndim == 1 else (sum(part.shape[1] for part in parts), size)
    out = np.zeros(shape, parts[0].dtype)
    np.concatenate([part.T for part in parts], out=out[..., : len(parts[0])])  # the only copy
    return jnp.asarray(out)


def topology(size: int, shape: np.ndarray, env: np.ndarray, uid: np.ndarray) -> Points:
    """Returns what ``cross_score`` reads of n tasks, padded to ``size``, and nothing else.

    Args:
      size: at least n.
      shape: f32[n, *], execution and reward.
      env: i32[n].
      uid: u32[n].
    """
    nothing = jnp.zeros((0, size), jnp.float32)
    mask, own, hashed = (column(size, a) for a in (np.ones(len(env), bool), env, uid))
    return Points(mask, own, hashed, own, nothing, nothing, nothing, column(size, shape))


def _best(
    score: Score,
    rows: Points,
    receiver: jax.Array,
    senders: Callable[[jax.Array], tuple[Points, jax.Array, jax.Array]],
    parts: int,
    salt: jax.Array,
    k: int,
) -> tuple[jax.Array, jax.Array]:
    """Returns the k best senders of all parts, i32[BLOCK, k], and which exist; part i gives columns, numbers, mask."""

    def step(i: jax.Array, best: Best) -> Best:
        more = _top(score, rows, receiver, *senders(i), salt, k)
        joined = [jnp.concatenate(both, axis=1) for both in zip(best, more, strict=True)]
        worst, tie, sender = lax.sort(joined, dimension=1, num_keys=3)
        return worst[:, :k], tie[:, :k], sender[:, :k]

    best = _top(score, rows, receiver, *senders(jnp.int32(0)), salt, k)
    negative, _, sender = lax.fori_loop(1, parts, step, best) if parts > 1 else best
    valid = negative <= 0
    return jnp.where(valid, sender, receiver[:, None]), valid


def _top(
    score: Score,
    rows: Points,
    receiver: jax.Array,
    cols: Points,
    sender: jax.Array,
    counts: jax.Array,
    salt: jax.Array,
    k: int,
) -> Best:
    candidate = (receiver[:, None] != sender[None, :]) & rows.mask[:, None] & (cols.mask & counts)[None, :]
    s = jnp.where(candidate, score(rows, cols), -1.0)
    h = pair_hash(rows.uid[:, None], cols.uid[None, :], salt)
    # Exact in two passes: the k-th score, then everything above it before the ties with the largest hash.
    # (A minimum and not the last column: XLA turns a slice of top_k into a sort, 70 times slower on CPUs.)
    kth = jnp.min(lax.top_k(s, k)[0], axis=1, keepdims=True)
    column = lax.top_k(jnp.where(s > kth, 2.0, jnp.where(s == kth, h, -1.0)), k)[1]
    keys = [-jnp.take_along_axis(a, column, axis=1) for a in (s, h)]
    negative, tie, number = lax.sort((*keys, sender[column].astype(jnp.int32)), dimension=1, num_keys=3)
    return negative, tie, number


def _slice(points: Points, start: jax.Array, size: int) -> Points:
    return jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, start, size, axis=-1), points)


def _dot(rows: jax.Array, cols: jax.Array) -> jax.Array:
    # Exact on the features' grid, as long as products are not rounded to bfloat16.
    return jnp.einsum("dr,dc->rc", rows, cols, precision=lax.Precision.HIGHEST)
