"""Every baseline against its formula in float64, over several steps with failed rollouts, absent and repeated rows."""

import inspect

import baseline_oracles as oracles
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from envsched_jax import schedulers, testing
from envsched_jax.schedulers import common, tally
from envsched_jax.select import sample
from envsched_jax.train.advantages import advantages
from envsched_jax.types import Status, outcome_of

B, G, N, REAL, ENVS = 6, 4, 43, 40, 5
SIZES = {"batch_size": B, "group_size": G}


@pytest.fixture(scope="module")
def graph():
    return testing.tiny_graph(REAL, envs=ENVS, k=3, seed=5, capacity=N)


def damage(step, outcome):
    """Makes the rows of an outcome hard: one failed altogether, one absent, one repeated, rewards between 0 and 1."""
    status, reward, node = outcome.status, outcome.reward, outcome.node
    if step % 3 == 0:
        status = status.at[1].set(jnp.int8(Status.INFRA_ERROR))
    if step % 3 == 1:
        status, node = status.at[5].set(jnp.int8(Status.ABSENT)), node.at[5].set(10**6)
    if step % 3 == 2:
        node = node.at[4].set(node[2])
        reward = reward.at[3].set(jnp.asarray([0.25, 0.75, 1.0, 0.25]))
    return outcome._replace(status=status, reward=reward, node=node)


def play(name, graph, steps=5, **settings):
    """Yields what each step did: key, state before, batch, outcome, state after; one trace of each function."""
    scheduler = schedulers.make(name, **SIZES | settings)
    select, observe = jax.jit(scheduler.select), jax.jit(scheduler.observe)
    state = scheduler.init(graph)
    for step in range(steps):
        key = jax.random.key(step)
        batch = select(key, graph, state)
        outcome = damage(step, testing.simulate(jax.random.key(100 + step), graph, batch, G, failures=0.25))
        after = observe(graph, state, outcome)
        yield key, state, batch, outcome, after
        last, state = state, after
    assert select._cache_size() == observe._cache_size() == 1
    check_failed(observe, graph, state, outcome)
    check_belief(schedulers.belief_fn(name, **SIZES | settings), graph, last, batch)


def check_failed(observe, graph, state, outcome):
    """Failed rollouts alone teach nothing; SCALER only notes which environments came back."""
    failed = outcome._replace(status=jnp.full_like(outcome.status, Status.ENV_TIMEOUT))
    after = observe(graph, state, failed).memory
    flags = {"active", "resting"}
    for name in set(after._fields) - flags:
        for x, y in zip(*(jax.tree.leaves(getattr(m, name)) for m in (after, state.memory)), strict=True):
            assert np.array_equal(x, y), name


def check_belief(believe, graph, state, batch):
    """What the recipe says it believes is what stands in the batch; no prediction is made up."""
    if believe is None:
        assert np.isnan(np.asarray(batch[4:])).all()
        return
    belief = jax.jit(believe)(graph, state)
    for ours, theirs in zip(batch[4:], belief, strict=False):
        assert np.allclose(ours, np.asarray(theirs)[np.asarray(batch.node)], atol=1e-6)
    assert all(np.isfinite(np.asarray(x)).all() for x in belief)
    assert (np.asarray(belief.p_informative)[:REAL] > 0.0).all()


def uniform(key, graph, *streams):
    for stream in streams:
        key = jax.random.fold_in(key, stream)
    return np.asarray(sample.uniform(key, graph.nodes.uid), np.float64)


def gumbel(key, graph, *streams):
    for stream in streams:
        key = jax.random.fold_in(key, stream)
    return np.asarray(sample.gumbel(key, graph.nodes.uid), np.float64)


def env_of(graph):
    return np.asarray(graph.nodes.env), np.asarray(graph.nodes.mask)


def close(ours, theirs, atol=2e-5):
    assert np.allclose(np.asarray(ours)[: len(theirs)], theirs, atol=atol, rtol=1e-4)


# posteriors


