import inspect
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envsched_jax import schedulers, testing
from envsched_jax.belief import history
from envsched_jax.schedulers import common
from envsched_jax.select import quota, sample
from envsched_jax.types import Outcome, Status

SIZES = {"batch_size": 5, "group_size": 4}
VARIANTS = {
    "envsched": {},
    "no_graph": {"value": "variance", "quota": "proportional"},
    "env_mean": {"select": "greedy", "informative": "share", "quota": "uniform"},
    "uniform": {},
    "stratified": {},
    "oracle": {"select": "argmax"},
    "mopps": {"candidates": 2, "discount": 0.5, "prior": (1.0, 2.0)},
    "mapp": {},
    "sec": {},
    "dump_ucb": {"window": 7},
    "scaler": {"active": 3, "patience": 2, "window": 2},
    "learnability": {},
    "plr": {"fill": 0.2},
    "vip_gp": {},
    "potts_graph": {"states": 4, "neighbours": 6},
    "gps_lite": {"updates": 3},
    "envsched_incremental": {"candidates": 64, "refresh": 2},
}


@pytest.fixture(scope="module")
def graph():
    return testing.tiny_graph(19, envs=4, k=3, seed=3, capacity=20)


def programs(name, **settings):
    scheduler = schedulers.make(name, **SIZES | settings)
    return scheduler, jax.jit(scheduler.select), jax.jit(scheduler.observe)


def outcome_of(graph, batch, key=None, failures=0.0):
    key = jax.random.key(0) if key is None else key
    return testing.simulate(key, graph, batch, SIZES["group_size"], failures)


# the laws, for every recipe

# The Gaussian field ages with every step and solves equations to a thousandth.
ALLOWANCE = {"envsched": {"ages": True, "tolerance": 5e-3}}


@pytest.mark.parametrize("name", ["envsched", "uniform"])
def test_laws(graph, name):
    scheduler = schedulers.make(name, **SIZES | VARIANTS[name])
    testing.check_scheduler(scheduler, graph, jax.random.key(1), eager=name == "uniform", **ALLOWANCE.get(name, {}))


def test_laws_with_beliefs_by_diffusion(graph):
    testing.check_scheduler(schedulers.envsched(**SIZES, belief="diffusion"), graph, jax.random.key(1), eager=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(schedulers.RECIPES))
def test_laws_also_op_by_op(graph, name):
    # Solving for the field op by op takes minutes; it is held to the other laws above.
    belief = {"belief": "diffusion"} if name == "envsched" else {}
    scheduler = schedulers.make(name, **SIZES | VARIANTS[name] | belief)
    allowed = {"ages": True, "numbers": True} if name == "envsched_incremental" else {}
    testing.check_scheduler(scheduler, graph, jax.random.key(2), **allowed)


def broken(name, graph):
    """Returns the uniform recipe with one fault."""
    good = schedulers.uniform(**SIZES)

    def select(key, graph, state):
        batch = good.select(key, graph, state)
        if name == "repeat":
            return batch._replace(node=batch.node.at[1].set(batch.node[0]))
        if name == "padding":
            return batch._replace(node=batch.node.at[0].set(graph.nodes.mask.shape[0] - 1))
        if name == "count":
            return batch._replace(mask=batch.mask.at[0].set(False))
        if name == "numbering":
            node, mask = sample.draw(
                jax.random.uniform(key, graph.nodes.uid.shape), graph.nodes.mask, graph.nodes.env, None, 5
            )
            return common.to_batch(node, mask, jnp.zeros_like(mask), state.truth)
        if name == "keys":
            return batch._replace(value=batch.value + 0.0 * (jax.random.normal(key) + jax.random.uniform(key)))
        return batch

    def observe(graph, state, outcome):
        if name == "mask":  # looks at rewards under any status
            sums = outcome.reward.sum(axis=1)
            return good.observe(graph, state, outcome)._replace(truth=state.truth.at[outcome.node].add(sums))
        if name == "failure":  # a failed rollout counts as reward 0
            failed = outcome.status > Status.POLICY_TIMEOUT
            outcome = outcome._replace(
                reward=jnp.where(failed, 0.0, outcome.reward),
                status=jnp.where(failed, jnp.int8(Status.OK), outcome.status),
            )
        if name == "absent":
            return good.observe(graph, state, outcome)._replace(truth=state.truth + 1.0)
        if name == "carry":
            return good.observe(graph, state, outcome)._replace(truth=state.truth.astype(jnp.float16))
        return good.observe(graph, state, outcome)

    return good._replace(select=select, observe=observe)


