"""GRPO: the clipped token-level objective, the optimiser and one update of the policy."""

import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from envsched_jax.environments.base import Environment
from envsched_jax.rollout.engine import Trajectory, score
from envsched_jax.types import is_valid

Normalise = Literal["token", "sequence"]


class UpdateMetrics(NamedTuple):
    """What one update did. Clipping and gap are those of the groups that have an advantage; the others need no pass."""

    loss: jax.Array  # f32[]
    grad_norm: jax.Array  # f32[], before clipping
    entropy: jax.Array  # f32[], nats per token: -log-prob of what was sampled, over the tokens of valid rollouts
    clip_fraction: jax.Array  # f32[], share of tokens whose ratio left [1 - clip_low, 1 + clip_high]
    logp_gap: jax.Array  # f32[], largest |log-prob now - log-prob at sampling|; near 0 on the first update of a rollout


class _Sums(NamedTuple):
    """The carry of the loop over parts of a batch."""

    loss: jax.Array  # f32[]
    gradient: nnx.State
    outside: jax.Array  # i32[], clipped tokens
    tokens: jax.Array  # i32[]
    gap: jax.Array  # f32[], largest so far


PART = 8  # groups per pass of an update


def _mean(values: jax.Array, mask: jax.Array) -> jax.Array:
    return jnp.where(mask, values, 0.0).sum() / jnp.maximum(mask.sum(), 1)


def loss(
    logp: jax.Array,
    old_logp: jax.Array,
    advantage: jax.Array,
    mask: jax.Array,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    reference_logp: jax.Array | None = None,
    kl_weight: float = 0.0,
    normalise: Normalise = "token",
) -> jax.Array:
    """Returns ``f32[]``: the clipped surrogate ``-min(w A, clip(w, 1 - low, 1 + high) A)``, ``w = exp(logp - old)``.

    With 'token' the sum over tokens is divided by *all* policy tokens of the batch, those of groups without signal
    (advantage 0) included. So the step shrinks with the share of informative groups: a batch in which few groups
    teach moves the policy little, instead of being blown up to full size. Schedulers are compared under this rule.
    With 'sequence' every rollout weighs the same, whatever its length: the mean over rollouts of its mean over tokens.

    Args:
      logp: ``f32[B, G, T]``, log-probabilities of the sampled tokens under the policy being trained.
      old_logp: ``f32[B, G, T]``, under the policy that sampled them.
      advantage: ``f32[B, G]``.
      mask: ``bool[B, G, T]``, tokens that count; what stands elsewhere, also NaN, leaves no trace.
      clip_low: how far the ratio may fall.
      clip_high: how far it may rise (clip-higher of DAPO, Yu et al. 2025, if larger than ``clip_low``).
      reference_logp: ``f32[B, G, T]`` under a reference policy; needed where ``kl_weight`` is not 0.
      kl_weight: times the estimator ``exp(d) - d - 1``, ``d = reference - logp`` (k3, Schulman 2020).
      normalise: 'token' or 'sequence'.

    Raises:
      ValueError: for an unknown ``normalise``, or a KL weight without a reference.
    """
    if normalise not in ("token", "sequence"):
        raise ValueError(f"normalise must be 'token' or 'sequence', not {normalise!r}")
    if kl_weight and reference_logp is None:
        raise ValueError("kl_weight needs reference_logp")
    logp = jnp.where(mask, logp, 0.0)
    ratio = jnp.exp(logp - jnp.where(mask, old_logp, 0.0))
    gain = jnp.where(mask.any(axis=-1), advantage, 0.0)[..., None]
    per_token = -jnp.minimum(ratio * gain, jnp.clip(ratio, 1.0 - clip_low, 1.0 + clip_high) * gain)
    if kl_weight and reference_logp is not None:
        gap = jnp.where(mask, reference_logp, 0.0) - logp
        per_token += kl_weight * (jnp.exp(gap) - gap - 1.0)
    if normalise == "token":
        return _mean(per_token, mask)
    count = mask.sum(axis=-1)
    per_sequence = jnp.where(mask, per_token, 0.0).sum(axis=-1) / jnp.maximum(count, 1)
    return _mean(per_sequence, count > 0)


def is_clipped(gap: jax.Array, clip_low: float, clip_high: float) -> jax.Array:
    """Tells where a ratio left ``[1 - clip_low, 1 + clip_high]``, of its logarithm, in bool and of the same shape."""
    return (gap < jnp.log(1.0 - clip_low)) | (gap > jnp.log(1.0 + clip_high))


