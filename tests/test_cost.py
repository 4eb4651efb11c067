import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import selection_oracles as oracles
from hypothesis import given, settings
from hypothesis import strategies as st

from envsched_jax import testing
from envsched_jax.belief import cost, history
from envsched_jax.select import value
from envsched_jax.types import Belief

N = 16
KINDS = jnp.asarray([1.0, 0.5, 0.0, 2.0, 4.0, 1.0, 0.3])
OPTIONS = {"nu": 5.0, "c": 2.0, "kind_weights": KINDS, "restart": 0.4, "mix": 0.7}

predict = jax.jit(cost.predict, static_argnames="rounds")


@pytest.fixture(scope="module")
def graph():
    return testing.tiny_graph(14, envs=3, k=3, seed=1, capacity=N)


def record(n, tokens, seconds):
    fields = {name: jnp.asarray(x, jnp.float32) for name, x in (("n", n), ("tokens", tokens), ("seconds", seconds))}
    return history.init(N)._replace(**fields)


# prediction


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([1, 2]))
def test_costs_equal_the_oracle(seed, rounds):
    graph = testing.tiny_graph(14, envs=3, k=3, seed=seed % 5, capacity=N)
    rng = np.random.default_rng(seed)
    n = rng.integers(0, 9, N) * (rng.random(N) < 0.5) * (np.arange(N) < 14)
    own = {
        "n": n.astype(np.float64),
        "tokens": n * rng.lognormal(6.0, 1.0, N),
        "seconds": n * rng.lognormal(0.0, 1.0, N),
    }
    got = predict(graph, record(**own), rounds=rounds, **OPTIONS)
    for name in got._fields:
        expected = oracles.costs(graph, own, name, rounds=rounds, **OPTIONS)
        assert np.allclose(getattr(got, name)[:14], expected[:14], rtol=2e-4), name


def test_costs_by_hand(graph):
    """One task of the first environment ran: itself, its neighbours, another environment, and nobody at all."""
    n = jnp.zeros(N).at[0].set(8.0)
    got = predict(graph, record(n, 300.0 * n, 3.0 * n), rounds=2, **OPTIONS)
    assert np.allclose(got.tokens, 300.0, rtol=1e-5) and np.allclose(got.seconds, 3.0, rtol=1e-5)
    n = n.at[13].set(2.0)  # of the last environment
    got = predict(graph, record(n, n * jnp.where(n == 2.0, 900.0, 300.0), n), rounds=2, **OPTIONS | {"nu": 0.0})
    pool = (8 * 300 + 2 * 900) / 10
    first, last = ((k * own + 2 * pool) / (k + 2) for k, own in ((8, 300), (2, 900)))
    env = np.asarray(graph.nodes.env)[:14]
    expected = np.where(env == env[0], first, np.where(env == env[13], last, pool))
    expected[0], expected[13] = (8 * 300 + 2 * first) / 10, (2 * 900 + 2 * last) / 4
    assert len(set(env.tolist())) == 3 and np.allclose(got.tokens[:14], expected, rtol=1e-5)
    assert np.allclose(got.seconds, 1.0)


def test_without_any_record_all_cost_the_same(graph):
    for c in (2.0, 0.0):
        got = predict(graph, history.init(N), rounds=2, **OPTIONS | {"c": c})
        assert np.allclose(got.tokens, cost.UNKNOWN) and np.allclose(got.seconds, cost.UNKNOWN)


def test_costs_are_finite_and_within_what_was_seen(graph):
    rng = np.random.default_rng(0)
    n = np.where(np.arange(N) % 3 == 0, 1e-20, rng.random(N)) * (np.arange(N) < 14)  # nearly forgotten records
    each = rng.uniform(1e4, 1e5, N)
    got = predict(graph, record(n, n * each, n * 0.0), rounds=2, **OPTIONS | {"c": 0.5})
    tokens = np.asarray(got.tokens)
    assert tokens.min() >= each.min() * 0.999 and tokens.max() <= each.max() * 1.001
    assert not np.asarray(got.seconds).any()


