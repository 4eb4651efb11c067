"""Pools that grow and shrink: no new compilation, nothing retired is drawn, beliefs about the others stay."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_graph import by_name, make_record, table

from envsched_jax import graph, schedulers, testing
from envsched_jax.pool import PoolError, Record, Verifier
from envsched_jax.select import quota
from envsched_jax.types import EDGE_KINDS

K = 3
OPTIONS = {"k": K, "num_patterns": 6, "feature_dim": 16}
SIZES = {"batch_size": 6, "group_size": 4}
DRAWERS = ("diffusion", "no_graph", "stratified", "uniform")


def recipe(name):
    """A recipe and its settings; 'diffusion' is envsched with that belief, which promises that beliefs stay."""
    return ("envsched", SIZES | {"belief": name}) if name == "diffusion" else (name, SIZES)


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_dtype_promotion("strict"):
        yield


@functools.cache
def records():
    """Old records in environments 0..3, then new ones in 2..5, of which 4 and 5 are new."""
    rng = np.random.default_rng(7)
    old = [make_record(i, i % 4, rng) for i in range(33)]
    return tuple(old), tuple(make_record(100 + i, 2 + i % 4, rng) for i in range(7))


@functools.cache
def built(capacity=40):
    return graph.build(records()[0], **OPTIONS, capacity=capacity, env_capacity=8)


@functools.cache
def programs(name):
    """The recipe, and its two programs that note down when they are traced."""
    known, settings = recipe(name)
    scheduler, traces = schedulers.make(known, **settings), []

    def select(*args):
        traces.append("select")
        return scheduler.select(*args)

    def observe(*args):
        traces.append("observe")
        return scheduler.observe(*args)

    return scheduler, jax.jit(select), jax.jit(observe), traces


def play(name, g, state, steps, seed=0):
    """Returns the state after some steps, and all nodes that were drawn."""
    _, select, observe, _ = programs(name)
    drawn = []
    for step in range(steps):
        key = jax.random.fold_in(jax.random.key(seed), step)
        batch = select(key, g, state)
        drawn.append(np.asarray(batch.node)[np.asarray(batch.mask)])
        state = observe(g, state, testing.simulate(jax.random.fold_in(key, 9), g, batch, SIZES["group_size"]))
    return state, np.concatenate(drawn)


@functools.cache
def belief_program(name):
    known, settings = recipe(name)
    return jax.jit(schedulers.belief_fn(known, **settings))


def believe(name, g, state):
    return jax.tree.map(np.asarray, belief_program(name)(g, state))


def assert_same_beliefs(before, after, n):
    for name, old, new in zip(before._fields, before, after, strict=True):
        np.testing.assert_allclose(new[:n], old[:n], rtol=0, atol=1e-6 * max(1.0, np.abs(old).max()), err_msg=name)


# ---------------------------------------------------------------- extend


@pytest.mark.parametrize("capacity", [40, 33])
def test_old_rows_stay_and_new_rows_are_those_of_a_full_build(capacity):
    old, new = records()
    g, index = built(capacity)
    g = graph.retire(g, index, [old[5].task_id])
    grown, named = graph.extend(g, index, old, new)
    n, total = len(old), len(old) + len(new)
    assert named.task_ids[:n] == index.task_ids and named.env_ids[:4] == index.env_ids
    assert sorted(named.task_ids[n:]) == sorted(r.task_id for r in new)
    assert named.capacity == 40 == grown.nodes.mask.shape[0] and named.env_capacity == 8
    assert [[*old, *new][i].task_id for i in named.record] == list(named.task_ids)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[:n], y[:n]), g.nodes, grown.nodes)
    for leaf in ("senders", "mask", "similarity"):
        x, y = (table(h, h.senders if leaf == "senders" else getattr(h.edges, leaf), K) for h in (g, grown))
        np.testing.assert_array_equal(x[:, :n], y[:, :n])
        assert not y[:, total:].any() or leaf == "senders"

    full = by_name(*graph.build([*old, *new], **OPTIONS, keep=index), k=K)
    ours = by_name(grown, named, k=K)
    for r in new:
        assert {**ours[r.task_id], "pattern": 0} == {**full[r.task_id], "pattern": 0}
    senders = table(grown, k=K)
    assert senders[:, n:total].max() >= n > senders[:, :n].max()  # new ones see new ones, old ones do not
    assert (senders[:, n:total] == index.node_of(old[5].task_id)).any()  # a retired task is still a neighbour
    assert np.asarray(grown.globals.env_mask).tolist() == [True] * 6 + [False] * 2
    exists = np.asarray(grown.nodes.pattern)[:total]
    assert np.asarray(grown.globals.pattern_mask).tolist() == [p in exists for p in range(6)]
    assert int(grown.n_node[0]) == 40 and int(grown.n_edge[0]) == 2 * K * 40
    if capacity == 40:
        assert jax.tree.map(lambda x: (x.shape, x.dtype), grown) == jax.tree.map(lambda x: (x.shape, x.dtype), g)


def test_order_of_new_records_and_none_at_all():
    old, new = records()
    g, index = built()
    first, named = graph.extend(g, index, old, new)
    other, renamed = graph.extend(g, index, old, new[::-1])
    jax.tree.map(np.testing.assert_array_equal, first, other)
    assert named.task_ids == renamed.task_ids
    same, kept = graph.extend(g, index, old, [])
    jax.tree.map(np.testing.assert_array_equal, g, same)
    assert kept.task_ids == index.task_ids and kept.record.tolist() == index.record.tolist()


def test_more_new_tasks_than_a_block_of_the_search():
    rng = np.random.default_rng(3)
    old, new = [make_record(i, i % 3, rng) for i in range(20)], [make_record(100 + i, i % 5, rng) for i in range(300)]
    g, index = graph.build(old, **OPTIONS)
    grown, named = graph.extend(g, index, old, new)
    full = by_name(*graph.build([*old, *new], **OPTIONS, keep=index), k=K)
    ours = by_name(grown, named, k=K)
    assert all(ours[r.task_id]["edges"] == full[r.task_id]["edges"] for r in new)


def test_new_names_leave_old_directions_alone():
    """Features of tasks that came at different times lie in one space: new tools do not turn it."""
    old = [Record(f"t{i}", "e", f"task about {'abcd'[i]}", (f"tool{i}", "x"), (f"tool{i}",)) for i in range(4)]
    g, index = graph.build(old, k=2, num_patterns=2, feature_dim=256, capacity=8)
    new = [dataclasses.replace(old[1], task_id="twin"), Record("n", "e", "else", ("a_tool", "zz"), ("a_tool", "zz"))]
    grown, named = graph.extend(g, index, old, new)
    rows = np.asarray(grown.nodes.feature)
    assert rows[named.node_of("twin")] @ rows[named.node_of("t1")] > 0.97
    assert abs(rows[named.node_of("n")] @ rows[named.node_of("t1")]) < 0.6


def test_errors_name_the_tasks():
    old, new = records()
    g, index = built()
    far = [make_record(500 + i, 9 + i, np.random.default_rng(0)) for i in range(5)]
    many = [dataclasses.replace(new[0], task_id=f"x{i}") for i in range(8)]
    for bad, options, error, message in [
        ([new[0], old[3]], {}, PoolError, "1 of the task_ids are there already: 'task-3': .*restore"),
        ([new[0], new[0]], {}, PoolError, "1 of the task_ids are there already: 'task-100'"),
        (new, {"capacity": 39}, ValueError, "capacity=39: expected room for 40 tasks"),
        (new[:1], {"capacity": 39}, ValueError, "capacity=39: expected at least 40, that of the graph"),
        (far, {"env_capacity": 8}, ValueError, "env_capacity=8: expected room for 9 environments"),
        (many, {"capacity": 40}, ValueError, "capacity=40: expected room for 41 tasks"),
    ]:
        with pytest.raises(error, match=message):
            graph.extend(g, index, old, bad, **options)
    with pytest.raises(PoolError, match=r"records: 32: expected the 33 that the index was made from"):
        graph.extend(g, index, old[:-1], new)
    with pytest.raises(PoolError, match=r"records: number \d+ is 'task-\d+': expected 'task-\d+', the order"):
        graph.extend(g, index, old[::-1], new)
    vectors = [Record(t, "e", "", (), embedding=(1.0, 0.0)) for t in "abc"]
    g2, index2 = graph.build(vectors, **OPTIONS)
    with pytest.raises(PoolError, match="1 have no embedding, as all others do: 'd'"):
        graph.extend(g2, index2, vectors, [Record("d", "e", "", ())])
    with pytest.raises(PoolError, match="field 'embedding': 2 and 3 numbers"):
        graph.extend(g2, index2, vectors, [Record("d", "e", "", (), embedding=(1.0, 0.0, 1.0))])
    names = [f"nobody-{i}" for i in range(7)]
    for change in (graph.retire, graph.restore):
        with pytest.raises(PoolError, match=rf"{change.__name__}: 7 of the task_ids are not .*'nobody-4', \.\.\."):
            change(g, index, [*names, old[0].task_id])


# ---------------------------------------------------------------- retire and restore


def test_retired_tasks_leave_only_the_choice():
    old, _ = records()
    g, index = built()
    gone = [r.task_id for r in old if r.env_id == "env-2"] + [old[0].task_id]
    fewer = graph.retire(g, index, gone)
    assert set(graph.retired(fewer, index)) == set(gone) and graph.retired(g, index) == ()
    assert int(fewer.nodes.mask.sum()) == len(old) - len(gone)
    jax.tree.map(np.testing.assert_array_equal, g.edges, fewer.edges)
    jax.tree.map(np.testing.assert_array_equal, g.nodes._replace(mask=0), fewer.nodes._replace(mask=0))
    counts = quota.count_tasks(fewer)
    assert counts[index.env_ids.index("env-2")] == 0 and counts[index.env_ids.index("env-0")] == 8
    share = quota.shares(fewer, mode="uniform")
    assert share[index.env_ids.index("env-2")] == 0 and float(share.sum()) == pytest.approx(1)
    again = graph.retire(fewer, index, gone[:2])
    jax.tree.map(np.testing.assert_array_equal, fewer, again)
    back = graph.restore(again, index, gone)
    jax.tree.map(np.testing.assert_array_equal, g, back)
    rebuilt, index2 = graph.build(old, **OPTIONS, keep=index)
    assert graph.retired(graph.retire(rebuilt, index2, graph.retired(fewer, index)), index2) == graph.retired(
        fewer, index
    )


def test_rewiring_keeps_retired_tasks_as_candidates():
    g, index = built()
    fewer = graph.retire(g, index, index.task_ids[::2])
    x, y = (graph.rewire(jax.random.key(0), h) for h in (g, fewer))
    np.testing.assert_array_equal(x.senders, y.senders)
    assert (table(y, k=K) != np.arange(40))[np.asarray(y.edges.mask).reshape(2 * K, 40)].all()


# ---------------------------------------------------------------- runs


@pytest.mark.parametrize("name", DRAWERS)
def test_no_trace_inside_a_bucket_and_nothing_retired_is_drawn(name):
    old, new = records()
    g, index = built()
    scheduler, _, _, traces = programs(name)
    state, _ = play(name, g, scheduler.init(g), 4)
    g, named = graph.extend(g, index, old, new)
    gone = [old[0].task_id, old[1].task_id, new[0].task_id, *(r.task_id for r in old if r.env_id == "env-3")]
    g = graph.retire(g, named, gone)
    nodes = {named.node_of(t) for t in gone}
    state = schedulers.grow(state, g, scheduler)
    state, drawn = play(name, g, state, 30, seed=1)
    assert not nodes & set(drawn.tolist()) and drawn.max() < 40
    assert {named.node_of(r.task_id) for r in new[1:]} & set(drawn.tolist())
    assert not set(np.flatnonzero(state.history.visits).tolist()) - nodes - set(range(40))
    g = graph.restore(g, named, gone)
    _, drawn = play(name, g, state, 30, seed=2)
    assert nodes & set(drawn.tolist())
    assert traces == ["select", "observe"]


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(schedulers.RECIPES) - {"envsched_incremental"}))  # see test_incremental
def test_every_recipe_grows_over_a_border_with_what_it_remembers(name):
    old, new = records()
    g, index = graph.build(old, **OPTIONS, capacity=33, env_capacity=4)
    grown, named = graph.extend(g, index, old, new)
    gone = [*named.task_ids[:5], *named.task_ids[-2:]]
    scheduler = programs(name)[0]
    state, _ = play(name, g, scheduler.init(g), 2)
    wide = schedulers.grow(state, grown, scheduler)
    fresh = scheduler.init(grown)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), wide) == jax.tree.map(lambda x: (x.shape, x.dtype), fresh)
    for kept, new_leaf in zip(jax.tree.leaves(state), jax.tree.leaves(wide), strict=True):
        np.testing.assert_array_equal(new_leaf[tuple(slice(0, n) for n in kept.shape)], kept)
    _, drawn = play(name, graph.retire(grown, named, gone), wide, 8, seed=3)
    assert len(drawn) == 8 * SIZES["batch_size"]
    assert not {named.task_ids[node] for node in drawn} & set(gone)


@pytest.mark.parametrize("name", ["diffusion", "no_graph", "env_mean"])
def test_beliefs_about_the_others_stay(name):
    """When tasks join, also across the border of a bucket, and when tasks leave; for all that was learned so far."""
    old, new = records()
    g, index = graph.build(old, **OPTIONS, capacity=33)
    scheduler = programs(name)[0]
    state, _ = play("uniform", g, scheduler.init(g), 6)
    before = believe(name, g, state)
    assert before.mean[:33].std() > 0.05
    fewer = graph.retire(g, index, [r.task_id for r in old[::3]])
    assert_same_beliefs(before, believe(name, fewer, state), 33)
    grown, named = graph.extend(fewer, index, old, new)
    wide = schedulers.grow(state, grown, scheduler)
    assert wide.truth.shape == (40,)
    after = believe(name, grown, wide)
    assert_same_beliefs(before, after, 33)
    if name == "diffusion":  # a new task borrows at once, also from retired ones
        assert (after.evidence[33:40] > 0).all()
        lender = graph.retire(grown, named, named.task_ids[:33])
        assert_same_beliefs(after, believe(name, lender, wide), 40)


@pytest.mark.slow
def test_beliefs_of_the_field_about_the_others():
    """They stay when tasks leave, for good, and at the moment when tasks join.

    With the next outcome new tasks are solved for along with the old ones and hold them a little to the mean, also
    before any evidence of their own, as they would have had they been there from the beginning.
    """
    old, new = records()
    g, index = graph.build(old, **OPTIONS, capacity=33, env_capacity=8)
    scheduler, select, observe, _ = programs("envsched")
    state, _ = play("envsched", g, scheduler.init(g), 12)
    before = believe("envsched", g, state)
    assert before.mean.std() > 0.05
    fewer = graph.retire(g, index, [r.task_id for r in old[::3]])
    grown, _ = graph.extend(fewer, index, old, new)
    wide = schedulers.grow(state, grown, scheduler)
    jax.tree.map(np.testing.assert_array_equal, before, believe("envsched", fewer, state))
    assert_same_beliefs(before, believe("envsched", grown, wide), 33)

    batch = select(jax.random.key(5), fewer, state)
    outcome = testing.simulate(jax.random.key(6), fewer, batch, SIZES["group_size"])
    after = believe("envsched", g, observe(g, state, outcome))
    left = believe("envsched", fewer, observe(fewer, state, outcome))
    jax.tree.map(np.testing.assert_array_equal, after, left)
    joined = believe("envsched", grown, observe(grown, wide, outcome))
    moved = np.abs(after.mean - before.mean).max()
    assert np.abs(joined.mean[:33] - after.mean).max() < min(0.02, 0.5 * moved)
    assert np.isfinite(joined.mean).all() and joined.mean[33:40].std() > 0.01  # and they tell the new ones apart


# ---------------------------------------------------------------- the state


def test_grown_states_keep_old_rows_and_start_new_ones():
    old, _ = records()
    g, index = graph.build(old[:8], **OPTIONS)
    scheduler = programs("diffusion")[0]

    def init(graph):
        n, e = graph.nodes.mask.shape[0], graph.globals.env_mask.shape[0]
        memory = {
            "node": jnp.full((n, 3), 7.0),
            "env": jnp.full(e, -1, jnp.int32),
            "both": jnp.ones((e, n)),
            "other": jnp.zeros(5),
        }
        return scheduler.init(graph)._replace(memory=memory)

    custom = scheduler._replace(init=init)
    grown, _ = graph.extend(g, index, old[:8], old[8:], env_capacity=16)
    state = jax.tree.map(lambda x: x + jnp.ones((), x.dtype), init(g))
    wide = schedulers.grow(state, grown, custom)
    fresh = init(grown)
    assert jax.tree.map(jnp.shape, wide) == jax.tree.map(jnp.shape, fresh)
    assert (g.nodes.mask.shape, grown.nodes.mask.shape, wide.quota_carry.shape) == ((8,), (40,), (16,))
    for new, kept, start in zip(*map(jax.tree.leaves, (wide, state, fresh)), strict=True):
        inside = np.zeros(new.shape, bool)
        inside[tuple(slice(0, size) for size in kept.shape)] = True
        np.testing.assert_array_equal(np.asarray(new)[inside], np.asarray(kept).reshape(-1))
        np.testing.assert_array_equal(np.asarray(new)[~inside], np.asarray(start)[~inside])
        assert new.dtype == kept.dtype
    assert wide.history.last_step.tolist() == [0] * 8 + [-1] * 32
    same = schedulers.grow(state, g, custom)
    assert all(x is y for x, y in zip(jax.tree.leaves(same), jax.tree.leaves(state), strict=True))
    seeds = jax.tree.map(lambda x: jnp.stack([x, x]), state)
    many = jax.jit(jax.vmap(lambda s: schedulers.grow(s, grown, custom)))(seeds)
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(x[1], y), many, wide)


def test_states_that_cannot_grow():
    old, _ = records()
    small, index = graph.build(old[:8], **OPTIONS)
    large, _ = graph.extend(small, index, old[:8], old[8:])
    scheduler = schedulers.make("uniform", **SIZES)
    with pytest.raises(ValueError, match="graph: room for 8 nodes or environments: expected at least 40"):
        schedulers.grow(scheduler.init(large), small, scheduler)
    other = scheduler._replace(init=lambda graph: scheduler.init(graph)._replace(memory=(graph.senders,)))
    with pytest.raises(ValueError, match="its memory is of another scheduler"):
        schedulers.grow(scheduler.init(small), large, other)
    with pytest.raises(
        ValueError, match=r"state.memory\[0\]: shape \(48,\) becomes \(240,\): expected axes that count"
    ):
        schedulers.grow(other.init(small), large, other)


# ---------------------------------------------------------------- a long run


@pytest.mark.parametrize(("name", "seed"), [pytest.param("diffusion", 0, marks=pytest.mark.slow), ("uniform", 1)])
def test_a_run_with_tasks_that_come_and_go(name, seed):
    """Adds, retires and restores at random over several buckets, and checks after each what must always hold."""
    rng = np.random.default_rng(seed)
    pool = [make_record(i, i % 3, rng) for i in range(6)]
    g, index = graph.build(pool, **OPTIONS, env_capacity=16)
    scheduler, _, _, traces = programs(name)
    state, gone, start, buckets = scheduler.init(g), set(), len(traces), {8}
    believes = believe("diffusion", g, state)
    for turn in range(12):
        before, carried, n = by_name(g, index, k=K), jax.tree.map(np.asarray, state), len(pool)
        active = [t for t in index.task_ids if t not in gone]
        if turn % 2 == 0:
            added = [make_record(1000 * (turn + 1) + i, rng.integers(turn + 3), rng) for i in range(rng.integers(1, 6))]
            g, index = graph.extend(g, index, pool, added)
            pool += added
            state = schedulers.grow(state, g, scheduler)
        elif turn % 3:
            leaving = rng.choice(active, rng.integers(1, 4), replace=False).tolist()
            g, gone = graph.retire(g, index, leaving), gone | set(leaving)
        else:
            g, gone = graph.restore(g, index, gone), set()
        buckets.add(index.capacity)
        assert set(graph.retired(g, index)) == gone
        after = by_name(g, index, k=K)
        assert all(after[t] == before[t] for t in before)
        old = jax.tree.map(lambda x, y: x[: len(y)] if y.ndim else x, state, carried)
        jax.tree.map(np.testing.assert_array_equal, old, carried)
        assert_same_beliefs(believes, believe("diffusion", g, state), n)
        state, drawn = play(name, g, state, 3, seed=turn)
        assert not {index.task_ids[i] for i in drawn} & gone
        eligible = len(pool) - len(gone)
        assert len(drawn) == 3 * min(SIZES["batch_size"], eligible)
        believes = believe("diffusion", g, state)
    assert len(buckets) > 2 and len(traces) - start <= 2 * len(buckets)
    if name == "uniform":
        testing.check_scheduler(scheduler, g, jax.random.key(0), eager=False)


def test_the_verifier_checks_and_uids_of_new_tasks():
    old, _ = records()
    g, index = built()
    new = [Record("p", "env-0", "", (), verifier=Verifier("v", 4, True)), Record("q", "env-0", "", ())]
    grown, named = graph.extend(g, index, old, new)
    rows = [named.node_of(t) for t in "pq"]
    assert grown.nodes.checks[jnp.asarray(rows)].tolist() == [4, 1]
    assert grown.nodes.uid[jnp.asarray(rows)].tolist() == [graph.task_uid(t) for t in "pq"]
    assert grown.edges.similarity.shape == (2 * K * 40, len(EDGE_KINDS))


# ---------------------------------------------------------------- transfer


@functools.cache
def moved():
    """A graph, one of another pool in another order and size, and where old tasks and environments are in it."""
    old, new = records()
    g, index = built()
    kept = [*old[4:], *new][::-1]
    other, named = graph.build(kept, **OPTIONS, capacity=56, env_capacity=16)
    there = set(named.task_ids)
    node = np.array([named.node_of(t) if t in there else -1 for t in index.task_ids])
    env = np.array([named.env_ids.index(e) if e in named.env_ids else -1 for e in index.env_ids])
    return g, other, node, env


SLOW = ("envsched", "envsched_incremental", "mopps", "potts_graph")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in sorted(schedulers.RECIPES)]
)
def test_a_state_moves_to_another_pool_row_by_row(name):
    g, other, node, env = moved()
    scheduler, settings = schedulers.make(name, **SIZES), SIZES["group_size"]
    state = jax.jit(scheduler.init)(g)
    select, observe = jax.jit(scheduler.select), jax.jit(scheduler.observe)
    for step in range(3):
        key = jax.random.fold_in(jax.random.key(1), step)
        batch = select(key, g, state)
        state = observe(g, state, testing.simulate(key, g, batch, settings))
    sizes = g.nodes.mask.shape[0], g.globals.env_mask.shape[0]
    there = schedulers.transfer(state, other, scheduler, node, env, sizes)
    fresh = scheduler.init(other)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), there) == jax.tree.map(lambda x: (x.shape, x.dtype), fresh)
    known = node >= 0
    for leaf in state.history._fields:
        old, new, start = (np.asarray(getattr(s.history, leaf)) for s in (state, there, fresh))
        np.testing.assert_array_equal(new[node[known]], old[: len(node)][known], err_msg=leaf)
        rest = np.setdiff1d(np.arange(len(new)), node[known])
        np.testing.assert_array_equal(new[rest], start[rest], err_msg=leaf)
    carry = np.asarray(there.quota_carry)
    np.testing.assert_array_equal(carry[env[env >= 0]], np.asarray(state.quota_carry)[: len(env)][env >= 0])
    assert int(there.step) == 3
    drawn = jax.jit(scheduler.select)(jax.random.key(2), other, there)  # and it can go on
    assert np.asarray(drawn.mask).sum() == SIZES["batch_size"]

    same = schedulers.transfer(state, g, scheduler, *map(np.arange, sizes), sizes)
    if name != "envsched_incremental":  # which works its memory out anew
        jax.tree.map(np.testing.assert_array_equal, same, state)


def test_a_state_of_other_sizes_does_not_move():
    g, other, node, env = moved()
    scheduler = schedulers.make("uniform", **SIZES)
    with pytest.raises(ValueError, match=r"state\.history\.n: axis 0 has 40: expected 41"):
        schedulers.transfer(scheduler.init(g), other, scheduler, node, env, (41, 8))
