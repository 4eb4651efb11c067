"""What an outcome says per task and per rollout, for the baselines, and picks of the largest with ties at random."""

import jax
import jax.numpy as jnp

from envsched_jax.belief import history
from envsched_jax.select import sample
from envsched_jax.types import Graph, Key, Outcome

TIE = 1e-4  # size of the random part that breaks ties
EPSILON = 1e-4  # added to a group's deviation, as in ``train.advantages``


def success(outcome: Outcome) -> tuple[jax.Array, jax.Array]:
    """Returns the rewards cut to [0, 1], f32[B, G], 0 where invalid, and which count, bool[B, G].

    The methods count passes; a reward between 0 and 1 counts as that part of a pass.
    """
    valid = history.counted(outcome)
    return jnp.where(valid, jnp.clip(outcome.reward, 0.0, 1.0), 0.0), valid


def per_row(outcome: Outcome) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns node i32[B] (0 for a row without valid rollouts), valid rollouts f32[B] and passes among them f32[B]."""
    passed, valid = success(outcome)
    n = valid.sum(axis=1).astype(jnp.float32)
    return jnp.where(n > 0.0, outcome.node, 0), n, passed.sum(axis=1)


def per_task(outcome: Outcome, num_nodes: int) -> tuple[jax.Array, jax.Array]:
    """Returns valid rollouts and passes of every task, f32[N] each; rows of one task add up."""
    node, n, passes = per_row(outcome)
    zero = jnp.zeros(num_nodes, jnp.float32)
    return zero.at[node].add(n), zero.at[node].add(passes)


def rates(outcome: Outcome, num_nodes: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the tasks of a batch without repeats: node i32[B], pass rate f32[B], and which rows are used bool[B].

    Rows of one task are pooled into the first of them; rows without valid rollouts are not used (node 0, rate 0).
    """
    node, n, _ = per_row(outcome)
    rollouts, passes = per_task(outcome, num_nodes)
    row = jnp.arange(node.shape[0])
    earlier = (node[:, None] == node[None, :]) & (n > 0.0)[None, :] & (row[None, :] < row[:, None])
    used = (n > 0.0) & ~earlier.any(axis=1)
    rate = passes[node] / jnp.maximum(rollouts[node], 1.0)
    return jnp.where(used, node, 0), jnp.where(used, rate, 0.0), used


def absolute_advantage(outcome: Outcome) -> tuple[jax.Array, jax.Array]:
    """Returns ``|A|`` of every rollout, f32[B, G], and which count, bool[B, G].

    ``A = (r - mean) / (deviation + 1e-4)`` over the valid rollouts of a group, the deviation dividing by their number,
    as the GRPO update of this library has it; 0 in groups whose rewards are all equal. Rewards are not cut.
    """
    valid = history.counted(outcome)
    reward = jnp.where(valid, outcome.reward, 0.0)
    n = jnp.maximum(valid.sum(axis=1, keepdims=True), 1).astype(jnp.float32)
    centred = jnp.where(valid, reward - reward.sum(axis=1, keepdims=True) / n, 0.0)
    deviation = jnp.sqrt(jnp.square(centred).sum(axis=1, keepdims=True) / n)
    mixed = history.group_statistics(outcome)["informative"][:, None] > 0.0
    return jnp.where(mixed, jnp.abs(centred) / (deviation + EPSILON), 0.0), valid


def largest(key: Key, graph: Graph, value: jax.Array, eligible: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Returns the ``count`` eligible tasks of the largest value: node i32[count], mask bool[count].

    Values that differ by less than 1e-4 are ordered by a random number per task, drawn from ``key`` and its uid.
    """
    score = value + TIE * sample.uniform(key, graph.nodes.uid)
    return sample.draw(score, eligible, graph.nodes.env, None, count)
