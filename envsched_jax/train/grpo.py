"""GRPO: the clipped token-level objective, the optimiser and one update of the policy."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from envsched_jax.environments.base import Environment
from envsched_jax.rollout.engine import Trajectory, log_probs
from envsched_jax.types import is_valid

Normalise = Literal["token", "sequence"]


class UpdateMetrics(NamedTuple):
    """What one update did; averages are over the policy tokens of valid rollouts."""

    loss: jax.Array  # f32[]
    grad_norm: jax.Array  # f32[], before clipping
    entropy: jax.Array  # f32[], nats per token, over the legal tokens
    clip_fraction: jax.Array  # f32[], share of tokens whose ratio left [1 - clip_low, 1 + clip_high]
    logp_gap: jax.Array  # f32[], largest |log-prob now - log-prob at sampling|; near 0 on the first update of a rollout


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

    def objective(params: nnx.State) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        everything = log_probs(nnx.merge(graphdef, params), environment, trajectory, temperature)
        logp = jnp.take_along_axis(everything, trajectory.target[..., None], axis=-1)[..., 0]
        value = loss(
            logp,
            trajectory.logp,
            advantage,
            mask,
            clip_low=clip_low,
            clip_high=clip_high,
            reference_logp=reference_logp,
            kl_weight=kl_weight,
            normalise=normalise,
        )
        return value, (logp, -(jnp.exp(everything) * everything).sum(axis=-1))

    (value, (logp, entropy)), gradient = jax.value_and_grad(objective, has_aux=True)(params)
    steps, opt_state = optimizer.update(gradient, opt_state, params)
    gap = jnp.where(mask, logp - trajectory.logp, 0.0)
    outside = (gap < jnp.log(1.0 - clip_low)) | (gap > jnp.log(1.0 + clip_high))
    metrics = UpdateMetrics(
        loss=value,
        grad_norm=optax.tree.norm(gradient),
        entropy=_mean(entropy, mask),
        clip_fraction=_mean(outside.astype(jnp.float32), mask),
        logp_gap=jnp.abs(gap).max(),
    )
    return optax.apply_updates(params, steps), opt_state, metrics