@pytest.mark.parametrize(
    "law", ["repeat", "padding", "count", "numbering", "keys", "mask", "failure", "absent", "carry"]
)
def test_the_check_catches(graph, law):
    with pytest.raises(AssertionError, match=law):
        testing.check_scheduler(broken(law, graph), graph, jax.random.key(1), eager=False)


# the registry


def test_every_recipe_takes_the_sizes_and_refuses_unknown_settings():
    for name in schedulers.RECIPES:
        with pytest.raises(TypeError, match="batchsize"):
            schedulers.make(name, **SIZES, batchsize=3)
        with pytest.raises(TypeError, match="group_size"):
            schedulers.make(name, batch_size=3)
        with pytest.raises(ValueError, match="at least 1"):
            schedulers.make(name, batch_size=0, group_size=4)
    assert list(schedulers.RECIPES) == sorted(schedulers.RECIPES)
    with pytest.raises(ValueError, match="unknown scheduler 'mopps2'"):
        schedulers.make("mopps2", **SIZES)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"belief": "magic"}, "belief must be one of"),
        ({"select": "argmax"}, "select must be one of"),
        ({"value": "regret"}, "value must be one of"),
        ({"quota": "fair"}, "quota must be one of"),
        ({"informative": "no"}, "informative must be one of"),
        ({"gamma": 1.5}, "gamma must lie"),
        ({"explore_share": -0.1}, "explore_share must lie"),
        ({"quota": "weights"}, "needs them"),
        ({"quota_weights": (1.0,)}, "belong to"),
        ({"quota": "none", "quota_cap": 3}, "belongs to"),
        ({"quota_cap": 0}, "at least 1"),
        ({"kind_weights": (1.0,)}, "needs 7 numbers"),
        ({"shortlist": 3}, "twice the batch"),
    ],
)
def test_settings_that_cannot_work_are_refused_at_once(settings, message):
    with pytest.raises(ValueError, match=message):
        schedulers.make("envsched", **SIZES, **settings)


def test_belief_fn_is_what_the_recipe_believes(graph):
    for name in ("envsched", "no_graph", "env_mean"):
        scheduler, select, observe = programs(name)
        state = scheduler.init(graph)
        batch = select(jax.random.key(0), graph, state)
        state = observe(graph, state, outcome_of(graph, batch))
        belief = jax.jit(schedulers.belief_fn(name, **SIZES))(graph, state)
        batch = select(jax.random.key(1), graph, state)
        assert np.allclose(batch.predicted_mean, belief.mean[batch.node], atol=1e-6)
        assert np.allclose(batch.predicted_variance, belief.variance[batch.node], atol=1e-6)
        assert np.allclose(batch.p_informative, belief.p_informative[batch.node], atol=1e-6)
    for name in ("uniform", "stratified", "oracle"):
        assert schedulers.belief_fn(name, **SIZES) is None
    with pytest.raises(TypeError, match="unknown"):
        schedulers.belief_fn("no_graph", **SIZES, unknown=1)
    assert inspect.signature(schedulers.oracle).parameters["power"].default == 8.0


def test_the_three_beliefs_differ_where_they_should(graph):
    _, select, observe = programs("uniform")
    state = schedulers.uniform(**SIZES).init(graph)
    state = observe(graph, state, outcome_of(graph, select(jax.random.key(0), graph, state)))
    full, own, flat = (
        jax.jit(schedulers.belief_fn("envsched", **SIZES, belief=belief))(graph, state).mean[:19]
        for belief in ("diffusion", "no_graph", "env_mean")
    )
    env = np.asarray(graph.nodes.env)[:19]
    fresh = np.asarray(state.history.visits)[:19] == 0
    assert all(np.ptp(np.asarray(flat)[env == e]) < 1e-6 for e in range(4))
    assert np.allclose(np.asarray(own)[fresh], np.asarray(flat)[fresh], atol=1e-6)
    assert np.abs(np.asarray(own) - np.asarray(flat))[~fresh].max() > 0.05
    assert np.abs(np.asarray(full) - np.asarray(own))[fresh].max() > 0.02


# values


