"""What a rollout of every task will cost: tokens and seconds, from own record, neighbours and environment.

Costs are predicted as rewards are: means of sums, blended by the rollouts behind them. Not on a log scale: a blend is
nearer to the geometric mean there, and a budget is spent on the sum of costs, of which that falls short. Means of sums
also need no record of single rollouts, and have no unit to be tuned to. Turns are not recorded, so not predicted.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from envsched_jax.belief import diffusion
from envsched_jax.belief.environment import blend
from envsched_jax.types import Graph, History

UNKNOWN = 1.0  # cost of every task while nothing at all was rolled out: only ratios between tasks then mean something


class Costs(NamedTuple):
    """Predicted cost of one rollout, per node."""

    tokens: jax.Array  # f32[N]
    seconds: jax.Array  # f32[N]


def predict(
    graph: Graph,
    history: History,
    *,
    nu: float | jax.Array,
    c: float | jax.Array,
    kind_weights: jax.Array,
    restart: float | jax.Array,
    mix: float | jax.Array,
    rounds: int,
) -> Costs:
    """Returns the predicted costs of one valid rollout, f32[N] each, at least 0.

    ``(own sum + nu_i * neighbours' mean + c * environment's mean) / (n + nu_i + c)`` with ``nu_i = min(nu, rollouts
    behind the neighbours' mean)``, as ``diffusion.believe`` predicts rewards. An environment's mean is shrunk to the
    pool's with the same ``c``; an environment without a record costs what the pool does. Before any rollout every
    cost is ``UNKNOWN``.

    Args:
      graph: the dual-relation graph.
      history: own records, f32[N] per field; costs of failed rollouts are not in it.
      nu: the most rollouts that the neighbours may count for; 0 predicts without the graph.
      c: rollouts that the environment's mean counts for, at least 0.
      kind_weights: f32[S], how much each kind of similarity counts.
      restart: share of a record that stays at its task in each round of diffusion.
      mix: share of the within relation.
      rounds: 0, 1 or 2.

    Raises:
      ValueError: if ``rounds`` exceeds 2.
    """
    sums, n = jnp.stack([history.tokens, history.seconds], axis=1), history.n[:, None]
    pool = blend(sums.sum(axis=0), n.sum(), jnp.zeros(()), jnp.float32(UNKNOWN))
    num_envs = graph.globals.env_mask.shape[0]
    weight = jnp.asarray(c, jnp.float32)
    env_sums, env_n = (jax.ops.segment_sum(x, graph.nodes.env, num_envs) for x in (sums, n))
    env_mean = blend(env_sums, env_n, weight, pool[None, :])

    table = diffusion.gather_table(graph)
    edges = diffusion.edge_weights(graph, kind_weights, mix)
    signal = jnp.concatenate([sums, n, jnp.ones_like(n)], axis=1)
    share = diffusion.self_share(table, edges, restart=restart, rounds=rounds)
    others = diffusion.diffuse(table, edges, signal, restart=restart, rounds=rounds) - share[:, None] * signal
    count, reach = others[:, 2:3], jnp.maximum(others[:, 3:], 0.0)
    length = diffusion.concentration(table, edges, restart=restart, rounds=rounds)[:, None]
    seen = (count > diffusion.UNSEEN * (1.0 + n)) & (length > 0.0)
    near = jnp.where(seen, jnp.maximum(others[:, :2], 0.0) / jnp.where(seen, count, 1.0), 0.0)
    evidence = jnp.where(seen, count * reach / jnp.where(seen, length, 1.0), 0.0)
    used = jnp.minimum(jnp.asarray(nu, jnp.float32), evidence)
    cost = blend(sums + used * near, n + used, weight, env_mean[graph.nodes.env])
    return Costs(cost[:, 0], cost[:, 1])
