"""Drawing tasks without replacement, in proportion to a power of their value, under quotas. No loop over picks."""

import jax
import jax.numpy as jnp

from envsched_jax.types import Graph, Key

SMALLEST = 1e-6  # values below this are drawn as if they were this: nothing has probability zero for ever


def gumbel(key: Key, uid: jax.Array) -> jax.Array:
    """Returns one standard Gumbel number per task, f32[N]; a task's depends on ``key`` and its uid only."""
    return jax.vmap(lambda u: jax.random.gumbel(jax.random.fold_in(key, u), dtype=jnp.float32))(uid)


def uniform(key: Key, uid: jax.Array) -> jax.Array:
    """Returns one number in [0, 1) per task, f32[N]; a task's depends on ``key`` and its uid only."""
    return jax.vmap(lambda u: jax.random.uniform(jax.random.fold_in(key, u), dtype=jnp.float32))(uid)


def keys(key: Key, uid: jax.Array, value: jax.Array, power: float | jax.Array) -> jax.Array:
    """Returns ``power * log(max(value, eps)) + Gumbel``, f32[N].

    Taking the largest is drawing without replacement in proportion to ``value ** power`` (Gumbel top-k).
    """
    return power * jnp.log(jnp.maximum(value, SMALLEST)) + gumbel(key, uid)


def count_cells(graph: Graph) -> jax.Array:
    """Returns the eligible tasks of every environment and pattern, f32[E, P]."""
    nodes, num_envs = graph.nodes, graph.globals.env_mask.shape[0]
    num_patterns = graph.globals.pattern_mask.shape[0]
    cell = nodes.env * num_patterns + nodes.pattern
    tasks = jax.ops.segment_sum(nodes.mask.astype(jnp.float32), cell, num_envs * num_patterns)
    return tasks.reshape(num_envs, num_patterns)


def stratified_log_weight(graph: Graph) -> jax.Array:
    """Returns log-weights under which a draw is even over environments, then over their patterns, f32[N].

    A task weighs ``1 / (patterns in its environment * tasks of its environment and pattern)``.
    """
    nodes, tasks = graph.nodes, count_cells(graph)
    patterns = (tasks > 0.0).sum(axis=1).astype(jnp.float32)
    return -jnp.log(jnp.maximum(patterns[nodes.env] * tasks[nodes.env, nodes.pattern], 1.0))


def rank_in_environment(score: jax.Array, env: jax.Array) -> jax.Array:
    """Returns how many tasks of the same environment come before each, i32[N]: larger score, else lower index."""
    node = jnp.arange(score.shape[0], dtype=jnp.int32)
    sorted_env, _, order = jax.lax.sort((env, -score, node), num_keys=2)
    first = jnp.concatenate([jnp.ones(1, bool), sorted_env[1:] != sorted_env[:-1]])
    start = jax.lax.cummax(jnp.where(first, node, 0))
    return jnp.zeros_like(node).at[order].set(node - start, unique_indices=True)


def draw(
    score: jax.Array, eligible: jax.Array, env: jax.Array, quota: jax.Array | None, count: int, *, even: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Returns the ``count`` eligible tasks of the largest score under the quotas: node i32[count], mask bool[count].

    Walking down the scores, a task is taken while its environment has had fewer than ``quota`` (i32[E]). If that
    leaves slots empty, the quotas are relaxed: the largest of the others follow. ``mask`` is false, and node 0, only
    where fewer than ``count`` tasks are eligible. Without quotas (``None``) one top-k does. With ``even`` the
    best task of every environment comes before the second of any, and so on.
    """
    if quota is None or count == 0:
        return _largest(score, eligible, count)
    rank = rank_in_environment(jnp.where(eligible, score, -jnp.inf), env)
    allowed = eligible & (rank < quota[env])
    if even:
        score = score / (1.0 + jnp.abs(score)) - 2.0 * rank.astype(jnp.float32)  # by rank, then in the old order
    node, mask = _largest(score, allowed, count)
    spare, spare_mask = _largest(score, eligible & ~allowed, count)
    slot = jnp.arange(count, dtype=jnp.int32)
    beyond = jnp.maximum(slot - mask.sum(dtype=jnp.int32), 0)
    return jnp.where(mask, node, spare[beyond]), mask | spare_mask[beyond]


def _largest(score: jax.Array, eligible: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Returns the nodes of the ``count`` largest scores; also where there are fewer nodes than ``count``."""
    found = min(count, score.shape[0])
    top, node = jax.lax.top_k(jnp.where(eligible, score, -jnp.inf), found)
    mask = jnp.pad(top > -jnp.inf, (0, count - found))
    return jnp.where(mask, jnp.pad(node, (0, count - found)), 0), mask
