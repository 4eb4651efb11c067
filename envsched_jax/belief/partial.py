"""Partial credit: rewards that are the passed share of C checks, and what that does to variance and to evidence.

The C checks of a rollout pass with equal chance m and are exchangeable with correlation rho: a rollout has a chance of
its own, Beta distributed around m with ``1/rho - 1`` as its total count, and its checks pass independently at that
chance. The number passed is beta-binomial, and a reward varies with ``m (1-m) k``, ``k = (1 + (C-1) rho) / C``. So a
rollout says as much about m as ``1/k`` that are all or nothing. ``rho = 1``, or C = 1, is all or nothing, ``rho = 0``
C independent checks; it is learned per environment. For any reward in [0, 1] the variance is at most ``m (1-m)``, so a
rho from 0 to 1 also fits many rewards that are no exact share.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from envsched_jax.belief.environment import blend
from envsched_jax.belief.informative import EDGE, SPREAD, p_informative
from envsched_jax.types import Belief, Graph, History

BINARY_VARIANCE = 0.25  # the largest of an all-or-nothing reward
LARGEST_CORRELATION = 1.0 - 1e-4
LOGITS = np.linspace(-10.0, 10.0, 81)  # of the chances over which a belief about m is averaged
ROOTS = np.linspace(0.0, 1.0, 33)  # square roots of the correlations between which a chance is interpolated
NARROWEST = 0.7  # standard deviation of a belief about logit m, in steps of that grid; sharper ones are widened to it


def variance_factor(checks: jax.Array, rho: jax.Array) -> jax.Array:
    """Returns ``k = (1 + (C-1) rho) / C``, the variance of a reward over ``m (1-m)``; fewer than 1 check counts as 1.

    Args:
      checks: C, integer or float.
      rho: correlation of the checks, in [0, 1], f32 of the shape of ``checks``.
    """
    count = jnp.maximum(checks, 1).astype(jnp.float32)
    return (1.0 + (count - 1.0) * rho) / count


def reward_variance(mean: jax.Array, checks: jax.Array, rho: jax.Array) -> jax.Array:
    """Returns the variance of the rewards of a task of this mean, ``m (1-m) (1 + (C-1) rho) / C``, elementwise."""
    return mean * (1.0 - mean) * variance_factor(checks, rho)


def effective_trials(checks: jax.Array, rho: jax.Array) -> jax.Array:
    """Returns how many all-or-nothing rollouts one rollout is worth, ``C / (1 + (C-1) rho)``, elementwise."""
    return 1.0 / variance_factor(checks, rho)


def correlation(graph: Graph, history: History, *, c: float | jax.Array, prior: float | jax.Array) -> jax.Array:
    """Returns the correlation of checks in every environment, f32[E], in [0, 1].

    With ``q = m (1-m)`` the expected sum of squares within the groups of a task is ``dof q (1 + (C-1) rho) / C``, so
    ``rho = sum (ssw - dof q / C) / sum (dof q (C-1) / C)`` over the tasks of an environment. For q stands the unbiased
    ``s1/n (1 - s1/n) + ssw / (dof n)``: the spread of the observed mean is put back. Tasks with one check say nothing.
    An environment's ratio is shrunk to the pool's, and that to ``prior``.

    Args:
      graph: gives environment and number of checks of every task.
      history: own records, f32[N] per field. Records that fade while a task's mean moves make rho come out low.
      c: degrees of freedom that pool and prior count for, each at the largest variance of a reward.
      prior: correlation before any record, in [0, 1].
    """
    seen = history.dof > 0.0
    n = jnp.where(seen, history.n, 1.0)
    mean = history.s1 / n
    spread = history.ssw / (n * jnp.where(seen, history.dof, 1.0))
    q = jnp.where(seen, jnp.maximum(mean * (1.0 - mean) + spread, 0.0), 0.0)
    count = jnp.maximum(graph.nodes.checks, 1).astype(jnp.float32)
    excess = jnp.where(count > 1.0, history.ssw - history.dof * q / count, 0.0)
    largest = history.dof * q * (count - 1.0) / count
    weight = jnp.asarray(c, jnp.float32) * BINARY_VARIANCE
    pool = blend(excess.sum(), largest.sum(), weight, jnp.asarray(prior, jnp.float32))
    num_envs = graph.globals.env_mask.shape[0]
    env_excess, env_largest = (jax.ops.segment_sum(x, graph.nodes.env, num_envs) for x in (excess, largest))
    return jnp.clip(blend(env_excess, env_largest, weight, pool), 0.0, 1.0)


def in_trials(graph: Graph, history: History, rho: jax.Array) -> History:
    """Returns the records as if all rollouts were all or nothing: ``n``, ``s1`` and ``ssw`` times ``effective_trials``.

    Then ``s1 / n`` is still the mean, with the right weight, and ``ssw / dof`` estimates ``m (1-m)`` whatever the
    number of checks, so that tasks with different verifiers can be averaged. ``with_credit`` is the way back. Use it
    for the belief only: visits and costs are counted in rollouts.

    Args:
      graph: gives environment and number of checks of every task.
      history: own records, f32[N] per field.
      rho: f32[E], see ``correlation``.
    """
    trials = effective_trials(graph.nodes.checks, rho[graph.nodes.env])
    return history._replace(n=history.n * trials, s1=history.s1 * trials, ssw=history.ssw * trials)


def with_credit(graph: Graph, belief: Belief, rho: jax.Array, *, group_size: int, max_checks: int) -> Belief:
    """Returns the belief about partial credit from one about ``in_trials`` records.

    The variance is multiplied by ``variance_factor`` and P(informative) is that of ``p_informative_checks``.
    ``evidence`` stays in all-or-nothing rollouts.

    Args:
      graph: gives environment and number of checks of every task.
      belief: f32[N] per field, with ``variance`` an expected ``m (1-m)``.
      rho: f32[E], see ``correlation``.
      group_size: G.
      max_checks: static, see ``p_informative_given``.
    """
    checks, own_rho = graph.nodes.checks, rho[graph.nodes.env]
    variance = belief.variance * variance_factor(checks, own_rho)
    p = p_informative_checks(belief.mean, variance, checks, own_rho, group_size=group_size, max_checks=max_checks)
    return belief._replace(variance=variance, p_informative=p)


def p_informative_given(
    mean: jax.Array, checks: jax.Array, rho: jax.Array, *, group_size: int, max_checks: int
) -> jax.Array:
    """Returns the chance that the rewards of a group differ if the task's mean is known, f32[...].

    ``1 - sum_v pmf(v)^G`` over the number v of checks passed, with the beta-binomial pmf; ``1 - m^G - (1-m)^G`` where
    there is one check or ``rho = 1``. With ``t = rho / (1-rho)`` and ``log [x]_n = sum_{i<n} log(x + i t)`` the pmf is
    ``C over v  [m]_v [1-m]_{C-v} / [1]_C``, which holds at ``rho = 0`` too. Time and memory are ``max_checks`` numbers
    per entry.

    Args:
      mean: m, f32[...]; cut to ``[EDGE, 1 - EDGE]``.
      checks: C, i32 of the shape of ``mean``; below 1 counts as 1.
      rho: f32 of the shape of ``mean``, in [0, 1].
      group_size: G, at least 1.
      max_checks: static, at least 1; more checks are treated as that many, with the correlation (at least 0) that gives
        the same variance. The chance then comes out low, by 0.1 at worst up to twice as many checks.

    Raises:
      ValueError: if a size is below 1.
    """
    if min(group_size, max_checks) < 1:
        raise ValueError(f"group_size={group_size}, max_checks={max_checks}: expected at least 1 each")
    count, rho = _at_most(checks, rho, max_checks)
    rho = jnp.minimum(rho, LARGEST_CORRELATION)
    mean = jnp.clip(mean, EDGE, 1.0 - EDGE)[..., None]
    passed = jnp.arange(max_checks + 1, dtype=jnp.int32).reshape((1,) * (mean.ndim - 1) + (max_checks + 1,))
    step = (rho / (1.0 - rho))[..., None] * (passed[..., 1:] - 1).astype(jnp.float32)
    rising = [_cumulate(jnp.log(x + step)) for x in (mean, 1.0 - mean, jnp.ones_like(mean))]
    # log n!, exact enough in float32: n is small
    factorial = jnp.broadcast_to(_cumulate(jnp.log(passed[..., 1:].astype(jnp.float32))), rising[0].shape)
    total = count[..., None]
    failed = jnp.broadcast_to(jnp.maximum(total - passed, 0), rising[0].shape)
    log_pmf = (
        rising[0]
        + jnp.take_along_axis(rising[1] - factorial, failed, axis=-1)
        - factorial
        + jnp.take_along_axis(factorial - rising[2], total, axis=-1)
    )
    equal = jnp.where(passed <= total, jnp.exp(group_size * log_pmf), 0.0).sum(axis=-1)
    return jnp.clip(1.0 - equal, 0.0, 1.0)


def p_informative_checks(
    mean: jax.Array,
    variance: jax.Array,
    checks: jax.Array,
    rho: jax.Array,
    *,
    group_size: int,
    max_checks: int,
) -> jax.Array:
    """Returns the chance that the rewards of a group differ if the task's mean is only believed, f32[N].

    As in ``informative.p_informative`` the unknown mean is Beta distributed around ``mean``, so spread that the rewards
    vary by ``variance`` on average: ``E[m (1-m)] = variance / k``. The chance at a known mean is averaged over that
    Beta by the trapezoid rule on the scale of logits, from a table that is worked out once per pair of sizes while the
    program is traced; what lies beyond the table, means within 5e-5 of 0 or 1, teaches next to nothing. Time and
    memory are 81 numbers per task. One check takes the closed form.

    Args:
      mean: believed mean reward, f32[N], in [0, 1].
      variance: believed within-task variance of the reward, f32[N]; cut to ``[0, k mean (1-mean)]``.
      checks: C, i32[N].
      rho: f32[N], in [0, 1].
      group_size: G, at least 1.
      max_checks: static, see ``p_informative_given``.

    Raises:
      ValueError: if a size is below 1.
    """
    believed = variance / variance_factor(checks, rho)
    binary = p_informative(mean, believed, group_size)
    if max_checks == 1:
        return binary
    table = jnp.asarray(_table(group_size, max_checks))
    count, rho = _at_most(checks, rho, max_checks)
    place = jnp.sqrt(rho) * (len(ROOTS) - 1)
    below = jnp.clip(place.astype(jnp.int32), 0, len(ROOTS) - 2)
    share = (place - below.astype(jnp.float32))[:, None]
    p = (1.0 - share) * table[below, count - 1] + share * table[below + 1, count - 1]
    mixed = (_beta_weights(mean, believed) * p).sum(axis=1)
    return jnp.clip(jnp.where(checks > 1, mixed, binary), 0.0, 1.0)


@functools.cache
def _table(group_size: int, max_checks: int) -> np.ndarray:
    """Returns ``p_informative_given`` at the roots, the numbers of checks and the logits, f32[33, max_checks, 81]."""
    if min(group_size, max_checks) < 1:
        raise ValueError(f"group_size={group_size}, max_checks={max_checks}: expected at least 1 each")
    rho = np.minimum(np.square(ROOTS), LARGEST_CORRELATION)
    ratio = (rho / (1.0 - rho))[:, None, None]
    chance = (1.0 / (1.0 + np.exp(-LOGITS)))[:, None]
    out = np.zeros((len(ROOTS), max_checks, len(LOGITS)), np.float32)
    for checks in range(1, max_checks + 1):
        step = ratio * np.arange(checks)
        up, down, total = (np.cumsum(np.log(x + step), axis=2) for x in (chance, 1.0 - chance, np.ones_like(chance)))
        up, down = (np.pad(x, ((0, 0), (0, 0), (1, 0))) for x in (up, down))
        ways = np.log([math.comb(checks, v) for v in range(checks + 1)])
        log_pmf = ways + up + down[:, :, ::-1] - total[:, :, -1:]
        out[:, checks - 1] = 1.0 - np.exp(group_size * log_pmf).sum(axis=2)
    return out


def _at_most(checks: jax.Array, rho: jax.Array, max_checks: int) -> tuple[jax.Array, jax.Array]:
    """Returns a number of checks from 1 to ``max_checks`` and a correlation in [0, 1] that give the same variance."""
    count = jnp.clip(checks, 1, max_checks)
    many = jnp.maximum(count - 1, 1).astype(jnp.float32)
    same = (variance_factor(checks, rho) * count.astype(jnp.float32) - 1.0) / many
    return count, jnp.clip(jnp.where(checks > max_checks, same, rho), 0.0, 1.0)


def _beta_weights(mean: jax.Array, believed: jax.Array) -> jax.Array:
    """Returns the weights of LOGITS, f32[N, 81], under Betas with these means and ``E[m (1-m)] = believed``."""
    mean = jnp.clip(mean, EDGE, 1.0 - EDGE)
    q = mean * (1.0 - mean)
    share = jnp.clip(believed / q, SPREAD, 1.0 - SPREAD)
    step = float(LOGITS[1] - LOGITS[0])
    total = jnp.minimum(share / (1.0 - share), 1.0 / (q * (NARROWEST * step) ** 2))
    a, b = mean * total, (1.0 - mean) * total
    constant = jax.lax.lgamma(total) - jax.lax.lgamma(a) - jax.lax.lgamma(b)
    log_p, log_q = (jax.nn.log_sigmoid(sign * jnp.asarray(LOGITS, jnp.float32))[None, :] for sign in (1.0, -1.0))
    return step * jnp.exp(a[:, None] * log_p + b[:, None] * log_q + constant[:, None])


def _cumulate(x: jax.Array) -> jax.Array:
    """Returns the sums of the first 0, 1, ..., n entries along the last axis."""
    return jnp.pad(jnp.cumsum(x, axis=-1), ((0, 0),) * (x.ndim - 1) + ((1, 0),))