def test_mopps(graph):
    settings = {"candidates": 3, "discount": 0.5, "prior": (1.0, 2.0)}
    oracle = oracles.Posterior(N, settings["prior"], settings["discount"])
    _, real = env_of(graph)
    for key, _, batch, outcome, after in play("mopps", graph, **settings):
        stream, uid = jax.random.fold_in(key, 1), graph.nodes.uid

        def draw(i, a, b, stream=stream, uid=uid):
            return float(jax.random.beta(jax.random.fold_in(stream, uid[i]), jnp.float32(a), jnp.float32(b)))

        assert batch.node.tolist() == oracle.thompson(uniform(key, graph, 0), draw, real, 3 * B, B)
        for ours, theirs in zip((batch.predicted_mean, batch.predicted_variance), oracle.belief(G), strict=False):
            close(ours, theirs[np.asarray(batch.node)])
        oracle.observe(outcome)
        close(after.memory.passes + 1.0, oracle.alpha)
        close(after.memory.failures + 2.0, oracle.beta)


def test_mopps_draws_from_the_posterior():
    """Of a task at Beta(5, 2) and a new one, the first is nearer to 1/2 with probability 1 - 2 E|p - 1/2|."""
    graph = testing.tiny_graph(2, envs=2, k=1, seed=0)
    scheduler = schedulers.mopps(batch_size=1, group_size=G)
    state = scheduler.init(graph)
    state = state._replace(
        memory=state.memory._replace(passes=jnp.asarray([4.0, 0.0]), failures=jnp.asarray([1.0, 0.0]))
    )
    node = jax.jit(jax.vmap(lambda key: scheduler.select(key, graph, state).node))(
        jax.random.split(jax.random.key(0), 20_000)
    )
    law = 1.0 - 2.0 * stats.beta(5, 2).expect(lambda p: abs(p - 0.5))
    assert np.mean(np.asarray(node) == 0) == pytest.approx(law, abs=0.016)


def test_mapp(graph):
    oracle = oracles.Posterior(N, (1.0, 1.0), 0.5)
    _, real = env_of(graph)
    for key, _, batch, outcome, after in play("mapp", graph):
        value = oracle.belief(G)[2]
        assert batch.node.tolist() == oracles.top(np.log(value) + gumbel(key, graph), real, B)
        close(batch.value, value[np.asarray(batch.node)])
        oracle.observe(outcome)
        close(after.memory.passes + 1.0, oracle.alpha)


# bandits


def test_sec_and_dump(graph):
    env, real = env_of(graph)
    arms = jnp.arange(ENVS, dtype=jnp.uint32)
    for name, oracle, temperature, settings in (
        ("sec", oracles.Sec(env, ENVS, 0.5), 0.4, {}),
        ("dump_ucb", oracles.Dump(env, ENVS, 7), 0.1, {"window": 7}),
    ):
        for key, _, batch, outcome, after in play(name, graph, **settings):
            stream = jax.random.fold_in(key, 0)
            noise = [np.asarray(sample.gumbel(jax.random.fold_in(stream, b), arms), np.float64) for b in range(B)]
            value = oracle.value
            picks = oracles.draw_arms(value, temperature, noise, uniform(key, graph, 1), real, env)
            assert sorted(batch.node.tolist()) == sorted(picks)
            close(batch.value, value[env[np.asarray(batch.node)]])
            oracle.observe(outcome)
            if name == "sec":
                close(after.memory.q, oracle.value)
        assert np.ptp(oracle.value) > 0.1


def test_sec_draws_environments_by_softmax(graph):
    """20,000 batches of one: environments by exp(Q / 0.4), whatever their size, and their tasks evenly."""
    scheduler = schedulers.sec(batch_size=1, group_size=G)
    state = scheduler.init(graph)
    q = np.array([0.1, 0.8, 0.5, 0.0, 0.3])
    state = state._replace(memory=state.memory._replace(q=jnp.asarray(q, jnp.float32)))
    node = jax.jit(jax.vmap(lambda key: scheduler.select(key, graph, state).node[0]))(
        jax.random.split(jax.random.key(0), 20_000)
    )
    env, real = env_of(graph)
    seen = np.bincount(np.asarray(node), minlength=N) / 20_000
    law = np.exp(q / 0.4) / np.exp(q / 0.4).sum()
    per_task = np.where(real, law[env] / np.maximum(np.bincount(env[real], minlength=ENVS), 1)[env], 0.0)
    assert np.abs(seen - per_task).max() < 4.5 * np.sqrt(per_task.max() / 20_000)


