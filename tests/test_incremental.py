"""Beliefs kept up to date, and a choice among candidates."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envsched_jax import graph as graphs
from envsched_jax import schedulers, testing
from envsched_jax.belief import diffusion, history, incremental
from envsched_jax.schedulers import incremental as recipe
from envsched_jax.types import Outcome, Status

KINDS = (1.0, 0.5, 2.0, 0.3, 4.0, 1.0, 0.7)
SIZES = {"batch_size": 8, "group_size": 4}


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture(scope="module")
def graph():
    return testing.tiny_graph(60, envs=5, k=4, seed=2, capacity=64)


def batches(seed, steps, rows=6, nodes=60):
    """Outcomes with repeated tasks, late ones, failed rollouts and rows of padding."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        status = rng.choice([int(Status.OK), int(Status.ENV_ERROR), int(Status.ABSENT)], (rows, 4), p=[0.8, 0.1, 0.1])
        status[-1] = int(Status.ABSENT)
        node = rng.integers(0, nodes, rows)
        node[1] = node[0]
        reward = np.where(status == int(Status.OK), rng.integers(0, 2, (rows, 4)), np.nan).astype(np.float32)
        nothing = jnp.zeros((rows, 4), jnp.float32)
        yield Outcome(
            jnp.asarray(node, jnp.int32),
            jnp.zeros(rows, bool),
            jnp.asarray(reward),
            jnp.asarray(status, jnp.int8),
            nothing,
            nothing,
            jnp.asarray(rng.integers(0, 3, rows), jnp.int32),
        )