# value per cost


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.5, 1.0]))
def test_value_per_cost(seed, alpha):
    rng = np.random.default_rng(seed)
    worth, price, mask = rng.random(N), rng.lognormal(5.0, 1.0, N), rng.random(N) < 0.7
    mask[0] = True
    args = jnp.asarray(worth, jnp.float32), jnp.asarray(price, jnp.float32), jnp.asarray(mask)
    got = value.per_cost(*args, alpha=alpha)
    relative = np.maximum(price / price[mask].mean(), 0.01)
    assert np.allclose(got, worth / relative**alpha, rtol=1e-4)
    in_other_units = value.per_cost(args[0], 1e3 * args[1], args[2], alpha=alpha)
    assert np.allclose(got, in_other_units, rtol=1e-4)


@pytest.mark.parametrize("alpha", [0.0, 0.5, 1.0])
def test_costs_that_are_not_known_divide_by_nothing(alpha):
    worth, real = jnp.asarray([0.1, 0.2, 0.3, 0.4]), jnp.asarray([True, True, True, False])
    for nothing in (jnp.zeros(4), jnp.full(4, jnp.nan)):
        assert np.array_equal(value.per_cost(worth, nothing, real, alpha=alpha), worth)
    assert np.array_equal(value.per_cost(worth, jnp.ones(4), ~(real | True), alpha=alpha), worth)
    some = value.per_cost(worth, jnp.asarray([0.0, math.nan, 2.0, math.inf]), real, alpha=alpha)
    assert np.allclose(some, [0.1 * 100.0**alpha, 0.2, 0.3 / 2.0**alpha, 0.4])


# the score that goes with the advantage


def belief_of(**fields):
    zero = jnp.zeros(N)
    return Belief(zero, zero, zero, zero)._replace(**{name: jnp.asarray(x, jnp.float32) for name, x in fields.items()})


def test_scores_by_hand(graph):
    rng = np.random.default_rng(4)
    mean, variance, p = rng.random(N), rng.random(N) / 4.0, rng.random(N)
    belief = belief_of(mean=mean, variance=variance, p_informative=p)
    graph = graph._replace(nodes=graph.nodes._replace(mask=graph.nodes.mask.at[2].set(False)))
    assert np.allclose(value.score(graph, belief, std="group"), p)
    for std in ("none", "batch"):
        assert np.allclose(value.score(graph, belief, std=std), 4.0 * variance)
    got = value.score(graph, belief, std="environment")
    env, mask = np.asarray(graph.nodes.env), np.asarray(graph.nodes.mask)
    for i in range(14):
        mine = (env == env[i]) & mask
        spread = variance[mine].mean() + mean[mine].var()
        assert float(got[i]) == pytest.approx(variance[i] / spread, rel=1e-4)
    with pytest.raises(ValueError, match="'pool'"):
        value.score(graph, belief, std="pool")


def test_scores_of_certain_tasks_are_finite(graph):
    for std in ("group", "environment", "batch", "none"):
        assert not np.asarray(value.score(graph, belief_of(), std=std)).any()


def test_the_environment_score_does_not_see_the_scale_of_its_rewards(graph):
    rng = np.random.default_rng(5)
    mean, variance = rng.random(N), 0.05 + rng.random(N) / 5.0
    scale = np.where(np.asarray(graph.nodes.env) == 0, 0.5, 1.0)
    one, other = (
        value.score(graph, belief_of(mean=mean * s, variance=variance * s * s), std="environment") for s in (1.0, scale)
    )
    assert np.allclose(one, other, rtol=1e-4)


def test_combine_is_target_plus_bonus(graph):
    counts = jnp.arange(N, dtype=jnp.float32)
    belief = belief_of(variance=np.full(N, 0.1), p_informative=np.full(N, 0.2))
    bonus = value.coverage_bonus(graph, counts, (0.1, 0.2, 0.4))
    for target, base, scale in (("p_informative", 0.2, 1.0), ("variance", 0.1, 0.25)):
        got = value.combine(graph, belief, counts, target=target, coverage=(0.1, 0.2, 0.4))
        assert np.allclose(got, base + scale * bonus)
