"""Exact nearest neighbours under any score, in blocks, with ties broken by a hash."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

BLOCK = 256
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


@partial(jax.jit, static_argnames=("score", "k", "width"))
def nearest(
    score: Score, points: Points, start: jax.Array, salt: jax.Array, *, k: int, width: int
) -> tuple[jax.Array, jax.Array]:
    """Finds the k best candidates of nodes: by score, ties by a hash of (receiver, sender), both downwards.

    Topology features tie massively, and ``top_k`` alone would make hubs of the first nodes. Memory is
    O(``BLOCK`` x width): ``lax.map`` over blocks of receivers, each against one window of senders.

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

    def block(args: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        first, window = args
        receiver, sender = first + jnp.arange(BLOCK), window + jnp.arange(width)
        rows, cols = _slice(points, first, BLOCK), _slice(points, window, width)
        candidate = (receiver[:, None] != sender[None, :]) & rows.mask[:, None] & cols.mask[None, :]
        s = jnp.where(candidate, score(rows, cols), -1.0)
        h = pair_hash(rows.uid[:, None], cols.uid[None, :], salt)
        # Exact in two passes: the k-th score, then everything above it before the ties with the largest hash.
        # (A minimum and not the last column: XLA turns a slice of top_k into a sort, 70 times slower on CPUs.)
        kth = jnp.min(lax.top_k(s, k)[0], axis=1, keepdims=True)
        column = lax.top_k(jnp.where(s > kth, 2.0, jnp.where(s == kth, h, -1.0)), k)[1]
        keys = [-jnp.take_along_axis(a, column, axis=1) for a in (s, h)]
        negative, _, column = lax.sort((*keys, column.astype(jnp.int32)), dimension=1, num_keys=2)
        valid = negative <= 0
        return jnp.where(valid, window + column, receiver[:, None]), valid

    first = jnp.arange(start.shape[0], dtype=jnp.int32) * BLOCK
    sender, valid = lax.map(block, (first, start))
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


def _slice(points: Points, start: jax.Array, size: int) -> Points:
    return jax.tree.map(lambda a: lax.dynamic_slice_in_dim(a, start, size, axis=-1), points)


def _dot(rows: jax.Array, cols: jax.Array) -> jax.Array:
    # Exact on the features' grid, as long as products are not rounded to bfloat16.
    return jnp.einsum("dr,dc->rc", rows, cols, precision=lax.Precision.HIGHEST)
