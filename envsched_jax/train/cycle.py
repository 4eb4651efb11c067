"""The whole cycle as one program: select, rollout, verify, update, observe; scan over steps, vmap over seeds.

Every function is pure and about one seed; ``train/build.py`` compiles them.
"""

import enum
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from envsched_jax.environments.base import Environment
from envsched_jax.rollout.engine import Trajectory, evaluate, rollout
from envsched_jax.train import grpo
from envsched_jax.train.advantages import Std, advantages
from envsched_jax.types import Batch, Graph, Key, Scheduler, SchedulerState, Status, is_valid, outcome_of

SAME = 1e-6  # rewards that differ by no more are equal


class Stream(enum.IntEnum):
    """Purposes of random numbers; each has its own stream, ``fold_in(fold_in(key, step), stream)``."""

    SELECT = 0
    ROLLOUT = 1
    TRUTH = 2
    REFILL = 3


class Setup(NamedTuple):
    """Everything that stays as it is during a run. Static but for the arrays inside."""

    graph: Graph
    task: jax.Array  # i32[N], the environment's task behind each node
    environment: Environment
    graphdef: nnx.GraphDef
    optimizer: optax.GradientTransformation
    scheduler: Scheduler
    batch_size: int
    group_size: int
    temperature: float
    std: Std
    clip_low: float
    clip_high: float
    quotas: Callable[[Graph, SchedulerState], jax.Array] | None  # i32[E], to tell where a batch goes beyond them
    max_draws: int  # batches that a step may draw to find informative groups; 1 is no filter


class CycleState(NamedTuple):
    """What a run carries from step to step, and what a checkpoint holds."""

    params: nnx.State
    opt_state: optax.OptState
    scheduler: SchedulerState
    key: Key
    step: jax.Array  # i32[], updates made
    rollouts: jax.Array  # f32[], rolled out so far, discarded ones included
    tokens: jax.Array  # f32[], generated so far, discarded ones included


class StepMetrics(NamedTuple):
    """What one step did. Shares are of the rolled-out groups, those that a filter threw away included."""

    informative_share: jax.Array  # f32[]
    solved_share: jax.Array  # f32[], groups that all got the same reward and succeeded
    failed_share: jax.Array  # f32[], groups that all got the same reward and did not
    predicted_informative_share: jax.Array  # f32[], NaN for a recipe without a belief
    reward_mean: jax.Array  # f32[]
    explore_share: jax.Array  # f32[]
    over_quota: jax.Array  # f32[], share of the groups that are beyond the quota of their environment
    loss: jax.Array  # f32[]
    grad_norm: jax.Array  # f32[]
    entropy: jax.Array  # f32[]
    clip_fraction: jax.Array  # f32[]
    logp_gap: jax.Array  # f32[]
    rollouts: jax.Array  # f32[], so far
    tokens: jax.Array  # f32[], so far
    env_count: jax.Array  # i32[E], groups rolled out per environment


def init(key: Key, setup: Setup, params: nnx.State) -> CycleState:
    """Returns the state before the first step; ``key`` is kept as the root of all streams."""
    zero = jnp.float32(0)
    return CycleState(
        params, setup.optimizer.init(params), setup.scheduler.init(setup.graph), key, jnp.int32(0), zero, zero
    )


def select(setup: Setup, key: Key, scheduler: SchedulerState) -> Batch:
    """Asks the scheduler for the next batch."""
    return setup.scheduler.select(key, setup.graph, scheduler)


def play(setup: Setup, key: Key, params: nnx.State, batch: Batch) -> Trajectory:
    """Rolls out and verifies a batch; rows that the batch does not fill are ABSENT."""
    model = nnx.merge(setup.graphdef, params)
    trajectory = rollout(
        key,
        model,
        setup.environment,
        setup.task[batch.node],
        setup.graph.nodes.uid[batch.node],
        group_size=setup.group_size,
        temperature=setup.temperature,
    )
    return trajectory._replace(status=jnp.where(batch.mask[:, None], trajectory.status, jnp.int8(Status.ABSENT)))


