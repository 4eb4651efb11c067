"""The words that every module shares: shapes, results and the scheduler interface.

Shape letters, here and everywhere:

======  ==========================================  ======  =====================================
letter  meaning                                     letter  meaning
======  ==========================================  ======  =====================================
``N``   nodes (tasks), padded to a bucket           ``B``   tasks per batch
``K``   neighbours per relation                     ``G``   rollouts per task (the group)
``S``   kinds of similarity (``len(EDGE_KINDS)``)   ``D``   feature size
``E``   environments, padded                        ``T``   tokens or turns, see the function
``P``   patterns, padded                            ``V``   vocabulary
======  ==========================================  ======  =====================================

Containers whose leaves are all arrays are ``NamedTuple``; they are pytrees and valid scan carries.
"""

import enum
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

Key = jax.Array  # a typed key: jax.random.key(seed)

WITHIN_KINDS = ("semantics", "tools", "state", "verifier", "near_duplicate")
CROSS_KINDS = ("execution", "reward")
EDGE_KINDS = WITHIN_KINDS + CROSS_KINDS


class Status(enum.IntEnum):
    """What became of one rollout. Only the first three outcomes say something about the policy."""

    ABSENT = 0  # no rollout in this slot
    OK = 1
    TRUNCATED = 2  # ran out of its token or turn budget: the policy's doing, the reward stands
    POLICY_TIMEOUT = 3
    ENV_TIMEOUT = 4  # from here on: never counted as reward 0, left out of every reward statistic
    ENV_ERROR = 5
    VERIFIER_ERROR = 6
    INFRA_ERROR = 7


def is_valid(status: jax.Array) -> jax.Array:
    """Tells which rollouts count: ``bool`` of the same shape, true for OK, TRUNCATED and POLICY_TIMEOUT."""
    return (status >= Status.OK) & (status <= Status.POLICY_TIMEOUT)


class Nodes(NamedTuple):
    """One row per task, and rows of padding, which carry zeros.

    ``mask`` is false for padding and for retired tasks; the latter keep everything else, edges too, and lend what was
    learned of them. So ``mask`` decides what is picked and counted for quotas, never what is believed.
    """

    mask: jax.Array  # bool[N], eligible
    env: jax.Array  # i32[N], in 0..E-1
    pattern: jax.Array  # i32[N], in 0..P-1
    uid: jax.Array  # u32[N], hash of task_id: the stream of this node's random draws
    feature: jax.Array  # f32[N, D], unit rows; sim(i, j) = max(0, <f_i, f_j>) in the similarity penalty
    static: jax.Array  # f32[N, *], what the record says of difficulty, see graph.static; about unit spread
    checks: jax.Array  # i32[N], checks of which the reward is the passed share; 1: all or nothing, or not known


class Edges(NamedTuple):
    """Slot-major: edge ``s * N + i`` is slot ``s`` of receiver ``i``; slots 0..K-1 within, K..2K-1 cross."""

    similarity: jax.Array  # f32[2KN, S], >= 0; a within edge is zero in the cross kinds and the reverse
    mask: jax.Array  # bool[2KN], false where a node has fewer than K candidates


class Globals(NamedTuple):
    """Which environments and patterns exist; the shapes give the capacities E and P."""

    env_mask: jax.Array  # bool[E]
    pattern_mask: jax.Array  # bool[P]


class Graph(Protocol):
    """The dual-relation graph: a ``jraph.GraphsTuple`` seen through the fields that we use.

    ``senders.reshape(2K, N)`` is a gather table without a copy; ``receivers`` is ``tile(arange(N), 2K)``.
    """

    @property
    def nodes(self) -> Nodes:
        """Rows per task."""
        ...

    @property
    def edges(self) -> Edges:
        """Rows per edge."""
        ...

    @property
    def senders(self) -> jax.Array:
        """Returns i32[2KN]."""
        ...

    @property
    def receivers(self) -> jax.Array:
        """Returns i32[2KN]."""
        ...

    @property
    def globals(self) -> Globals:
        """Masks of environments and patterns."""
        ...