@pytest.mark.parametrize("rounds, block", [(1, None), (2, None), (2, 1), (2, 7), (2, 4000)])
def test_sums_equal_the_dense_matrix_in_float64(graph, rounds, block, monkeypatch):
    ways = incremental.routes(graph, kind_weights=jnp.asarray(KINDS), restart=0.4, mix=0.6, rounds=rounds)
    state, record = incremental.init(graph, ways), history.init(64)
    update = jax.jit(lambda s, o: incremental.update(graph, s, o, 0.8, block=block))
    for step, outcome in enumerate(batches(0, 12)):
        state = update(state, outcome)
        record = history.update(record, outcome, jnp.int32(step), 0.8)
    signal = np.stack([np.asarray(getattr(record, name), np.float64) for name in incremental.SUMS], axis=1)
    weights = np.asarray(diffusion.edge_weights(graph, jnp.asarray(KINDS), 0.6), np.float64)
    dense = np.zeros((64, 64))
    for slot, row in enumerate(np.asarray(diffusion.gather_table(graph))):
        np.add.at(dense, (np.arange(64), row), weights[slot])
    expected = signal if rounds == 1 else 0.6 * dense @ signal + 0.4 * signal
    np.testing.assert_allclose(state.scale * state.ahead, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(state.scale, 0.8**12, rtol=1e-5)
    env = np.zeros((5, 6))
    np.add.at(env, np.asarray(graph.nodes.env), signal)
    np.testing.assert_allclose(state.scale * state.env, env, rtol=1e-5, atol=1e-5)
    again = incremental.refresh(graph, state, record)
    np.testing.assert_allclose(again.ahead, expected, rtol=1e-5, atol=1e-5)
    assert float(again.scale) == 1.0 and 0.0 <= float(again.drift) < 1e-5
    spoiled = incremental.refresh(graph, state._replace(ahead=state.ahead + 1.0), record)
    assert float(spoiled.drift) > 1e-3
    monkeypatch.setattr(incremental, "BLOCK", 24)  # three blocks, of which two overlap
    blocks = incremental.refresh(graph, state, record)
    np.testing.assert_allclose(blocks.ahead, expected, rtol=1e-5, atol=1e-5)
    assert float(blocks.drift) < 1e-5
    for kept, was in zip(incremental.refresh(graph, state, record, False)[1:], state[1:], strict=True):
        np.testing.assert_array_equal(kept, was)


def test_masked_edges_and_kinds_of_weight_zero_lead_nowhere(graph):
    kinds = (1.0,) * 5 + (0.0,) * 2
    ways = incremental.routes(graph, kind_weights=jnp.asarray(kinds), restart=0.4, mix=1.0, rounds=2)
    used = np.asarray(ways.weight) > 0.0
    assert int(ways.first[-1]) == used.sum() < ways.outgoing.shape[0]
    sender, place = np.asarray(ways.sender).reshape(-1), np.asarray(ways.outgoing)
    for node in range(64):
        edges = place[int(ways.first[node]) : int(ways.first[node + 1])]
        assert sorted(edges) == np.flatnonzero((sender == node) & used.reshape(-1)).tolist()
    with pytest.raises(ValueError, match=r"rounds must be 1 or 2 .* got 3"):
        incremental.routes(graph, kind_weights=jnp.asarray(kinds), restart=0.4, mix=1.0, rounds=3)


@pytest.mark.parametrize("settings", [{}, {"rounds": 1, "value": "variance"}, {"informative": "share", "mix": 0.2}])
def test_whole_pools_are_picked_from_as_envsched_does(graph, settings):
    plain = schedulers.make("envsched", **SIZES, belief="diffusion", **settings)
    kept = schedulers.make("envsched_incremental", **SIZES, candidates=64, refresh=7, **settings)
    states = [s.init(graph) for s in (plain, kept)]
    programs = [(jax.jit(s.select), jax.jit(s.observe)) for s in (plain, kept)]
    believe = [
        jax.jit(schedulers.belief_fn(name, **SIZES, **settings, **more))
        for name, more in (("envsched", {"belief": "diffusion"}), ("envsched_incremental", {"candidates": 64}))
    ]
    for step in range(20):
        key = jax.random.key(step)
        one, two = (select(key, graph, state) for (select, _), state in zip(programs, states, strict=True))
        for a, b in zip(one, two, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
        outcome = testing.simulate(jax.random.fold_in(key, 1), graph, one, 4)
        states = [observe(graph, s, outcome) for (_, observe), s in zip(programs, states, strict=True)]
        for a, b in zip(*(of(graph, s) for of, s in zip(believe, states, strict=True)), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_laws_with_fewer_candidates_than_tasks(graph):
    scheduler = schedulers.envsched_incremental(**SIZES, candidates=32, refresh=2)
    testing.check_scheduler(scheduler, graph, jax.random.key(1), eager=False, ages=True, numbers=True)


def test_the_numbering_of_the_nodes_does_not_matter(graph):
    order = jax.random.permutation(jax.random.key(5), 64)
    place = jnp.argsort(order).astype(jnp.int32)
    scheduler = schedulers.envsched_incremental(**SIZES, candidates=32, refresh=3)
    select, observe = jax.jit(scheduler.select), jax.jit(scheduler.observe)
    moved = testing.permute(graph, order)
    one, two = scheduler.init(graph), scheduler.init(moved)
    for step, outcome in enumerate(batches(2, 10)):
        one = observe(graph, one, outcome)
        two = observe(moved, two, outcome._replace(node=place[outcome.node]))
        first, second = (select(jax.random.key(step), g, s) for g, s in ((graph, one), (moved, two)))
        np.testing.assert_array_equal(first.node, order[second.node])
        np.testing.assert_allclose(first.p_informative, second.p_informative, rtol=1e-4)


@pytest.mark.slow
def test_edges_are_read_at_the_start_only(graph):
    scheduler = schedulers.envsched_incremental(**SIZES, candidates=32, refresh=2)
    state, lean = scheduler.init(graph), recipe.lean(graph)
    assert lean.senders.size == lean.edges.similarity.size == 0
    batch = scheduler.select(jax.random.key(0), graph, state)
    jax.tree.map(np.testing.assert_array_equal, batch, scheduler.select(jax.random.key(0), lean, state))
    outcome = testing.simulate(jax.random.key(1), graph, batch, 4)
    one, two = (scheduler.observe(g, state, outcome) for g in (graph, lean))
    jax.tree.map(np.testing.assert_array_equal, one, two)


def test_equal_to_full_propagation_after_ten_thousand_steps(graph):
    """The sums are worked out anew only when the scale runs out of range, and stay within 1e-4 all the same."""
    scheduler = schedulers.envsched_incremental(**SIZES, candidates=32, refresh=10**9)

    @jax.jit
    def run(state):
        def step(state, index):
            key = jax.random.fold_in(jax.random.key(0), index)
            batch = scheduler.select(key, graph, state)
            state = scheduler.observe(graph, state, testing.simulate(jax.random.fold_in(key, 1), graph, batch, 4))
            return state, state.memory.belief.drift

        return jax.lax.scan(step, state, jnp.arange(10_000))

    state, drift = run(scheduler.init(graph))
    fresh = incremental.refresh(graph, state.memory.belief, state.history)
    np.testing.assert_allclose(state.memory.belief.scale * state.memory.belief.ahead, fresh.ahead, rtol=1e-4, atol=1e-4)
    assert float(drift.max()) < 1e-4 and len(np.unique(np.asarray(drift))) > 5  # several refreshes were made
    full = schedulers.belief_fn("envsched", **SIZES, belief="diffusion")(graph, state)
    kept = schedulers.belief_fn("envsched_incremental", **SIZES)(graph, state)
    for a, b in zip(full, kept, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_visits_by_environment_and_pattern_are_kept_exactly(graph):
    scheduler = schedulers.envsched_incremental(**SIZES, candidates=32, refresh=10**9, gamma=0.8)
    state, observe = scheduler.init(graph), jax.jit(scheduler.observe)
    for outcome in batches(3, 15):
        state = observe(graph, state, outcome)
    fresh = recipe._refresh_if(jnp.ones((), bool), schedulers.Settings(**SIZES, gamma=0.8), graph, state)
    scale = state.memory.belief.scale
    np.testing.assert_allclose(scale * state.memory.env_visits, fresh.env_visits, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(scale * state.memory.pattern_visits, fresh.pattern_visits, rtol=1e-4, atol=1e-5)


def test_draws_are_even_over_tasks_or_over_environments(graph):
    thinned = graph._replace(nodes=graph.nodes._replace(mask=graph.nodes.mask & (graph.nodes.uid % 3 > 0)))
    who, count = recipe.roster(thinned), 40_000
    eligible = np.asarray(thinned.nodes.mask)
    env = np.asarray(thinned.nodes.env)
    tasks = np.bincount(env[eligible], minlength=5)
    even = np.bincount(np.asarray(recipe.draw_members(jax.random.key(0), who, count)), minlength=64) / count
    np.testing.assert_allclose(even, eligible / eligible.sum(), atol=0.006)
    spread = np.bincount(np.asarray(recipe.draw_spread(jax.random.key(0), who, count)), minlength=64) / count
    np.testing.assert_allclose(spread, np.where(eligible, 1.0 / (5 * tasks[env]), 0.0), atol=0.006)


@pytest.mark.slow
def test_the_shortlist_finds_the_best_tasks_of_the_pool():
    """With nothing new to learn it ends with the best there are, which a look at all tasks confirms."""
    g = testing.tiny_graph(400, envs=8, k=4, seed=5)
    settings = schedulers.Settings(**SIZES, belief="diffusion", gamma=1.0)
    scheduler = schedulers.envsched_incremental(**SIZES, candidates=64, gamma=1.0, refresh=4)
    state, observe = scheduler.init(g), jax.jit(scheduler.observe)
    for outcome in batches(1, 40, nodes=400):
        state = observe(g, state, outcome)
    nothing = next(batches(1, 1, nodes=400))
    nothing = nothing._replace(status=jnp.zeros_like(nothing.status))
    for _ in range(80):
        state = observe(g, state, nothing)
    worth, _ = recipe._worth(settings, g, state, jnp.arange(400))
    found = np.sort(np.asarray(worth)[np.asarray(state.memory.shortlist)])[::-1]
    assert len(set(state.memory.shortlist.tolist())) == 32
    np.testing.assert_allclose(found, np.sort(np.asarray(worth))[::-1][:32], atol=2e-4)


def test_a_changed_graph_is_taken_up_by_grow():
    from test_growth import OPTIONS, records

    old, new = records()
    g, index = graphs.build(old, **OPTIONS, capacity=40, env_capacity=8)
    scheduler = schedulers.envsched_incremental(**SIZES, candidates=32)
    select, observe = jax.jit(scheduler.select), jax.jit(scheduler.observe)

    def play(g, state, steps, seed):
        drawn = set()
        for step in range(steps):
            key = jax.random.fold_in(jax.random.key(seed), step)
            batch = select(key, g, state)
            drawn |= set(np.asarray(batch.node)[np.asarray(batch.mask)].tolist())
            state = observe(g, state, testing.simulate(jax.random.fold_in(key, 1), g, batch, 4))
        return state, drawn

    state, _ = play(g, scheduler.init(g), 4, seed=0)
    grown, named = graphs.extend(g, index, old, new)
    gone = [old[0].task_id, new[0].task_id]
    grown = graphs.retire(grown, named, gone)
    state = schedulers.grow(state, grown, scheduler)
    full = schedulers.belief_fn("envsched", **SIZES, belief="diffusion")(grown, state)
    kept = schedulers.belief_fn("envsched_incremental", **SIZES)(grown, state)
    for a, b in zip(full, kept, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    _, drawn = play(grown, state, 30, seed=1)
    assert {named.node_of(r.task_id) for r in new[1:]} & drawn
    assert not {named.node_of(task) for task in gone} & drawn
    assert select._cache_size() == observe._cache_size() == 1


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"belief": "gaussian_field"}, "belief must be 'diffusion' here"),
        ({"select": "greedy"}, "select must be 'sample' here"),
        ({"cost": "tokens"}, "cost must be 'none' here"),
        ({"value": "environment"}, "needs a look at every task"),
        ({"rounds": 0}, "rounds must be 1 or 2 here, got 0"),
        ({"candidates": 31}, "candidates must be at least 8 and 4 times the batch, got 31"),
        ({"refresh": 0}, "refresh must be at least 1"),
        ({"gamma": 0.0}, "gamma must be above 0 here"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        schedulers.make("envsched_incremental", **SIZES, **settings)