def learn(
    setup: Setup, params: nnx.State, opt_state: optax.OptState, trajectory: Trajectory
) -> tuple[nnx.State, optax.OptState, grpo.UpdateMetrics]:
    """One GRPO update."""
    advantage = advantages(trajectory.reward, is_valid(trajectory.status), std=setup.std)
    return grpo.update(
        params,
        opt_state,
        setup.graphdef,
        setup.optimizer,
        setup.environment,
        trajectory,
        advantage,
        temperature=setup.temperature,
        clip_low=setup.clip_low,
        clip_high=setup.clip_high,
    )


def observe(setup: Setup, scheduler: SchedulerState, batch: Batch, trajectory: Trajectory) -> SchedulerState:
    """Tells the scheduler what came back; on the device nothing is stale and seconds are not known per rollout."""
    outcome = outcome_of(batch, trajectory.reward, trajectory.status, tokens=trajectory.tokens)
    return setup.scheduler.observe(setup.graph, scheduler, outcome)


def informative_groups(trajectory: Trajectory) -> jax.Array:
    """Which groups have valid rewards that differ, bool[B]."""
    valid = is_valid(trajectory.status)
    low = jnp.where(valid, trajectory.reward, jnp.inf).min(axis=1)
    high = jnp.where(valid, trajectory.reward, -jnp.inf).max(axis=1)
    return high - low > SAME


class _Drawn(NamedTuple):
    """The carry of the loop over draws: the best groups so far and what was spent on all."""

    trajectory: Trajectory
    scheduler: SchedulerState
    draws: jax.Array  # i32[]
    sums: "_Sums"


class _Sums(NamedTuple):
    """Sums over every group rolled out in one step."""

    groups: jax.Array
    informative: jax.Array
    solved: jax.Array
    predicted: jax.Array
    explore: jax.Array
    over_quota: jax.Array
    reward: jax.Array  # sum over valid rollouts
    valid: jax.Array  # valid rollouts
    tokens: jax.Array
    env_count: jax.Array  # i32[E]


def _sums(setup: Setup, before: SchedulerState, batch: Batch, trajectory: Trajectory) -> _Sums:
    valid, live = is_valid(trajectory.status), batch.mask
    informative = informative_groups(trajectory)
    env = setup.graph.nodes.env[batch.node]
    env_count = jax.ops.segment_sum(live.astype(jnp.int32), env, setup.graph.globals.env_mask.shape[0])
    beyond = (
        jnp.int32(0) if setup.quotas is None else jnp.maximum(env_count - setup.quotas(setup.graph, before), 0).sum()
    )
    return _Sums(
        groups=live.sum().astype(jnp.float32),
        informative=(live & informative).sum().astype(jnp.float32),
        solved=(live & ~informative & (trajectory.success & valid).any(axis=1)).sum().astype(jnp.float32),
        predicted=jnp.where(live, batch.p_informative, 0.0).sum(),
        explore=(live & batch.explore).sum().astype(jnp.float32),
        over_quota=beyond.astype(jnp.float32),
        reward=jnp.where(valid, trajectory.reward, 0.0).sum(),
        valid=valid.sum().astype(jnp.float32),
        tokens=jnp.where(live[:, None], trajectory.tokens, 0.0).sum(),
        env_count=env_count,
    )


def _draw(setup: Setup, key: Key, params: nnx.State, scheduler: SchedulerState) -> _Drawn:
    """One batch: selected, rolled out, observed."""
    before = scheduler
    batch = select(setup, jax.random.fold_in(key, Stream.SELECT), before)
    trajectory = play(setup, jax.random.fold_in(key, Stream.ROLLOUT), params, batch)
    scheduler = observe(setup, scheduler, batch, trajectory)
    return _Drawn(trajectory, scheduler, jnp.int32(1), _sums(setup, before, batch, trajectory))


