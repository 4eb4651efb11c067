import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envsched_jax import testing
from envsched_jax.belief import diffusion, environment, history, informative
from envsched_jax.belief.environment import Moments
from envsched_jax.types import History, Outcome, Status

G = 4
KINDS = jnp.asarray([1.0, 0.5, 0.0, 2.0, 4.0, 1.0, 0.3])
PRIOR = Moments(jnp.float32(0.3), jnp.float32(0.1), jnp.float32(0.7))  # asymmetric: wins and losses differ
OPTIONS = {"nu": 5.0, "c": 2.0, "kind_weights": KINDS, "restart": 0.4, "mix": 0.7, "rounds": 2, "group_size": G}

update = jax.jit(history.update, static_argnames="gamma")
believe = jax.jit(functools.partial(diffusion.believe, prior=PRIOR, informative="share", **OPTIONS))


@pytest.fixture(scope="module")
def graph():
    return testing.tiny_graph(14, envs=3, k=3, seed=1, capacity=16)


def outcome(node, reward, status=None, age=0):
    reward = jnp.asarray(reward, jnp.float32)
    status = jnp.full(reward.shape, Status.OK) if status is None else jnp.asarray(status)
    rows = reward.shape[0]
    return Outcome(
        node=jnp.asarray(node, jnp.int32),
        explore=jnp.zeros(rows, bool),
        reward=reward,
        status=status.astype(jnp.int8),
        tokens=jnp.full(reward.shape, 3.0),
        seconds=jnp.full(reward.shape, 0.5),
        age=jnp.full(rows, age, jnp.int32),
    )


def random_outcomes(seed, nodes, steps=3, rows=5):
    rng = np.random.default_rng(seed)
    out = []
    for _ in range(steps):
        status = rng.integers(0, 8, (rows, G)) * (rng.random((rows, 1)) > 0.2)
        reward = np.where((status >= 1) & (status <= 3), rng.integers(-1, 3, (rows, G)) / 2.0, np.nan)
        one = outcome(rng.integers(0, nodes, rows), reward, status)
        out.append(one._replace(age=jnp.asarray(rng.integers(0, 3, rows), jnp.int32)))
    return out


def replay(outcomes, n=6, gamma=0.9):
    state = history.init(n)
    for step, one in enumerate(outcomes):
        state = update(state, one, jnp.int32(step), gamma)
    return state


def stats_of(state):
    return {name: np.asarray(x, np.float64) for name, x in state._asdict().items()}


def test_two_groups_of_one_task_by_hand():
    state = replay([outcome([2, 2], [[1, 0, 1, 1], [1, 1, 1, 1]]), outcome([0], [[0.5, 0, 0, 0]])])
    # around their own means: 3 * (1/4)^2 + (3/4)^2 = 0.75 and 0; pooled it would be 0.875
    assert np.allclose(state.ssw[2], 0.9 * 0.75) and np.allclose(state.dof[2], 0.9 * 6)
    assert np.allclose([state.n[2], state.s1[2]], [0.9 * 8, 0.9 * 7])
    assert np.allclose([state.informative[2], state.groups[2]], [0.9, 1.8])
    assert np.allclose([state.n[0], state.s1[0], state.ssw[0]], [4, 0.5, 0.1875])
    assert state.visits.tolist() == [1, 0, 2, 0, 0, 0] and state.last_step.tolist() == [1, -1, 0, -1, -1, -1]
    assert np.allclose(state.tokens[2], 0.9 * 24) and np.allclose(state.seconds[2], 0.9 * 4)


def test_failures_leave_no_trace_and_policy_failures_count():
    bad = [Status.ENV_TIMEOUT, Status.ENV_ERROR, Status.VERIFIER_ERROR, Status.INFRA_ERROR]
    good = [Status.OK, Status.TRUNCATED, Status.POLICY_TIMEOUT, Status.ABSENT]
    nan = math.nan
    state = replay([outcome([0, 1, 99], [[nan] * 4, [1, 0, 0, nan], [nan] * 4], [bad, good, [0] * 4])])
    assert [float(x[0]) for x in state[:8]] == [0.0] * 8 and int(state.visits[0]) == 1
    assert np.allclose([state.n[1], state.s1[1], state.dof[1], state.tokens[1]], [3, 1, 2, 9])
    assert int(state.visits.sum()) == 2  # the padding row's node 99 is arbitrary


