"""What all recipes share: the state, how outcomes enter it, and how picks become a batch."""

import jax
import jax.numpy as jnp

from envsched_jax.belief import history
from envsched_jax.select import quota
from envsched_jax.types import Batch, Belief, Graph, Outcome, PyTree, SchedulerState


def init(graph: Graph, memory: PyTree = ()) -> SchedulerState:
    """Returns the state before the first rollout; ``memory`` is the recipe's own."""
    num_nodes, num_envs = graph.nodes.mask.shape[0], graph.globals.env_mask.shape[0]
    return SchedulerState(
        step=jnp.zeros((), jnp.int32),
        history=history.init(num_nodes),
        quota_carry=jnp.zeros(num_envs, jnp.float32),
        truth=jnp.zeros(num_nodes, jnp.float32),
        memory=memory,
    )


def observe(
    graph: Graph,
    state: SchedulerState,
    outcome: Outcome,
    *,
    gamma: float | jax.Array,
    mode: str = "none",
    weights: tuple[float, ...] | None = None,
) -> SchedulerState:
    """Returns the state one step later; quotas are settled by what was delivered, not by what was proposed.

    ``memory`` stays as it is: a recipe that has one replaces it.
    """
    delivered = history.counted(outcome).any(axis=1)
    env = graph.nodes.env[jnp.where(delivered, outcome.node, 0)]
    per_env = jax.ops.segment_sum(delivered.astype(jnp.int32), env, state.quota_carry.shape[0])
    share = quota.shares(graph, mode=mode, weights=weights)
    return SchedulerState(
        step=state.step + 1,
        history=history.update(state.history, outcome, state.step, gamma),
        quota_carry=quota.settle(state.quota_carry, share, per_env, outcome.node.shape[0]),
        truth=state.truth,
        memory=state.memory,
    )


def to_batch(
    node: jax.Array, mask: jax.Array, explore: jax.Array, value: jax.Array, belief: Belief | None = None
) -> Batch:
    """Returns the batch of these picks. Where a recipe has no belief its predictions are NaN, not a made-up number."""

    def at(x: jax.Array) -> jax.Array:
        return jnp.where(mask, x[node], 0.0)

    nothing = jnp.where(mask, jnp.nan, 0.0).astype(jnp.float32)
    return Batch(
        node=node,
        mask=mask,
        explore=explore & mask,
        value=at(value),
        predicted_mean=nothing if belief is None else at(belief.mean),
        predicted_variance=nothing if belief is None else at(belief.variance),
        p_informative=nothing if belief is None else at(belief.p_informative),
    )


def check_sizes(batch_size: int, group_size: int) -> None:
    """Raises ValueError unless both sizes are at least 1."""
    if batch_size < 1 or group_size < 1:
        raise ValueError(f"batch_size and group_size must be at least 1, got {batch_size} and {group_size}")
