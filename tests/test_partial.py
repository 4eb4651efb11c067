import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import selection_oracles as oracles
from hypothesis import given, settings
from hypothesis import strategies as st

from envsched_jax import testing
from envsched_jax.belief import environment, history, partial
from envsched_jax.belief.environment import Moments
from envsched_jax.types import Outcome, Status

N, G, MOST = 16, 8, 12

informative_given = jax.jit(partial.p_informative_given, static_argnames=("group_size", "max_checks"))
informative = jax.jit(partial.p_informative_checks, static_argnames=("group_size", "max_checks"))


@pytest.fixture(scope="module")
def graph():
    graph = testing.tiny_graph(14, envs=3, k=3, seed=1, capacity=N)
    checks = jnp.where(graph.nodes.mask, jnp.asarray([1, 2, 5, 12] * 4, jnp.int32), 0)
    return graph._replace(nodes=graph.nodes._replace(checks=checks))


def simulate(rng, mean, checks, rho, rollouts):
    """Rewards of rollouts whose checks pass with a chance of their own, Beta around the mean."""
    total = 1.0 / rho - 1.0
    chance = rng.beta(mean * total, (1.0 - mean) * total, rollouts)
    return rng.binomial(checks, chance) / checks


def observe(groups, n=N):
    """The history after these groups: node and rewards f32[G]."""
    state = history.init(n)
    reward = jnp.asarray([r for _, r in groups], jnp.float32)
    node = jnp.asarray([i for i, _ in groups], jnp.int32)
    status = jnp.full(reward.shape, Status.OK, jnp.int8)
    zero = jnp.zeros_like(reward)
    outcome = Outcome(node, jnp.zeros(len(groups), bool), reward, status, zero, zero, jnp.zeros_like(node))
    return history.update(state, outcome, jnp.int32(0), 1.0)


# moments


@settings(max_examples=50, deadline=None)
@given(st.floats(0.02, 0.98), st.integers(1, MOST), st.sampled_from([0.0, 0.05, 0.5, 0.9, 1.0]))
def test_variance_is_that_of_the_distribution(mean, checks, rho):
    share = np.arange(checks + 1) / checks
    chance = oracles.pmf(mean, checks, rho)
    expected = chance @ share**2 - (chance @ share) ** 2
    args = jnp.float32(mean), jnp.int32(checks), jnp.float32(rho)
    assert float(partial.reward_variance(*args)) == pytest.approx(expected, rel=1e-4)
    trials = float(partial.effective_trials(*args[1:]))
    assert mean * (1.0 - mean) / trials == pytest.approx(expected, rel=1e-4) and 1.0 - 1e-6 <= trials <= checks + 1e-4


def test_padding_counts_as_all_or_nothing():
    assert np.allclose(
        partial.variance_factor(jnp.asarray([0, 1, 8, 8]), jnp.asarray([0.3, 0.3, 0.0, 1.0])), [1, 1, 0.125, 1]
    )


# P(informative), the mean known


@settings(max_examples=60, deadline=None)
@given(
    st.floats(0.001, 0.999),
    st.integers(1, MOST),
    st.one_of(st.sampled_from([0.0, 1.0]), st.floats(0.001, 0.999)),
    st.sampled_from([2, 8]),
)
def test_p_informative_equals_the_beta_binomial(mean, checks, rho, group_size):
    args = jnp.float32(mean), jnp.int32(checks), jnp.float32(rho)
    got = float(informative_given(*args, group_size=group_size, max_checks=MOST))
    assert got == pytest.approx(
        oracles.p_informative_given(mean, checks, rho, group_size), abs=2e-3 if rho == 1.0 else 2e-4
    )


def test_p_informative_at_its_ends():
    mean = jnp.asarray([0.05, 0.05, 0.05, 0.3, 0.3, 0.3])
    checks = jnp.asarray([1, 4, 8, 1, 5, 0])
    rho = jnp.asarray([0.0, 0.0, 0.0, 0.7, 1.0, 0.2])
    got = informative_given(mean, checks, rho, group_size=8, max_checks=8)
    assert np.allclose(1.0 - got[:3], [0.663, 0.19, 0.04], atol=6e-3)
    assert np.allclose(got[3:], 1.0 - 0.3**8 - 0.7**8, atol=1e-3)
    assert np.allclose(informative_given(mean, checks, rho, group_size=1, max_checks=8), 0.0, atol=1e-5)
    with pytest.raises(ValueError, match="max_checks=0"):
        partial.p_informative_given(mean, checks, rho, group_size=8, max_checks=0)


