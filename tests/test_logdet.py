import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import selection_oracles as oracles
from hypothesis import given, settings
from hypothesis import strategies as st

from envsched_jax.select import greedy, logdet, sample

N, E, B, C = 24, 5, 8, 3

pick = jax.jit(logdet.pick, static_argnames=("count", "shortlist"))
FREE = {"noise": jnp.ones(N), "shortlist": 64, "cost": jnp.zeros(N), "budget": math.inf}


def unit_rows(rng, n=N, dim=6):
    feature = rng.normal(size=(n, dim))
    return (feature / np.linalg.norm(feature, axis=1, keepdims=True)).astype(np.float32)


def tasks(seed, n=N, dim=6):
    """Value, sd, feature, eligible, env and quota of a random pool."""
    rng = np.random.default_rng(seed)
    value, sd = rng.random(n).astype(np.float32), (3.0 * rng.random(n)).astype(np.float32)
    return rng, [value, sd, unit_rows(rng, n, dim), rng.random(n) < 0.8, rng.integers(0, E, n), rng.integers(0, 3, E)]


def on_device(value, sd, feature, eligible, env, quota, chosen=(), chosen_mask=()):
    floats = [jnp.asarray(x, jnp.float32) for x in (value, sd, feature)]
    ints = [jnp.asarray(x, jnp.int32) for x in (env, quota, chosen)]
    return *floats, jnp.asarray(eligible), *ints, jnp.asarray(chosen_mask, bool)


def real(result):
    node, mask = (np.asarray(x) for x in result)
    assert not node[~mask].any()
    return node[mask].tolist()


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.3, 3.0]), st.sampled_from([0.0, 0.4, 1.0]))
def test_picks_equal_the_dense_oracle(seed, weight, shared):
    rng, (value, sd, feature, eligible, env, quota) = tasks(seed)
    chosen, chosen_mask = rng.choice(N, C, replace=False), rng.random(C) < 0.7
    eligible[chosen[chosen_mask]] = False
    noise = (0.2 + rng.random(N)).astype(np.float32)
    cost = rng.integers(1, 9, N) / 4.0  # sums are exact, so that float32 and float64 agree on what fits
    budget = float(rng.integers(0, 40)) / 4.0
    got = pick(
        *on_device(value, sd, feature, eligible, env, quota, chosen, chosen_mask),
        count=B,
        weight=weight,
        noise=jnp.asarray(noise),
        shared=shared,
        shortlist=64,
        cost=jnp.asarray(cost, jnp.float32),
        budget=budget,
    )
    matrix = oracles.covariance(sd, feature, env, shared, noise)
    assert real(got) == oracles.logdet_greedy(
        value,
        matrix,
        eligible,
        env,
        quota,
        chosen[chosen_mask].tolist(),
        count=B,
        weight=weight,
        cost=cost,
        budget=budget,
    )
    assert cost[real(got)].sum() <= budget


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6))
def test_without_information_or_budget_it_takes_the_largest_values(seed):
    _, (value, sd, feature, eligible, env, quota) = tasks(seed)
    args = on_device(value, sd, feature, eligible, env, quota, [0] * C, [False] * C)
    got = pick(*args, count=B, weight=0.0, shared=0.2, **FREE)
    draw = sample.draw(args[0], args[3], args[4], args[5], B)
    assert real(got) == real(draw)


def test_a_short_list_gives_the_picks_of_the_whole_pool():
    _, (value, sd, feature, eligible, env, _) = tasks(3, n=300, dim=32)
    args = on_device(value, sd, feature, eligible, env, np.full(E, 2))
    options = {"count": B, "weight": 0.5, "noise": 1.0, "shared": 0.1}
    short, full = (real(pick(*args, **options, shortlist=m)) for m in (100, 300))
    assert short == full and len(full) == B


def test_a_short_list_holds_only_what_the_budget_allows():
    value = np.arange(30, dtype=np.float32)
    cost = np.where(np.arange(30) < 4, 1.0, 9.0)
    args = on_device(value, np.ones(30), unit_rows(np.random.default_rng(0), 30), np.ones(30, bool), [0] * 30, [9])
    got = pick(
        *args,
        count=4,
        weight=0.1,
        noise=1.0,
        shared=0.0,
        shortlist=8,
        cost=jnp.asarray(cost, jnp.float32),
        budget=3.5,
    )
    assert sorted(real(got)) == [1, 2, 3]


