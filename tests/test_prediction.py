"""Prediction of recorded outcomes that were not seen: what is asked, that nothing leaks, how answers are scored."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_recorded import DATA, needs_data, write_set

from envsched_jax.belief import environment
from envsched_jax.belief.environment import Moments
from envsched_jax.types import Scheduler, Status
from experiments import metrics, prediction, recorded, reference
from experiments.reference import Estimate

SIZES = {"batch_size": 2, "group_size": 4}


@pytest.fixture(scope="module")
def problem(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prediction") / "toy"
    write_set(folder, models=3, trials=4, seed=1)
    return prediction.problem(folder)


def env_mean(graph, history):
    prior = Moments(0.5, 0.125, 0.6)
    return environment.believe(graph, history, own=False, c=1.0, prior=prior, group_size=4, informative="share")


# ------------------------------------------------------------------------------------------------ questions


@pytest.mark.parametrize("setting", prediction.SETTINGS)
def test_no_question_shows_what_it_asks_for_or_what_comes_after(problem, setting):
    pool = problem.pool
    asked = prediction.cases(pool, setting, 0, 8)
    assert len(asked) == (3 if setting in prediction.COLD else 2)
    there = ~np.isnan(pool.pooled)
    for case in asked:
        assert not case.shown[case.present][case.target].any()
        assert not case.shown[case.present + 1 :].any()
        assert not (case.shown & ~there).any()
        assert case.target.any()


def test_cold_questions_hold_out_whole_blocks_of_one_checkpoint(problem):
    pool = problem.pool
    blocks = {"cold": np.arange(40), "cold_env": pool.env, "cold_scenario": pool.scenario}
    for setting, block in blocks.items():
        for case in prediction.cases(pool, setting, 3, 8):
            assert case.shown.any(axis=(1, 2)).nonzero()[0].tolist() == [case.present]
            inside = case.shown[case.present].any(axis=1)
            np.testing.assert_array_equal(inside, ~case.target)
            assert not set(block[inside]) & set(block[case.target])
            assert 10 <= inside.sum() <= 20


def test_past_questions_show_one_rollout_or_everything(problem):
    pool = problem.pool
    for case in prediction.cases(pool, "stale", 0, 8):
        np.testing.assert_array_equal(case.shown[case.present - 1].sum(axis=1), 1)
        assert case.shown.sum() == 40 and case.target.all()
    share = {}
    for setting in prediction.SPARSE:
        last = prediction.cases(pool, setting, 0, 8)[-1]
        count = last.shown[: last.present].sum(axis=2)
        assert count.max() == 1
        share[setting] = count.mean()
    assert share == pytest.approx(prediction.SPARSE, abs=0.12)
    for case in prediction.cases(pool, "dense", 0, 8):
        assert case.shown[: case.present].all() and not case.shown[case.present :].any()


def test_questions_depend_on_the_seed_alone_and_spread_over_the_checkpoints(problem):
    first, again, other = (prediction.cases(problem.pool, "cold", seed, 2) for seed in (0, 0, 1))
    assert [case.present for case in first] == [0, 2]
    np.testing.assert_array_equal(first[0].shown, again[0].shown)
    assert (first[0].shown != other[0].shown).any()


def test_what_a_data_set_does_not_allow_is_not_asked(problem):
    pool = problem.pool
    assert prediction.cases(pool._replace(scenario=np.full(40, -1)), "cold_scenario", 0, 8) == []
    assert prediction.cases(pool._replace(env=np.zeros(40, int)), "cold_env", 0, 8) == []
    assert prediction.cases(pool._replace(pooled=pool.pooled[:1]), "dense", 0, 8) == []
    with pytest.raises(ValueError, match="unknown setting 'warm'; there are: cold, "):
        prediction.cases(pool, "warm", 0, 8)


# ------------------------------------------------------------------------------------------------ answers


class Diary(NamedTuple):
    """What a scheduler was shown, by observation."""

    step: jax.Array
    seen: jax.Array  # [C, N], valid rewards
    total: jax.Array  # [C, N], their sum
    leak: jax.Array  # largest reward in a slot that is not valid


def diarist(checkpoints):
    """A believer that writes down what it is shown, and believes just that."""

    def init(graph):
        empty = jnp.zeros((checkpoints, graph.nodes.mask.shape[0]))
        return Diary(jnp.zeros((), jnp.int32), empty, empty, jnp.zeros(()))

    def observe(graph, state, outcome):
        valid = outcome.status == int(Status.OK)
        return Diary(
            state.step + 1,
            state.seen.at[state.step, outcome.node].set(valid.sum(axis=1)),
            state.total.at[state.step, outcome.node].set(jnp.where(valid, outcome.reward, 0).sum(axis=1)),
            jnp.maximum(state.leak, jnp.where(valid, 0, outcome.reward).max()),
        )

    return prediction.Believer(Scheduler(init, None, observe), lambda graph, state: state)


def padded(pool, case):
    """What is shown by node."""
    return np.pad(case.shown, ((0, 0), (0, pool.table.there.shape[1] - len(pool.env)), (0, 0)))


def test_a_believer_observes_the_shown_trials_in_order_of_time_and_nothing_else(problem):
    pool = problem.pool
    run = prediction.program(diarist(3))
    pooled = np.nan_to_num(pool.pooled)
    for setting, start in (("sparse_40", 0), ("cold", 1)):
        case = next(c for c in prediction.cases(pool, setting, 0, 8) if c.present == max(1, start))
        stop = case.present + (setting == "cold")
        diary = run(pool.graph, pool.table, padded(pool, case), start, stop)
        assert diary.step == stop - start and diary.leak == 0
        for row in range(3):
            time = start + row
            inside = case.shown[time] if time < stop else np.zeros_like(case.shown[0])
            np.testing.assert_array_equal(diary.seen[row, :40], inside.sum(axis=1))
            np.testing.assert_array_equal(diary.total[row, :40], (pooled[min(time, 2)] * inside).sum(axis=1))
        assert not diary.seen[:, 40:].any()


@pytest.fixture(scope="module")
def programs():
    believers = {
        "history": prediction.of_history(env_mean),
        "no_graph": prediction.of_recipe("no_graph", **SIZES),
        "envsched": prediction.of_recipe("envsched", **SIZES),
    }
    return {name: prediction.program(believer) for name, believer in believers.items()}


def guesses(task, case, setting, programs):
    """What every method says of one case."""
    found = {name: prediction.answer(run, task.pool, case, setting) for name, run in programs.items()}
    seen = prediction.observed(task.pool.pooled, case.shown, task.group_size)
    return found | {name: predict(seen) for name, predict in reference.predictors(task.view).items()}


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["cold", "cold_env", "sparse_40", "dense"])
def test_no_method_depends_on_outcomes_that_are_not_shown(problem, programs, setting):
    """Every outcome that is not shown is turned round; then, as a control, those that are."""
    pool = problem.pool
    case = prediction.cases(pool, setting, 0, 8)[-1]
    before = guesses(problem, case, setting, programs)
    for turned, same in ((~case.shown, True), (case.shown, False)):
        pooled = np.where(turned, 1 - pool.pooled, pool.pooled)
        table = recorded.tables(pooled, np.arange(40), pool.table.there.shape[1], problem.group_size)
        after = guesses(problem._replace(pool=pool._replace(pooled=pooled, table=table)), case, setting, programs)
        for name, estimate in before.items():
            equal = [np.array_equal(x, y) for x, y in zip(estimate, after[name], strict=True)]
            assert all(equal) if same else not all(equal), name


def test_what_has_no_belief_or_only_observes_says_so():
    assert prediction.of_recipe("uniform", **SIZES) is None
    with pytest.raises(ValueError, match="only observes"):
        prediction.of_history(env_mean).scheduler.select(None, None, None)


@pytest.mark.parametrize("gamma", [1.0, 0.5])
def test_of_history_hands_over_the_history_of_what_was_shown(problem, gamma):
    pool = problem.pool
    run = prediction.program(prediction.of_history(lambda graph, history: history, gamma))
    case = prediction.cases(pool, "dense", 0, 8)[-1]
    assert case.present == 2
    history = run(pool.graph, pool.table, padded(pool, case), 0, 2)
    np.testing.assert_allclose(history.n[:40], gamma * 4 + 4, rtol=1e-6)
    np.testing.assert_allclose(history.s1[:40], gamma * pool.pooled[0].sum(1) + pool.pooled[1].sum(1), rtol=1e-6)
    np.testing.assert_array_equal(history.n[40:], 0)


def test_of_recipe_believes_as_the_recipe_with_these_settings(problem):
    pool, case = problem.pool, prediction.cases(problem.pool, "dense", 0, 8)[-1]
    said = []
    for settings in ({}, {"gamma": 0.5}):
        believer = prediction.of_recipe("no_graph", **SIZES, **settings)
        said.append(prediction.answer(prediction.program(believer), pool, case, "dense"))
    for estimate in said:
        assert estimate.mean.shape == (40,) and ((estimate.share >= 0) & (estimate.share <= 1)).all()
    assert not np.allclose(said[0].mean, said[1].mean)
    with pytest.raises(ValueError, match="nobody"):
        prediction.of_recipe("nobody", **SIZES)


def test_observed_by_hand():
    """Groups of one task are never pooled into one variance; a single rollout has none."""
    nan = np.nan
    pooled = np.array([[[1, 0, nan], [0, 0, 0], [0, 1, 1]], [[1, 1, 1], [1, 1, 1], [1, 1, 1]]], np.float64)
    shown = np.zeros(pooled.shape, bool)
    shown[0, 0, :2] = shown[1, 0] = shown[0, 2, 0] = True
    got = prediction.observed(pooled, shown, 2)
    np.testing.assert_array_equal(got.rollouts, [5, 0, 1])
    np.testing.assert_allclose(got.mean, [0.8, nan, 0])
    np.testing.assert_array_equal(got.dof, [3, 0, 0])
    np.testing.assert_allclose(got.variance, [1 / 6, nan, nan])
    np.testing.assert_array_equal(got.groups, [2, 0, 0])
    np.testing.assert_allclose(got.share, [0.5, nan, nan])
    np.testing.assert_allclose(got.last, [1, nan, 0])


# ------------------------------------------------------------------------------------------------ scores


def test_score_by_hand():
    """Five tasks always or never pass, five half the time, one has too few trials; first the truth is told."""
    reward = np.array([[0.0] * 4] * 4 + [[1.0] * 4] + [[0, 1, 0, 1.0]] * 5 + [[np.nan] * 3 + [1.0]])
    target = np.ones(11, bool)
    _, mean, variance = metrics.moments(reward)
    share = metrics.p_informative(reward, 2)
    np.testing.assert_allclose(share[:10], [0] * 5 + [2 / 3] * 5)  # four of six pairs differ
    got = prediction.score(Estimate(mean, variance, share), reward, target, 2)
    assert got["spearman_mean"] == pytest.approx(1) and got["spearman_variance"] == pytest.approx(1)
    assert got["auc_mixed"] == got["auc_informative"] == 1 and got["ece"] == got["ece_mean"] == 0
    assert got["brier"] == pytest.approx(0.5 * 2 / 9)  # what is left is chance: p (1 - p)
    flat = prediction.score(Estimate(mean, variance, np.full(11, 0.5)), reward, target, 2)
    assert flat["brier"] == pytest.approx(0.25) and flat["nll"] == pytest.approx(np.log(2))
    assert flat["ece"] == pytest.approx(1 / 6) and flat["auc_informative"] == 0.5


def test_score_says_nothing_of_few_tasks_or_of_a_share_that_is_not_told():
    reward = np.array([[0.0, 1.0], [0.0, 0.0], [1.0, 1.0]] * 4)
    guess = Estimate(*(np.linspace(0, 1, 12) for _ in range(2)), None)
    assert np.isnan(list(prediction.score(guess, reward, np.arange(12) < 7, 2).values())).all()
    got = prediction.score(guess, reward, np.ones(12, bool), 2)
    assert np.isnan([got[name] for name in ("auc_informative", "ece", "brier", "nll")]).all()
    assert np.isfinite([got[name] for name in ("spearman_mean", "auc_mixed", "ece_mean")]).all()


def test_every_setting_asks_every_method_alike(problem):
    settings = ("cold", "cold_env", "sparse_15", "dense")
    mine = {"mine": prediction.of_history(env_mean)}
    got = prediction.evaluate(problem, mine, seeds=2, most=2, settings=settings)
    assert tuple(got) == settings
    for setting, methods in got.items():
        own = set() if setting in prediction.COLD else set(reference.OWN)
        assert {"mine", "ref_env_mean", "ref_gp", *own} <= methods.keys()
        assert own or not set(reference.OWN) & methods.keys()
        for values in methods.values():
            assert set(values) == set(prediction.METRICS)
    text = prediction.table(got).splitlines()
    assert len(text) == 1 + sum(map(len, got.values())) and text[0].split()[:2] == ["setting", "method"]
    alone = prediction.evaluate(problem, mine, seeds=1, most=1, settings=("dense",), references=False)
    assert list(alone["dense"]) == ["mine"]


@needs_data
def test_recorded_agents_are_predicted_better_than_by_chance():
    task = prediction.problem(DATA / "mcpmark")
    assert [p.name for p in prediction.problems(DATA / "mcpmark")] == [task.name] == ["mcpmark"]
    mine = {"mine": prediction.of_history(env_mean)}
    got = prediction.evaluate(task, mine, seeds=2, most=2, settings=("dense",))["dense"]
    assert all(methods["spearman_mean"]["mean"] > 0 for methods in got.values())
