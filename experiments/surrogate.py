"""A surrogate of RL on a task pool in which every pass rate is exact, driven by the schedulers of this package.

The policy is a vector of abilities ``theta``, f32[A]. Task i is passed with probability ``p_i = sigmoid(b_i + w_i .
theta)``: ``b_i`` is how hard it is at the start, the unit vector ``w_i`` what it takes. A part of ``w_i`` is common to
all tasks, one to the tasks of its environment, one to those of its topology, and the rest, most of it, is the task's
own: training a task moves itself most, its environment and its topology less, and everybody a little.

The own directions are drawn at random in fewer dimensions than there are tasks, so they overlap a little, as
directions in a network do: training one task also nudges every other one up *or down*. Without that no update could
ever harm, and the largest learning rate would always be best. And all of ``w`` is turned at random, so that no
parameter belongs to one ability: Adam scales every parameter by itself, and would otherwise give a rarely trained
ability steps of its own.

A step is GRPO's: groups of G rewards, advantages divided by the group's deviation, mean over all rollouts. For this
policy the gradient has a closed form, ``mean over the batch of sqrt(m_i (1 - m_i)) w_i``, m_i the share of the group
that passed (up to the constant that is added to the deviation): zero where all rewards are equal. See ``ascent``.

Shapes as in ``envsched_jax.types``, and M: the N nodes of the pool followed by held-out tasks, A: abilities.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from envsched_jax import graph as graphs
from envsched_jax.pool import Record, Verifier
from envsched_jax.train.advantages import advantages
from envsched_jax.types import Graph, Key, Scheduler, outcome_of

SELECT, GROUP, NOISE = range(3)  # streams of random numbers within a run
POOL, SEEN_ENV, NEW_ENV = range(3)  # rows of World.average
MOST, HALVINGS = 100.0, 40  # shift and factor are sought in [0, MOST]
# Calls of one round by topology, as (verb, object): what asks and changes, and what is used again, differ.
ROUNDS = (
    (("get", "a"), ("set", "a")),
    (("get", "a"), ("get", "b"), ("set", "c")),
    (("set", "a"), ("set", "a"), ("set", "a")),
    (("list", "a"), ("get", "b"), ("list", "a"), ("set", "b")),
    (("set", "a"), ("check", "a")),
    (("check", "a"), ("set", "b"), ("set", "c"), ("get", "b")),
)


class World(NamedTuple):
    """What all cells share: the graph, what tasks take, and how structure alone would order them."""

    graph: Graph
    weight: jax.Array  # f32[M, A], unit rows; 0 for padding of the graph
    structure: jax.Array  # f32[M], mean 0 and variance 1 over the pool
    average: jax.Array  # f32[3, M], rows sum to 1: the means over the pool and over both kinds of held-out tasks


class Cell(NamedTuple):
    """The regime of a run, all traced."""

    degenerate: jax.Array  # f32[], share of degenerate groups under uniform selection at the start
    structure: jax.Array  # f32[], share of the variance of difficulty that the structure explains
    learning_rate: jax.Array  # f32[]
    eps: jax.Array  # f32[], Adam's


class Trace(NamedTuple):
    """One run of S steps."""

    rate: jax.Array  # f32[S + 1, 3], exact mean pass rates, rows as in World.average
    expected: jax.Array  # f32[S], exact P(informative), mean over the picks
    informative: jax.Array  # f32[S], share of the groups whose rewards came out different
    drop: jax.Array  # f32[], share of the pool that the whole run left more than 0.3 below its best pass rate
    degenerate: jax.Array  # f32[], exact share of degenerate groups of the pool at the start


def informative(rate: jax.Array, group_size: int) -> jax.Array:
    """Returns P(the rewards of a group differ), ``1 - p^G - (1 - p)^G``, of the shape of ``rate``."""
    return 1.0 - rate**group_size - (1.0 - rate) ** group_size


def solve(share: Callable[[jax.Array], jax.Array], target: jax.Array, most: float) -> jax.Array:
    """Returns x f32[] in [0, most] with ``share(x) = target``, by bisection; ``share`` must rise.

    Where the target lies beyond an end, that end is returned.
    """

    def halve(_: int, ends: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = ends
        middle = 0.5 * (low + high)
        lacking = share(middle) < target
        return jnp.where(lacking, middle, low), jnp.where(lacking, high, middle)

    low, high = jax.lax.fori_loop(0, HALVINGS, halve, (jnp.float32(0.0), jnp.float32(most)))
    return 0.5 * (low + high)


def difficulty(
    key: Key, world: World, cell: Cell, *, spread: float, group_size: int, sharp: bool
) -> tuple[jax.Array, jax.Array]:
    """Returns the logits of all tasks at the start, f32[M], and the factor of ``w . theta`` in them, f32[].

    With ``d = sqrt(s) * structure + sqrt(1 - s) * noise``, the noise being the seed's, the share of degenerate groups
    is brought about in one of two ways:

    * a *hard* pool, ``spread * d - x``: most tasks are never solved, and the mean pass rate is low;
    * a *sharp* policy, ``x * d``: tasks are solved always or never, half of them each. All logits are then steeper,
      those of what is learned as well, by ``x / spread``.

    Args:
      key: of the noise.
      world: shared.
      cell: the regime.
      spread: deviation of the logits of a hard pool, and of a policy that is as sharp as that.
      group_size: G.
      sharp: which of the two.
    """
    mask = world.graph.nodes.mask
    noise = jax.random.normal(key, world.structure.shape)
    order = jnp.sqrt(cell.structure) * world.structure + jnp.sqrt(1.0 - cell.structure) * noise

    def share(logit: jax.Array) -> jax.Array:
        teaches = informative(jax.nn.sigmoid(logit[: mask.shape[0]]), group_size)
        return 1.0 - world.average[POOL, : mask.shape[0]] @ teaches

    if sharp:
        factor = solve(lambda x: share(x * order), cell.degenerate, MOST)
        return factor * order, factor / spread
    logit = spread * order
    return logit - solve(lambda x: share(logit - x), cell.degenerate, MOST), jnp.float32(1.0)


def ascent(weight: jax.Array, reward: jax.Array, mask: jax.Array) -> jax.Array:
    """Returns the gradient of the GRPO objective with respect to the abilities, f32[A].

    The log-probability of a reward r is ``r log p + (1 - r) log(1 - p)``, and its derivative by the logit ``r - p``.
    Advantages of a group sum to 0, so p drops out: ``sum_j A_j (r_j - p) = sum_j A_j r_j``.

    Args:
      weight: f32[B, A], of the picked tasks.
      reward: f32[B, G], 0 or 1.
      mask: bool[B], which rows are picks; every rollout of these counts in the mean, as in ``grpo.loss``.
    """
    advantage = advantages(reward, jnp.broadcast_to(mask[:, None], reward.shape), std="group")
    push = (advantage * reward).mean(axis=1)
    return (push[:, None] * weight).sum(axis=0) / jnp.maximum(mask.sum(), 1)


def simulate(
    seed: jax.Array,
    world: World,
    cell: Cell,
    *,
    scheduler: Scheduler,
    steps: int,
    group_size: int,
    spread: float,
    sharp: bool,
) -> Trace:
    """Runs one arm in one cell; ``vmap`` over seeds and cells.

    Runs with the same seed have the same pool and meet the same luck whoever asks: a task's draws at a step depend on
    the seed, the step and the task alone.

    Args:
      seed: i32[].
      world: shared.
      cell: the regime.
      scheduler: the arm; its ``truth`` is P(informative), exact at every step.
      steps: S.
      group_size: G.
      spread: see ``difficulty``.
      sharp: see ``difficulty``.
    """
    nodes = world.graph.nodes
    size = nodes.mask.shape[0]
    root = jax.random.key(seed)
    key_noise = jax.random.fold_in(root, NOISE)
    start, factor = difficulty(key_noise, world, cell, spread=spread, group_size=group_size, sharp=sharp)
    optimizer = optax.adam(cell.learning_rate, b1=0.9, b2=0.99, eps=cell.eps)
    theta = jnp.zeros(world.weight.shape[1], jnp.float32)

    def rates(theta: jax.Array) -> jax.Array:
        return jax.nn.sigmoid(start + factor * (world.weight @ theta))

    def step(carry: tuple, index: jax.Array) -> tuple[tuple, tuple]:
        theta, optimizer_state, state, best = carry
        rate = rates(theta)
        teaches = informative(rate[:size], group_size)
        key_select = jax.random.fold_in(jax.random.fold_in(root, SELECT), index)
        key_group = jax.random.fold_in(jax.random.fold_in(root, GROUP), index)
        state = state._replace(truth=jnp.where(nodes.mask, teaches, 0.0))
        batch = scheduler.select(key_select, world.graph, state)
        luck = jax.vmap(lambda uid: jax.random.uniform(jax.random.fold_in(key_group, uid), (group_size,)))(
            nodes.uid[batch.node]
        )
        reward = (luck < rate[batch.node][:, None]).astype(jnp.float32)
        state = scheduler.observe(world.graph, state, outcome_of(batch, reward))
        gradient = factor * ascent(world.weight[batch.node], reward, batch.mask)
        change, optimizer_state = optimizer.update(-gradient, optimizer_state)
        count = jnp.maximum(batch.mask.sum(), 1)
        differs = (reward.min(axis=1) < reward.max(axis=1)) & batch.mask
        row = (
            world.average @ rate,
            jnp.where(batch.mask, teaches[batch.node], 0.0).sum() / count,
            differs.sum() / count,
        )
        return (theta + change, optimizer_state, state, jnp.maximum(best, rate[:size])), row

    first = rates(theta)
    carry = (theta, optimizer.init(theta), scheduler.init(world.graph), first[:size])
    (theta, _, _, best), (rate, expected, differed) = jax.lax.scan(step, carry, jnp.arange(steps))
    last = rates(theta)
    return Trace(
        rate=jnp.concatenate([rate, (world.average @ last)[None, :]]),
        expected=expected,
        informative=differed,
        drop=world.average[POOL, :size] @ (best - last[:size] > 0.3).astype(jnp.float32),
        degenerate=1.0 - world.average[POOL, :size] @ informative(first[:size], group_size),
    )


# ------------------------------------------------------------------------------------------------ the pool


def records(
    environments: Sequence[int], *, topologies: int, depths: int, copies: int
) -> tuple[list[Record], np.ndarray]:
    """Returns the records of some environments, and the environment, topology and depth of each, i64[n, 3].

    A record shows its structure as real ones do: the environment in the names of tools and state, the topology in the
    order of the calls, the depth in their number. Nothing of it tells the noise of the difficulty.

    Raises:
      ValueError: more topologies than there are ``ROUNDS``.
    """
    if not 1 <= topologies <= len(ROUNDS):
        raise ValueError(f"topologies must be from 1 to {len(ROUNDS)}, got {topologies}")
    found, where = [], []
    for env in environments:
        name = f"env{env:02d}"
        tools = tuple(sorted({f"{name}.{verb}_{thing}" for calls in ROUNDS for verb, thing in calls}))
        for topology in range(topologies):
            for depth in range(depths):
                actions = tuple(f"{name}.{verb}_{thing}" for verb, thing in ROUNDS[topology] * (depth + 1))
                for copy in range(copies):
                    found.append(
                        Record(
                            task_id=f"{name}-{topology}-{depth}-{copy}",
                            env_id=name,
                            text=f"case {copy} of {name}: {' then '.join(a.split('.')[1] for a in actions)}",
                            tools_available=tools,
                            gt_actions=actions,
                            n_turns=1,
                            state_reads=(f"{name}.a",),
                            state_writes=(f"{name}.{ROUNDS[topology][-1][1]}",),
                            verifier=Verifier(kind="state", n_checks=depth + 1, partial=False),
                            domain=name,
                        )
                    )
                    where.append((env, topology, depth))
    return found, np.array(where)


def build_world(
    *,
    environments: int,
    new_environments: int,
    topologies: int,
    depths: int,
    copies: int,
    held_out_copies: int,
    general: float,
    environment: float,
    topology: float,
    directions: int,
    seed: int,
    graph: dict,
) -> World:
    """Builds the pool, its graph and the held-out tasks; on the host.

    Args:
      environments: E of the pool.
      new_environments: others, of which only held-out tasks exist.
      topologies: of every environment.
      depths: rounds of calls, from 1 up, in every topology.
      copies: tasks of the pool by environment, topology and depth.
      held_out_copies: held-out ones.
      general: squared share of w that all tasks have in common.
      environment: that of an environment.
      topology: that of a topology; the rest of the square is the task's own.
      directions: dimensions in which the own parts lie.
      seed: of the structure, the own parts and the turn.
      graph: arguments of ``envsched_jax.graph.build``.

    Raises:
      ValueError: shares that are negative or beyond 1 in sum; too many topologies.
    """
    own = 1.0 - general - environment - topology
    if min(general, environment, topology, own) < 0.0:
        raise ValueError(f"shares must be at least 0 and at most 1 in sum, got {general}, {environment}, {topology}")
    kinds = {"topologies": topologies, "depths": depths}
    pool, pool_at = records(range(environments), copies=copies, **kinds)
    _, seen_at = records(range(environments), copies=held_out_copies, **kinds)
    _, new_at = records(range(environments, environments + new_environments), copies=held_out_copies, **kinds)
    built, index = graphs.build(pool, seed=seed, **graph)
    padding = np.zeros((index.capacity - len(pool), 3), np.int64)
    place = np.concatenate([pool_at[index.record], padding, seen_at, new_at])
    kind = np.repeat([POOL, -1, SEEN_ENV, NEW_ENV], [len(pool), len(padding), len(seen_at), len(new_at)])

    rng = np.random.default_rng(seed)
    levels = environments + new_environments
    effect = rng.standard_normal(levels)[place[:, 0]] + rng.standard_normal(topologies)[place[:, 1]]
    effect -= (place[:, 2] - (depths - 1) / 2) / max(float(np.std(np.arange(depths))), 1e-9)
    structure = (effect - effect[kind == POOL].mean()) / effect[kind == POOL].std()

    unit = rng.standard_normal((len(place), directions))
    unit /= np.linalg.norm(unit, axis=1, keepdims=True)
    parts = (
        np.sqrt(general) * np.ones((len(place), 1)),
        np.sqrt(environment) * np.eye(levels)[place[:, 0]],
        np.sqrt(topology) * np.eye(topologies)[place[:, 1]],
        np.sqrt(own) * unit,
    )
    weight = np.concatenate(parts, axis=1)
    turn, _ = np.linalg.qr(rng.standard_normal((weight.shape[1], weight.shape[1])))
    weight = (weight @ turn) * (kind >= 0)[:, None]
    average = np.stack([(kind == k) / max((kind == k).sum(), 1) for k in (POOL, SEEN_ENV, NEW_ENV)])
    return World(
        graph=built,
        weight=jnp.asarray(weight, jnp.float32),
        structure=jnp.asarray(structure, jnp.float32),
        average=jnp.asarray(average, jnp.float32),
    )
