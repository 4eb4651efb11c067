import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import phase as phase_config
from envsched_jax import schedulers
from envsched_jax.train import build, grpo
from envsched_jax.train.advantages import advantages
from experiments import common, phase, phase_score, surrogate

GROUP, STEPS = 8, 5


@pytest.fixture(scope="module")
def world():
    return surrogate.build_world(**build.plain(phase_config.get_config("smoke").world))


def cell(degenerate=0.85, structure=0.5, rate=80.0, eps=1.0):
    return surrogate.Cell(*(jnp.float32(x) for x in (degenerate, structure, rate, eps)))


@pytest.fixture(scope="module")
def run(world):
    """Runs an arm with seeds and cells stacked."""

    def start(name, seeds, cells, sharp=False):
        one = partial(
            surrogate.simulate,
            scheduler=schedulers.make(name, batch_size=4, group_size=GROUP),
            steps=STEPS,
            group_size=GROUP,
            spread=3.0,
            sharp=sharp,
        )
        stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *cells)
        return jax.jit(jax.vmap(one, (0, None, 0)))(jnp.asarray(seeds), world, stacked)

    return start


def test_ascent_is_the_gradient_of_the_grpo_objective():
    rng = np.random.default_rng(0)
    weight = jnp.asarray(rng.standard_normal((6, 7)), jnp.float32)
    start, theta = (jnp.asarray(rng.standard_normal(n), jnp.float32) for n in (6, 7))
    reward = jnp.asarray(rng.random((6, GROUP)) < 0.4, jnp.float32).at[1].set(0.0).at[2].set(1.0)
    mask = jnp.array([True, True, True, True, True, False])
    everywhere = jnp.broadcast_to(mask[:, None], reward.shape)

    def logp(theta):
        logit = (start + weight @ theta)[:, None]
        return reward * jax.nn.log_sigmoid(logit) + (1.0 - reward) * jax.nn.log_sigmoid(-logit)

    def loss(theta):
        # One token per rollout: the loss that the package trains with.
        return grpo.loss(
            logp(theta)[..., None],
            jax.lax.stop_gradient(logp(theta))[..., None],
            advantages(reward, everywhere),
            everywhere[..., None],
        )

    closed = surrogate.ascent(weight, reward, mask)
    np.testing.assert_allclose(closed, -jax.grad(loss)(theta), atol=1e-6)
    passed = np.asarray(reward).mean(axis=1)
    formula = (np.sqrt(passed * (1 - passed)) * np.asarray(mask)) @ np.asarray(weight) / 5
    np.testing.assert_allclose(closed, formula, atol=2e-4)  # the deviation has 1e-4 added to it


def test_informative_share_equals_simulation():
    rate = np.array([0.0, 0.02, 0.3, 0.9, 1.0])
    draws = np.random.default_rng(0).random((40_000, GROUP, len(rate))) < rate
    differ = draws.any(axis=1) & ~draws.all(axis=1)
    np.testing.assert_allclose(surrogate.informative(jnp.asarray(rate), GROUP), differ.mean(axis=0), atol=0.01)


@pytest.mark.parametrize("sharp", [False, True])
def test_the_share_of_degenerate_groups_is_met(world, sharp):
    size = world.graph.nodes.mask.shape[0]
    mask = np.asarray(world.graph.nodes.mask)
    for target in (0.55, 0.85, 0.95):
        for structure in (0.0, 1.0):
            logit, factor = surrogate.difficulty(
                jax.random.key(3), world, cell(target, structure), spread=3.0, group_size=GROUP, sharp=sharp
            )
            rate = np.asarray(jax.nn.sigmoid(logit[:size]), np.float64)[mask]
            assert 1 - surrogate.informative(rate, GROUP).mean() == pytest.approx(target, abs=1e-4)
            assert sharp or factor == 1.0
            assert (0.3 < rate.mean() < 0.7) if sharp else rate.mean() < 0.4


def test_uniform_moves_the_policy_as_expected(world):
    """One step of uniform selection: a mean over many seeds beside the exact expectation of the gradient."""
    size, seeds = world.graph.nodes.mask.shape[0], 3000
    start, _ = surrogate.difficulty(jax.random.key(0), world, cell(0.6, 0.0), spread=3.0, group_size=GROUP, sharp=False)
    rate = np.asarray(jax.nn.sigmoid(start[:size]), np.float64)
    scheduler = schedulers.make("uniform", batch_size=4, group_size=GROUP)

    def once(seed):
        key = jax.random.key(seed)
        batch = scheduler.select(jax.random.fold_in(key, 0), world.graph, scheduler.init(world.graph))
        luck = jax.random.uniform(jax.random.fold_in(key, 1), (4, GROUP))
        reward = (luck < jax.nn.sigmoid(start)[batch.node][:, None]).astype(jnp.float32)
        return surrogate.ascent(world.weight[batch.node], reward, batch.mask)

    mean = np.asarray(jax.jit(jax.vmap(once))(jnp.arange(seeds))).mean(axis=0)
    count = np.arange(GROUP + 1)
    ways = np.array([1, 8, 28, 56, 70, 56, 28, 8, 1], np.float64)
    chance = ways * rate[:, None] ** count * (1 - rate[:, None]) ** (GROUP - count)
    push = chance @ np.sqrt(count / GROUP * (1 - count / GROUP))
    expected = np.asarray(world.average[surrogate.POOL, :size], np.float64) * push @ np.asarray(world.weight[:size])
    np.testing.assert_allclose(mean, expected, atol=5 * 0.25 / np.sqrt(4 * seeds))
    assert np.corrcoef(mean, expected)[0, 1] > 0.9


