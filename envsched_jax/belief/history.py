"""Discounted sufficient statistics of every task's own rollouts."""

import jax
import jax.numpy as jnp

from envsched_jax.types import History, Outcome, Status, is_valid

SAME_REWARD = 1e-6  # rewards of a group that lie closer than this are equal
SUMS = ("n", "s1", "ssw", "dof", "informative", "groups", "tokens", "seconds")  # the discounted fields


def init(n: int) -> History:
    """Returns the history of ``n`` tasks before the first rollout."""
    sums = {name: jnp.zeros(n, jnp.float32) for name in SUMS}  # one buffer each, so that a state can be donated
    return History(**sums, visits=jnp.zeros(n, jnp.int32), last_step=jnp.full(n, -1, jnp.int32))


def counted(outcome: Outcome) -> jax.Array:
    """Tells which rollouts enter the statistics: bool[B, G], a valid status and a finite reward."""
    return is_valid(outcome.status) & jnp.isfinite(outcome.reward)


def group_statistics(outcome: Outcome) -> dict[str, jax.Array]:
    """Returns what one batch adds to the float fields of ``History``, f32[B] each.

    The sum of squares is taken around the *group's* mean: rewards of different groups are never pooled into one
    variance. A group of one rollout says nothing about variance and adds to ``n`` and ``s1`` only.
    """
    valid = counted(outcome)
    reward = jnp.where(valid, outcome.reward, 0.0)
    n = valid.sum(axis=1).astype(jnp.float32)
    s1 = reward.sum(axis=1)
    mean = s1 / jnp.maximum(n, 1.0)
    deviation = jnp.where(valid, reward - mean[:, None], 0.0)
    highest = jnp.where(valid, reward, -jnp.inf).max(axis=1)
    lowest = jnp.where(valid, reward, jnp.inf).min(axis=1)
    group = n >= 2.0
    return {
        "n": n,
        "s1": s1,
        "ssw": jnp.square(deviation).sum(axis=1),
        "dof": jnp.maximum(n - 1.0, 0.0),
        "informative": (group & (highest - lowest > SAME_REWARD)).astype(jnp.float32),
        "groups": group.astype(jnp.float32),
        "tokens": jnp.where(valid & jnp.isfinite(outcome.tokens), outcome.tokens, 0.0).sum(axis=1),
        "seconds": jnp.where(valid & jnp.isfinite(outcome.seconds), outcome.seconds, 0.0).sum(axis=1),
    }


def present(outcome: Outcome) -> jax.Array:
    """Tells which rows are real: bool[B], false where every status is ABSENT (padding, whatever its node)."""
    return (outcome.status != Status.ABSENT).any(axis=1)


def additions(outcome: Outcome, gamma: float | jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Returns the tasks of a batch, i32[B], and what each row adds to the float fields of ``History``, f32[B] each.

    A row that is ``age`` policy versions old is worth ``gamma ** age``; padding adds nothing, to task 0.
    """
    real = present(outcome)
    weight = jnp.where(real, gamma ** jnp.maximum(outcome.age, 0).astype(jnp.float32), 0.0)
    node = jnp.where(real, outcome.node, 0)  # statistics of padding rows are zero, so any row will do
    return node, {name: weight * value for name, value in group_statistics(outcome).items()}


def rows(history: History, node: jax.Array | slice) -> History:
    """Returns the records of some tasks: f32[C] per field for ``node`` i32[C]."""
    return History(*(field[node] for field in history))


def update(history: History, outcome: Outcome, step: jax.Array, gamma: float | jax.Array) -> History:
    """Returns the history one step later: everything known is discounted by ``gamma``, the outcome is added.

    Rows of one node add up. An outcome that is ``age`` policy versions old is worth ``gamma ** age``, as much as if
    it had come back at once: what arrives late changes nothing but when it is known. ``visits`` is never discounted
    and counts failed rollouts too, so that a task whose environment is broken does not stay new for ever.
    """
    real = present(outcome)
    node, more = additions(outcome, gamma)
    added = {name: (gamma * getattr(history, name)).at[node].add(value) for name, value in more.items()}
    return History(
        **added,
        visits=history.visits.at[node].add(real.astype(jnp.int32)),
        last_step=history.last_step.at[node].max(jnp.where(real, step, -1)),
    )