def test_scaler(graph):
    env, real = env_of(graph)
    settings = {"active": 3, "levels": 4, "window": 3, "patience": 2}
    oracle = oracles.Scaler(env, ENVS, real, **settings)
    checked = 0
    for key, _, batch, outcome, after in play("scaler", graph, steps=14, **settings):
        luck = np.asarray(sample.uniform(jax.random.fold_in(key, 0), jnp.arange(ENVS, dtype=jnp.uint32)), np.float64)
        picks, short = oracle.select(luck, uniform(key, graph, 1), B)
        if not short:  # else slots go to the nearest of other environments
            assert sorted(batch.node.tolist()) == sorted(picks)
            checked += 1
        oracle.observe(outcome)
        close(after.memory.difficulty, oracle.d)
        assert set(np.flatnonzero(after.memory.active)) == oracle.active
        assert set(np.flatnonzero(after.memory.resting)) == oracle.resting
    assert oracle.replaced >= 3 and checked >= 5 and oracle.d.max() > 1.0


def test_scaler_leaves_what_is_mastered_and_what_is_hopeless():
    """Worked by hand: d is 0, 1, 2, 2, 2 before the visits of a mastered environment, 0 before those of a hopeless."""
    graph = testing.tiny_graph(12, envs=2, k=2, seed=0)
    scheduler = schedulers.scaler(batch_size=2, group_size=G, levels=2, window=99, patience=3)
    observe, state, active = jax.jit(scheduler.observe), scheduler.init(graph), []
    node = jnp.asarray([int(np.flatnonzero(np.asarray(graph.nodes.env) == e)[0]) for e in range(2)])
    batch = common.to_batch(node, jnp.ones(2, bool), jnp.zeros(2, bool), jnp.zeros(12))
    for _ in range(5):
        state = observe(graph, state, outcome_of(batch, jnp.asarray([[1.0] * G, [0.0] * G])))
        active.append(state.memory.active.tolist())
    assert [mastered for mastered, _ in active] == [True, True, True, True, False]
    assert [hopeless for _, hopeless in active] == [True, True, False, True, True]
    assert state.memory.difficulty.tolist() == [2.0, 0.0] and state.memory.resting.tolist() == [True, False]


# replay


def test_learnability(graph):
    oracle = oracles.Replayed(N, "learnability")
    _, real = env_of(graph)
    most = 0
    for key, _, batch, outcome, after in play("learnability", graph, steps=9, share=0.34):
        picks, measured = oracle.learnable(uniform(key, graph, 0), uniform(key, graph, 1), real, 2, B)
        assert batch.node.tolist() == picks
        assert batch.explore.tolist() == [False] * measured + [True] * (B - measured)
        most = max(most, measured)
        oracle.observe(outcome)
        close(after.memory.score, oracle.score)
    assert most == 2


def test_plr(graph):
    settings = {"fill": 0.3, "replay": 0.7}
    oracle = oracles.Replayed(N, "plr")
    _, real = env_of(graph)
    kinds = []
    for key, _, batch, outcome, after in play("plr", graph, steps=8, **settings):
        chance = float(jax.random.uniform(jax.random.fold_in(key, 2), dtype=jnp.float32))
        replayed = oracle.known[:REAL].sum() >= 0.3 * REAL and chance < 0.7
        kinds.append(replayed)
        if replayed:
            weight = oracle.weights(uniform(key, graph, 0, 0), 0.3, 0.3)
            close(batch.value, weight[np.asarray(batch.node)])
            score = np.log(np.maximum(weight, 1e-30)) + gumbel(key, graph, 0, 1)
            assert batch.node.tolist() == oracles.top(score, oracle.known, B)
            assert not np.asarray(batch.explore).any()
        else:
            score = uniform(key, graph, 1) - oracle.visits
            assert batch.node.tolist() == oracles.top(score, real & ~oracle.known, B)
            assert np.asarray(batch.explore).all()
        oracle.observe(outcome)
        close(after.memory.score, oracle.score)
        assert np.array_equal(after.memory.measured, oracle.known)
    assert 2 <= sum(kinds) <= 6