class Batch(NamedTuple):
    """What to roll out next, and what was believed of it when it was picked."""

    node: jax.Array  # i32[B], 0 where mask is false
    mask: jax.Array  # bool[B], false when fewer than B tasks are eligible
    explore: jax.Array  # bool[B], drawn whatever the belief says
    value: jax.Array  # f32[B]
    predicted_mean: jax.Array  # f32[B]
    predicted_variance: jax.Array  # f32[B]
    p_informative: jax.Array  # f32[B]


class Outcome(NamedTuple):
    """What came back for one batch. A row whose statuses are all ABSENT is padding, whatever its node."""

    node: jax.Array  # i32[B]
    explore: jax.Array  # bool[B]
    reward: jax.Array  # f32[B, G], anything (also NaN) where the status is not valid
    status: jax.Array  # i8[B, G], see Status
    tokens: jax.Array  # f32[B, G], generated tokens
    seconds: jax.Array  # f32[B, G]
    age: jax.Array  # i32[B], policy versions between proposal and now


def outcome_of(
    batch: Batch,
    reward: jax.Array,
    status: jax.Array | None = None,
    *,
    tokens: jax.Array | None = None,
    seconds: jax.Array | None = None,
    age: jax.Array | None = None,
) -> Outcome:
    """Returns the outcome of a batch, in the order of its rows.

    Args:
      batch: as selected; rows that it does not fill become ABSENT.
      reward: f32[B, G].
      status: i8[B, G] of ``Status``; by default OK where the reward is a number and VERIFIER_ERROR where it is NaN, so
        that a missing reward is never counted as a failure.
      tokens: f32[B, G], 0 by default.
      seconds: f32[B, G], 0 by default.
      age: i32[B], 0 by default.
    """
    if status is None:
        status = jnp.where(jnp.isnan(reward), jnp.int8(Status.VERIFIER_ERROR), jnp.int8(Status.OK))
    return Outcome(
        node=batch.node,
        explore=batch.explore,
        reward=reward,
        status=jnp.where(batch.mask[:, None], status.astype(jnp.int8), jnp.int8(Status.ABSENT)),
        tokens=jnp.zeros_like(reward) if tokens is None else tokens,
        seconds=jnp.zeros_like(reward) if seconds is None else seconds,
        age=jnp.zeros_like(batch.node) if age is None else age,
    )


class Belief(NamedTuple):
    """What the scheduler thinks now, per node, whatever the method."""

    mean: jax.Array  # f32[N], expected reward
    variance: jax.Array  # f32[N], expected within-task reward variance (divided by G - 1)
    p_informative: jax.Array  # f32[N], probability that a group of G has rewards that differ
    evidence: jax.Array  # f32[N], effective number of rollouts behind it (own and borrowed)


class History(NamedTuple):
    """Discounted sufficient statistics per node. Rewards of different tasks are never pooled."""

    n: jax.Array  # f32[N], valid rollouts
    s1: jax.Array  # f32[N], sum of rewards
    ssw: jax.Array  # f32[N], sum of squares within groups
    dof: jax.Array  # f32[N], degrees of freedom of ssw: sum of (G_valid - 1)
    informative: jax.Array  # f32[N], groups whose valid rewards differ
    groups: jax.Array  # f32[N], groups with at least two valid rewards
    tokens: jax.Array  # f32[N], tokens of valid rollouts
    seconds: jax.Array  # f32[N]
    visits: jax.Array  # i32[N], times rolled out, never discounted
    last_step: jax.Array  # i32[N], step of the last visit, -1 if never


class SchedulerState(NamedTuple):
    """The whole state of any recipe: arrays only, so a scan carry and a checkpoint item."""

    step: jax.Array  # i32[], outcomes observed so far
    history: History
    quota_carry: jax.Array  # f32[E], fractional slots owed to each environment
    truth: jax.Array  # f32[N], read by the oracle only; filled by the cycle's evaluator
    memory: Any = ()  # what one recipe remembers beyond the history: a NamedTuple of arrays, or nothing


class Scheduler(NamedTuple):
    """A recipe: three pure functions, as an optimiser has two."""

    init: Callable[[Graph], SchedulerState]
    select: Callable[[Key, Graph, SchedulerState], Batch]
    observe: Callable[[Graph, SchedulerState, Outcome], SchedulerState]


PyTree = Any