def test_a_twin_has_little_left_to_tell_by_hand():
    """Two equal tasks and one unlike them, all unsure: sd^2 / R = 4, so log(1 + 4) then log(1 + 4/5) for the twin."""
    feature = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    twin = 0.5 * (math.log(5.0) - math.log(1.8))  # how much more the unlike one tells
    for margin, second in ((0.01, 1), (-0.01, 2)):
        args = on_device([1.0, 1.0 - 0.1, 0.9 - twin - margin], [2.0] * 3, feature, [True] * 3, [0, 1, 2], [1, 1, 1])
        got = pick(*args, count=2, weight=1.0, noise=1.0, shared=0.0, shortlist=8)
        assert real(got) == [0, second]
    # the same if the first is in the batch already
    args = on_device(
        [0.0, 0.9, 0.9 - twin + 0.01], [2.0] * 3, feature, [False, True, True], [0, 1, 2], [1] * 3, [0], [1]
    )
    assert real(pick(*args, count=1, weight=1.0, noise=1.0, shared=0.0, shortlist=8)) == [2]


def test_tasks_of_one_environment_share_what_they_tell():
    feature = np.eye(3)
    args = on_device([1.0, 0.9, 0.8], [2.0] * 3, feature, [True] * 3, [0, 0, 1], [3, 3])
    for shared, expected in ((0.0, [0, 1]), (0.9, [0, 2])):
        assert real(pick(*args, count=2, weight=1.0, noise=1.0, shared=shared, shortlist=8)) == expected


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.0, 0.3, 1.0]))
def test_the_correlation_is_one_of_a_distribution(seed, shared):
    rng = np.random.default_rng(seed)
    feature, env = unit_rows(rng, dim=2), jnp.asarray(rng.integers(0, E, N), jnp.int32)
    rho = jax.vmap(logdet.correlation, (None, None, 0, 0, None))(jnp.asarray(feature), env, feature, env, shared)
    rho = np.asarray(rho, np.float64)
    assert np.allclose(np.diag(rho), 1.0, atol=1e-5) and np.allclose(rho, rho.T, atol=1e-6) and rho.min() >= 0.0
    assert np.linalg.eigvalsh(rho).min() > -1e-5


def test_cosines_cut_at_zero_are_no_correlation():
    angle = np.arange(8) * np.pi / 4.0
    feature = np.stack([np.cos(angle), np.sin(angle)], axis=1)
    assert np.linalg.eigvalsh(np.maximum(feature @ feature.T, 0.0)).min() < -0.4
    args = on_device(np.zeros(8), np.full(8, 50.0), feature, [True] * 8, [0] * 8, [8])
    got = real(pick(*args, count=8, weight=1.0, noise=1.0, shared=0.0, shortlist=16))
    assert sorted(got) == list(range(8)) and abs(got[1] - got[0]) in (2, 6)  # a right angle tells most


def test_budget_skips_what_does_not_fit_and_is_never_relaxed():
    value, cost = [5.0, 4.0, 3.0, 2.0, 1.0], jnp.asarray([4.0, 7.0, math.nan, 3.0, 3.0])
    args = on_device(value, np.zeros(5), np.eye(5), [True] * 5, [0, 0, 0, 0, 1], [1, 0])
    options = {"weight": 1.0, "noise": 1.0, "shared": 0.0, "shortlist": 16, "cost": cost}
    assert real(pick(*args, count=4, budget=9.0, **options)) == [0, 3]  # quotas are relaxed from the second on
    assert real(pick(*args, count=4, budget=10.0, **options)) == [0, 3, 4]
    assert real(pick(*args, count=4, budget=11.0, **options)) == [0, 1]
    assert real(pick(*args, count=4, budget=2.0, **options)) == []
    with pytest.raises(ValueError, match="belong together"):
        logdet.pick(*args, count=4, **options)


def test_equals_greedy_where_neither_looks_at_likeness():
    _, (value, sd, _, eligible, env, quota) = tasks(11)
    args = on_device(value, np.ones_like(sd), np.eye(N), eligible, env, quota, [0] * C, [False] * C)
    got = pick(*args, count=B, weight=2.0, shared=0.0, **FREE)
    other = greedy.pick(args[0], args[2], *args[3:6], jnp.zeros(N), count=B, eta=1.0, shortlist=64)
    assert real(got) == real(other)