def test_single_rollouts_change_only_count_and_sum():
    state = replay([outcome([3], [[1.0, 5.0, 5.0, 5.0]], [[1, 0, 5, 0]])])
    assert (state.n[3], state.s1[3]) == (1.0, 1.0)
    assert (state.ssw[3], state.dof[3], state.informative[3], state.groups[3]) == (0.0, 0.0, 0.0, 0.0)


def test_differences_below_the_tolerance_are_equal():
    state = replay([outcome([0, 1], [[0.5, 0.5 + 1e-7, 0.5, 0.5], [0.5, 0.51, 0.5, 0.5]])])
    assert state.informative.tolist()[:2] == [0.0, 1.0]


def test_a_reward_that_is_not_finite_does_not_count():
    state = replay([outcome([0], [[math.nan, 1.0, math.inf, 0.0]])])
    assert (state.n[0], state.s1[0], state.dof[0]) == (2.0, 1.0, 1.0)


def test_late_outcomes_end_as_if_they_had_come_at_once():
    one, nothing = outcome([1], [[1, 0, 0, 1]]), outcome([0], [[0] * 4], [[0] * 4])
    early, late = replay([one, nothing, nothing]), replay([nothing, nothing, one._replace(age=one.age + 2)])
    for name in history.SUMS:
        assert np.allclose(getattr(early, name), getattr(late, name)), name


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6))
def test_history_equals_the_oracle(seed):
    outcomes = random_outcomes(seed, nodes=6)
    state, expected = replay(outcomes), oracles.history(6, outcomes, 0.9)
    for name, value in expected.items():
        assert np.allclose(getattr(state, name), value, rtol=1e-5, atol=1e-5), name


@pytest.mark.parametrize("mix", [0.0, 0.7, 1.0])
def test_edge_weights_equal_the_dense_oracle(graph, mix):
    # one node without within edges and one without any
    mask = graph.edges.mask.reshape(6, 16).at[:3, 4].set(False).at[:, 5].set(False)
    graph = graph._replace(edges=graph.edges._replace(mask=mask.reshape(-1)))
    table, weight = diffusion.gather_table(graph), diffusion.edge_weights(graph, KINDS, mix)
    dense = np.zeros((16, 16))
    for slot, i in np.ndindex(6, 16):
        dense[i, int(table[slot, i])] += float(weight[slot, i])
    expected = oracles.dense_weights(graph, KINDS, mix)
    assert np.allclose(dense, expected, atol=1e-6)
    rows = dense.sum(axis=1)
    assert np.allclose(rows[4], 0.0 if mix == 1.0 else 1.0) and rows[5] == 0.0 and not rows[14:].any()
    assert float(weight.min()) >= 0.0


def test_negative_kind_weights_count_as_zero(graph):
    one = diffusion.edge_weights(graph, KINDS.at[2].set(-9.0), 0.7)
    assert np.array_equal(one, diffusion.edge_weights(graph, KINDS, 0.7))


@pytest.mark.parametrize("rounds", [0, 1, 2])
@pytest.mark.parametrize("restart", [0.0, 0.4])
def test_diffusion_and_own_share_equal_the_dense_matrix(graph, rounds, restart):
    table, weight = diffusion.gather_table(graph), diffusion.edge_weights(graph, KINDS, 0.7)
    full = oracles.diffusion_matrix(oracles.dense_weights(graph, KINDS, 0.7), restart, rounds)
    signal = np.random.default_rng(0).normal(size=(16, 3))
    got = diffusion.diffuse(table, weight, jnp.asarray(signal, jnp.float32), restart=restart, rounds=rounds)
    assert np.allclose(got, full @ signal, atol=1e-5)
    share = diffusion.self_share(table, weight, restart=restart, rounds=rounds)
    assert np.allclose(share, np.diag(full), atol=1e-6)
    if rounds == 2:
        assert float(np.asarray(share)[:14].max()) > restart + 1e-3  # walks do return, so the test sees them


def test_more_rounds_have_no_closed_form(graph):
    table, weight = diffusion.gather_table(graph), diffusion.edge_weights(graph, KINDS, 0.7)
    with pytest.raises(ValueError, match="rounds=3"):
        diffusion.self_share(table, weight, restart=0.4, rounds=3)