def make_optimizer(
    name: Literal["adam", "sgd"] = "adam",
    learning_rate: float | optax.Schedule = 1e-3,
    *,
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 1e-8,
    momentum: float = 0.0,
    max_norm: float | None = 1.0,
) -> optax.GradientTransformation:
    """Returns an optax optimiser whose gradients are first clipped to a global norm of ``max_norm`` (None: never).

    Args:
      name: 'adam' (``b1, b2, eps``) or 'sgd' (``momentum``).
      learning_rate: a number or an optax schedule.
      b1: decay of Adam's mean.
      b2: decay of Adam's second moment.
      eps: Adam's denominator floor. Large (0.1), it turns Adam into momentum SGD with step ``learning_rate / eps``:
        then the size of a gradient matters, and a batch with little signal moves the policy little.
      momentum: of 'sgd'.
      max_norm: global norm of the gradient above which it is scaled down.

    Raises:
      ValueError: for an unknown ``name``.
    """
    if name == "adam":
        step = optax.adam(learning_rate, b1=b1, b2=b2, eps=eps)
    elif name == "sgd":
        step = optax.sgd(learning_rate, momentum=momentum or None)
    else:
        raise ValueError(f"unknown optimizer {name!r}; known: adam, sgd")
    return step if max_norm is None else optax.chain(optax.clip_by_global_norm(max_norm), step)


def update(
    params: nnx.State,
    opt_state: optax.OptState,
    graphdef: nnx.GraphDef,
    optimizer: optax.GradientTransformation,
    environment: Environment,
    trajectory: Trajectory,
    advantage: jax.Array,
    *,
    temperature: float | jax.Array = 1.0,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    reference_logp: jax.Array | None = None,
    kl_weight: float = 0.0,
    normalise: Normalise = "token",
) -> tuple[nnx.State, optax.OptState, UpdateMetrics]:
    """One GRPO step on one batch of trajectories.

    Args:
      params: of ``graphdef, params = nnx.split(model)``.
      opt_state: of ``optimizer.init(params)``.
      graphdef: static.
      optimizer: static.
      environment: static.
      trajectory: rollouts whose status is not valid count neither in the sum nor in its normalisation.
      advantage: ``f32[B, G]``.
      temperature: at which the trajectory was sampled.
      clip_low: as in :func:`loss`, like the following ones.
      clip_high: see :func:`loss`.
      reference_logp: see :func:`loss`.
      kl_weight: see :func:`loss`.
      normalise: see :func:`loss`.

    Returns:
      new params, new optimiser state and :class:`UpdateMetrics`.
    """
    mask = trajectory.mask & is_valid(trajectory.status)[..., None]
    weigh = functools.partial(loss, clip_low=clip_low, clip_high=clip_high, kl_weight=kl_weight, normalise=normalise)

    def objective(
        params: nnx.State, part: Trajectory, advantage: jax.Array, mask: jax.Array, reference: jax.Array | None
    ) -> tuple[jax.Array, jax.Array]:
        logp = score(nnx.merge(graphdef, params), environment, part, temperature)
        return weigh(logp, part.logp, advantage, mask, reference_logp=reference), logp

    # A group without advantage has no gradient, so only the others are computed, a few at a time. The loss is a mean;
    # the share that a part has in the whole batch makes the sum over parts the loss of the whole.
    batch = advantage.shape[0]
    size = min(PART, batch)
    teaches = jnp.any(advantage != 0, axis=1) | (kl_weight != 0)
    order = jnp.pad(jnp.argsort(~teaches, stable=True), (0, -batch % size))
    count = mask if normalise == "token" else mask.any(axis=-1)
    total = jnp.maximum(count.sum(), 1).astype(jnp.float32)

    def add(number: jax.Array, sums: _Sums) -> _Sums:
        place = number * size + jnp.arange(size)
        rows = order[place]
        live = mask[rows] & (place < batch)[:, None, None]
        part = jax.tree.map(lambda x: x[rows], trajectory)
        reference = None if reference_logp is None else reference_logp[rows]
        value_and_gradient = jax.value_and_grad(objective, has_aux=True)
        (value, logp), gradient = value_and_gradient(params, part, advantage[rows], live, reference)
        share = jnp.where(jnp.expand_dims(place < batch, range(1, count.ndim)), count[rows], False).sum() / total
        gap = jnp.where(live, logp - part.logp, 0.0)
        outside = live & is_clipped(gap, clip_low, clip_high)
        return _Sums(
            loss=sums.loss + share * value,
            gradient=jax.tree.map(lambda total, g: total + share * g, sums.gradient, gradient),
            outside=sums.outside + outside.sum(),
            tokens=sums.tokens + live.sum(),
            gap=jnp.maximum(sums.gap, jnp.abs(gap).max()),
        )

    nothing = _Sums(jnp.float32(0), jax.tree.map(jnp.zeros_like, params), jnp.int32(0), jnp.int32(0), jnp.float32(0))
    sums = jax.lax.fori_loop(0, (teaches.sum() + size - 1) // size, add, nothing)
    steps, opt_state = optimizer.update(sums.gradient, opt_state, params)
    metrics = UpdateMetrics(
        loss=sums.loss,
        grad_norm=optax.tree.norm(sums.gradient),
        entropy=-_mean(trajectory.logp, mask),
        clip_fraction=sums.outside / jnp.maximum(sums.tokens, 1),
        logp_gap=sums.gap,
    )
    return optax.apply_updates(params, steps), opt_state, metrics