def test_cells_side_by_side_equal_cells_alone(run):
    cells = [cell(), cell(0.6, 1.0, 160.0), cell(0.95, 0.0, 0.1, 1e-8)]
    together = run("oracle", [0, 1, 2], cells)
    alone = run("oracle", [1], cells[1:2])
    for many, one in zip(together, alone, strict=True):
        np.testing.assert_allclose(many[1], one[0], atol=1e-3)
    assert np.isfinite(together.rate).all()
    np.testing.assert_allclose(together.degenerate, [0.85, 0.6, 0.95], atol=1e-3)


def test_arms_share_the_pool_and_the_oracle_sees_more_signal(run):
    cells = [cell(d, s) for d in (0.7, 0.9) for s in (0.0, 1.0)]
    uniform, oracle = (run(name, range(4), cells) for name in ("uniform", "oracle"))
    np.testing.assert_array_equal(uniform.rate[:, 0], oracle.rate[:, 0])
    assert (oracle.expected.mean(axis=1) >= uniform.expected.mean(axis=1)).all()
    gain = uniform.rate[:, -1, surrogate.POOL] - uniform.rate[:, 0, surrogate.POOL]
    assert gain.mean() > 0.0


def test_a_learning_rate_is_chosen_by_other_seeds_than_it_is_scored_on():
    value = np.array([[0.0, 9.0, 0.0, 9.0], [5.0, 0.0, 5.0, 0.0]])  # rate 0 is best for odd seeds, 1 for even ones
    assert phase_score.own_rate(value).tolist() == [0, 1, 0, 1]
    with pytest.raises(ValueError, match="at least 2 seeds"):
        phase_score.own_rate(value[:, :1])


def test_rollouts_to_a_level():
    curve = np.array([[0.0, 0.2, 0.5, 0.4, 0.6], [0.0, 0.1, 0.1, 0.1, 0.1]])
    assert phase_score.share_to_reach(np.array([0.5, 0.5]), curve).tolist() == [0.5, 1.0]


def test_what_cannot_be_is_said(world):
    with pytest.raises(ValueError, match="topologies must be from 1 to"):
        surrogate.records(range(2), topologies=9, depths=1, copies=1)
    config = phase_config.get_config("smoke")
    section = build.plain(config.world)
    with pytest.raises(ValueError, match="shares must be at least 0"):
        surrogate.build_world(**section | {"general": 0.99, "environment": 0.5})
    config.optimizers.sgd_like.rates = (1.0,)
    with pytest.raises(ValueError, match="as many learning rates"):
        phase.axes_of(config)
    config = phase_config.get_config("smoke")
    config.spread, config.degenerate, config.steps = 30.0, (0.5,), 1
    with pytest.raises(ValueError, match=r"leaves a degenerate share of 0\.50 out of reach"):
        phase.run_part(config, world, {"name": "uniform"}, 4)


def test_smoke_runs_to_its_summary_and_keeps_finished_parts(tmp_path, monkeypatch):
    config = phase_config.get_config("smoke")
    config.steps = 3
    config.arms = {name: {"name": name} for name in ("uniform", "oracle")}
    done = []
    real = phase.run_part
    monkeypatch.setattr(phase, "run_part", lambda *args: done.append(args[2]["name"]) or real(*args))
    phase.main(config, tmp_path)
    assert done == ["uniform", "oracle"]
    summary = common.read_summary(tmp_path)
    assert summary["kind"] == "phase"
    assert {"axes", "seeds", "tasks", "cells", "marginal", "sweep_edges", "transfer", "dropped"} <= summary.keys()
    assert len(summary["cells"]) == 2 * 1 * 2 * 2
    one = summary["cells"][0]
    measures = {"final", "average", "rollouts_share", "informative_share"}
    assert measures == one["at_equal_rates"][0]["arms"]["oracle"].keys()
    assert measures < one["at_own_rates"]["arms"]["oracle"].keys()
    for row in one["at_equal_rates"]:
        assert row["arms"]["uniform"]["final"]["mean"] == 0.0
        assert row["uniform_final"] != row["uniform_start"]
    assert set(summary["marginal"]["at_own_rates"]) == {"batch_size", "optimizer", "degenerate", "structure"}
    rows = common.read_metrics(tmp_path)
    assert len(rows) == 2 * 2 * 2 * 2 * 2
    assert {"final_over_uniform", "informative_share", "learning_rate"} <= rows[0].keys()
    assert len(list((tmp_path / "figures").glob("*.png"))) == 6
    assert "does not compare envsched with uniform" in (tmp_path / "report.html").read_text()

    done.clear()
    (tmp_path / "parts" / "oracle.4.npz").unlink()
    phase.main(config, tmp_path)
    assert done == ["oracle"]  # what is missing, and only that
    again = common.read_summary(tmp_path)
    assert json.dumps(again["marginal"]) == json.dumps(summary["marginal"])
    with np.load(tmp_path / "parts" / "oracle.4.npz") as stored:
        identity = json.loads(str(stored["identity"]))
    assert phase._kept(tmp_path / "parts" / "oracle.4.npz", identity) is not None
    other = identity | {"config": identity["config"] | {"spread": 2.9}}
    assert phase._kept(tmp_path / "parts" / "oracle.4.npz", other) is None
