"""Binomial outcomes under log-odds that are believed normal: Gaussian bound, slopes, expectations, regression."""

import jax
import jax.numpy as jnp
import numpy as np

_POINTS, _MASSES = np.polynomial.hermite_e.hermegauss(9)  # for expectations under a standard normal
POINTS = tuple(float(x) for x in _POINTS)
MASSES = tuple(float(w) for w in _MASSES / _MASSES.sum())
LARGEST_LOGIT = 7.0
BOUND_ROUNDS = 4  # of the fixed point of one outcome's Gaussian bound


def gaussian_bound(n: jax.Array, k: jax.Array, mean: jax.Array, var: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns weight and place of the Gaussian that stands for k passes of n, given log-odds N(mean, var), f32[B].

    ``w = n tanh(xi / 2) / (2 xi)`` and ``y = (k - n/2) / w`` with ``xi^2 = E f^2`` after the outcome, a fixed point
    (Jaakkola and Jordan 2000). An outcome that was thought impossible moves a belief no further than it should.
    """

    def weight(xi: jax.Array) -> jax.Array:
        return n * jnp.tanh(0.5 * xi) / (2.0 * xi)

    def step(_: int, xi: jax.Array) -> jax.Array:
        spread = 1.0 / (1.0 / var + weight(xi))
        place = spread * (mean / var + k - 0.5 * n)
        return jnp.sqrt(jnp.square(place) + spread)

    w = weight(jax.lax.fori_loop(0, BOUND_ROUNDS, step, jnp.sqrt(jnp.square(mean) + var)))
    return w, jnp.where(n > 0.0, (k - 0.5 * n) / jnp.where(n > 0.0, w, 1.0), 0.0)


def slopes(n: jax.Array, k: jax.Array, mean: jax.Array, var: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns d log P(k of n) by mean and by variance of the log-odds N(mean, var), f32[B] each."""

    def log_likelihood(mean: jax.Array, var: jax.Array) -> jax.Array:
        f = mean[:, None] + jnp.sqrt(var)[:, None] * jnp.asarray(POINTS, jnp.float32)[None, :]
        terms = k[:, None] * jax.nn.log_sigmoid(f) + (n - k)[:, None] * jax.nn.log_sigmoid(-f)
        return jax.nn.logsumexp(terms + jnp.log(jnp.asarray(MASSES, jnp.float32))[None, :], axis=1).sum()

    return jax.grad(log_likelihood, argnums=(0, 1))(mean, var)


def expectations(mean: jax.Array, var: jax.Array, group_size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns expectations of p, p(1-p) and 1 - p^G - (1-p)^G for log-odds N(mean, var)."""
    deviation = jnp.sqrt(var)
    passing = variance = mixed = jnp.zeros_like(mean)
    for point, mass in zip(POINTS, MASSES, strict=True):
        p = jax.nn.sigmoid(mean + point * deviation)
        passing, variance = passing + mass * p, variance + mass * p * (1.0 - p)
        mixed = mixed + mass * (1.0 - p**group_size - (1.0 - p) ** group_size)
    return passing, variance, mixed


def logit(p: jax.Array) -> jax.Array:
    """Returns the log-odds of p, cut to a thousandth from 0 and 1."""
    p = jnp.clip(p, 1e-3, 1.0 - 1e-3)
    return jnp.log(p) - jnp.log1p(-p)


def regress(
    weight: jax.Array, cov: jax.Array, signals: jax.Array, n: jax.Array, k: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns mean f32[J] and covariance f32[J, J] of a logistic regression's weights after k of n, f32[B].

    One Newton step from the prior ``weight``, ``cov``; ``signals`` is f32[B, J].
    """
    p = jax.nn.sigmoid(jnp.clip(dot(signals, weight[:, None])[:, 0], -LARGEST_LOGIT, LARGEST_LOGIT))
    weighted = signals * (n * p * (1.0 - p))[:, None]
    cov = jnp.linalg.solve(jnp.eye(cov.shape[0], dtype=jnp.float32) + dot(cov, dot(weighted.T, signals)), cov)
    cov = 0.5 * (cov + cov.T)
    return weight + dot(cov, dot(signals.T, (k - n * p)[:, None]))[:, 0], cov


def dot(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the matrix product in full float32, also on accelerators."""
    return jnp.matmul(a, b, precision="highest")