@settings(max_examples=20, deadline=None)
@given(st.floats(0.02, 0.98), st.integers(13, 30), st.sampled_from([0.1, 0.4, 0.8]))
def test_more_checks_than_are_looked_at(mean, checks, rho):
    args = jnp.float32(mean), jnp.int32(checks), jnp.float32(rho)
    got = float(informative_given(*args, group_size=8, max_checks=MOST))
    assert got == pytest.approx(oracles.p_informative_given(mean, checks, rho, 8), abs=0.11)


# P(informative), the mean believed


@settings(max_examples=25, deadline=None)
@given(st.floats(0.01, 0.99), st.floats(0.02, 0.98), st.integers(1, MOST), st.sampled_from([0.0, 0.2, 0.8]))
def test_p_informative_of_a_belief_equals_the_oracle(mean, share, checks, rho):
    believed = share * mean * (1.0 - mean)
    factor = (1.0 + (checks - 1) * rho) / checks
    args = (jnp.float32(x)[None] for x in (mean, believed * factor))
    got = informative(*args, jnp.asarray([checks]), jnp.asarray([rho], jnp.float32), group_size=8, max_checks=MOST)
    assert float(got[0]) == pytest.approx(oracles.p_informative_checks(mean, believed, checks, rho, 8), abs=5e-3)


def test_a_certain_belief_is_a_known_mean():
    mean, checks, rho = (
        jnp.asarray([0.01, 0.2, 0.5, 0.9]),
        jnp.asarray([3, 12, 2, 7]),
        jnp.asarray([0.1, 0.0, 0.9, 0.4]),
    )
    sharp = informative(mean, partial.reward_variance(mean, checks, rho), checks, rho, group_size=8, max_checks=MOST)
    assert np.allclose(sharp, informative_given(mean, checks, rho, group_size=8, max_checks=MOST), atol=0.01)


def test_beliefs_at_the_edge_stay_chances():
    mean, variance = (x.ravel() for x in jnp.meshgrid(jnp.linspace(-0.2, 1.2, 8), jnp.linspace(0.0, 0.5, 5)))
    p = informative(mean, variance, jnp.full(40, 5), jnp.full(40, 0.3), group_size=8, max_checks=MOST)
    assert np.isfinite(p).all() and float(p.min()) >= 0.0 and float(p.max()) <= 1.0


# the correlation of checks


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6))
def test_correlation_equals_the_oracle(seed):
    graph = testing.tiny_graph(14, envs=3, k=3, seed=1, capacity=N)
    rng = np.random.default_rng(seed)
    checks = rng.integers(1, 6, N)
    graph = graph._replace(nodes=graph.nodes._replace(checks=jnp.asarray(checks, jnp.int32)))
    groups = [(int(i), simulate(rng, rng.uniform(0.1, 0.9), checks[i], 0.4, G)) for i in rng.integers(0, 14, 6)]
    state = observe(groups)
    numbers = {name: np.asarray(x, np.float64) for name, x in state._asdict().items()}
    got = correlation(graph, state)
    assert np.allclose(got, oracles.correlation(np.asarray(graph.nodes.env), checks, numbers, 5.0, 0.3, 3), atol=1e-4)


correlation = jax.jit(functools.partial(partial.correlation, c=5.0, prior=0.3))


