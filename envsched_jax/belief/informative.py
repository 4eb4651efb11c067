"""Probability that a group of rollouts teaches something: that its rewards are not all equal."""

import jax
import jax.numpy as jnp

EDGE = 1e-4  # how near to 0 and 1 a believed mean may come
SPREAD = 1e-3  # how near to 0 and 1 the share of within-task variance may come


def p_informative(mean: jax.Array, variance: jax.Array, group_size: int) -> jax.Array:
    """Returns the probability that a group of binary rewards is mixed, f32 of the shape of ``mean``.

    A task's unknown pass rate ``p`` is Beta(a, b) with ``E p = mean`` and ``E p(1-p) = variance``. Since
    ``E p(1-p) = mean (1-mean) s / (s+1)`` with ``s = a + b``, the ratio ``r = variance / (mean (1-mean))`` gives
    ``s = r / (1-r)``. Then ``P = 1 - [B(a+G, b) + B(a, b+G)] / B(a, b)``, the beta-binomial chance of neither all
    passes nor all failures. For integer ``G`` both ratios are products of ``G`` factors, ``prod (a+i) / (s+i)``,
    which float32 computes more exactly than a difference of log-gammas.

    Args:
      mean: believed mean reward, in [0, 1].
      variance: believed within-task variance; cut to ``[0, mean (1-mean)]``.
      group_size: rollouts per group, at least 1.
    """
    if group_size < 1:
        raise ValueError(f"group_size must be at least 1, got {group_size}")
    mean = jnp.clip(mean, EDGE, 1.0 - EDGE)
    share = jnp.clip(variance / (mean * (1.0 - mean)), SPREAD, 1.0 - SPREAD)
    total = (share / (1.0 - share))[..., None]
    draws = jnp.arange(group_size, dtype=jnp.float32).reshape((1,) * mean.ndim + (group_size,))
    # log((b+i)/(s+i)) = log1p(-a/(s+i)), and likewise for the passes
    all_fail = jnp.log1p(-mean[..., None] * total / (total + draws)).sum(axis=-1)
    all_pass = jnp.log1p((mean[..., None] - 1.0) * total / (total + draws)).sum(axis=-1)
    return jnp.clip(-jnp.expm1(all_fail) - jnp.exp(all_pass), 0.0, 1.0)
