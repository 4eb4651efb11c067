"""Diffusion of records along the two relations: the graph gives the prior, a task's own record the evidence.

Sums and counts pass along ``A = b A_within + (1-b) A_cross`` by ``belief.propagate.diffuse``; here are the weights of
``A``, what of a task's own record comes back to it, and what the neighbours' records are worth as evidence. The
reference in tests is the dense matrix in float64.
"""

import jax
import jax.numpy as jnp

from envsched_jax.belief import environment
from envsched_jax.belief.environment import Moments, blend
from envsched_jax.belief.propagate import diffuse, propagate, rows
from envsched_jax.types import Belief, Graph, History

UNSEEN = 1e-5  # borrowed mass below this, relative to 1 + the own mass, is rounding error and counts as none


def gather_table(graph: Graph) -> jax.Array:
    """Returns ``senders`` as a table, i32[2K, N]: row k holds the neighbour in slot k of every node."""
    return graph.senders.reshape(-1, graph.nodes.mask.shape[0])


def edge_weights(graph: Graph, kind_weights: jax.Array, mix: float | jax.Array) -> jax.Array:
    """Returns the weights of ``A``, f32[2K, N], non-negative.

    A relation's weights, ``max(kind_weights, 0) . similarity`` under the mask, are normalised per receiver to sum to
    ``mix`` (within) and ``1 - mix`` (cross). Where a node has no weight in one relation the other takes all the mass,
    unless ``mix`` itself gives that other nothing; a node without any weight keeps a row of zeros and borrows nothing.
    """
    kinds = jnp.maximum(kind_weights, 0.0)
    # a sum of columns, not a product: a matmul may round to less than float32 on accelerators
    raw = sum(kinds[s] * graph.edges.similarity[:, s] for s in range(kinds.shape[0]))
    raw = jnp.where(graph.edges.mask, jnp.maximum(raw, 0.0), 0.0).reshape(2, -1, graph.nodes.mask.shape[0])
    total = raw.sum(axis=1)
    share = jnp.stack([jnp.where(total[0] > 0.0, mix, 0.0), jnp.where(total[1] > 0.0, 1.0 - mix, 0.0)])
    scale = share / (nonzero(total) * nonzero(share.sum(axis=0))[None, :])
    return (raw * scale[:, None, :]).reshape(-1, raw.shape[2])  # [2, K, N] -> [2K, N]


def self_share(table: jax.Array, weight: jax.Array, *, restart: float | jax.Array, rounds: int) -> jax.Array:
    """Returns the diagonal of the diffusion matrix, f32[N]: what of a task's own record comes back to it.

    ``rounds = 2`` gives ``a + (1-a) a A_ii + (1-a)^2 sum_k A_ik A_ki``, exactly; way and return of a walk of two
    edges belong to the same relation, since "same environment" is symmetric.

    Raises:
      ValueError: if ``rounds`` exceeds 2, where the diagonal has no cheap closed form.
    """
    if not 0 <= rounds <= 2:
        raise ValueError(f"a task's own share has a closed form for 0, 1 or 2 rounds, got rounds={rounds}")
    if rounds == 0:
        return jnp.ones(table.shape[1], weight.dtype)
    node = jnp.arange(table.shape[1], dtype=table.dtype)
    loop = jnp.where(table == node[None, :], weight, 0.0).sum(axis=0)
    if rounds == 1:
        return restart + (1.0 - restart) * loop
    tables, weights = (x.reshape(2, -1, table.shape[1]) for x in (table, weight))
    back = sum(_return_weight(tables[r], weights[r]) for r in range(2))
    return restart + (1.0 - restart) * (restart * loop + (1.0 - restart) * back)


