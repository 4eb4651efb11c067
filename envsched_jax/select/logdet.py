"""Picking one task after the other by value and by how much a batch tells about the whole: value plus information.

The batch ``S`` maximises ``sum_{i in S} value_i + weight * 1/2 log det(I + Sigma_SS / noise)``. The second term is the
information, in nats, that observing the batch gives about the latents; it is monotone and submodular, so taking the
largest gain first reaches at least ``1 - 1/e`` of the best batch of that size where no quota or budget binds (Nemhauser
et al. 1978; for Gaussian processes Srinivas et al. 2010). A task like one that is in the batch already has little left
to tell: the penalty on repeats follows from the belief instead of being set.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from envsched_jax.select.greedy import argmax, candidates


class _Walk(NamedTuple):
    """What is carried from pick to pick, over the M tasks that are looked at."""

    left: jax.Array  # bool[M], may still be picked
    variance: jax.Array  # f32[M], of the latent in units of the noise, once the picks so far are observed
    factor: jax.Array  # f32[picks, M], rows of the Cholesky factor
    quota: jax.Array  # i32[E]
    room: jax.Array  # f32[], what is left of the budget


def correlation(
    feature: jax.Array, env: jax.Array, other_feature: jax.Array, other_env: jax.Array, shared: float | jax.Array
) -> jax.Array:
    """Returns the prior correlation of one task's latent with those of others, f32[M].

    ``(1 - shared) cos^2 + shared [same environment]``, which is 1 for the task itself. The cosine is squared, not cut
    at 0 as in ``greedy``: both are never negative, but cutting does not keep a matrix positive semidefinite (eight unit
    vectors spread evenly over a circle show it), and then there is no log-determinant. Squaring does (Schur 1911).

    Args:
      feature: unit rows, f32[M, D].
      env: i32[M].
      other_feature: of the one task, f32[D].
      other_env: of the one task, i32[].
      shared: in [0, 1], what tasks of one environment have in common however unlike they are.
    """
    cosine = jnp.matmul(feature, other_feature, precision="highest")
    return (1.0 - shared) * jnp.square(cosine) + shared * (env == other_env).astype(feature.dtype)


def pick(
    value: jax.Array,
    sd: jax.Array,
    feature: jax.Array,
    eligible: jax.Array,
    env: jax.Array,
    quota: jax.Array,
    chosen: jax.Array,
    chosen_mask: jax.Array,
    *,
    count: int,
    weight: float | jax.Array,
    noise: float | jax.Array,
    shared: float | jax.Array,
    shortlist: int,
    cost: jax.Array | None = None,
    budget: float | jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns ``count`` picks: node i32[count] in the order of picking, and mask bool[count].

    Each is the largest ``value_i + weight/2 log(1 + v_i)``, with ``v_i`` the variance of the latent in units of the
    noise that is left once the tasks picked so far have been observed, over the tasks whose environment has had fewer
    than ``quota``; if no such task is left, over all that are left. With a budget only tasks that still fit are looked
    at, whatever comes before them, and it is never relaxed: where nothing fits any more the mask is false. Ties go to
    the lower index, so give values without ties.

    ``v`` comes from a pivoted Cholesky factor of ``I + Sigma/noise``, one row per pick: ``count^2`` times the list's
    length in all, plus ``count`` times the list's length times D. In a pool of more than ``shortlist`` tasks only the
    best by first gain are looked at, as in ``greedy.pick``; a gain never grows while the batch does, so a task that is
    left out would have come before a pick only if its first gain is above what that pick gained.

    Args:
      value: f32[N].
      sd: posterior standard deviation of every latent, f32[N]; ``Sigma_ij = sd_i sd_j correlation_ij``.
      feature: unit rows, f32[N, D].
      eligible: bool[N].
      env: i32[N].
      quota: i32[E], what each environment may still have.
      chosen: tasks that are in the batch already, i32[C]; C may be 0. They count as observed, not in ``quota`` or
        ``budget``, and must not be eligible.
      chosen_mask: bool[C], which of them are real.
      count: number of picks.
      weight: of the information, in values per nat; at least 0, and 0 takes the largest values.
      noise: variance with which one group of rollouts tells a latent, above 0; a scalar or f32[N].
      shared: see ``correlation``.
      shortlist: the most tasks to look at; at least ``2 * count``.
      cost: f32[N], of one group of rollouts, at least 0; a NaN never fits. Needed with ``budget``.
      budget: what the picks may cost together, in the unit of ``cost``; None is no limit.

    Raises:
      ValueError: if only one of ``cost`` and ``budget`` is given.
    """
    if (cost is None) != (budget is None):
        raise ValueError("cost and budget belong together: give both or neither")
    price = jnp.zeros_like(value) if cost is None else cost
    room = jnp.asarray(0.0 if budget is None else budget, jnp.float32)
    eligible = eligible & (price <= room)
    scale = sd * jax.lax.rsqrt(jnp.broadcast_to(jnp.asarray(noise, jnp.float32), sd.shape))

    index = jnp.arange(value.shape[0], dtype=jnp.int32)
    if value.shape[0] > shortlist:
        first_gain = value + 0.5 * weight * jnp.log1p(jnp.square(scale))
        index = candidates(jnp.where(eligible, first_gain, -jnp.inf), env, quota.shape[0], shortlist)
    num_chosen = chosen.shape[0]
    index = jnp.concatenate([chosen, index])  # the chosen come first and are not eligible there
    eligible = eligible[index] & (jnp.arange(index.shape[0]) >= num_chosen)
    value, scale, feature, env, price = value[index], scale[index], feature[index], env[index], price[index]

    def step(walk: _Walk, forced: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[_Walk, tuple[jax.Array, jax.Array]]:
        slot, is_chosen, is_real = forced
        fits = walk.left & (price <= walk.room)
        allowed = fits & (walk.quota[env] > 0)
        gain = value + 0.5 * weight * jnp.log1p(walk.variance)
        best = argmax(jnp.where(jnp.where(allowed.any(), allowed, fits), gain, -jnp.inf))
        best = jnp.where(is_chosen, slot, best)
        found = jnp.where(is_chosen, is_real, fits.any())
        taken = found & ~is_chosen
        covariance = scale[best] * scale * correlation(feature, env, feature[best], env[best], shared)
        known = jnp.matmul(walk.factor[:, best], walk.factor, precision="highest")
        row = jnp.where(found, (covariance - known) * jax.lax.rsqrt(1.0 + walk.variance[best]), 0.0)
        walk = _Walk(
            left=walk.left.at[best].set(walk.left[best] & ~taken),
            variance=jnp.maximum(walk.variance - jnp.square(row), 0.0),
            factor=walk.factor.at[slot].set(row),
            quota=walk.quota.at[env[best]].add(-taken.astype(walk.quota.dtype)),
            room=walk.room - jnp.where(taken, price[best], 0.0),
        )
        return walk, (jnp.where(taken, index[best], 0), taken)

    steps = num_chosen + count
    slot = jnp.arange(steps, dtype=jnp.int32)
    forced = slot, slot < num_chosen, jnp.pad(chosen_mask, (0, count))
    start = _Walk(eligible, jnp.square(scale), jnp.zeros((steps, index.shape[0]), jnp.float32), quota, room)
    _, (node, mask) = jax.lax.scan(step, start, forced)
    return node[num_chosen:], mask[num_chosen:]
