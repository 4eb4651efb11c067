"""What can be set about ``envsched``: wrong settings are refused by name, right ones do what they say."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envsched_jax import schedulers, testing
from envsched_jax.belief import field
from envsched_jax.schedulers.envsched import costs, from_settings
from envsched_jax.select import quota

B, G, N = 8, 4, 40
SIZES = {"batch_size": B, "group_size": G}
LOGDET = {"select": "logdet", "cost": "tokens"}
PLAIN = {"belief": "no_graph"}  # where the belief does not matter: it compiles in no time
EXACT = {"nu": 0.0, "c": 0.0, "coverage": (0.0, 0.0, 0.0), "explore_share": 0.0}  # own records decide, and nothing else


@pytest.fixture(scope="module")
def graph():
    return testing.tiny_graph(N, envs=5, k=3, seed=2, capacity=N + 4)


@functools.cache
def programs(**settings):
    scheduler = schedulers.envsched(**SIZES, **settings)
    return scheduler, jax.jit(scheduler.select), jax.jit(scheduler.observe)


def recorded(graph, state, *, mean=0.5, tokens=100.0):
    """The state after 20 groups of every task; ``mean`` and ``tokens`` of a rollout as numbers or f32[N + 4]."""
    real = graph.nodes.mask.astype(jnp.float32)
    groups, n = 20.0 * real, 20.0 * G * real
    mean, tokens = jnp.asarray(mean, jnp.float32), jnp.asarray(tokens, jnp.float32)
    dof = 20.0 * (G - 1) * real
    record = state.history._replace(
        n=n,
        s1=n * mean,
        dof=dof,
        ssw=dof * mean * (1.0 - mean),
        groups=groups,
        informative=0.8 * groups,
        tokens=n * tokens,
        seconds=n * (300.0 - tokens),
        visits=graph.nodes.mask.astype(jnp.int32),
        last_step=jnp.zeros_like(state.history.last_step),
    )
    return state._replace(step=jnp.int32(1), history=record)


def keys(count):
    return jax.random.split(jax.random.key(0), count)


# what is refused


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("batch_size", {"batch_size": 0}),
        ("group_size", {"group_size": 0}),
        ("belief", {"belief": "gauss"}),
        ("informative", {"informative": "gamma"}),
        ("value", {"value": "p"}),
        ("cost", {"cost": "turns"}),
        ("cost_power", {"cost_power": 1.5}),
        ("cost_power", {"cost_power": -0.5}),
        ("select", {"select": "argmax"}),
        ("power", {"power": -1.0}),
        ("power", {"power": float("nan")}),
        ("eta", {"eta": -0.1}),
        ("shortlist", {"shortlist": 2 * B - 1}),
        ("information", {"information": -0.5}),
        ("budget", {"budget": 100.0}),
        ("budget", {"budget": 100.0, "select": "logdet"}),
        ("budget", {"budget": 100.0, "cost": "tokens"}),
        ("budget", {"budget": 0.0, **LOGDET}),
        ("budget", {"budget": float("nan"), **LOGDET}),
        ("explore_share", {"explore_share": 1.1}),
        ("coverage", {"coverage": (0.1, 0.1)}),
        ("coverage", {"coverage": (0.1, 0.1, -0.1)}),
        ("quota", {"quota": "even"}),
        ("quota_weights", {"quota": "weights"}),
        ("quota_weights", {"quota_weights": (1.0, 2.0)}),
        ("quota_weights", {"quota": "weights", "quota_weights": (1.0, -2.0)}),
        ("quota_weights", {"quota": "weights", "quota_weights": (0.0, 0.0)}),
        ("quota_cap", {"quota_cap": 0}),
        ("quota_cap", {"quota": "uniform", "quota_cap": 2}),
        ("gamma", {"gamma": 1.01}),
        ("nu", {"nu": -1.0}),
        ("c", {"c": -1.0}),
        ("prior", {"prior": (0.5, 0.125)}),
        ("prior", {"prior": (1.5, 0.125, 0.6)}),
        ("restart", {"restart": -0.1}),
        ("mix", {"mix": 2.0}),
        ("rounds", {"rounds": 3}),
        ("kind_weights", {"kind_weights": (1.0,) * 6}),
        ("kind_weights", {"kind_weights": (1.0,) * 6 + (-1.0,)}),
        ("field", {"field": "wide"}),
        ("field.graph", {"field": {"graph": 0.0}}),
        ("field.own", {"field": field.Settings(own=-1.0)}),
        ("field.static", {"field": {"static": -0.1}}),
        ("field.walk_env", {"field": {"walk_env": float("nan")}}),
        ("field.memory", {"field": {"memory": 1.2}}),
        ("field.rate", {"field": {"rate": -0.1}}),
        ("field.probes", {"field": {"probes": 33}}),
        ("field.iterations", {"field": {"iterations": 0}}),
        ("field.refresh", {"field": {"refresh": 0}}),
        ("field.kinds", {"field": {"kinds": (1.0,)}}),
        ("field.kinds", {"field": {"kinds": (1.0,) * 6 + (-1.0,)}}),
        ("field.blend", {"field": {"blend": (0.0, 1.0)}}),
        ("field.blend_var", {"field": {"blend_var": -1.0}}),
    ],
)
def test_wrong_settings_are_refused_by_name(name, settings):
    with pytest.raises(ValueError, match=rf"^(batch_size and )?{name}\b"):
        schedulers.envsched(**SIZES | settings)


def test_unknown_settings_are_a_type_error():
    with pytest.raises(TypeError, match="'costs'"):
        schedulers.envsched(**SIZES, costs="tokens")
    with pytest.raises(TypeError, match="'graphs'"):
        schedulers.envsched(**SIZES, field={"graphs": 1.0})


def test_what_is_at_the_border_is_allowed():
    lenient = {"power": 0.0, "eta": 0.0, "information": 0.0, "c": 0.0, "nu": 0.0, "coverage": (0.0, 0.0, 0.0)}
    schedulers.envsched(**SIZES, **lenient, cost_power=1.0, rounds=0, kind_weights=(0.0,) * 7, shortlist=2 * B)
    schedulers.envsched(**SIZES, field={"kinds": (0.0,) * 7, "rate": 0.0, "memory": 1.0, "probes": 32})


# the field's settings


def test_a_mapping_is_as_good_as_field_settings(graph):
    some = {"graph": 5.0, "own": 0.2, "rate": 0.0, "probes": 4}
    states = []
    for given in (some, field.Settings(**some)):
        assert schedulers.Settings(**SIZES, field=given).field == field.Settings(**some)
        scheduler = schedulers.envsched(**SIZES, field=given)
        state = jax.jit(scheduler.init)(graph)
        batch = jax.jit(schedulers.uniform(**SIZES).select)(jax.random.key(0), graph, state)
        states.append(jax.jit(scheduler.observe)(graph, state, testing.simulate(jax.random.key(1), graph, batch, G)))
    jax.tree.map(np.testing.assert_array_equal, *states)
    assert states[0].memory.passing.probe.shape == (N + 4, 4)
    assert np.abs(np.asarray(states[0].memory.passing.field)).max() > 0.05
    assert schedulers.Settings(**SIZES, field={}) == schedulers.Settings(**SIZES)


# log-determinant with quotas and budget


@pytest.mark.parametrize("quotas", [{"quota_cap": 2}, {"quota": "weights", "quota_weights": (4.0, 1.0, 1.0, 1.0, 1.0)}])
def test_logdet_keeps_quotas(graph, quotas):
    settings = schedulers.Settings(**SIZES, **PLAIN, select="logdet", **quotas)
    scheduler = from_settings(settings)
    state = scheduler.init(graph)
    allowed = schedulers.quotas(settings, graph, state)
    batches = jax.jit(jax.vmap(scheduler.select, in_axes=(0, None, None)))(keys(20), graph, state)
    assert np.asarray(batches.mask).all()
    over = jax.vmap(lambda batch: quota.deviation(graph, batch, allowed))(batches)
    assert np.asarray(over).max() <= 0
    per_env = np.stack([np.bincount(env, minlength=5) for env in np.asarray(graph.nodes.env)[np.asarray(batches.node)]])
    assert (per_env <= np.asarray(allowed)).all() and (per_env.max(axis=0) > 0).all()


def test_logdet_keeps_the_budget_and_masks_what_does_not_fit(graph):
    """One budget, prices from far too high to next to nothing; explore picks are paid from it too."""
    budget = 2000.0
    settings = schedulers.Settings(**SIZES, **PLAIN, **LOGDET, budget=budget)
    scheduler = from_settings(settings)
    uneven = jnp.linspace(0.2, 1.8, N + 4)
    level = jnp.asarray([10_000.0, 400.0, 150.0, 80.0, 20.0])
    states = jax.vmap(lambda t: recorded(graph, scheduler.init(graph), tokens=t * uneven))(level)
    batches = jax.jit(jax.vmap(jax.vmap(scheduler.select, (0, None, None)), (None, None, 0)))(keys(8), graph, states)
    price = G * np.asarray(jax.jit(jax.vmap(lambda state: costs(settings, graph, state)))(states))
    mask, node = np.asarray(batches.mask), np.asarray(batches.node)
    spent = np.where(mask, np.take_along_axis(price[:, None, :], node, axis=2), 0.0)
    assert spent.sum(axis=2).max() <= budget * (1.0 + 1e-6)
    count = mask.sum(axis=2)
    assert not count[0].any() and (count[-1] == B).all()
    assert (count[1:4] > 0).all() and (count[1] < B).all() and (np.diff(count.mean(axis=1)) >= 0).all()
    for leaf in batches:
        assert not np.asarray(leaf)[~mask].any()  # an empty row is all zeros, also its flag
    real = np.asarray(graph.nodes.mask)
    for row, seen in np.ndindex(count.shape):
        picks = node[row, seen][mask[row, seen]]
        assert real[picks].all() and len(set(picks.tolist())) == len(picks)
        left = np.setdiff1d(np.flatnonzero(real), picks)
        if count[row, seen] < B:  # what is left unspent is too little for anything that is left
            explorers_dropped = (~mask[row, seen][:2]).any()
            assert explorers_dropped or price[row][left].min() > budget - spent[row, seen].sum() - 1e-2


def test_observed_batches_with_empty_rows_leave_no_trace_of_them(graph):
    scheduler, select, observe = programs(**PLAIN, **LOGDET, budget=2000.0)
    state = recorded(graph, scheduler.init(graph), tokens=250.0)
    batch = select(jax.random.key(0), graph, state)
    assert 0 < int(batch.mask.sum()) < B
    after = observe(graph, state, testing.simulate(jax.random.key(1), graph, batch, G))
    grown = np.flatnonzero(np.asarray(after.history.visits - state.history.visits))
    assert sorted(grown) == sorted(np.asarray(batch.node)[np.asarray(batch.mask)])


# costs and values


def test_cost_prefers_the_cheap_among_equals(graph):
    """Half of the tasks take 10 tokens, half 290; seconds are the other way round."""
    cheap = np.arange(N + 4) % 2 == 0
    share, worth = {}, {}
    for cost in ("none", "tokens", "seconds"):
        scheduler, _, _ = programs(**EXACT, belief="env_mean", cost=cost, quota="none")
        state = recorded(graph, scheduler.init(graph), tokens=np.where(cheap, 10.0, 290.0))
        batches = jax.jit(jax.vmap(scheduler.select, (0, None, None)))(keys(200), graph, state)
        node, value = np.asarray(batches.node), np.asarray(batches.value)
        share[cost] = cheap[node].mean()
        worth[cost] = [value[cheap[node] == side].mean() if (cheap[node] == side).any() else np.nan for side in (1, 0)]
    assert share["none"] == pytest.approx(0.5, abs=0.05)
    assert share["tokens"] > 0.98 and share["seconds"] < 0.02
    level = worth["none"][0]
    assert worth["none"][1] == pytest.approx(level, rel=1e-5)
    assert worth["tokens"][0] == pytest.approx(level * (10.0 / 150.0) ** -0.5, rel=1e-3)
    assert worth["seconds"][1] == pytest.approx(level * (10.0 / 150.0) ** -0.5, rel=1e-3)


def test_cost_power_says_how_much_cost_counts(graph):
    values = {}
    for power in (0.0, 0.5, 1.0):
        settings = {**EXACT, "belief": "env_mean", "cost": "tokens", "cost_power": power, "power": 0.0}
        scheduler, select, _ = programs(**settings)
        state = recorded(graph, scheduler.init(graph), tokens=jnp.linspace(50.0, 250.0, N + 4))
        batch = select(jax.random.key(0), graph, state)
        price = np.asarray(jax.jit(functools.partial(costs, schedulers.Settings(**SIZES, **settings)))(graph, state))
        relative = price / price[np.asarray(graph.nodes.mask)].mean()
        values[power] = np.asarray(batch.value) * relative[np.asarray(batch.node)] ** power
        again = select(jax.random.key(0), graph, state)
        np.testing.assert_array_equal(again.node, batch.node)
    np.testing.assert_allclose(values[0.5], values[0.0], rtol=1e-5)
    np.testing.assert_allclose(values[1.0], values[0.0], rtol=1e-5)


def test_value_by_environment_is_the_share_of_its_variance(graph):
    """The formula in plain float64; a task counts for more where all others of its environment are decided."""
    env, real = np.asarray(graph.nodes.env), np.asarray(graph.nodes.mask)
    mean = np.where(env == 0, 0.03, 0.5)
    mean[np.flatnonzero(real & (env == 0))[0]] = 0.4
    settings = {**EXACT, "belief": "no_graph", "value": "environment", "quota": "none", "c": 1e-3}
    scheduler, select, _ = programs(**settings)
    state = recorded(graph, scheduler.init(graph), mean=mean)
    belief = jax.jit(functools.partial(schedulers.predict, schedulers.Settings(**SIZES, **settings)))(graph, state)
    m, v = np.asarray(belief.mean, np.float64), np.asarray(belief.variance, np.float64)
    expected = np.zeros(N + 4)
    for e in range(5):
        inside = real & (env == e)
        expected[inside] = v[inside] / (v[inside].mean() + m[inside].var())
    batch = select(jax.random.key(3), graph, state)
    np.testing.assert_allclose(batch.value, expected[np.asarray(batch.node)], rtol=1e-4)
    best = int(expected.argmax())
    assert env[best] == 0 and m[best] == pytest.approx(0.4, abs=0.01) and expected[best] > 2.0
    assert best in np.asarray(batch.node)
    other = schedulers.envsched(**SIZES, **settings | {"value": "variance", "power": 50.0})
    worth = jax.jit(other.select)(jax.random.key(3), graph, state)
    assert not set(env[np.asarray(worth.node)].tolist()) & {0}


# what holds for all of them

SETTINGS = {
    "sample": {"belief": "env_mean"},
    "greedy": {"belief": "diffusion", "select": "greedy", "cost": "seconds", "cost_power": 1.0},
    "logdet": {**PLAIN, **LOGDET, "budget": 1e9},
    "environment": {"value": "environment", "field": {"probes": 2, "refresh": 1}, "informative": "share"},
}


@functools.cache
def played():
    """For each of SETTINGS: the batches of three keys after two steps, by jit and by vmap, and the states after."""
    graph = testing.tiny_graph(N, envs=5, k=3, seed=2, capacity=N + 4)
    out = {}
    for name, settings in SETTINGS.items():
        scheduler = schedulers.envsched(**SIZES, **settings)
        select, observe = jax.jit(scheduler.select), jax.jit(scheduler.observe)
        state = jax.jit(scheduler.init)(graph)
        for step in range(2):
            batch = select(jax.random.key(step), graph, state)
            state = observe(graph, state, testing.simulate(jax.random.key(10 + step), graph, batch, G))
        some = keys(3)
        single = [select(key, graph, state) for key in some]
        outcomes = [testing.simulate(key, graph, batch, G) for key, batch in zip(some, single, strict=True)]
        after = [observe(graph, state, outcome) for outcome in outcomes]
        several = jax.jit(jax.vmap(scheduler.select, (0, None, None)))(some, graph, state)
        stacked = jax.tree.map(lambda *x: jnp.stack(x), *outcomes)
        followed = jax.jit(jax.vmap(scheduler.observe, (None, None, 0)))(graph, state, stacked)
        out[name] = single, after, several, followed
    return out


@pytest.mark.parametrize("name", SETTINGS)
def test_jitted_and_vmapped_alike(name):
    single, after, several, followed = played()[name]
    for row, (batch, state) in enumerate(zip(single, after, strict=True)):
        assert np.asarray(several.node[row]).tolist() == batch.node.tolist()
        for x, y in zip(jax.tree.leaves((batch, state)), jax.tree.leaves((several, followed)), strict=True):
            np.testing.assert_allclose(y[row], x, rtol=1e-3, atol=1e-4)
    assert len({tuple(batch.node.tolist()) for batch in single}) == 3


def test_explore_picks_come_first_are_flagged_and_the_same_for_all():
    firsts = []
    for single, _, _, _ in played().values():
        for batch in single:
            assert np.asarray(batch.mask).all()
            assert batch.explore.tolist() == [True] * 2 + [False] * (B - 2)  # a quarter of the batch
            assert len(set(batch.node.tolist())) == B
        firsts.append([batch.node[:2].tolist() for batch in single])
    assert all(first == firsts[0] for first in firsts)
