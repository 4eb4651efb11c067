import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envsched_jax import testing
from envsched_jax.belief import field, logistic, springs
from envsched_jax.types import EDGE_KINDS, Outcome, Status

STIFF = (2.0, 0.3, 0.3, 0.1, 60.0, 0.2, 0.1)


@pytest.fixture(scope="module")
def graph():
    return testing.tiny_graph(40, envs=4, k=4, seed=1, capacity=44)


def outcome(nodes, reward, status=None):
    reward = jnp.asarray(reward, jnp.float32)
    status = jnp.full(reward.shape, int(Status.OK), jnp.int8) if status is None else jnp.asarray(status, jnp.int8)
    nothing, none = jnp.zeros_like(reward), jnp.zeros(len(nodes), jnp.int32)
    return Outcome(jnp.asarray(nodes, jnp.int32), none.astype(bool), reward, status, nothing, nothing, none)


def passes(nodes, k, n):
    """Groups of n rollouts of which the first k pass."""
    return outcome(nodes, [[1.0] * int(a) + [0.0] * (n - int(a)) for a in k])


def dense_precision(graph, weight, variance):
    """Q in plain float64 loops over edges."""
    n = graph.nodes.mask.shape[0]
    senders, receivers = np.asarray(graph.senders), np.asarray(graph.receivers)
    similarity, mask = np.asarray(graph.edges.similarity, np.float64), np.asarray(graph.edges.mask)
    q = np.eye(n)
    for i, j, sim, there in zip(receivers, senders, similarity, mask, strict=True):
        if there:
            w = 0.5 * sum(weight[s] * sim[s] ** 3 for s in range(len(EDGE_KINDS)))
            q[i, i] += w
            q[j, j] += w
            q[i, j] -= w
            q[j, i] -= w
    return q / variance


# the field's prior and its solution


@pytest.mark.parametrize("variance", [0.5, 20.0])
def test_solution_and_variances_are_those_of_the_dense_matrix(graph, variance):
    q = dense_precision(graph, STIFF, variance)
    own = np.where(np.arange(len(q)) % 3 == 0, 2.0, 0.0) * np.asarray(graph.nodes.mask)
    target = np.random.default_rng(0).normal(size=(len(q), 2))
    prior = springs.springs(graph, jnp.asarray(STIFF, jnp.float32), jnp.float32(variance))
    given_own = jnp.asarray(own, jnp.float32)
    solved = springs.solve(
        prior, given_own, jnp.asarray(target, jnp.float32), jnp.zeros((len(q), 2)), iterations=200, tolerance=1e-5
    )
    np.testing.assert_allclose(solved, np.linalg.solve(q + np.diag(own), target), rtol=1e-3, atol=1e-3)

    noise = springs.noise(prior, graph.nodes.uid, given_own, 32)
    probe = springs.solve(prior, given_own, noise, jnp.zeros_like(noise), iterations=200, tolerance=1e-5)
    exact = np.diag(np.linalg.inv(q + np.diag(own)))
    error = np.asarray(springs.variances(prior, given_own, probe)) / exact - 1.0
    assert np.sqrt(np.mean(error**2)) < 0.15 and np.abs(error).max() < 0.5
    assert abs(error.mean()) < 0.08


def test_slopes_are_the_finite_differences_of_the_dense_solution(graph):
    """How a function of the solution changes with the logarithm of every weight and of the variance."""
    size, variance, step = graph.nodes.mask.shape[0], 20.0, 1e-5
    rng = np.random.default_rng(0)
    own = rng.uniform(0.0, 2.0, size) * np.asarray(graph.nodes.mask)
    target, cost = rng.normal(size=(2, size))

    def function(log_weight, log_variance):
        q = dense_precision(graph, np.exp(log_weight), np.exp(log_variance)) + np.diag(own)
        return cost @ np.linalg.solve(q, target)

    at = np.concatenate([np.log(STIFF), [np.log(variance)]])
    moves = step * np.eye(len(at))
    expected = [(function(*split(at + m)) - function(*split(at - m))) / (2 * step) for m in moves]

    q = dense_precision(graph, STIFF, variance) + np.diag(own)
    solution, adjoint = np.linalg.solve(q, np.stack([target, cost], axis=1)).T.astype(np.float32)
    weight = jnp.asarray(STIFF, jnp.float32)
    prior = springs.springs(graph, weight, jnp.float32(variance))
    by_kind, by_variance = springs.slopes(graph, prior, weight, jnp.asarray(solution), jnp.asarray(adjoint))
    np.testing.assert_allclose(np.append(by_kind, by_variance), expected, rtol=1e-3, atol=1e-4)
    assert np.abs(expected).min() > 1e-3  # every kind of edge has a say here


def split(at):
    return at[:-1], at[-1]