# predictors


def test_vip_gp(graph):
    _, real = env_of(graph)
    oracle = oracles.Gp(graph.nodes.feature, real, np.asarray(graph.nodes.uid), 0.05, 1e-4)
    for key, state, batch, outcome, after in play("vip_gp", graph):
        p = 1 / (1 + np.exp(-oracle.m))
        assert batch.node.tolist() == oracles.top(p * (1 - p) + oracles.TIE * uniform(key, graph), real, B)
        close(batch.predicted_mean, p[np.asarray(batch.node)])
        close(batch.p_informative, (1 - p**G - (1 - p) ** G)[np.asarray(batch.node)])
        assert float(state.memory.width) == pytest.approx(oracle.width, rel=1e-5)
        oracle.observe(outcome)
        close(after.memory.mean, oracle.m, atol=1e-4)
    assert np.ptp(oracle.m[real]) > 1.0


def test_potts_graph(graph):
    settings = {"states": 4, "neighbours": 6, "coupling": 1.5, "discount": 0.8, "strength": 3.0, "sweeps": 4}
    _, real = env_of(graph)
    oracle = oracles.Potts(graph.nodes.feature, real, **settings)
    uid = np.asarray(graph.nodes.uid)
    for key, state, batch, outcome, after in play("potts_graph", graph, **settings):
        linked, near = np.asarray(state.memory.linked), np.asarray(state.memory.neighbour)
        assert [set(near[i][linked[i]]) for i in range(N)] == [set(uid[j] for j in oracle.near[i]) for i in range(N)]
        mean, variance, informative = oracle.belief(G)
        picks = batch.node.tolist()
        assert picks == oracles.top(mean * (1 - mean) + oracles.TIE * uniform(key, graph), real, B)
        close(batch.predicted_mean, mean[picks])
        close(batch.predicted_variance, variance[picks])
        close(batch.p_informative, informative[picks])
        oracle.observe(outcome)
        close(jax.nn.softmax(after.memory.logit), oracle.q, atol=1e-4)
        close(after.memory.alpha, oracle.a, atol=1e-4)
        close(after.memory.beta, oracle.b, atol=1e-4)
    assert any(oracle.near) and np.ptp(oracle.belief(G)[0]) > 0.3


def test_gps_lite(graph):
    settings = {"hidden": 16, "learning_rate": 0.5, "updates": 4, "diversity": 0.2}
    _, real = env_of(graph)
    weights = schedulers.gps_lite(**SIZES | settings).init(graph).memory.network.hidden
    oracle = oracles.GpsLite(graph.nodes.feature, weights, 0.5, 4, 0.2)
    for key, _, batch, outcome, after in play("gps_lite", graph, **settings):
        picks = batch.node.tolist()
        assert picks == oracle.select(uniform(key, graph), real, B)
        close(batch.predicted_mean, oracle.predict()[picks])
        close(batch.value, -((oracle.predict()[picks] - 0.5) ** 2))
        oracle.observe(outcome)
        close(after.memory.network.hidden, oracle.w)
        close(after.memory.network.out, oracle.out)
        close(after.memory.direction, oracle.direction)
    assert np.ptp(oracle.predict()[real]) > 0.05