def test_the_correlation_of_each_environment_is_found():
    rng = np.random.default_rng(7)
    graph = testing.tiny_graph(8, envs=3, k=1, seed=0)  # of which only the environments count here
    env, checks = np.repeat([0, 1, 2], 200), np.tile([1, 3, 8, 20], 150)
    truth = np.array([0.05, 0.3, 0.8])
    nodes = graph.nodes._replace(env=jnp.asarray(env, jnp.int32), checks=jnp.asarray(checks, jnp.int32))
    groups = [(i, simulate(rng, rng.uniform(0.1, 0.9), checks[i], truth[env[i]], G)) for i in range(600)]
    got = partial.correlation(graph._replace(nodes=nodes), observe(groups, 600), c=5.0, prior=0.3)
    assert np.allclose(got, truth, atol=0.06)
    # two groups per task halve the spread put back, so an estimate without it would move
    twice = [*groups, *((i, simulate(rng, r.mean().clip(0.1, 0.9), checks[i], truth[env[i]], G)) for i, r in groups)]
    again = partial.correlation(graph._replace(nodes=nodes), observe(twice, 600), c=5.0, prior=0.3)
    assert np.allclose(again, truth, atol=0.08)


def test_without_partial_credit_the_prior_stays(graph):
    binary = graph._replace(nodes=graph.nodes._replace(checks=jnp.ones(N, jnp.int32)))
    state = observe([(0, [0, 1, 1, 0, 1, 0, 0, 0])])
    assert np.allclose(correlation(binary, state), 0.3)
    assert np.allclose(correlation(graph, history.init(N)), 0.3)
    assert np.allclose(partial.correlation(graph, history.init(N), c=0.0, prior=0.3), 0.3)
    assert np.allclose(correlation(graph, observe([(3, [0.0] * G), (2, [1.0] * G)])), 0.3)  # no variance, no news


# records and beliefs


def test_records_in_trials_by_hand(graph):
    state = observe([(i, [0, 0, 0.5, 0.5, 1, 1, 1, 1]) for i in range(3)])
    rho = jnp.asarray([0.5, 0.5, 0.5])
    got = partial.in_trials(graph, state, rho)
    trials = [1.0, 2.0 / 1.5, 5.0 / 3.0]
    assert np.allclose(got.n[:3], [8.0 * t for t in trials]) and np.allclose(got.s1[:3] / got.n[:3], 5.0 / 8.0)
    assert np.allclose(got.ssw[:3] / got.dof[:3], state.ssw[0] / 7.0 * jnp.asarray(trials))
    for name in ("dof", "groups", "informative", "tokens", "visits"):
        assert np.array_equal(getattr(got, name), getattr(state, name)), name


OPTIONS = {"own": True, "c": 2.0, "prior": Moments(*map(jnp.float32, (0.3, 0.1, 0.7))), "informative": "beta"}


@functools.partial(jax.jit, static_argnames="max_checks")
def believe(graph, state, rho, max_checks=MOST):
    belief = environment.believe(graph, partial.in_trials(graph, state, rho), group_size=G, **OPTIONS)
    return belief, partial.with_credit(graph, belief, rho, group_size=G, max_checks=max_checks)


def test_partial_credit_lowers_variance_and_raises_the_chance_to_learn(graph):
    state = observe([(0, [0, 1, 0, 1, 0, 0, 1, 0])])
    binary, belief = believe(graph, state, jnp.asarray([0.2, 0.2, 0.2]))
    some = np.asarray(graph.nodes.checks) > 1
    assert np.array_equal(belief.mean, binary.mean) and np.array_equal(belief.evidence, binary.evidence)
    assert np.allclose(belief.variance, binary.variance * partial.variance_factor(graph.nodes.checks, jnp.full(N, 0.2)))
    assert np.allclose(belief.p_informative[~some], binary.p_informative[~some])
    assert (np.asarray(belief.p_informative)[some] > np.asarray(binary.p_informative)[some] + 0.02).all()


def test_all_or_nothing_is_as_it_was(graph):
    state = observe([(1, [0, 1, 0, 1, 0, 0, 1, 0]), (2, [0, 0, 0, 0, 0, 0, 0, 1])])
    plain = environment.believe(graph, state, group_size=G, **OPTIONS)
    one_check = graph._replace(nodes=graph.nodes._replace(checks=jnp.ones(N, jnp.int32)))
    for pool, rho, most in (
        (one_check, jnp.full(3, 0.2), MOST),
        (one_check, jnp.full(3, 0.2), 1),
        (graph, jnp.ones(3), MOST),
    ):
        _, got = believe(pool, state, rho, max_checks=most)
        for name, x, y in zip(got._fields, got, plain, strict=True):
            assert np.allclose(x, y, atol=5e-3 if name == "p_informative" else 1e-5), name