def _refill(setup: Setup, key: Key, params: nnx.State, first: _Drawn) -> _Drawn:
    """Draws on until there is a whole batch of informative groups or ``max_draws`` are spent (DAPO, Yu et al. 2025)."""

    def lacking(drawn: _Drawn) -> jax.Array:
        return (informative_groups(drawn.trajectory).sum() < setup.batch_size) & (drawn.draws < setup.max_draws)

    def again(drawn: _Drawn) -> _Drawn:
        stream = jax.random.fold_in(jax.random.fold_in(key, Stream.REFILL), drawn.draws)
        more = _draw(setup, stream, params, drawn.scheduler)
        both = jax.tree.map(lambda a, b: jnp.concatenate([a, b]), drawn.trajectory, more.trajectory)
        best = jnp.argsort(~informative_groups(both), stable=True)[: setup.batch_size]
        return _Drawn(
            jax.tree.map(lambda x: x[best], both),
            more.scheduler,
            drawn.draws + 1,
            jax.tree.map(jnp.add, drawn.sums, more.sums),
        )

    return jax.lax.while_loop(lacking, again, first)


def step(setup: Setup, state: CycleState) -> tuple[CycleState, StepMetrics]:
    """Select, rollout, verify, observe and update, once.

    What is selected depends only on outcomes of earlier steps, so it makes no difference that the scheduler observes
    before the policy is updated.
    """
    key = jax.random.fold_in(state.key, state.step)
    drawn = _draw(setup, key, state.params, state.scheduler)
    if setup.max_draws > 1:
        drawn = _refill(setup, key, state.params, drawn)
    params, opt_state, update = learn(setup, state.params, state.opt_state, drawn.trajectory)
    sums = drawn.sums
    groups = jnp.maximum(sums.groups, 1)
    following = CycleState(
        params,
        opt_state,
        drawn.scheduler,
        state.key,
        state.step + 1,
        state.rollouts + sums.groups * setup.group_size,
        state.tokens + sums.tokens,
    )
    metrics = StepMetrics(
        informative_share=sums.informative / groups,
        solved_share=sums.solved / groups,
        failed_share=(sums.groups - sums.informative - sums.solved) / groups,
        predicted_informative_share=sums.predicted / groups,
        reward_mean=sums.reward / jnp.maximum(sums.valid, 1),
        explore_share=sums.explore / groups,
        over_quota=sums.over_quota / groups,
        loss=update.loss,
        grad_norm=update.grad_norm,
        entropy=update.entropy,
        clip_fraction=update.clip_fraction,
        logp_gap=update.logp_gap,
        rollouts=following.rollouts,
        tokens=following.tokens,
        env_count=sums.env_count,
    )
    return following, metrics


def run(setup: Setup, state: CycleState, *, steps: int) -> tuple[CycleState, StepMetrics]:
    """Runs ``steps`` steps; the metrics get a leading axis of steps."""
    return jax.lax.scan(lambda carry, _: step(setup, carry), state, length=steps)


def reveal(setup: Setup, state: CycleState, *, group_size: int) -> CycleState:
    """Fills ``truth`` for the oracle: P(informative) of every node from ``group_size`` fresh rollouts, never charged.

    The truth is the share of groups of G, drawn without replacement from n fresh rollouts, whose rewards differ. With
    ``n_v`` rollouts of reward v that is ``1 - sum_v C(n_v, G) / C(n, G)``, unbiased for ``n >= G`` (Chen et al. 2021,
    the estimator of pass@k).
    """
    key = jax.random.fold_in(jax.random.fold_in(state.key, state.step), Stream.TRUTH)
    model = nnx.merge(setup.graphdef, state.params)
    reward, _ = evaluate(
        key, model, setup.environment, setup.task, group_size=group_size, temperature=setup.temperature
    )
    truth = jnp.where(setup.graph.nodes.mask, share_of_mixed_groups(reward, setup.group_size), 0.0)
    return state._replace(scheduler=state.scheduler._replace(truth=truth))


def share_of_mixed_groups(reward: jax.Array, group_size: int) -> jax.Array:
    """Share of the groups of ``group_size`` among n rewards that have unequal rewards, f32[N] for f32[N, n]."""
    total = reward.shape[1]
    alike = (jnp.abs(reward[:, :, None] - reward[:, None, :]) <= SAME).sum(axis=2).astype(jnp.float32)  # n_v of each
    terms = jnp.arange(group_size, dtype=jnp.float32)[None, None]
    chance = jnp.prod(jnp.maximum(alike[..., None] - terms, 0.0) / (total - terms), axis=-1)
    return 1.0 - (chance / alike).sum(axis=1)  # each value v was counted n_v times