def test_what_predicts_learns_from_neighbours():
    """Two clusters, one always solved and one never: unseen tasks are told apart by all that predict, else by none."""
    graph = testing.tiny_graph(REAL, envs=2, k=3, seed=1)
    side = np.arange(REAL) % 2
    noise = np.random.default_rng(0).normal(size=(REAL, 8)) * 0.15
    feature = noise + np.where(side[:, None] == 1, 1.0, -1.0) * np.eye(8)[0]
    feature /= np.linalg.norm(feature, axis=1, keepdims=True)
    graph = graph._replace(nodes=graph.nodes._replace(feature=jnp.asarray(feature, jnp.float32)))
    for name in ("vip_gp", "potts_graph", "gps_lite", "mopps"):
        scheduler = schedulers.make(name, **SIZES)
        state = scheduler.init(graph)
        observe = jax.jit(scheduler.observe)
        for step in range(3):
            node = jnp.arange(step * B, (step + 1) * B, dtype=jnp.int32)
            batch = common.to_batch(node, jnp.ones(B, bool), jnp.zeros(B, bool), jnp.zeros(REAL))
            passed = jnp.broadcast_to(jnp.asarray(side, jnp.float32)[node][:, None], (B, G))
            state = observe(graph, state, outcome_of(batch, passed))
        mean = np.asarray(jax.jit(schedulers.belief_fn(name, **SIZES))(graph, state).mean)[3 * B :]
        gap = mean[side[3 * B :] == 1].min() - mean[side[3 * B :] == 0].max()
        assert gap > 0.2 if name != "mopps" else gap == 0.0


# common parts


@pytest.mark.parametrize(
    "name, authors",
    [
        ("mopps", (16, 1.0, (1.0, 1.0), 0.5)),
        ("sec", (0.5, 0.4)),
        ("dump_ucb", (300, 0.1)),
        ("scaler", (64, 10, 0.5, 2.0, 10, 5)),  # levels are ours
        ("plr", (0.8, 0.3, 0.3, 4000, 0.5)),
    ],
)
def test_defaults_are_the_authors(name, authors):
    parameters = inspect.signature(schedulers.RECIPES[name]).parameters.values()
    assert tuple(p.default for p in parameters if p.name not in SIZES) == authors


def test_rates_pool_the_rows_of_one_task():
    node = jnp.asarray([7, 3, 7, 5], jnp.int32)
    batch = common.to_batch(node, jnp.ones(4, bool), jnp.zeros(4, bool), jnp.zeros(N))
    reward = jnp.asarray([[1.0, 0.0], [jnp.nan, jnp.nan], [0.0, 2.0], [0.5, jnp.nan]])
    node, rate, used = tally.rates(outcome_of(batch, reward), N)
    assert node.tolist() == [7, 0, 0, 5]  # 2 is cut to 1
    assert rate.tolist() == [0.5, 0.0, 0.0, 0.5] and used.tolist() == [True, False, False, True]


def test_which_recipes_predict():
    predicting = {"mopps", "mapp", "vip_gp", "potts_graph", "gps_lite"}
    assert set(schedulers.BELIEFS) - set(schedulers.FAMILY) - {"envsched_incremental"} == predicting
    for name in predicting | {"sec", "dump_ucb", "scaler", "learnability", "plr"}:
        assert (schedulers.belief_fn(name, **SIZES) is not None) == (name in predicting)
        assert schedulers.quota_fn(name, **SIZES) is None


def test_absolute_advantages_are_those_of_the_update(graph):
    node = jnp.arange(B, dtype=jnp.int32)
    batch = common.to_batch(node, jnp.ones(B, bool), jnp.zeros(B, bool), jnp.zeros(N))
    outcome = damage(2, testing.simulate(jax.random.key(3), graph, batch, G))
    size, valid = tally.absolute_advantage(outcome)
    with jax.numpy_dtype_promotion("standard"):
        expected = jnp.abs(advantages(outcome.reward, valid))
    assert np.allclose(size, expected, atol=1e-6)
    assert (np.asarray(size) > 0).any() and not np.asarray(size)[~np.asarray(valid)].any()


@pytest.mark.parametrize(
    "name, settings",
    [
        ("mopps", {"candidates": 0}),
        ("mapp", {"prior": (0.0, 1.0)}),
        ("sec", {"rate": -0.1}),
        ("dump_ucb", {"window": 0}),
        ("scaler", {"levels": 0}),
        ("learnability", {"share": 2.0}),
        ("plr", {"replay": 1.1}),
        ("vip_gp", {"edge": 0.5}),
        ("potts_graph", {"sweeps": 0}),
        ("gps_lite", {"diversity": -1.0}),
    ],
)
def test_settings_out_of_range_are_refused(name, settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        schedulers.make(name, **SIZES, **settings)
