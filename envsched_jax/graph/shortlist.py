"""Approximate neighbours of other environments: each task looks only where topology is like its own.

Tasks are sorted into tiles of ``BLOCK`` by halving them again and again along their principal axis, a balanced tree (as
the k-d tree of Sproull, "Refinements to nearest-neighbor searching", 1991). The tasks of a tile look among those of its
``PROBES`` best tiles, by the inner product of the means: an inverted file (Jegou and others, "Product quantization for
nearest neighbor search", 2011), whose lists are all of one length, so that shapes are fixed.
"""

import jax
import jax.numpy as jnp
import numpy as np

from envsched_jax.graph import knn

PROBES = 32
_SAMPLE = 1024  # rows that an axis is taken from
_ROUNDS = 8  # of power iteration
_GRID = 2.0**10  # of the features: products with numbers on it are exact, so equal rows stay together
_PART = 1 << 16  # rows that are copied at once
_MORE = 8  # times as many tiles for tasks that found too few


def search(
    shape: np.ndarray, env: np.ndarray, uid: np.ndarray, salt: jax.Array, *, k: int, probes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Finds good neighbours of other environments by ``knn.cross_score``.

    A task has as many neighbours as there are, up to k: where a tile's shortlist has too few of other environments, it
    is searched again with a longer one.

    Args:
      shape: f32[n, *], execution and reward.
      env: i32[n].
      uid: u32[n].
      salt: u32[], varies the hash that breaks ties.
      k: K.
      probes: tiles that a task looks in, its own among them; with all of them, the neighbours are exact.

    Returns:
      Positions i64[K, n] and which of them exist.
    """
    n, order = len(env), arrange(shape, uid)
    tiles = -(-n // knn.BLOCK)
    every = knn.topology(tiles * knn.BLOCK, shape[order], env[order], uid[order])
    means = _means(shape, env, order, tiles)
    want = np.minimum(k, n - np.bincount(env)[env[order]])
    sender, valid = np.zeros((n, k), np.int64), np.zeros((n, k), bool)
    todo = np.arange(tiles)
    while len(todo):
        nearest, there = _rank(means, tiles, salt, min(max(probes, -(-k // knn.BLOCK)), tiles))
        args = (todo, nearest[todo], there[todo])
        found = knn.among(knn.cross_score, every, *map(jnp.asarray, args), salt, k=k)
        rows = (todo[:, None] * knn.BLOCK + np.arange(knn.BLOCK)).reshape(-1)
        real = rows < n
        sender[rows[real]], valid[rows[real]] = (np.asarray(x)[real] for x in found)
        short = valid.sum(axis=1) < want
        todo = np.unique(np.flatnonzero(short) // knn.BLOCK)
        probes *= _MORE
    out, exists = np.empty((k, n), np.int64), np.empty((k, n), bool)
    out[:, order], exists[:, order] = order[sender].T, valid.T
    return out, exists


def arrange(rows: np.ndarray, uid: np.ndarray) -> np.ndarray:
    """Returns an order i64[n] in which every run of ``BLOCK`` rows, from a multiple of it on, is alike.

    Args:
      rows: f32[n, C], on the features' grid.
      uid: u32[n]; equal rows come in the order of these.
    """
    out = np.argsort(uid, kind="stable")
    todo = [(0, len(out))]
    while todo:
        first, last = todo.pop()
        blocks = -(-(last - first) // knn.BLOCK)
        if blocks < 2:
            continue
        part = out[first:last]
        axis = _axis(rows[part[:: -(-len(part) // _SAMPLE)]])
        place = np.concatenate([rows[part[i : i + _PART]] @ axis for i in range(0, len(part), _PART)])
        out[first:last] = part[np.argsort(place, kind="stable")]
        middle = first + blocks // 2 * knn.BLOCK
        todo += [(first, middle), (middle, last)]
    return out


def _axis(rows: np.ndarray) -> np.ndarray:
    """Returns the principal axis f32[C] of the rows, by power iteration, on the grid."""
    centred = rows - rows.mean(axis=0)
    axis = centred[np.argmax((centred**2).sum(axis=1))]
    for _ in range(_ROUNDS):
        axis = axis / max(float(np.linalg.norm(axis)), 1e-6)
        axis = centred.T @ (centred @ axis)
    axis = axis / max(float(np.linalg.norm(axis)), 1e-6)
    return (np.round(axis * _GRID) / _GRID).astype(np.float32)


def _means(shape: np.ndarray, env: np.ndarray, order: np.ndarray, tiles: int) -> knn.Points:
    """Returns every tile as a point: the mean of its rows, and its environment if it has only one."""
    starts = np.arange(tiles) * knn.BLOCK
    mean = np.stack([shape[order[i : i + knn.BLOCK]].mean(axis=0) for i in starts])
    low, high = np.minimum.reduceat(env[order], starts), np.maximum.reduceat(env[order], starts)
    own = np.where(low == high, low, -1 - np.arange(tiles)).astype(np.int32)
    size = -(-tiles // knn.BLOCK) * knn.BLOCK
    return knn.topology(size, np.round(mean * _GRID) / np.float32(_GRID), own, np.arange(tiles, dtype=np.uint32))


def _rank(means: knn.Points, tiles: int, salt: jax.Array, probes: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tiles in which each tile looks, i32[tiles, probes], itself first, and which count."""
    own = np.arange(tiles, dtype=np.int32)[:, None]
    if probes == 1:
        return own, np.ones_like(own, bool)
    size = means.mask.shape[0]
    start = jnp.zeros(size // knn.BLOCK, jnp.int32)
    found = knn.nearest(knn.cross_score, means, start, salt, k=probes - 1, width=size)
    near, there = (np.asarray(x)[:tiles] for x in found)
    return np.concatenate([own, near], axis=1), np.concatenate([np.ones_like(own, bool), there], axis=1)