def test_probes_have_the_covariance_of_the_precision(graph):
    """Over many slots of signs the right-hand sides have covariance Q + diag(own): here through its diagonal."""
    prior = springs.springs(graph, jnp.asarray(STIFF, jnp.float32), jnp.float32(2.0))
    own = jnp.ones_like(prior.degree)
    rows = [springs.noise(prior, graph.nodes.uid + jnp.uint32(7919 * i), own, 32) for i in range(30)]
    spread = np.square(np.concatenate(rows, axis=1)).mean(axis=1)
    np.testing.assert_allclose(spread, np.asarray(prior.ground + prior.degree + own), rtol=0.2)


def test_signs_are_even_and_their_own(graph):
    signs = np.asarray(springs.signs(jnp.arange(4000, dtype=jnp.uint32), 3, 32))
    assert set(np.unique(signs)) == {-1.0, 1.0}
    assert np.abs(signs.mean(axis=0)).max() < 0.07
    correlation = signs.T @ signs / len(signs) - np.eye(32)
    assert np.abs(correlation).max() < 0.08


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 8), st.floats(-4.0, 4.0), st.floats(0.1, 6.0), st.data())
def test_bound_agrees_with_quadrature(n, mean, var, data):
    k = data.draw(st.integers(0, n))
    w, y = logistic.gaussian_bound(*(jnp.asarray([x], jnp.float32) for x in (n, k, mean, var)))
    spread = 1.0 / (1.0 / var + float(w[0]))
    place = spread * (mean / var + float(w[0] * y[0]))
    f = np.linspace(mean - 12 * np.sqrt(var), mean + 12 * np.sqrt(var), 20001)
    log = -((f - mean) ** 2) / (2 * var) - k * np.logaddexp(0, -f) - (n - k) * np.logaddexp(0, f)
    density = np.exp(log - log.max())
    exact = (f * density).sum() / density.sum()
    exact_spread = ((f - exact) ** 2 * density).sum() / density.sum()
    assert abs(place - exact) < 0.25 * np.sqrt(var) + 0.05
    assert 0.3 < spread / exact_spread < 1.4
    assert (place - mean) * (k / n - 1 / (1 + np.exp(-mean))) >= -1e-3  # it moves towards what was seen


# the belief


@pytest.mark.slow
def test_one_task_moves_its_twins_most_then_its_environment(graph):
    start = field.init(field.Settings(), graph)
    before = field.believe(graph, start, 4)
    after = field.believe(graph, field.update(field.Settings(), graph, start, passes([0], [8], 8)), 4)
    gain = np.asarray(after.mean - before.mean)
    real, env = np.asarray(graph.nodes.mask), np.asarray(graph.nodes.env)
    assert gain[0] == gain[real].max() and gain[0] > 0.2
    assert gain[real & (env == env[0])][1:].mean() > gain[real & (env != env[0])].mean() > 0.0
    assert float(after.evidence[0]) > float(before.evidence[0])