def test_concentration_is_exact_for_one_round_and_a_bound_for_two(graph):
    table, weight = diffusion.gather_table(graph), diffusion.edge_weights(graph, KINDS, 0.7)
    matrix = oracles.dense_weights(graph, KINDS, 0.7)
    for rounds in (1, 2):
        full = oracles.diffusion_matrix(matrix, 0.4, rounds)
        np.fill_diagonal(full, 0.0)
        exact = np.square(full).sum(axis=1)
        got = np.asarray(diffusion.concentration(table, weight, restart=0.4, rounds=rounds))
        assert np.allclose(got, oracles.length_bound(matrix, 0.4, rounds), rtol=1e-4, atol=1e-7)
        assert np.allclose(got, exact, atol=1e-6) if rounds == 1 else (got >= exact - 1e-6).all()
        assert (got[:14] < 5.0 * exact[:14]).all()  # about 2, more in the environment of two, where walks return


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10**6))
def test_belief_equals_the_oracle(graph_seed):
    graph = testing.tiny_graph(14, envs=3, k=3, seed=graph_seed % 5, capacity=16)
    outcomes = random_outcomes(graph_seed, nodes=14, rows=4)
    state = replay(outcomes, n=16)
    got = believe(graph, state)
    expected = oracles.believe(graph, stats_of(state), prior=[float(x) for x in PRIOR], **OPTIONS)
    for name, x, y in zip(got._fields, got, expected, strict=True):
        assert np.allclose(np.asarray(x)[:14], np.maximum(y[:14], 0.0 if name != "mean" else -9.0), atol=1e-4), name


def test_belief_by_hand_with_an_asymmetric_prior():
    # nodes 0 and 1 in one environment hear only each other, node 2 in another hears nobody; one round
    graph = testing.tiny_graph(3, envs=2, k=1, seed=0)
    graph = graph._replace(
        nodes=graph.nodes._replace(env=jnp.asarray([0, 0, 1])),
        senders=jnp.asarray([1, 0, 0, 0, 0, 0]),
        edges=graph.edges._replace(
            similarity=jnp.full((6, 7), 0.5), mask=jnp.asarray([True, True, False, False, False, False])
        ),
    )
    zero = jnp.zeros(3)
    own = dict.fromkeys(("ssw", "dof", "informative", "groups", "tokens", "seconds"), zero)
    record = History(
        n=jnp.asarray([0.0, 8.0, 0.0]), s1=jnp.asarray([0.0, 6.0, 0.0]), **own, visits=zero, last_step=zero
    )
    belief = diffusion.believe(graph, record, prior=PRIOR, informative="share", **OPTIONS | {"rounds": 1})
    pool = (6 + 2 * 0.3) / (8 + 2)  # 0.66
    first = (6 + 2 * pool) / (8 + 2)  # 0.732
    expected = [
        (5 * 0.75 + 2 * first) / (5 + 2),  # nothing of its own: 5 of the neighbour's 8 rollouts at 6/8
        (6 + 2 * first) / (8 + 2),  # its neighbour knows nothing: the term drops out
        (2 * pool) / 2,  # an environment never seen: the pool's mean
    ]
    assert np.allclose(belief.mean, expected, atol=1e-6)
    assert np.allclose(belief.evidence, [5.0, 8.0, 0.0], atol=1e-5)
    assert np.allclose(belief.variance, 0.1) and np.allclose(belief.p_informative, 0.7)


def test_own_record_does_not_come_back_through_the_graph(graph):
    """With all other records empty the graph must add nothing, whatever the own record is."""
    state = replay([outcome([0], [[1, 1, 1, 0]])], n=16)
    values, evidence = diffusion.borrow(graph, state, kind_weights=KINDS, restart=0.4, mix=0.7, rounds=2)
    for kind in range(3):
        assert float(evidence[kind][0]) == 0.0 and float(values[kind][0]) == 0.0
    assert float(evidence.mean.max()) > 1.0  # but its neighbours hear of it