def test_uniform_is_shuffled_epochs(graph):
    scheduler, select, observe = programs("uniform")
    state = scheduler.init(graph)
    picks = []
    for step in range(19):  # five epochs of 19 tasks in batches of 5
        batch = select(jax.random.key(step), graph, state)
        picks += batch.node.tolist()
        state = observe(graph, state, outcome_of(graph, batch, failures=0.5))
    epochs = [picks[i : i + 19] for i in range(0, 95, 19)]
    assert all(sorted(epoch) == list(range(19)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 5


def test_uniform_draws_every_task_equally_often(graph):
    scheduler = schedulers.uniform(**SIZES)
    state = scheduler.init(graph)
    select = jax.jit(jax.vmap(lambda key: scheduler.select(key, graph, state).node))
    seen = np.bincount(np.asarray(select(jax.random.split(jax.random.key(0), 20_000))).ravel(), minlength=20) / 20_000
    p = 5 / 19
    assert np.abs(seen[:19] - p).max() < 4.5 * math.sqrt(p * (1 - p) / 20_000) and seen[19] == 0


def test_stratified_is_even_over_environments(graph):
    graph = graph._replace(nodes=graph.nodes._replace(env=jnp.arange(20, dtype=jnp.int32) // 5))
    scheduler, select, observe = programs("stratified")
    state = scheduler.init(graph)
    per_env = np.zeros(4)
    for step in range(21):
        batch = select(jax.random.key(step), graph, state)
        np.add.at(per_env, np.asarray(graph.nodes.env)[np.asarray(batch.node)], 1)
        state = observe(graph, state, outcome_of(graph, batch))
        assert np.abs(per_env - (step + 1) * 5 / 4).max() < 1.0
    visits, env = np.asarray(state.history.visits)[:19], np.asarray(graph.nodes.env)[:19]
    assert all(np.ptp(visits[env == e]) <= 1 for e in range(4))


def test_oracle_reads_the_truth(graph):
    truth = jnp.zeros(20).at[jnp.asarray([2, 3, 5, 7, 11])].set(0.5).at[0].set(jnp.nan)
    for settings in ({"select": "argmax"}, {"power": 9.0}):
        scheduler, select, _ = programs("oracle", **settings)
        state = scheduler.init(graph)._replace(truth=truth)
        batch = select(jax.random.key(0), graph, state)
        assert sorted(batch.node.tolist()) == [2, 3, 5, 7, 11] and batch.value.tolist() == [0.5] * 5
        assert np.isnan(np.asarray(batch.p_informative)).all()
    one = schedulers.oracle(batch_size=1, group_size=4, power=2.0)
    state = one.init(graph)._replace(truth=jnp.zeros(20).at[2].set(0.2).at[3].set(0.4))
    draw = jax.jit(jax.vmap(lambda key: one.select(key, graph, state).node[0]))
    seen = np.bincount(np.asarray(draw(jax.random.split(jax.random.key(0), 20_000))), minlength=20) / 20_000
    assert seen[3] == pytest.approx(0.8, abs=0.013) and seen[2] == pytest.approx(0.2, abs=0.013)
    with pytest.raises(ValueError, match="sample, argmax"):
        schedulers.oracle(**SIZES, select="greedy")


def test_explore_picks_come_first_and_ignore_the_belief(graph):
    one, select, observe = programs("no_graph", explore_share=0.3, quota="none")
    state = one.init(graph)
    first = select(jax.random.key(7), graph, state)
    for step in range(3):
        state = observe(graph, state, outcome_of(graph, select(jax.random.key(step), graph, state)))
    later = select(jax.random.key(7), graph, state)
    assert first.explore.tolist() == [True, True, False, False, False]  # 0.3 of 5, rounded up
    assert first.node[:2].tolist() == later.node[:2].tolist()
    assert len({int(graph.nodes.env[i]) for i in first.node[:2]}) == 2


def test_sampling_prefers_what_is_worth_more_and_power_zero_does_not(graph):
    """20,000 batches of one: frequencies follow value ** power."""
    for power in (3.0, 0.0):
        settings = {"batch_size": 1, "group_size": 4, "explore_share": 0.0, "power": power, "quota": "none"}
        scheduler, _, _ = programs("no_graph", **settings)
        state = scheduler.init(graph)
        record = state.history
        n = jnp.where(jnp.arange(20) % 2 == 0, 40.0, 0.0) * graph.nodes.mask.astype(jnp.float32)
        state = state._replace(history=record._replace(n=n, s1=n, dof=n * 0.75, groups=n / 4))
        pick = jax.jit(jax.vmap(lambda key, s=scheduler, at=state: s.select(key, graph, at)))
        batch = pick(jax.random.split(jax.random.key(0), 20_000))
        value = np.zeros(20)
        value[np.asarray(batch.node)[:, 0]] = np.asarray(batch.value)[:, 0]
        seen = np.bincount(np.asarray(batch.node)[:, 0], minlength=20) / 20_000
        law = np.where(value > 0, value**power, 0.0) if power else np.arange(20) < 19
        law = law / law.sum()
        assert np.abs(seen - law).max() < 4.5 * math.sqrt(0.25 / 20_000)


@pytest.mark.parametrize("select_name", ["sample", "greedy"])
def test_quotas_hold_on_what_is_delivered(select_name):
    """Three environments at 0.5, 0.3, 0.2, with explore picks; 60 % of the first one's rows fail altogether."""
    graph = testing.tiny_graph(60, envs=3, k=2, seed=0)
    graph = graph._replace(nodes=graph.nodes._replace(env=jnp.arange(60, dtype=jnp.int32) // 20))
    weights = (0.5, 0.3, 0.2)
    scheduler = schedulers.envsched(
        batch_size=7, group_size=2, quota="weights", quota_weights=weights, select=select_name, explore_share=0.3
    )
    settings = schedulers.Settings(batch_size=7, group_size=2, quota="weights", quota_weights=weights)

    def step(state, index):
        key = jax.random.fold_in(jax.random.key(0), index)
        batch = scheduler.select(key, graph, state)
        over = quota.deviation(graph, batch, schedulers.quotas(settings, graph, state))
        env = graph.nodes.env[batch.node]
        lost = (env == 0) & (jax.random.uniform(jax.random.fold_in(key, 9), (7,)) < 0.6)
        status = jnp.where(lost[:, None], jnp.int8(Status.ENV_ERROR), jnp.int8(Status.OK)) * jnp.ones((7, 2), jnp.int8)
        reward, zero = jnp.zeros((7, 2)), jnp.zeros(7, jnp.int32)
        state = scheduler.observe(
            graph, state, Outcome(batch.node, batch.explore, reward, status, reward, reward, zero)
        )
        return state, (jnp.zeros(3).at[env].add(jnp.where(lost, 0.0, 1.0)), over)

    state, (delivered, over) = jax.jit(lambda s: jax.lax.scan(step, s, jnp.arange(150)))(scheduler.init(graph))
    total = np.asarray(delivered).sum(axis=0)
    assert not np.asarray(over).any()
    assert np.abs(total / total.sum() - weights).max() < 0.015
    assert np.allclose(state.quota_carry, np.asarray(weights) * total.sum() - total, atol=0.02)


def test_nothing_has_probability_zero_for_ever(graph):
    """Tasks seen to fail a hundred times are probed again once their records have faded."""
    scheduler, select, observe = programs("envsched", quota="none", gamma=0.9)
    state = scheduler.init(graph)
    seen = set()
    for step in range(60):
        batch = select(jax.random.key(step), graph, state)
        outcome = outcome_of(graph, batch)
        state = observe(graph, state, outcome._replace(reward=jnp.zeros_like(outcome.reward)))
        seen |= set(batch.node.tolist()) if step >= 30 else set()
    assert seen == set(range(19))


def test_a_run_is_one_scan_and_seeds_are_a_vmap(graph):
    scheduler = schedulers.envsched(**SIZES)

    def run(key):
        def step(state, index):
            batch = scheduler.select(jax.random.fold_in(key, 2 * index), graph, state)
            outcome = testing.simulate(jax.random.fold_in(key, 2 * index + 1), graph, batch, 4)
            return scheduler.observe(graph, state, outcome), batch.node

        return jax.lax.scan(step, scheduler.init(graph), jnp.arange(6))

    state, nodes = jax.jit(jax.vmap(run))(jax.random.split(jax.random.key(0), 3))
    assert state.step.tolist() == [6, 6, 6] and nodes.shape == (3, 6, 5)
    assert (np.asarray(state.history.visits).sum(axis=1) == 30).all()
    assert not np.array_equal(nodes[0], nodes[1])
    assert np.isfinite(np.asarray(state.history.s1)).all()


def test_states_can_be_donated(graph):
    scheduler = schedulers.envsched(**SIZES)
    observe = jax.jit(scheduler.observe, donate_argnums=1)
    state = scheduler.init(graph)
    batch = jax.jit(scheduler.select)(jax.random.key(0), graph, state)
    assert int(observe(graph, state, outcome_of(graph, batch)).step) == 1
    pointers = [x.unsafe_buffer_pointer() for x in jax.tree.leaves(history.init(4))]
    assert len(set(pointers)) == len(pointers)