def test_a_larger_bucket_changes_nothing_over_many_steps(graph):
    """Rows of padding must not even take part in the path of the solver, which stops long before it is exact."""
    prior, wide = field.Settings(), testing.pad(graph, 60)
    step = jax.jit(lambda g, s, o: field.update(prior, g, s, o))
    small, large = (jax.jit(lambda g: field.init(prior, g))(g) for g in (graph, wide))
    for i in range(6):
        seen = passes([i, 7 + 3 * i, 39 - i], [i % 5, 4, (2 * i) % 5], 4)
        small, large = step(graph, small, seen), step(wide, large, seen)
    for x, y in zip(field.believe(graph, small, 4), field.believe(wide, large, 4), strict=True):
        np.testing.assert_allclose(y[:40], x[:40], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(large.passing.probe[:40], small.passing.probe[:40], atol=1e-4)


def test_failed_and_absent_rollouts_say_nothing(graph):
    prior = field.Settings()
    start = field.init(prior, graph)
    failed = outcome([0, 1], [[jnp.nan] * 4] * 2, [[int(Status.ENV_ERROR)] * 4, [int(Status.ABSENT)] * 4])
    after = field.believe(graph, field.update(prior, graph, start, failed), 4)
    np.testing.assert_allclose(after.mean, field.believe(graph, start, 4).mean, atol=1e-4)


def test_decisive_records_keep_their_order(graph):
    """Tasks rolled out again and again are ordered by their own record, whatever the neighbours say."""
    prior = field.Settings()
    state = field.init(prior, graph)
    rate = np.random.default_rng(5).permutation(np.linspace(0.02, 0.98, 40))
    observe = jax.jit(lambda s, o: field.update(prior, graph, s, o))
    for _ in range(12):
        state = observe(state, passes(np.arange(40), np.round(rate * 16), 16))
    mean = np.asarray(field.believe(graph, state, 4).mean)[:40]
    order = np.argsort(rate)
    steps = np.diff(mean[order])
    assert (steps[np.diff(np.round(rate * 16)[order]) >= 2] > 0).all()
    assert np.corrcoef(mean, rate)[0, 1] > 0.98


def test_a_shift_of_all_reaches_tasks_that_were_not_tried(graph):
    """After the pool has learned, tasks seen before are believed better, too, in their old order."""
    prior = field.Settings(walk_pool=0.2)
    state = field.init(prior, graph)
    first, second = np.arange(0, 20), np.arange(20, 40)
    observe = jax.jit(lambda s, o: field.update(prior, graph, s, o))
    for _ in range(3):
        state = observe(state, passes(first, np.arange(20) // 5, 8))
        state = observe(state, passes(second, np.ones(20), 8))
    old = np.asarray(field.believe(graph, state, 4).mean)
    for _ in range(4):
        state = observe(state, passes(second, np.full(20, 7), 8))
    new = np.asarray(field.believe(graph, state, 4).mean)
    assert (new[first] > old[first] + 0.03).mean() > 0.9
    assert np.corrcoef(old[first], new[first])[0, 1] > 0.9


def test_informative_share_is_calibrated_and_mixed_is_seen_beyond_the_mean(graph):
    """Half of the environments solve all or nothing, half at random: the same mean, another share of mixed groups."""
    prior = field.Settings()
    state = field.init(prior, graph)
    observe = jax.jit(lambda s, o: field.update(prior, graph, s, o))
    rng, env = np.random.default_rng(0), np.asarray(graph.nodes.env)
    steady = rng.random(44) < 0.5
    foretold, found = [], []
    for step in range(40):
        nodes = rng.choice(40, 8, replace=False)
        chance = np.where(env[nodes] % 2 == 0, steady[nodes], 0.5)
        reward = (rng.random((8, 4)) < chance[:, None]).astype(np.float32)
        if step >= 10:
            foretold.append(np.asarray(field.believe(graph, state, 4).p_informative)[nodes])
            found.append(reward.max(axis=1) > reward.min(axis=1))
        state = observe(state, outcome(nodes, reward))
    assert abs(np.mean(foretold) - np.mean(found)) < 0.08
    belief = np.asarray(field.believe(graph, state, 4).p_informative)[:40]
    assert belief[env[:40] % 2 == 1].mean() > belief[env[:40] % 2 == 0].mean() + 0.3


def test_worth_of_a_rollout_counts(graph):
    """A reward that is a share of many independent checks says more about the mean."""
    prior = field.Settings()
    start = field.init(prior, graph)
    one = outcome([0], [[0.75, 1.0, 0.75, 1.0]])
    plain = field.believe(graph, field.update(prior, graph, start, one), 4)
    trials = jnp.full(44, 4.0)
    rich = field.believe(graph, field.update(prior, graph, start, one, trials), 4, trials)
    assert float(rich.mean[0]) > float(plain.mean[0])
    assert float(rich.variance[0]) < float(plain.variance[0])


def test_weights_of_misleading_edges_fall():
    """Edges between unlike tasks lose their weight, those between alike tasks keep more of it."""
    tasks, slots = 300, 8
    graph = testing.tiny_graph(tasks, envs=6, k=slots // 2, seed=4)
    rate = np.random.default_rng(2).choice([0.05, 0.95], tasks)
    alike = rate[np.asarray(graph.senders).reshape(slots, tasks)] == rate[None, :]
    similarity = np.zeros((slots, tasks, len(EDGE_KINDS)), np.float32)
    similarity[..., 0], similarity[..., 1] = alike, ~alike
    edges = graph.edges._replace(similarity=jnp.asarray(similarity.reshape(-1, len(EDGE_KINDS))))
    graph = graph._replace(edges=edges)
    prior = field.Settings(kinds=(1.0,) * 7, refresh=1)
    state = field.init(prior, graph)
    observe = jax.jit(lambda s, o: field.update(prior, graph, s, o))
    rng = np.random.default_rng(3)
    for _ in range(40):
        nodes = rng.choice(tasks, 12, replace=False)
        reward = (rng.random((12, 4)) < rate[nodes][:, None]).astype(np.float32)
        state = observe(state, outcome(nodes, reward))
    weight = np.exp(np.asarray(state.passing.log_weight))
    assert weight[1] < 0.05 and weight[0] > 2 * weight[1]
    assert weight[2] == pytest.approx(1.0, rel=0.2)  # a kind without edges has no reason to move


def test_a_kind_of_weight_zero_is_off(graph):
    off = field.Settings(kinds=(0.0,) * 7)
    state = field.update(off, graph, field.init(off, graph), passes([0, 1], [8, 0], 8))
    changed = graph._replace(edges=graph.edges._replace(similarity=jnp.zeros_like(graph.edges.similarity)))
    other = field.update(off, changed, field.init(off, changed), passes([0, 1], [8, 0], 8))
    np.testing.assert_allclose(
        field.believe(graph, state, 4).mean, field.believe(changed, other, 4).mean, rtol=1e-4, atol=1e-4
    )
