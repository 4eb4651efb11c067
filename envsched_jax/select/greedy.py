"""Picking one task after the other: the most valuable that is least like those already picked."""

import jax
import jax.numpy as jnp

from envsched_jax.select.sample import rank_in_environment


def similarity_to(feature: jax.Array, node: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns every task's largest similarity to a set of tasks, f32[N]; 0 for an empty set.

    Args:
      feature: unit rows, f32[N, D].
      node: the set, i32[M].
      mask: bool[M], which entries of it are real.
    """
    cosine = jnp.matmul(feature, feature[node].T, precision="highest")
    return jnp.where(mask[None, :], cosine, 0.0).max(axis=1, initial=0.0)


def pick(
    value: jax.Array,
    feature: jax.Array,
    eligible: jax.Array,
    env: jax.Array,
    quota: jax.Array,
    closest: jax.Array,
    *,
    count: int,
    eta: float | jax.Array,
    shortlist: int,
) -> tuple[jax.Array, jax.Array]:
    """Returns ``count`` picks: node i32[count] in the order of picking, and mask bool[count].

    Each is the ``argmax of value_i - eta * max_{j picked} max(0, <f_i, f_j>)`` over the tasks whose environment has
    had fewer than ``quota``; if no such task is left, over all that are left. Ties go to the lower index, so give
    values without ties. In a pool of more than ``shortlist`` tasks only the best are looked at: half of the list by
    value, the other half by value within their environment, evenly over environments. The work is ``count`` times
    the list's length times D.

    Args:
      value: f32[N].
      feature: unit rows, f32[N, D].
      eligible: bool[N].
      env: i32[N].
      quota: i32[E], what each environment may still have.
      closest: f32[N], largest similarity to a task that is in the batch already, see ``similarity_to``.
      count: number of picks.
      eta: weight of the penalty, at least 0.
      shortlist: the most tasks to look at; at least ``2 * count``.
    """
    num_nodes = value.shape[0]
    index = jnp.arange(num_nodes, dtype=jnp.int32)
    if num_nodes > shortlist:
        index = candidates(jnp.where(eligible, value, -jnp.inf), env, quota.shape[0], shortlist)
    value, eligible, env, closest = value[index], eligible[index], env[index], closest[index]
    columns = feature[index].T  # [D, M]: the reduction over D then runs over contiguous rows

    def step(
        state: tuple[jax.Array, jax.Array, jax.Array], _: None
    ) -> tuple[tuple[jax.Array, jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
        left, closest, quota = state
        allowed = left & (quota[env] > 0)
        open_nodes = jnp.where(allowed.any(), allowed, left)
        best = argmax(jnp.where(open_nodes, value - eta * closest, -jnp.inf))
        found = left.any()
        cosine = jnp.matmul(columns[:, best], columns, precision="highest")
        state = left.at[best].set(False), jnp.maximum(closest, cosine), quota.at[env[best]].add(-1)
        return state, (jnp.where(found, index[best], 0), found)

    _, (node, mask) = jax.lax.scan(step, (eligible, closest, quota), None, length=count)
    return node, mask


def argmax(x: jax.Array) -> jax.Array:
    """Returns the first index of the maximum; two reductions vectorise on CPU where argmax does not."""
    index = jnp.arange(x.shape[0], dtype=jnp.int32)
    return jnp.where(x == x.max(), index, x.shape[0] - 1).min()


def candidates(value: jax.Array, env: jax.Array, num_envs: int, length: int) -> jax.Array:
    """Returns the nodes worth looking at, i32[length]: the best overall and the best of every environment."""
    overall = jax.lax.top_k(value, length // 2)[0][-1]
    each = max(1, length // (2 * num_envs))
    keep = (value >= overall) | (rank_in_environment(value, env) < each)
    return jax.lax.top_k(jnp.where(keep, value, -jnp.inf), length)[1]