def _return_weight(table: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns ``sum_k A_ik A_ki`` over the edges of one relation, f32[N], by looking for i among the slots of k."""
    slots, num_nodes = table.shape
    node = jnp.arange(num_nodes, dtype=table.dtype)

    def add(slot: jax.Array, total: jax.Array) -> jax.Array:
        sender = table[slot]
        back = sum(jnp.where(rows(table[q], sender) == node, rows(weight[q], sender), 0.0) for q in range(slots))
        return total + weight[slot] * back

    return jax.lax.fori_loop(0, slots, add, jnp.zeros(num_nodes, weight.dtype))


def concentration(table: jax.Array, weight: jax.Array, *, restart: float | jax.Array, rounds: int) -> jax.Array:
    """Returns the sum of squared weights with which others enter a task's row of the diffusion matrix, f32[N].

    Exact for one round. For more it is an upper bound, hence evidence errs on the low side: with ``r_l`` a bound on
    the length of row i after l rounds, ``r_1 = (1-a) |A_i|`` and ``r_{l+1} = (1-a) (a |A_i| + sqrt(sum_k A_ik
    r_l,k^2))``, by the triangle inequality and convexity. It is tight where all neighbours of a node have the same
    neighbours, as within an environment, and costs one gather pass of one channel per further round.
    """
    if rounds == 0:
        return jnp.zeros(table.shape[1], weight.dtype)
    first = jnp.sqrt(jnp.square(weight).sum(axis=0))
    length = (1.0 - restart) * first
    for _ in range(rounds - 1):
        further = jnp.sqrt(propagate(table, weight, jnp.square(length)[:, None])[:, 0])
        length = (1.0 - restart) * (restart * first + further)
    return jnp.square(length)


def borrow(
    graph: Graph,
    history: History,
    *,
    kind_weights: jax.Array,
    restart: float | jax.Array,
    mix: float | jax.Array,
    rounds: int,
) -> tuple[Moments, Moments]:
    """Returns what the neighbours say about every task, and how many observations stand behind it, f32[N] each.

    A task's own record is removed exactly. With ``w`` the weights of the others, normalised to sum to one, the
    averaged count ``n~ = sum_j w_j n_j`` becomes evidence ``n~ / sum_j w_j^2``: as many observations as the equal
    neighbours hold together. Where there is none, evidence is 0 and the moments are 0.
    """
    table = gather_table(graph)
    weight = edge_weights(graph, kind_weights, mix)
    own_sum, own_count = environment.sums(history), environment.counts(history)
    signal = jnp.stack([*own_sum, *own_count, jnp.ones_like(history.n)], axis=1)
    share = self_share(table, weight, restart=restart, rounds=rounds)
    others = diffuse(table, weight, signal, restart=restart, rounds=rounds) - share[:, None] * signal
    reach = jnp.maximum(others[:, 6], 0.0)  # the weights of the others sum to this
    per_count = reach / nonzero(concentration(table, weight, restart=restart, rounds=rounds))
    return said(others, own_count, per_count)


def said(others: jax.Array, own_count: Moments, per_count: jax.Array) -> tuple[Moments, Moments]:
    """Returns moments and evidence, f32[C] each, from what neighbours lend to C tasks.

    Args:
      others: f32[C, >= 6], the diffused sums, then counts, of all other tasks.
      own_count: f32[C] each.
      per_count: f32[C], observations that stand behind one of the averaged count.
    """
    values, evidence = [], []
    for kind, own in enumerate(own_count):
        count = others[:, 3 + kind]
        seen = count > UNSEEN * (1.0 + own)
        values.append(jnp.where(seen, others[:, kind] / jnp.where(seen, count, 1.0), 0.0))
        evidence.append(jnp.where(seen, count * per_count, 0.0))
    return Moments(*values), Moments(*evidence)


def believe(
    graph: Graph,
    history: History,
    *,
    nu: float | jax.Array,
    c: float | jax.Array,
    prior: Moments,
    kind_weights: jax.Array,
    restart: float | jax.Array,
    mix: float | jax.Array,
    rounds: int,
    group_size: int,
    informative: str,
) -> Belief:
    """Returns the belief that blends own record, neighbours and environment.

    ``m = (s1 + nu_i m_g + c m_e) / (n + nu_i + c)`` with ``nu_i = min(nu, evidence_i)``, and so for variance (in
    degrees of freedom) and for the share of informative groups (in groups). So the graph fades as own rollouts come
    in: for rewards in [0, 1], ``|m - s1/n| <= (nu + c) / (n + nu + c)``, and two tasks whose own means differ by more
    than the sum of their bounds keep that order. A term without evidence drops out.

    Args:
      graph: the dual-relation graph.
      history: own records, f32[N] per field.
      nu: the most rollouts that the neighbours may count for; for groups, ``nu / group_size``.
      c: rollouts that the environment's mean counts for, always; for groups, ``c / group_size``.
      prior: constants to which the pool's moments are shrunk, scalars.
      kind_weights: f32[S], how much each kind of similarity counts.
      restart: ``a``, the share that stays at the source in every round.
      mix: ``b``, the share of the within relation.
      rounds: 0, 1 or 2.
      group_size: G, for P(informative).
      informative: 'beta' (binary rewards) or 'share' (any reward).
    """
    weight = environment.in_units(c, group_size)
    env_moments, _ = environment.means(graph, history, weight, prior)
    there = Moments(*(value[graph.nodes.env] for value in env_moments))
    lent = borrow(graph, history, kind_weights=kind_weights, restart=restart, mix=mix, rounds=rounds)
    return weigh(history, there, lent, nu=nu, c=c, group_size=group_size, informative=informative)


def weigh(
    history: History,
    there: Moments,
    lent: tuple[Moments, Moments],
    *,
    nu: float | jax.Array,
    c: float | jax.Array,
    group_size: int,
    informative: str,
) -> Belief:
    """Returns the belief about C tasks from own records, environments and neighbours, as ``believe`` says.

    Args:
      history: own records, f32[C] per field.
      there: moments of each task's environment, f32[C] each.
      lent: moments and evidence of the neighbours, f32[C] each.
      nu: see ``believe``.
      c: see ``believe``.
      group_size: see ``believe``.
      informative: see ``believe``.
    """
    values, evidence = lent
    used = Moments(*map(jnp.minimum, environment.in_units(nu, group_size), evidence))
    own = zip(environment.sums(history), environment.counts(history), strict=True)
    others = zip(values, used, environment.in_units(c, group_size), there, strict=True)
    posterior = Moments(
        *(
            blend(total + nu_kind * value, count + nu_kind, c_kind, env_value)
            for (total, count), (value, nu_kind, c_kind, env_value) in zip(own, others, strict=True)
        )
    )
    return environment.to_belief(posterior, history.n + used.mean, group_size, informative)


def nonzero(x: jax.Array) -> jax.Array:
    """Returns ``x``, and 1 where it is not above 0: what a sum of weights is divided by."""
    return jnp.where(x > 0.0, x, 1.0)
