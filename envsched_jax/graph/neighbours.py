"""The neighbours of all tasks in both relations, and how similar they are."""

import jax
import jax.numpy as jnp
import numpy as np

from envsched_jax.graph import features, knn, shortlist
from envsched_jax.types import EDGE_KINDS, WITHIN_KINDS

PART = 1 << 16  # tasks whose features are held at once; an environment is never divided
_WITHIN = len(WITHIN_KINDS)


def parts(env: np.ndarray) -> list[slice]:
    """Divides tasks, sorted by environment, into runs of whole environments with at least ``PART`` tasks.

    Args:
      env: i32[n].
    """
    ends = np.append(np.flatnonzero(env[1:] != env[:-1]) + 1, len(env))
    out, first = [], 0
    for last in ends.tolist():
        if last - first >= PART or last == len(env):
            out.append(slice(first, last))
            first = last
    return out


def points(rows: features.Features, env: np.ndarray, uid: np.ndarray, group: np.ndarray, k: int) -> knn.Points:
    """Returns what the search reads of n tasks, padded to whole blocks, and to k."""
    # Parts of a large pool differ a little in size: padded to the same, they share a program.
    step = knn.BLOCK if len(env) < PART else knn.WINDOW
    size = -(-max(len(env), k) // step) * step
    return knn.Points(
        mask=knn.column(size, np.ones(len(env), bool)),
        env=knn.column(size, env),
        uid=knn.column(size, uid),
        group=knn.column(size, group),
        semantics=knn.column(size, rows.semantics),
        tools=knn.column(size, rows.tools),
        other=knn.column(size, rows.state, rows.verifier),
        shape=knn.column(size, rows.execution, rows.reward),
    )


def within(every: knn.Points, env: np.ndarray, k: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Finds the best neighbours of the same environment.

    Args:
      every: of n tasks.
      env: i32[n], sorted by environment.
      k: K.
      seed: of the breaking of ties.

    Returns:
      Their positions i64[K, n] and which of them exist.
    """
    n, size = len(env), every.mask.shape[0]
    # Environments are contiguous here: a block needs only those that it touches.
    edges = np.flatnonzero(np.r_[True, env[1:] != env[:-1], True])
    first = np.arange(0, n, knn.BLOCK)
    start = edges[np.searchsorted(edges, first, side="right") - 1]
    stop = edges[np.searchsorted(edges, np.minimum(first + knn.BLOCK, n), side="left")]
    width = min(size, -(-max(int((stop - start).max()), k) // knn.BLOCK) * knn.BLOCK)
    start = np.minimum(np.pad(start, (0, size // knn.BLOCK - len(start))), size - width).astype(np.int32)
    return _host(n, knn.nearest(knn.within_score, every, jnp.asarray(start), salt(seed), k=k, width=width))


def cross(
    execution: np.ndarray, reward: np.ndarray, env: np.ndarray, uid: np.ndarray, k: int, seed: int, approximate: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Finds the best neighbours of other environments.

    Args:
      execution: f32[n, *], see ``Features``.
      reward: f32[n, *].
      env: i32[n].
      uid: u32[n].
      k: K.
      seed: of the breaking of ties.
      approximate: search a shortlist of each task, see ``shortlist.search``.

    Returns:
      Their positions i64[K, n] and which of them exist.
    """
    shape = np.concatenate([execution, reward], axis=1)
    if approximate:
        return shortlist.search(shape, env, uid, salt(seed), k=k, probes=shortlist.PROBES)
    size = -(-max(len(env), k) // knn.BLOCK) * knn.BLOCK
    every = knn.topology(size, shape, env, uid)
    start = jnp.zeros(size // knn.BLOCK, jnp.int32)
    return _host(len(env), knn.nearest(knn.cross_score, every, start, salt(seed), k=k, width=size))


def similarities_within(rows: features.Features, group: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Returns f32[K, r, S] in the order of EDGE_KINDS, in [0, 1], zero in the cross kinds.

    Args:
      rows: of n tasks.
      group: i32[n].
      positions: i64[K, r], the neighbours of the first r tasks, as positions in ``0 .. n - 1``.
    """
    own = group[: positions.shape[1]]
    out = np.zeros((*positions.shape, len(EDGE_KINDS)), np.float32)
    for slot, sender in zip(out, positions, strict=True):
        semantics, tools = _inner(rows.semantics, sender), _inner(rows.tools, sender)
        twin = (own >= 0) & (own == group[sender]) | (semantics >= knn.NEAR) & (tools >= knn.NEAR)
        kinds = [semantics, tools, _inner(rows.state, sender), _inner(rows.verifier, sender), twin]
        slot[:, :_WITHIN] = np.stack(kinds, axis=1)
    return out


def similarities_cross(execution: np.ndarray, reward: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Returns f32[K, r, S], zero in the within kinds; arguments as for ``cross`` and ``similarities_within``."""
    out = np.zeros((*positions.shape, len(EDGE_KINDS)), np.float32)
    for slot, sender in zip(out, positions, strict=True):
        slot[:, _WITHIN:] = np.stack([_inner(execution, sender), _inner(reward, sender)], axis=1)
    return out


def salt(seed: int) -> jax.Array:
    """Returns u32[], what a seed means to the hash that breaks ties."""
    return jnp.asarray(seed % 2**32, jnp.uint32)


def _inner(rows: np.ndarray, sender: np.ndarray) -> np.ndarray:
    """Returns the inner products f32[r] of the first r rows with those of their senders, cut to [0, 1]."""
    out = np.empty(len(sender), np.float32)
    for first in range(0, len(sender), PART):  # the rows of all senders at once may be more than fit
        part = slice(first, min(first + PART, len(sender)))
        out[part] = np.einsum("nd,nd->n", rows[part], rows[sender[part]])
    return np.clip(out, 0.0, 1.0)


def _host(n: int, found: tuple[jax.Array, jax.Array]) -> tuple[np.ndarray, np.ndarray]:
    sender, valid = (np.asarray(a)[:n].T for a in found)
    return sender, valid
