"""Diffusion kept up to date: a step costs what its batch touches, not the pool.

Diffusion is linear in the records. The last round but one, ``X``, is kept; an outcome pushes only what it changed along
the edges that leave the tasks of the batch, and the last round is pulled for the tasks that are asked about. So a step
costs ``B * 2K`` row additions and ``2K`` row reads per task asked, and gives what ``diffusion.believe`` gives.

All records fade by the same factor per step. Sums are therefore stored divided by ``scale``, which alone fades:
nothing is touched for being one step older. ``refresh`` works all sums out anew now and then; it bounds rounding and
tells how far they had drifted.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from envsched_jax.belief import diffusion, environment, history
from envsched_jax.belief.environment import Moments
from envsched_jax.types import Belief, Graph, History, Outcome

SUMS = ("s1", "ssw", "informative", "n", "dof", "groups")  # what is diffused: sums, then what they are divided by
BLOCK = 16_384  # tasks that a refresh works out at once
SMALLEST_SCALE = 1e-24  # below this sums would leave the range of float32; refreshed before


class Routes(NamedTuple):
    """What depends on the graph alone. Rows by node: a few tasks are asked about, and their neighbours lie together."""

    sender: jax.Array  # i32[N, 2K], the gather table
    weight: jax.Array  # f32[N, 2K], of ``diffusion.edge_weights``
    outgoing: jax.Array  # i32[2KN], places in the two tables above, ordered by their sender
    first: jax.Array  # i32[N + 1], where each sender's begin
    share: jax.Array  # f32[N], of a task's own record in what diffusion gives it
    per_count: jax.Array  # f32[N], observations that stand behind one of the averaged count
    restart: jax.Array  # f32[]
    rounds: jax.Array  # i32[], 1 or 2


class State(NamedTuple):
    """What is kept up to date; true sums are these times ``scale``."""

    routes: Routes
    scale: jax.Array  # f32[]
    ahead: jax.Array  # f32[N, 6], X of the last round but one
    env: jax.Array  # f32[E, 6], sums of every environment
    drift: jax.Array  # f32[], largest difference at the last refresh, relative to the largest sum


def routes(
    graph: Graph, *, kind_weights: jax.Array, restart: float | jax.Array, mix: float | jax.Array, rounds: int
) -> Routes:
    """Returns what depends on the graph alone. Costs a sort of all edges and ``K`` reads per edge; once per graph.

    Raises:
      ValueError: ``rounds`` is neither 1 nor 2.
    """
    if rounds not in (1, 2):
        raise ValueError(f"rounds must be 1 or 2 to be kept up to date, got {rounds}")
    table, num_nodes = diffusion.gather_table(graph), graph.nodes.mask.shape[0]
    weight = diffusion.edge_weights(graph, kind_weights, mix)
    share = diffusion.self_share(table, weight, restart=restart, rounds=rounds)
    ones = jnp.ones((num_nodes, 1), jnp.float32)
    reach = diffusion.diffuse(table, weight, ones, restart=restart, rounds=rounds)[:, 0] - share
    spread = diffusion.concentration(table, weight, restart=restart, rounds=rounds)
    # Edges of weight zero, as all masked ones, carry nothing and are left out: they come last, behind every sender.
    sender = jnp.where(weight > 0.0, table, num_nodes).T.reshape(-1)
    degree = jnp.zeros(num_nodes + 1, jnp.int32).at[sender].add(1)[:num_nodes]
    return Routes(
        sender=table.T,
        weight=weight.T,
        outgoing=jnp.argsort(sender).astype(jnp.int32),
        first=jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(degree, dtype=jnp.int32)]),
        share=share,
        per_count=jnp.maximum(reach, 0.0) / diffusion.nonzero(spread),
        restart=jnp.asarray(restart, jnp.float32),
        rounds=jnp.asarray(rounds, jnp.int32),
    )


def init(graph: Graph, ways: Routes) -> State:
    """Returns the state before the first outcome."""
    return State(
        routes=ways,
        scale=jnp.ones((), jnp.float32),
        ahead=jnp.zeros((graph.nodes.mask.shape[0], len(SUMS)), jnp.float32),
        env=jnp.zeros((graph.globals.env_mask.shape[0], len(SUMS)), jnp.float32),
        drift=jnp.zeros((), jnp.float32),
    )


def update(
    graph: Graph, state: State, outcome: Outcome, gamma: float | jax.Array, *, block: int | None = None
) -> State:
    """Returns the state one step later, as ``history.update`` discounts and adds.

    Args:
      graph: the graph of ``state.routes``.
      state: before the outcome.
      outcome: what came back; rows of one task add up, late ones weigh ``gamma ** age``.
      gamma: discount per step.
      block: edges pushed at a time, any number; 2KB by default, about as many as a batch has.
    """
    node, more = history.additions(outcome, gamma)
    scale = gamma * state.scale
    added = jnp.stack([more[name] for name in SUMS], axis=1) / scale
    ways = state.routes
    kept = jnp.where(ways.rounds == 2, ways.restart, 1.0)
    size = block or ways.weight.shape[1] * node.shape[0]
    ahead = _push(ways, state.ahead.at[node].add(kept * added), node, (1.0 - kept) * added, size)
    env = state.env.at[graph.nodes.env[node]].add(added)
    return state._replace(scale=jnp.asarray(scale, jnp.float32), ahead=ahead, env=env)


def _push(ways: Routes, ahead: jax.Array, node: jax.Array, added: jax.Array, size: int) -> jax.Array:
    """Adds ``A added`` to ``ahead``, f32[N, F]: along all edges that leave the nodes, ``size`` at a time."""
    degree = jnp.where((added != 0.0).any(axis=1), ways.first[node + 1] - ways.first[node], 0)
    end = jnp.cumsum(degree, dtype=jnp.int32)
    flat, slots = ways.weight.reshape(-1), ways.weight.shape[1]

    def more(carry: tuple[jax.Array, jax.Array]) -> jax.Array:
        return carry[0] < end[-1]

    def push(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        done, ahead = carry
        place = done + jnp.arange(size, dtype=jnp.int32)
        row = jnp.minimum(jnp.searchsorted(end, place, side="right"), node.shape[0] - 1)
        there = place < end[-1]
        edge = ways.outgoing[jnp.where(there, ways.first[node[row]] + place - (end - degree)[row], 0)]
        weight = jnp.where(there, flat[edge], 0.0)
        return done + size, ahead.at[edge // slots].add(weight[:, None] * added[row])

    return jax.lax.while_loop(more, push, (jnp.zeros((), jnp.int32), ahead))[1]


def refresh(graph: Graph, state: State, record: History, due: bool | jax.Array = True) -> State:
    """Returns the state worked out from all records, with what had drifted, where that is ``due``, bool[].

    Costs a round over the pool. Rows are written block by block into where they are: otherwise a step that refreshes
    nothing would copy them all.
    """
    ways, num_nodes = state.routes, state.ahead.shape[0]
    size = min(BLOCK, num_nodes)
    fields = [getattr(record, name) for name in SUMS]

    def block(number: jax.Array, carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple:
        ahead, largest, error = carry
        start = jnp.minimum(number * size, num_nodes - size)  # the last block overlaps the one before

        def rows(x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(x, start, size)

        sender, weight = rows(ways.sender), rows(ways.weight)
        around = jnp.stack([(weight * field[sender]).sum(axis=1) for field in fields], axis=1)
        own = jnp.stack([rows(field) for field in fields], axis=1)
        new = jnp.where(ways.rounds == 2, (1.0 - ways.restart) * around + ways.restart * own, own)
        first = (start + jnp.arange(size, dtype=jnp.int32) >= number * size)[:, None]
        drift = jnp.where(first, jnp.abs(new - state.scale * rows(ahead)), 0.0).max()
        ahead = jax.lax.dynamic_update_slice_in_dim(ahead, new, start, 0)
        return ahead, jnp.maximum(largest, jnp.abs(new).max()), jnp.maximum(error, drift)

    blocks = jnp.where(due, jnp.int32(-(-num_nodes // size)), jnp.int32(0))
    ahead, largest, error = jax.lax.fori_loop(
        jnp.int32(0), blocks, block, (state.ahead, jnp.float32(1.0), jnp.float32(0.0))
    )

    def sums(_: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        env = jax.ops.segment_sum(jnp.stack(fields, axis=1), graph.nodes.env, state.env.shape[0])
        return jnp.zeros((), bool), env

    _, env = jax.lax.while_loop(lambda carry: carry[0], sums, (jnp.asarray(due, bool), state.env))
    scale = jnp.where(due, jnp.float32(1.0), state.scale)
    return State(ways, scale, ahead, env, jnp.where(due, error / largest, state.drift))


def believe(
    graph: Graph,
    state: State,
    record: History,
    node: jax.Array | slice,
    *,
    nu: float | jax.Array,
    c: float | jax.Array,
    prior: Moments,
    group_size: int,
    informative: str,
) -> Belief:
    """Returns what ``diffusion.believe`` says of the tasks ``node``, i32[C] or a slice, f32[C] per field."""
    ways = state.routes
    own = history.rows(record, node)
    signal = jnp.stack([getattr(own, name) for name in SUMS], axis=1)
    pulled = state.scale * diffusion.propagate(ways.sender[node].T, ways.weight[node].T, state.ahead)
    others = (1.0 - ways.restart) * pulled + (ways.restart - ways.share[node])[:, None] * signal
    lent = diffusion.said(others, environment.counts(own), ways.per_count[node])
    sums = (state.scale * state.env).T
    moments, _ = environment.shrunk(Moments(*sums[:3]), Moments(*sums[3:]), environment.in_units(c, group_size), prior)
    there = Moments(*(value[graph.nodes.env[node]] for value in moments))
    return diffusion.weigh(own, there, lent, nu=nu, c=c, group_size=group_size, informative=informative)
