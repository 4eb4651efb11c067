"""How many tasks of one environment a batch may hold."""

import jax
import jax.numpy as jnp

from envsched_jax.types import Batch, Graph

MODES = ("none", "uniform", "proportional", "weights", "cap")


def count_tasks(graph: Graph) -> jax.Array:
    """Returns the eligible tasks per environment, i32[E]; padding and retired tasks do not count."""
    return jax.ops.segment_sum(graph.nodes.mask.astype(jnp.int32), graph.nodes.env, graph.globals.env_mask.shape[0])


def shares(
    graph: Graph, *, mode: str, weights: tuple[float, ...] | None = None, tasks: jax.Array | None = None
) -> jax.Array:
    """Returns the share of the batch that each environment is meant to get, f32[E].

    Environments without eligible tasks get none. The shares sum to 1 (to 0 if every weight is 0); the modes 'none'
    and 'cap' mean no shares, all 0. ``tasks`` is ``count_tasks(graph)`` where that is known already.
    """
    tasks = (count_tasks(graph) if tasks is None else tasks).astype(jnp.float32)
    if mode == "uniform":
        wanted = (tasks > 0.0).astype(jnp.float32)
    elif mode == "proportional":
        wanted = tasks
    elif mode == "weights":
        given = jnp.asarray(weights, jnp.float32)
        if given.shape[0] > tasks.shape[0]:
            raise ValueError(f"{given.shape[0]} quota weights for a capacity of {tasks.shape[0]} environments")
        wanted = jnp.where(tasks > 0.0, jnp.pad(given, (0, tasks.shape[0] - given.shape[0])), 0.0)
    elif mode in MODES:
        wanted = jnp.zeros_like(tasks)
    else:
        raise ValueError(f"quota must be one of {', '.join(MODES)}, got {mode!r}")
    total = wanted.sum()
    return wanted / jnp.where(total > 0.0, total, 1.0)


def allocate(
    graph: Graph,
    carry: jax.Array,
    *,
    batch_size: int,
    mode: str,
    weights: tuple[float, ...] | None = None,
    cap: int | jax.Array | None = None,
    tasks: jax.Array | None = None,
) -> jax.Array:
    """Returns the quota of every environment, i32[E].

    With shares (uniform, proportional, weights) an environment is owed ``share * batch_size + carry``, and the slots
    go one by one to whoever is owed most: the largest-remainder rule with a memory. Environments get no more slots
    than they have tasks, so the quotas sum to ``batch_size`` wherever the tasks suffice. 'cap' gives each ``cap``,
    'none' the whole batch.

    Args:
      graph: gives the eligible tasks of every environment.
      carry: f32[E], slots owed from earlier batches, see ``settle``.
      batch_size: B.
      mode: none, uniform, proportional, weights or cap.
      weights: for 'weights', one per environment in order of their index; missing ones are 0.
      cap: for 'cap', the most tasks of one environment; None is no limit.
      tasks: ``count_tasks(graph)`` where that is known already.
    """
    tasks = count_tasks(graph) if tasks is None else tasks
    share = shares(graph, mode=mode, weights=weights, tasks=tasks)
    if mode == "none":
        return jnp.full(share.shape, batch_size, jnp.int32)
    if mode == "cap":
        return jnp.full(share.shape, batch_size if cap is None else cap, jnp.int32)
    seat = jnp.arange(batch_size, dtype=jnp.int32)[:, None]
    owed = (share * batch_size + carry)[None, :] - seat.astype(jnp.float32)  # before it gets this seat
    exists = (seat < tasks[None, :]) & (share > 0.0)[None, :]
    priority, taken = jax.lax.top_k(jnp.where(exists, owed, -jnp.inf).ravel(), batch_size)
    given = (priority > -jnp.inf).astype(jnp.int32)
    return jnp.zeros(share.shape, jnp.int32).at[taken % share.shape[0]].add(given)


def settle(carry: jax.Array, share: jax.Array, delivered: jax.Array, batch_size: int) -> jax.Array:
    """Returns the slots owed after a batch, f32[E].

    What counts is what was delivered (i32[E], tasks with at least one valid rollout), not what was proposed:
    ``carry + share * sum(delivered) - delivered``, so the realised mix is right over any window. The debt of an
    environment that cannot deliver is cut at one batch, lest it takes over once it can.
    """
    got = delivered.astype(jnp.float32)
    return jnp.where(share > 0.0, jnp.clip(carry + share * got.sum() - got, -batch_size, batch_size), 0.0)


def deviation(graph: Graph, batch: Batch, quota: jax.Array) -> jax.Array:
    """Returns how many tasks of each environment the batch holds beyond its quota, i32[E], negative where fewer.

    A positive entry means that the quotas could not fill the batch and were relaxed.
    """
    env = graph.nodes.env[batch.node]
    return jax.ops.segment_sum(batch.mask.astype(jnp.int32), env, quota.shape[0]) - quota
