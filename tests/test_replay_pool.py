"""Replay with the graph of another pool: BFCL's own tools, state and checks, or a file of JSON lines."""

import json
from dataclasses import replace

import numpy as np
import pytest
from test_recorded import DATA, write_set

from configs import replay as config_file
from envsched_jax import graph
from envsched_jax.environments import bfcl
from envsched_jax.pool import Record, read_jsonl, write_jsonl
from experiments import recorded, replay, replay_arm
from experiments.recorded import RecordedError

needs_package = pytest.mark.skipif(not bfcl.available(), reason="bfcl-eval is not installed: `make bfcl` does it")
needs_data = pytest.mark.skipif(not (DATA / "bfcl_multiturn").is_dir(), reason="recorded outcomes are not here")
STATE = "GorillaFileSystem.root"


def test_a_pool_comes_in_the_order_of_the_outcomes(tmp_path):
    write_set(tmp_path / "toy")
    data = recorded.load(tmp_path / "toy")
    other = [replace(r, text=f"other {r.task_id}") for r in reversed(data.records)]
    got = recorded.with_pool(data, other, "p")
    assert [r.text for r in got.records] == [f"other {r.task_id}" for r in data.records]
    np.testing.assert_array_equal(got.reward, data.reward)


def test_a_pool_of_other_tasks_is_refused(tmp_path):
    write_set(tmp_path / "toy", tasks=6)
    data = recorded.load(tmp_path / "toy")
    with pytest.raises(RecordedError, match=r"pool p: lacks 4 tasks of data set toy: t2, t3, t4, \.\.\."):
        recorded.with_pool(data, data.records[:2], "p")
    more = [*data.records, Record("t9", "e0", "", ())]
    with pytest.raises(RecordedError, match="pool p: has 1 tasks that are not in data set toy: t9"):
        recorded.with_pool(data, more, "p")


def test_which_pool_is_read(tmp_path):
    write_set(tmp_path / "all" / "toy")
    write_set(tmp_path / "all" / "two")
    records = read_jsonl(tmp_path / "all" / "toy" / "tasks.jsonl")
    write_jsonl(tmp_path / "pool.jsonl", [replace(r, state_writes=(r.task_id,)) for r in records])
    toy, file = str(tmp_path / "all" / "toy"), str(tmp_path / "pool.jsonl")
    ((_, plain),), ((folder, other),) = replay._load(toy, None), replay._load(toy, None, file)
    assert plain.records[0].state_writes is None and other.records[0].state_writes == ("t0",)
    marks = {replay._fingerprint(folder, data, {}, {}) for data in (plain, other)}
    assert len(marks) == 2  # so that what the one pool gave is not kept for the other
    with pytest.raises(RecordedError, match="expected one data set, got 2"):
        replay._load(str(tmp_path / "all"), None, file)
    with pytest.raises(RecordedError, match=r"nosuch: no such file; expected one of JSON lines, or 'bfcl'"):
        replay._load(toy, None, "nosuch")


@pytest.mark.slow
def test_the_program_takes_the_pool(tmp_path):
    write_set(tmp_path / "toy", models=4, trials=5)
    records = read_jsonl(tmp_path / "toy" / "tasks.jsonl")
    write_jsonl(tmp_path / "pool.jsonl", [replace(r, env_id="one") for r in records])
    config = config_file.get_config("smoke")
    config.data_dir, config.pool = str(tmp_path / "toy"), str(tmp_path / "pool.jsonl")
    config.arms, config.steps, config.seeds = ("uniform", "oracle"), 4, 1
    config.predict.settings = ()
    replay.main(config, tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["datasets"]["toy"]["environments"] == 1


@needs_package
def test_state_is_what_the_reference_solution_touches():
    tasks = bfcl.tasks(["base"])
    assert bfcl.touched(tasks["multi_turn_base_0"]) == ((STATE,), (STATE,))  # mkdir, mv, grep, sort, diff
    assert bfcl.touched(tasks["multi_turn_base_13"]) == ((STATE,), ())  # cd, tail, diff
    reads, writes = bfcl.touched(tasks["multi_turn_base_144"])  # get_stock_info, mean
    assert reads == ("TradingBot.stocks",) and writes == ()
    # A change counts although a later turn takes it back, and is seen inside a list.
    task = tasks["multi_turn_base_0"]
    undone = task._replace(solution=(("touch(file_name='new')",), ("rm(file_name='new')",), (), ()))
    assert bfcl.touched(undone)[1] == (STATE,)
    assert bfcl.touched(task._replace(solution=((), ()))) == ((), ())
    assert task == bfcl.tasks(["base"])["multi_turn_base_0"]  # nothing is left in the task


@needs_package
def test_the_pool_tells_tasks_of_one_environment_apart():
    pool = bfcl.pool()
    assert len(pool) == 800 and pool == bfcl.pool()
    environments = {r.env_id for r in pool}
    assert len({r.state_writes for r in pool}) > 3 * len(environments)
    for record in pool:
        owners = {name.split(".")[0] for name in (*record.state_reads, *record.state_writes)}
        assert owners <= set(record.env_id.split("+"))
        assert 0 < record.verifier.n_checks <= record.n_turns


@needs_package
@needs_data
def test_the_recorded_outcomes_take_the_real_pool():
    ((_, data),) = replay._load(str(DATA / "bfcl_multiturn"), None, "bfcl")
    assert len(data.records) == 600 and all(r.state_writes is not None for r in data.records)
    ready = replay_arm.prepare(data, group_size=4, cohort=5, graph={"k": 8, "num_patterns": 8})
    recorded_graph, _ = graph.build(recorded.load(DATA / "bfcl_multiturn").records, k=8, num_patterns=8)
    assert not np.array_equal(ready.graph.senders, recorded_graph.senders)
    with pytest.raises(RecordedError, match="lacks"):
        replay._load(str(DATA / "taubench"), None, "bfcl")
