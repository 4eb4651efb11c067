"""Recorded outcomes: loading, checkpoints, draws and what the oracle knows."""

import collections
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from envsched_jax.types import Status
from experiments import recorded
from experiments.recorded import RecordedError

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
SETS = ("bfcl_multiturn", "bfcl_v1_2024", "mcpmark", "swebench_verified", "taubench")
needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="recorded outcomes are not beside the checkout")


def write_set(folder, tasks=40, models=12, trials=1, seed=0, change=lambda records, arrays: None):
    """A synthetic data set: difficulty by environment, abler models pass more."""
    rng = np.random.default_rng(seed)
    env = np.arange(tasks) % 4
    logit = np.linspace(-2, 2, models)[:, None] + np.array([-2.0, 0, 1, 3])[env] + rng.normal(size=tasks)
    reward = (rng.random((trials, models, tasks)) < 1 / (1 + np.exp(-logit))).astype(np.float16)
    records = [
        {
            "task_id": f"t{i}",
            "env_id": f"e{env[i]}",
            "text": f"do thing {i % 7} in place {i % 3}",
            "tools_available": [f"tool{env[i]}"],
            "group_id": f"g{i // 2}",
        }
        for i in range(tasks)
    ]
    arrays = {
        "task_ids": np.array([r["task_id"] for r in records][::-1]),
        "models": np.array([f"m{i}" for i in range(models)]),
        "reward": np.moveaxis(reward, 0, 2)[:, ::-1],
    }
    change(records, arrays)
    folder.mkdir(parents=True)
    (folder / "tasks.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    np.savez(folder / "outcomes.npz", **arrays)
    return records, reward


# ------------------------------------------------------------------------------------------------ data


def test_outcomes_are_put_in_the_order_of_the_records(tmp_path):
    records, reward = write_set(tmp_path / "toy")
    data = recorded.load(tmp_path / "toy")
    assert [r.task_id for r in data.records] == [r["task_id"] for r in records]
    np.testing.assert_array_equal(data.reward, np.moveaxis(reward, 0, 2))
    assert data.name == "toy" and data.models[0] == "m0"


def test_find_sets_takes_one_set_or_a_folder(tmp_path):
    for name in ("b", "a"):
        write_set(tmp_path / "all" / name)
    assert [p.name for p in recorded.find_sets(tmp_path / "all")] == ["a", "b"]
    assert recorded.find_sets(tmp_path / "all" / "b") == [tmp_path / "all" / "b"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(RecordedError, match="neither a data set"):
        recorded.find_sets(tmp_path / "empty")
    with pytest.raises(RecordedError, match="no such folder"):
        recorded.find_sets(tmp_path / "missing")


BROKEN = {
    "has no outcomes for 1 tasks: t39": lambda r, a: a.update(task_ids=a["task_ids"][1:], reward=a["reward"][:, 1:]),
    r"not in tasks.jsonl: t0": lambda r, a: r.pop(0),
    "twice": lambda r, a: a["task_ids"].__setitem__(0, "t0"),
    r"must be numbers of shape \[models 12, tasks 40": lambda r, a: a.update(reward=a["reward"][1:]),
    "models is not a file": lambda r, a: a.pop("models"),
    "finite": lambda r, a: a["reward"].__setitem__((0, 0, 0), np.inf),
}


@pytest.mark.parametrize("message", BROKEN)
def test_a_broken_set_gives_one_clear_error(tmp_path, message):
    write_set(tmp_path / "toy", change=BROKEN[message])
    with pytest.raises(RecordedError, match=message) as error:
        recorded.load(tmp_path / "toy")
    assert "outcomes.npz" in str(error.value) and "\n" not in str(error.value)


def test_a_missing_file_is_named(tmp_path):
    write_set(tmp_path / "toy")
    (tmp_path / "toy" / "outcomes.npz").unlink()
    with pytest.raises(RecordedError, match=r"outcomes\.npz: file is missing"):
        recorded.load(tmp_path / "toy")


# ------------------------------------------------------------------------------------------------ checkpoints


@pytest.mark.parametrize(
    ("models", "sizes"), [(10, [5, 5]), (12, [5, 7]), (14, [5, 5, 4]), (4, [4]), (3, [3]), (71, [5] * 13 + [6])]
)
def test_single_trials_are_pooled_in_cohorts_of_five(models, sizes):
    _, members = recorded.checkpoints(np.zeros((models, 3, 1)), 4)
    assert [len(m) for m in members] == sizes
    assert [m for one in members for m in one] == list(range(models))


def test_models_with_enough_trials_stand_alone_and_the_others_join():
    reward = np.zeros((4, 10, 4))
    reward[1, :, 1:] = np.nan  # one trial only: joins the next
    _, members = recorded.checkpoints(reward, 4)
    assert members == [(0,), (1, 2), (3,)]
    reward[3, :, 2:] = np.nan  # two trials, last: joins the one before
    assert recorded.checkpoints(reward, 4)[1] == [(0,), (1, 2, 3)]
    reward[0, :2] = np.nan  # 80 % of the tasks are not enough
    assert recorded.checkpoints(reward, 4)[1] == [(0, 1, 2, 3)]


@settings(deadline=None, max_examples=50)
@given(hnp.arrays(np.float64, (6, 4, 2), elements=st.sampled_from([0.0, 0.5, 1.0, np.nan])))
def test_pooling_keeps_every_trial_once_and_puts_them_first(reward):
    pooled, members = recorded.checkpoints(reward, 3)
    assert [m for one in members for m in one] == list(range(6))
    for checkpoint, models in enumerate(members):
        for task in range(4):
            there = ~np.isnan(pooled[checkpoint, task])
            assert not there.any() or there[: there.sum()].all()
            source = reward[list(models), task].ravel()
            assert collections.Counter(pooled[checkpoint, task][there]) == collections.Counter(
                source[~np.isnan(source)]
            )


# ------------------------------------------------------------------------------------------------ draws


def toy_tables(group_size=2):
    """Three checkpoints, four tasks in three nodes' order, five slots; every reward is a number of its own."""
    pooled = np.arange(60, dtype=np.float64).reshape(3, 4, 5) / 64
    pooled[1, 2, 1:] = np.nan
    pooled[:, 3, 2:] = np.nan
    return pooled, recorded.tables(pooled, np.array([3, 0, 2, 1]), 6, group_size)


def test_tables_follow_the_nodes_and_pad_with_nothing():
    pooled, table = toy_tables()
    np.testing.assert_array_equal(table.there.sum(-1)[1], [2, 5, 1, 5, 0, 0])
    np.testing.assert_allclose(table.reward[2, 1], pooled[2, 0])
    np.testing.assert_allclose(table.variance[0, 3], pooled[0, 1].var(ddof=1), rtol=1e-5)
    assert table.variance[1, 2] == 0 and table.variance[1, 5] == 0
    both = np.concatenate([pooled[0, 2], pooled[2, 2]])
    np.testing.assert_allclose(table.near[1, 2], [10, both.sum(), (both**2).sum()], rtol=1e-6)
    np.testing.assert_allclose(table.near[0, 2], [1, pooled[1, 2, 0], pooled[1, 2, 0] ** 2], rtol=1e-6)


draw = jax.jit(recorded.draw, static_argnums=4)
held_back = jax.jit(recorded.held_back_variance, static_argnums=4)
UID = jnp.array([11, 5, 7, 900, 1, 2], jnp.uint32)


def test_draws_are_without_replacement_and_absent_where_trials_are_few():
    _, table = toy_tables()
    reward, status = draw(jax.random.key(3), UID, table.reward[1], table.there[1], 4)
    np.testing.assert_array_equal((np.asarray(status) == Status.OK).sum(1), [2, 4, 1, 4, 0, 0])
    assert set(np.unique(status)) == {int(Status.ABSENT), int(Status.OK)}
    for node in range(4):
        drawn = np.asarray(reward)[node][np.asarray(status)[node] == Status.OK].tolist()
        available = np.asarray(table.reward[1, node])[np.asarray(table.there[1, node])].tolist()
        assert len(set(drawn)) == len(drawn) and set(drawn) <= set(available)


def test_a_draw_depends_on_key_and_task_only():
    _, table = toy_tables()
    key = jax.random.key(3)
    whole, _ = draw(key, UID, table.reward[0], table.there[0], 2)
    some = jnp.array([3, 1])
    few, _ = draw(key, UID[some], table.reward[0, some], table.there[0, some], 2)
    np.testing.assert_array_equal(few, np.asarray(whole)[[3, 1]])
    other, _ = draw(jax.random.key(4), UID, table.reward[0], table.there[0], 2)
    assert not np.array_equal(other, whole)


def test_every_pair_of_trials_is_equally_likely():
    _, table = toy_tables()
    keys = jax.random.split(jax.random.key(0), 20_000)
    one = jnp.array([1])
    drawn = jax.jit(jax.vmap(lambda k: recorded.draw(k, UID[one], table.reward[0, one], table.there[0, one], 2)[0][0]))
    pairs = np.sort(np.asarray(drawn(keys)), axis=1)
    counts = np.array(list(collections.Counter(map(tuple, pairs.tolist())).values()))
    assert len(counts) == 10
    assert ((counts - 2000) ** 2 / 2000).sum() < 27.9  # chi-squared with 9 degrees of freedom, 0.1 %


def test_the_oracle_sees_exactly_what_is_not_drawn():
    pooled, table = toy_tables()
    for seed in range(5):
        key = jax.random.key(seed)
        reward, status = draw(key, UID, table.reward[1], table.there[1], 2)
        got = np.asarray(held_back(key, UID, table, jnp.asarray(1), 2))
        for node, task in enumerate([3, 0, 2, 1]):
            drawn = np.asarray(reward)[node][np.asarray(status)[node] == Status.OK].tolist()
            here = pooled[1, task][~np.isnan(pooled[1, task])]
            left = [r for r in here if r not in drawn]
            beside = np.concatenate([pooled[0, task], pooled[2, task]])
            known = np.array([*left, *beside[~np.isnan(beside)]])
            expected = 0.0 if len(here) < 2 else known.var(ddof=1)
            assert got[node] == pytest.approx(expected, rel=1e-4, abs=1e-6)
        np.testing.assert_array_equal(got[4:], 0)


def test_the_oracle_of_a_single_checkpoint_falls_back_on_all_trials():
    pooled = np.array([[[0.0, 1, 1, 1, 0], [0, 1, np.nan, np.nan, np.nan], [1, np.nan, np.nan, np.nan, np.nan]]])
    table = recorded.tables(pooled, np.arange(3), 3, 4)
    got = held_back(jax.random.key(0), UID[:3], table, jnp.asarray(0), 4)
    np.testing.assert_allclose(got, [0.3, 0.5, 0.0], rtol=1e-6)


# ------------------------------------------------------------------------------------------------ real data


@needs_data
@pytest.mark.parametrize("name", SETS)
def test_recorded_sets_load_and_give_groups(name):
    data = recorded.load(DATA / name)
    pooled, members = recorded.checkpoints(data.reward, 4)
    assert [m for one in members for m in one] == list(range(len(data.models)))
    count = (~np.isnan(pooled)).sum(-1)
    assert count.sum() == (~np.isnan(data.reward)).sum()
    assert (count >= 4).mean() > 0.89
    expected = {"mcpmark": 38, "swebench_verified": 12, "bfcl_multiturn": 1, "bfcl_v1_2024": 14, "taubench": 1}
    assert len(members) == expected[name]
