"""Group-relative advantages: how much better a rollout did than the other rollouts of its task."""

from typing import Literal

import jax
import jax.numpy as jnp

Std = Literal["group", "none", "batch"]


def advantages(reward: jax.Array, valid: jax.Array, *, std: Std = "group", eps: float = 1e-4) -> jax.Array:
    """Returns ``f32[B, G]``: ``(r - mean of the group) / (s + eps)``, over valid rollouts; 0 where invalid.

    A group whose valid rewards are all equal gets exactly 0, whatever ``std``. Deviations divide by the count.

    Args:
      reward: ``f32[B, G]``, anything (also NaN) where not valid.
      valid: ``bool[B, G]``.
      std: what ``s`` is. 'group': the deviation within the group (GRPO, Shao et al. 2024). 'batch': that of all valid
        rewards of the batch (Liu et al. 2025, Tricks or Traps). 'none': the centred reward is returned undivided
        (Dr. GRPO, Liu et al. 2025).
      eps: added to ``s``.

    Raises:
      ValueError: for an unknown ``std``.
    """
    if std not in ("group", "none", "batch"):
        raise ValueError(f"std must be 'group', 'none' or 'batch', not {std!r}")
    clean = jnp.where(valid, reward, 0.0)
    axis = None if std == "batch" else 1
    count = jnp.maximum(valid.sum(axis=1, keepdims=True), 1)
    centred = jnp.where(valid, clean - clean.sum(axis=1, keepdims=True) / count, 0.0)
    low = jnp.where(valid, reward, jnp.inf).min(axis=1, keepdims=True)
    high = jnp.where(valid, reward, -jnp.inf).max(axis=1, keepdims=True)
    informative = valid & (low < high)  # rounding can leave a centred reward that is not 0 where all are equal
    if std == "none":
        return jnp.where(informative, centred, 0.0)
    total = jnp.maximum(valid.sum(axis=axis, keepdims=True), 1)
    mean = clean.sum(axis=axis, keepdims=True) / total
    variance = jnp.square(jnp.where(valid, clean - mean, 0.0)).sum(axis=axis, keepdims=True) / total
    deviation = jnp.sqrt(jnp.where(informative, variance, 1.0))  # 1: no 0/0, also in a gradient
    return jnp.where(informative, centred / (deviation + eps), 0.0)
