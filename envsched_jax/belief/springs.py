"""A Gaussian Markov random field on the graph: precision ``Q = (I + sum_s w_s L_s) / s^2``, solved without a matrix.

Think of springs: one along every edge, as stiff as the weighted similarity, and one that pulls each node to zero.
Means come from conjugate gradients, marginal variances from probes that are solved for in the same pass. Reference: Rue
and Held, "Gaussian Markov Random Fields", 2005; the oracle in tests is the dense matrix in float64.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from envsched_jax.types import EDGE_KINDS, Graph

PRIOR_NOISE, RECORD_NOISE = -1, -2  # slots of the probes' noise that are no edges
SMALLEST = 1e-20
POWER = 3  # of a similarity: near-equal tasks count, vaguely similar ones hardly


class Springs(NamedTuple):
    """The prior precision of the field."""

    table: jax.Array  # i32[2K, N], the other end of every edge
    edge: jax.Array  # f32[2K, N]; W = (A + A^T) / 2, so a directed edge is half a spring
    ground: jax.Array  # f32[]
    degree: jax.Array  # f32[N], sum of the springs at a node


def springs(graph: Graph, weight: jax.Array, variance: jax.Array) -> Springs:
    """Returns the precision for these weights of the kinds of similarity, f32[S], and variance s^2 of a lone node."""
    num_nodes = graph.nodes.mask.shape[0]
    table = graph.senders.reshape(-1, num_nodes)
    raw = sum(weight[s] * _closeness(graph, s) for s in range(len(EDGE_KINDS)))
    edge = jnp.where(graph.edges.mask, 0.5 * raw / variance, 0.0).reshape(table.shape)
    back = jnp.zeros(num_nodes, jnp.float32).at[table.reshape(-1)].add(edge.reshape(-1))
    return Springs(table, edge, 1.0 / variance, edge.sum(axis=0) + back)


def _closeness(graph: Graph, kind: int) -> jax.Array:
    """Returns how stiff a spring of weight 1 is by this kind of similarity, f32[2KN]."""
    return graph.edges.similarity[:, kind] ** POWER


def pull(springs: Springs, x: jax.Array) -> jax.Array:
    """Returns ``W x``, f32[N, R] for f32[N, R]: what the springs carry over from the neighbours."""

    def one(slot: jax.Array, total: jax.Array) -> jax.Array:
        sender, weight = springs.table[slot], springs.edge[slot][:, None]
        return (total + weight * x[sender]).at[sender].add(weight * x)

    return jax.lax.fori_loop(0, springs.table.shape[0], one, jnp.zeros_like(x))


def solve(
    springs: Springs, own: jax.Array, target: jax.Array, start: jax.Array, *, iterations: int, tolerance: float = 1e-3
) -> jax.Array:
    """Returns ``(Q + diag(own))^-1 target`` by conjugate gradients, f32[N, R], column by column.

    Args:
      springs: Q.
      own: f32[N], precision of each node's own evidence.
      target: f32[N, R].
      start: f32[N, R], the closer, the fewer iterations.
      iterations: the most.
      tolerance: ends when every column's residual is this small beside its target, by the norm of the inverse diagonal.
    """
    diagonal = (springs.ground + springs.degree + own)[:, None]

    def times(x: jax.Array) -> jax.Array:
        return diagonal * x - pull(springs, x)

    def step(state: tuple[Any, ...]) -> tuple[Any, ...]:
        count, x, residual, direction, size = state
        ahead = times(direction)
        length = size / jnp.maximum((direction * ahead).sum(axis=0), SMALLEST)
        x, residual = x + length[None, :] * direction, residual - length[None, :] * ahead
        scaled = residual / diagonal
        following = (residual * scaled).sum(axis=0)
        direction = scaled + (following / jnp.maximum(size, SMALLEST))[None, :] * direction
        return count + 1, x, residual, direction, following

    small = tolerance**2 * (jnp.square(target) / diagonal).sum(axis=0)
    residual = target - times(start)
    scaled = residual / diagonal
    state = (jnp.int32(0), start, residual, scaled, (residual * scaled).sum(axis=0))
    return jax.lax.while_loop(lambda s: (s[0] < iterations) & (s[4] > small).any(), step, state)[1]


def slopes(
    graph: Graph, springs: Springs, weight: jax.Array, field: jax.Array, adjoint: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns ``- adjoint . dQ field`` by the logarithms of the weights, f32[S], and of the variance, f32[].

    With ``(Q + Lambda) field = b`` and ``(Q + Lambda) adjoint`` the gradient of a function by the field, these are its
    gradients by what Q is made of.

    Args:
      graph: as for ``springs``.
      springs: Q.
      weight: f32[S], as for ``springs``.
      field: f32[N].
      adjoint: f32[N].
    """
    table = springs.table
    stretch = (field[None, :] - field[table]) * (adjoint[None, :] - adjoint[table])  # [2K, N]
    stretch = jnp.where(graph.edges.mask, stretch.reshape(-1), 0.0)
    by_kind = jnp.stack([(stretch * _closeness(graph, s)).sum() for s in range(len(EDGE_KINDS))])
    by_kind = 0.5 * by_kind * weight * springs.ground
    return -by_kind, by_kind.sum() + springs.ground * (field * adjoint).sum()


def signs(uid: jax.Array, slot: jax.Array | int, probes: int) -> jax.Array:
    """Returns random signs f32[N, R], R <= 32, that depend on uid and slot only: bits mixed as Murmur3 does."""
    x = uid ^ (jnp.asarray(slot, jnp.int32).astype(jnp.uint32) * jnp.uint32(0x9E3779B9))
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> jnp.uint32(shift))) * jnp.uint32(factor)
    x = x ^ (x >> jnp.uint32(16))
    bit = (x[:, None] >> jnp.arange(probes, dtype=jnp.uint32)[None, :]) & jnp.uint32(1)
    return 2.0 * bit.astype(jnp.float32) - 1.0


def noise(springs: Springs, uid: jax.Array, own: jax.Array, probes: int) -> jax.Array:
    """Returns right-hand sides f32[N, R] of covariance ``Q + diag(own)``: a random sign per spring and per record.

    Solving for them gives draws of covariance ``(Q + diag(own))^-1`` (Papandreou and Yuille 2010). The signs are always
    the same, so that the last solution is a good start for the next.
    """
    total = jnp.sqrt(springs.ground) * signs(uid, PRIOR_NOISE, probes)
    total = total + jnp.sqrt(own)[:, None] * signs(uid, RECORD_NOISE, probes)

    def one(slot: jax.Array, total: jax.Array) -> jax.Array:
        push = jnp.sqrt(springs.edge[slot])[:, None] * signs(uid, slot, probes)
        return (total + push).at[springs.table[slot]].add(-push)

    return jax.lax.fori_loop(0, springs.table.shape[0], one, total)


def variances(springs: Springs, own: jax.Array, probe: jax.Array) -> jax.Array:
    """Returns the marginal variances of the field, f32[N], from solved probes, f32[N, R].

    A node's conditional variance plus the spread of its conditional mean over the probes (Siden et al. 2018): the first
    part is exact, so few probes do.
    """
    diagonal = springs.ground + springs.degree + own
    conditional = pull(springs, probe) / diagonal[:, None]
    return jnp.minimum(1.0 / diagonal + jnp.square(conditional).mean(axis=1), 1.0 / springs.ground)
