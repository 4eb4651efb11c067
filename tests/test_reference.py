"""Reference methods beside the beliefs: each against values worked out by hand."""

import numpy as np
import pytest

from envsched_jax.pool import Record
from experiments import reference
from experiments.reference import Observed

NAN = np.nan


def seen(**fields):
    """Two groups of task 0, nothing of task 1, a single rollout of task 2."""
    values = {
        "rollouts": [5.0, 0, 1],
        "mean": [0.8, NAN, 0],
        "dof": [3.0, 0, 0],
        "variance": [1 / 6, NAN, NAN],
        "groups": [2.0, 0, 0],
        "share": [0.5, NAN, NAN],
        "last": [1.0, NAN, 0],
    } | fields
    return Observed(**{name: np.array(value) for name, value in values.items()})


def test_the_pools_mean():
    assert reference.pool_mean(np.array([3.0, 0, 1]), np.array([1.0, NAN, 0])) == 0.75
    assert reference.pool_mean(np.zeros(2), np.array([NAN, NAN])) == 0.5


def test_an_environments_mean_is_shrunk_to_the_pools():
    regress = reference.by_environment(np.array([0, 0, 1, 2]))
    got = regress(np.array([3.0, 1, 4, 0]), np.array([1.0, 0, 0.25, NAN]))
    assert reference.SHRINK == 1  # the pool's mean is (3 + 0 + 1) / 8
    np.testing.assert_allclose(got, [(3 + 0.5) / 5, (3 + 0.5) / 5, (1 + 0.5) / 5, 0.5])


def test_an_own_record_stands_over_what_others_say():
    got = reference.with_own(lambda weight, value: np.full(3, 0.4), np.array([3.0, 1, 0]), np.array([1.0, 0, NAN]))
    np.testing.assert_allclose(got, [(3 + 0.4) / 4, 0.4 / 2, 0.4])


def test_neighbours_are_others_that_were_observed():
    similar = np.array([[1, 0.9, 0.3, 0.2], [0.9, 1, 0.1, 0.1], [0.3, 0.1, 1, 0.8], [0.2, 0.1, 0.8, 1]])
    weight, value = np.array([1.0, 9, 2, 0]), np.array([1.0, 0, 0.5, NAN])
    nearest = reference.by_neighbours(similar, k=1)(weight, value)
    np.testing.assert_allclose(nearest, [0, 1, 1, 0.5])
    two = reference.by_neighbours(similar, k=2)(weight, value)
    near, far = 0.8**3, 0.2**3  # of task 3 to tasks 2 and 0; how much was observed of them plays no part
    assert two[3] == pytest.approx((near * 0.5 + far * 1) / (near + far), abs=1e-4)
    np.testing.assert_allclose(reference.by_neighbours(similar)(np.array([2.0, 0, 0, 0]), value), 1)


def test_the_process_follows_its_kernel():
    """Two clusters of four: an unseen task gets the level of its own cluster."""
    cluster = np.repeat([0, 1], 4)
    kernel = (cluster[:, None] == cluster).astype(np.float64)
    weight = np.array([8.0, 8, 8, 0, 8, 8, 8, 0])
    value = np.array([0.9, 0.8, 0.9, NAN, 0.1, 0.2, 0.1, NAN])
    regress = reference.by_process(kernel[None])
    got = regress(weight, np.nan_to_num(value))
    assert got[3] > 0.65 and got[7] < 0.35
    np.testing.assert_array_equal(regress(weight, value), got)
    np.testing.assert_allclose(regress(weight, np.full(8, 0.3)), 0.3)  # nothing to tell apart


def test_the_newest_group_of_the_task_itself():
    got = reference.own_last(seen())
    np.testing.assert_allclose(got.mean, [(1 + 0.5) / 2, 0.5, 0.5 / 2])  # the pool: 1 and 0, a rollout each
    np.testing.assert_allclose(got.variance, 1 / 6)
    np.testing.assert_allclose(got.share, 0.5)


def test_all_the_past_of_the_task_itself():
    view = reference.View(np.array([0, 0, 1]), np.eye(3), np.eye(3))
    got = reference.predictors(view)["ref_all_past"](seen())
    pool = 4 / 6
    np.testing.assert_allclose(got.mean, [(4 + pool) / 6, pool, pool / 2])


def test_single_rollouts_give_the_variance_of_the_predicted_mean_and_no_share():
    single = seen(rollouts=[1.0, 1, 1], mean=[1.0, 0, 0], dof=[0.0] * 3, groups=[0.0] * 3)
    got = reference.estimate(lambda weight, value: np.array([1.2, 0.5, 0.1]), single, own=False)
    np.testing.assert_allclose(got.mean, [1, 0.5, 0.1])
    np.testing.assert_allclose(got.variance, [0, 0.25, 0.09])
    assert got.share is None


def test_similarities_come_from_what_is_known_before_any_rollout():
    def record(i, text, tools, **extra):
        return Record(task_id=f"t{i}", env_id="e", text=text, tools_available=tools, extra=extra)

    records = [
        record(0, "read the file", ("read",), n_files=1, ref_models=["a"]),
        record(1, "read the file", ("read",), n_files=1, ref_models=["b"]),
        record(2, "send a mail", ("send",), n_files=9, ref_models=["a"]),
        record(3, "send a mail", ("send",), n_files=9, ref_models=["a"]),
    ]
    view = reference.view(records, np.zeros(4, int))
    for similarity in (view.text, view.structure):
        np.testing.assert_allclose(similarity, similarity.T, atol=1e-7)
        assert similarity[0, 1] == pytest.approx(1) and similarity[0, 1] > similarity[0, 2] + 0.5
    changed = [record(i, r.text, r.tools_available, **(r.extra | {"ref_models": []})) for i, r in enumerate(records)]
    np.testing.assert_array_equal(reference.view(changed, np.zeros(4, int)).structure, view.structure)
