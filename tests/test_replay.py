"""Replay on recorded outcomes: one arm, its scores, the summary and the whole program."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_recorded import UID, draw, toy_tables, write_set

from configs import replay as config_file
from envsched_jax.types import Batch, Belief, Scheduler, Status
from experiments import common, metrics, replay, replay_arm, replay_score, replay_summary
from experiments.recorded import RecordedError

# ------------------------------------------------------------------------------------------------ one arm


class Nodes(NamedTuple):
    uid: jax.Array
    mask: jax.Array


class State(NamedTuple):
    step: jax.Array
    total: jax.Array
    truth: jax.Array


class TinyGraph(NamedTuple):
    nodes: Nodes


def round_robin(batch, size):
    """Picks nodes in turn, the last slot masked out, and sums up the valid rewards that it is shown."""

    def init(graph):
        return State(jnp.zeros((), jnp.int32), jnp.zeros(()), jnp.zeros(size))

    def select(key, graph, state):
        node = (state.step * batch + jnp.arange(batch)) % 4
        zero = jnp.zeros(batch)
        return Batch(node, jnp.arange(batch) < batch - 1, zero > 0, state.truth[node], zero, zero, zero)

    def observe(graph, state, outcome):
        shown = jnp.where(outcome.status == Status.OK, outcome.reward, 0).sum()
        return state._replace(step=state.step + 1, total=state.total + shown)

    return Scheduler(init, select, observe)


def test_simulate_draws_the_checkpoints_in_order_and_counts_live_groups():
    _, table = toy_tables()
    graph = TinyGraph(Nodes(UID, jnp.ones(6, bool)))

    def believe(graph, state):
        return Belief(state.truth, jnp.full(6, state.total), state.truth, state.truth)

    trace = jax.jit(
        lambda seeds: replay_arm.simulate(
            seeds,
            graph,
            table,
            scheduler=round_robin(2, 6),
            believe=believe,
            steps=6,
            scored=[1, 2, 4],
            group_size=4,
            oracle="recorded",
        )
    )(jnp.arange(3))
    np.testing.assert_array_equal(trace.node[0], [[0, 1], [2, 3], [0, 1], [2, 3], [0, 1], [2, 3]])
    assert not trace.mask[..., 1].any() and trace.mask[..., 0].all()
    # nodes 0 and 2 in turn; node 2 has 5 trials, but one at checkpoint 1, which is that of steps 2 and 3
    np.testing.assert_array_equal(trace.rollouts.sum(axis=2), [[2, 4, 2, 1, 2, 4]] * 3)
    np.testing.assert_array_equal(trace.live.sum(axis=2), [[1, 1, 1, 0, 1, 1]] * 3)
    checkpoint = np.array([1, 2, 4]) // 2  # of the steps whose beliefs are kept
    np.testing.assert_allclose(trace.belief.mean, np.broadcast_to(table.variance[checkpoint], (3, 3, 6)), rtol=1e-6)
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(1), 0), 0)
    first = draw(key, UID[:1], table.reward[0, :1], table.there[0, :1], 4)[0].sum()
    assert trace.belief.variance[1, 0, 0] == pytest.approx(float(first))


def test_beliefs_are_scored_where_a_checkpoint_begins():
    assert replay_score.evaluation_steps(8, 4, 10) == [2, 4, 6]
    assert replay_score.evaluation_steps(80, 12, 3) == [7, 40, 74]
    assert replay_score.evaluation_steps(10, 1, 3) == [1, 5, 9]
    assert replay_score.evaluation_steps(10, 40, 3) == [1, 5, 9]


def test_splits_by_hand():
    node = np.array([[0, 1], [0, 2], [3, 3]])
    mask = np.array([[True, True], [True, False], [True, True]])
    visits = replay_score.visits_before(node, mask, 2, 6)
    np.testing.assert_array_equal(visits, [2, 1, 0, 0, 0, 0])
    got = replay_score.splits(visits, np.array([0, 0, 0, 1, 1, 2]), np.array([5, 4, 4, 0, -1, -1]))
    assert {name: np.flatnonzero(inside).tolist() for name, inside in got.items()} == {
        "never": [2, 3, 4, 5],
        "once": [1],
        "more": [0],
        "unseen_env": [3, 4, 5],
        "unseen_group": [3],
    }


def test_score_of_the_truth_is_perfect_and_leaves_out_what_is_not_known():
    rng = np.random.default_rng(0)
    reward = (rng.random((60, 5)) < rng.random((60, 1))).astype(float)
    reward[:3] = np.nan
    count, mean, variance = metrics.moments(reward)
    share = metrics.p_informative(reward, 4)
    belief = Belief(*(np.nan_to_num(x, nan=7.0) for x in (mean, variance, share, count)))
    where = {"never": np.ones(60, bool), "once": np.arange(60) < 9}
    got = replay_score.score(belief, replay_score.truth(reward, 4), where)
    assert got["spearman_mean_never"] == pytest.approx(1) and got["spearman_variance_never"] == pytest.approx(1)
    assert got["auc_mixed_never"] == 1 and got["mae_mean"] == 0 and got["mae_variance"] == 0 and got["ece"] == 0
    assert got["nll"] >= 0
    assert math.isnan(got["auc_mixed_once"])  # six tasks are left: too few


def test_summary_by_hand():
    def arm(per_1k):
        return {
            "live_per_1k": per_1k,
            "rows": [(0, 1, {"ece": 0.2, "auc_mixed_never": 0.6}), (1, 1, {"ece": 0.4, "auc_mixed_never": None})],
            "envs_touched": [2, 5],
            "gini_visits": [0.1, 0.3],
            "rollouts": [8, 8],
            "live": [[1, 2], [3, 4]],
            "degenerate": [{"predicted": [0.5], "realised": [0.6], "error": [0.1]}] * 2,
            "reliability": None,
        }

    got = replay_summary.summarise({"uniform": arm([10.0, 20]), "mine": arm([20.0, 24]), "oracle": arm([25.0, 35])})
    assert got["uniform"]["gap_closed"] == 0 and got["oracle"]["gap_closed"] == 1
    assert got["mine"]["gap_closed"] == pytest.approx(7 / 15)
    assert got["mine"]["live_per_1k"]["mean"] == 22 and got["mine"]["gain"]["mean"] == 7
    assert got["mine"]["ece"] == pytest.approx(0.3) and got["mine"]["auc_mixed"]["never"] == 0.6
    assert math.isnan(got["mine"]["auc_mixed"]["once"]) and got["mine"]["envs_touched"] == 3.5
    assert got["mine"]["live_curve"] == [2, 3]
    alone = replay_summary.summarise({"mine": arm([20.0, 24])})["mine"]
    assert math.isnan(alone["gap_closed"]) and math.isnan(alone["gain"]["mean"])


def test_degenerate_shares_by_window():
    """Ten steps of two groups: predicted 0.3 degenerate, one in four realised; a row without G rollouts is left out."""
    predicted = np.full((10, 2), 0.7)
    live = np.arange(20).reshape(10, 2) % 4 > 0
    full = np.ones((10, 2), bool)
    row = replay_score.degenerate(predicted, live, full)
    assert row["predicted"] == pytest.approx([0.3]) and row["realised"] == [0.25]
    assert row["error"] == pytest.approx([np.sqrt(20 * 0.21) / 20])
    assert replay_score.calibrated_share([row]) == 1.0
    far = replay_score.degenerate(np.full((10, 2), 0.05), live, full)
    assert replay_score.calibrated_share([row, far]) == 0.5
    unknown = replay_score.degenerate(np.full((10, 2), np.nan), live, full)
    assert math.isnan(replay_score.calibrated_share([unknown]))
    full[:5] = False
    assert replay_score.degenerate(predicted, live, full)["realised"] == [pytest.approx(0.2)]


def test_windows_may_be_cut_short_or_empty():
    """Of 25 steps the last window has five; one in which no group is complete is not defined and not counted."""
    predicted, live = np.full((25, 2), 0.5), np.zeros((25, 2), bool)
    live[20:] = True
    full = np.ones((25, 2), bool)
    full[10:20] = False
    row = replay_score.degenerate(predicted, live, full)
    np.testing.assert_array_equal(row["realised"], [1, np.nan, 0])
    np.testing.assert_array_equal(row["predicted"], [0.5, np.nan, 0.5])
    np.testing.assert_allclose(row["error"], [0.5 / np.sqrt(20), np.nan, 0.5 / np.sqrt(10)])
    assert replay_score.calibrated_share([row]) == 0  # 0.5 off is more than 0.05 and two errors, 0.22 and 0.32
    sure = replay_score.degenerate(np.ones((10, 2)), np.ones((10, 2), bool), np.ones((10, 2), bool))
    assert (sure["predicted"], sure["realised"], sure["error"]) == ([0], [0], [0])


def test_reliability_by_hand():
    reward = np.array([[0.0, 0, 0, 0], [1, 1, 1, 1], [0, 1, 0, 1], [np.nan] * 4])
    real = replay_score.truth(reward, 4)
    belief = Belief(np.array([0.05, 0.95, 0.55, 0.5]), np.zeros(4), np.array([0.1, 0.1, 0.9, 0.9]), np.zeros(4))
    mean, share = replay_score.reliability(belief, real)
    assert replay_score.diagram(mean) == {
        "tasks": [1, 1, 1],
        "predicted": pytest.approx([0.05, 0.55, 0.95]),
        "realised": [0, 0.5, 1],
    }
    assert replay_score.diagram(share) == {"tasks": [2, 1], "predicted": pytest.approx([0.1, 0.9]), "realised": [0, 1]}
    edge = replay_score.reliability(belief._replace(mean=np.array([0.0, 1.0, 0.5, 0.5])), real)[0]
    assert edge[0].tolist() == [1, 0, 0, 0, 0, 1, 0, 0, 0, 1]  # 1 belongs to the last bin
    both = replay_score.diagram(edge + mean)
    assert both["tasks"] == [2, 2, 2] and both["predicted"] == pytest.approx([0.025, 0.525, 0.975])


def test_the_best_peer_is_one_arm_and_differences_are_paired():
    def arm(per_1k):
        return {"live_per_1k": per_1k}

    one = {
        "uniform": arm([10.0, 10.0]),
        "oracle": arm([20.0, 20.0]),
        "envsched": arm([19.0, 17.0]),
        "no_graph": arm([18.0, 18.0]),
        "mopps": arm([14.0, 12.0]),
        "plr": arm([11.0, 12.0]),
    }
    two = one | {"plr": arm([12.0, 12.0])}
    got = replay_summary.compare({"one": one, "two": two})
    assert (got["best_peer"], got["best_ablation"]) == ("mopps", "no_graph")
    ours = got["arms"]["envsched"]
    assert ours["role"] == "ours" and ours["gap_closed"]["mean"] == pytest.approx(0.8)
    assert ours["over_peer"]["mean"] == pytest.approx(0.5) and ours["over_peer"]["ci"] == pytest.approx([0.5, 0.5])
    assert ours["over_ablation"]["mean"] == pytest.approx(0.0)
    half = 12.706 * 0.1  # Student's t of one degree of freedom; the differences are 0.1 and -0.1
    assert ours["over_ablation"]["ci"] == pytest.approx([-half, half], rel=1e-4)
    assert got["arms"]["mopps"]["over_peer"] is None and got["datasets"] == 2
    lone = {arm: {"live_per_1k": values["live_per_1k"][:1]} for arm, values in one.items()}
    assert np.isnan(replay_summary.compare({"one": lone})["arms"]["envsched"]["over_peer"]["ci"]).all()
    flat = one | {"oracle": arm([9.0, 9.0]), "plr": arm([90.0, 90.0])}
    assert replay_summary.compare({"flat": flat})["best_peer"] is None
    mixed = replay_summary.compare({"one": one, "flat": flat})  # a set without a gap is left out, whoever wins there
    assert mixed["best_peer"] == "mopps"
    assert mixed["arms"]["envsched"]["gap_closed"]["mean"] == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("role", "arms"),
    [
        ("bound", ("oracle", "clairvoyant")),
        ("ours", ("envsched", "envsched_logdet", "envsched_no_graph")),
        ("ablation", ("no_graph", "env_mean")),
        ("peer", ("uniform", "stratified", "mopps", "vip_gp")),
    ],
)
def test_what_an_arm_is_follows_from_its_name(role, arms):
    assert {replay_summary.role(arm) for arm in arms} == {role}


# ------------------------------------------------------------------------------------------------ the program


def smoke(data_dir, **changes):
    config = config_file.get_config("smoke")
    config.data_dir = str(data_dir)
    config.arms = ("uniform", "envsched", "oracle")
    variants = changes.pop("variants", {})
    with config.unlocked():
        config.update(changes)
        config.variants.update(variants)
    return config


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    root = tmp_path_factory.mktemp("replay")
    write_set(root / "data" / "single")
    write_set(root / "data" / "many", models=3, trials=4, seed=1)
    replay.main(smoke(root / "data"), root / "run")
    return root


@pytest.mark.slow
def test_the_summary_has_the_documented_keys(finished):
    summary = common.read_summary(finished / "run")
    assert {"commit", "device", "config", "wall_s", "datasets"} <= summary.keys()
    assert sorted(summary["datasets"]) == ["many", "single"]
    for data in summary["datasets"].values():
        assert list(data["arms"]) == ["uniform", "envsched", "oracle"]
        for arm in data["arms"].values():
            assert len(arm["live_per_1k"]["ci"]) == 2 and arm["live_per_1k"]["mean"] >= 0
            for name in replay_score.RANKED:
                assert set(arm[name]) == set(replay_score.SPLITS)
            assert {"ece", "nll", "gap_closed", "envs_touched", "gain"} <= arm.keys()
        assert data["arms"]["uniform"]["ece"] is None
        assert 0 <= data["arms"]["envsched"]["ece"] <= 1
        assert data["arms"]["envsched"]["auc_mixed"]["never"] is not None
        assert data["clairvoyant"]["live_per_1k"]["mean"] > 0
    assert [len(c) for c in summary["datasets"]["single"]["checkpoints"]] == [5, 7]
    assert summary["datasets"]["many"]["batch_size"] == 1
    assert (finished / "run" / "figures" / "gap_closed.png").stat().st_size > 1000
    assert (finished / "run" / "figures" / "live_groups.png").stat().st_size > 1000


@pytest.mark.slow
def test_metrics_hold_one_row_per_arm_seed_and_evaluation(finished):
    rows = common.read_metrics(finished / "run")
    last = [r for r in rows if r["dataset"] == "many" and r["step"] == 10]
    assert {(r["arm"], r["seed"]) for r in last} == {
        (arm, seed) for arm in ("uniform", "envsched", "oracle", "clairvoyant") for seed in (0, 1)
    }
    assert all(r["rollouts"] == 40 for r in last)
    summary = common.read_summary(finished / "run")["datasets"]["many"]["arms"]["oracle"]
    live = [r["live"] for r in last if r["arm"] == "oracle"]
    assert summary["live_per_1k"]["mean"] == pytest.approx(1000 * np.mean(live) / 40)


@pytest.mark.slow
def test_a_finished_arm_is_kept_until_its_settings_or_data_change(finished, monkeypatch, capsys):
    before = (finished / "run" / "metrics.jsonl").read_text()
    ran = []
    real = replay.run_arm
    monkeypatch.setattr(replay, "run_arm", lambda pool, **kw: (ran.append(kw["recipe"]), real(pool, **kw))[1])
    first = common.read_summary(finished / "run")
    replay.main(smoke(finished / "data"), finished / "run")
    assert ran == [] and capsys.readouterr().out.count("kept from an earlier run") == 10
    assert (finished / "run" / "metrics.jsonl").read_text() == before
    assert common.read_summary(finished / "run")["datasets"] == first["datasets"]
    replay.main(smoke(finished / "data" / "many", arms=("uniform",), seeds=1), finished / "again")
    assert ran == ["uniform", "oracle"]


@pytest.mark.slow
def test_a_variant_is_a_recipe_with_other_arguments(finished):
    config = smoke(finished / "data" / "many", arms=("uniform", "mine"), variants={"mine": {"recipe": "stratified"}})
    replay.main(config, finished / "variant")
    assert list(common.read_summary(finished / "variant")["datasets"]["many"]["arms"]) == ["uniform", "mine"]


def test_mistakes_end_in_clear_errors(tmp_path):
    with pytest.raises(RecordedError, match=r"--config\.data_dir"):
        replay.main(config_file.get_config("smoke"), tmp_path)
    write_set(tmp_path / "toy")
    with pytest.raises(ValueError, match="no recipe 'nobody'; there are: "):
        replay.main(smoke(tmp_path / "toy", arms=("nobody",)), tmp_path)
    with pytest.raises(TypeError, match="stepps"):
        replay.main(smoke(tmp_path / "toy", stepps=3), tmp_path)
    with pytest.raises(ValueError, match="at least 2"):
        replay.main(smoke(tmp_path / "toy", group_size=1), tmp_path)
    with pytest.raises(ValueError, match="unknown preset"):
        config_file.get_config("fast")
