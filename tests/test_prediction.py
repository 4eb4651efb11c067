"""Prediction of recorded outcomes that were not seen: nothing leaks, and simple methods are what they say."""

import numpy as np
import pytest
from test_recorded import write_set

from envsched_jax.belief import environment
from envsched_jax.belief.environment import Moments
from experiments import prediction, reference


@pytest.fixture(scope="module")
def problem(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prediction") / "toy"
    write_set(folder, models=3, trials=4, seed=1)
    return prediction.problem(folder)


def env_mean(graph, history):
    prior = Moments(0.5, 0.125, 0.6)
    return environment.believe(graph, history, own=False, c=1.0, prior=prior, group_size=4, informative="share")


def test_every_setting_asks_every_method_alike(problem):
    got = prediction.evaluate(
        problem,
        {"mine": prediction.of_history(env_mean)},
        seeds=2,
        most=2,
        settings=("cold", "cold_env", "sparse_15", "dense"),
    )
    assert got and set(got) <= {"cold", "cold_env", "sparse_15", "dense"}
    for methods in got.values():
        assert "mine" in methods and "ref_env_mean" in methods
        for metrics in methods.values():
            assert set(metrics) == set(prediction.METRICS)


def test_a_recipe_without_a_belief_is_no_predictor():
    assert prediction.of_recipe("uniform", batch_size=2, group_size=4) is None
    assert prediction.of_recipe("no_graph", batch_size=2, group_size=4) is not None


def test_the_environments_mean_by_hand():
    regress = reference.by_environment(np.array([0, 0, 0, 1]))
    got = regress(np.array([4.0, 4.0, 0.0, 0.0]), np.array([1.0, 0.0, 0.0, 0.0]))
    assert got[2] == pytest.approx(0.5) and got[3] == pytest.approx(0.5)
    sure = regress(np.array([400.0, 400.0, 0.0, 0.0]), np.array([0.9, 0.9, 0.0, 0.0]))
    assert sure[2] == pytest.approx(0.9, abs=0.01)


def test_the_process_follows_its_kernel():
    """Two clusters of four: an unseen task gets the level of its own cluster."""
    cluster = np.repeat([0, 1], 4)
    kernel = (cluster[:, None] == cluster).astype(np.float64)
    weight = np.array([8.0, 8, 8, 0, 8, 8, 8, 0])
    value = np.array([0.9, 0.8, 0.9, 0, 0.1, 0.2, 0.1, 0])
    got = reference.by_process(kernel[None])(weight, value)
    assert got[3] > 0.65 and got[7] < 0.35