def test_tasks_never_tried_differ_by_their_neighbours(graph):
    state = replay([outcome([0, 1, 2, 12, 13], np.repeat([[1.0], [1.0], [0.0], [0.0], [1.0]], G, axis=1))], n=16)
    fresh = [i for i in range(14) if int(state.visits[i]) == 0 and int(graph.nodes.env[i]) == 0]
    means = np.asarray(believe(graph, state).mean)[fresh]
    assert len(fresh) >= 3 and len(np.unique(np.round(means, 5))) == len(fresh)
    without = environment.believe(graph, state, own=True, c=2.0, prior=PRIOR, group_size=G, informative="share")
    assert np.ptp(np.asarray(without.mean)[fresh]) == 0.0


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6))
def test_the_graph_fades_and_never_reorders_decisive_records(seed):
    graph = testing.tiny_graph(14, envs=3, k=3, seed=1, capacity=16)
    rng = np.random.default_rng(seed)
    n = rng.integers(0, 60, 16) * (np.arange(16) < 14)
    s1 = rng.binomial(n, rng.choice([0.02, 0.5, 0.98], 16))
    zero = jnp.zeros(16)
    own = dict.fromkeys(("ssw", "dof", "informative", "groups", "tokens", "seconds"), zero)
    record = History(jnp.asarray(n, jnp.float32), jnp.asarray(s1, jnp.float32), **own, visits=zero, last_step=zero)
    mean = np.asarray(believe(graph, record).mean, np.float64)
    seen = np.flatnonzero(n)
    raw, bound = s1[seen] / n[seen], (5.0 + 2.0) / (n[seen] + 5.0 + 2.0)
    assert (np.abs(mean[seen] - raw) <= bound + 1e-5).all()
    decisive = raw[:, None] - raw[None, :] > bound[:, None] + bound[None, :]
    assert (mean[seen][:, None] > mean[seen][None, :])[decisive].all()


def test_beliefs_without_the_graph_by_hand(graph):
    state = replay([outcome([0, 13], [[1, 1, 1, 0], [0, 0, 0, 0]])], n=16)
    options = {"c": 2.0, "prior": PRIOR, "group_size": G, "informative": "share"}
    pool = (3 + 2 * 0.3) / (8 + 2)
    first, last = (3 + 2 * pool) / (4 + 2), (0 + 2 * pool) / (4 + 2)
    means = environment.believe(graph, state, own=False, **options)
    assert np.allclose(means.mean[0], first) and np.allclose(means.mean[13], last) and np.allclose(means.mean[1], first)
    assert means.evidence[1] == 4.0
    blended = environment.believe(graph, state, own=True, **options)
    assert np.allclose(blended.mean[0], (3 + 2 * first) / (4 + 2)) and np.allclose(blended.mean[1], first)
    pool_share = (1 + 0.5 * 0.7) / (2 + 0.5)  # c counts for half a group of four
    first_share = (1 + 0.5 * pool_share) / (1 + 0.5)
    assert np.allclose(blended.p_informative[0], (1 + 0.5 * first_share) / (1 + 0.5), atol=1e-6)
    none = environment.believe(graph, history.init(16), own=True, **options | {"c": 0.0})
    assert np.allclose(none.mean, 0.3)  # nothing has any weight: the constant, not 0/0


def test_unknown_kind_of_informative_is_an_error(graph):
    with pytest.raises(ValueError, match="'guess'"):
        environment.believe(graph, history.init(16), own=True, c=1.0, prior=PRIOR, group_size=G, informative="guess")


p_informative = jax.jit(informative.p_informative, static_argnums=2)


@settings(max_examples=60, deadline=None)
@given(st.floats(0.001, 0.999), st.floats(0.0, 1.2), st.sampled_from([2, 8, 32]))
def test_p_informative_equals_the_beta_binomial(mean, share, group_size):
    variance = share * mean * (1.0 - mean)
    got = float(p_informative(jnp.float32(mean), jnp.float32(variance), group_size))
    assert got == pytest.approx(oracles.p_informative(mean, variance, group_size), abs=2e-5)


def test_p_informative_at_its_ends():
    mean = jnp.asarray([0.5, 0.5, 0.0, 1.0, 0.9])
    variance = jnp.asarray([0.25, 0.0, 0.0, 0.0, 0.09])
    got = np.asarray(p_informative(mean, variance, 8))
    assert got[0] == pytest.approx(1 - 2 * 0.5**8, abs=0.02)  # one rate for sure: binomial
    assert (got[1:4] < 0.02).all() and (got >= 0.0).all()  # bimodal, or certain
    assert got[4] == pytest.approx(1 - 0.9**8 - 0.1**8, abs=0.02)
    assert float(p_informative(jnp.float32(0.3), jnp.float32(0.1), 1)) == pytest.approx(0.0, abs=1e-6)
    with pytest.raises(ValueError, match="at least 1"):
        informative.p_informative(mean, variance, 0)
