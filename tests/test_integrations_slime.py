"""slime's data source on a dispatcher's tasks: a fake of its classes always, miles' own where it is installed."""

import copy
import enum
import functools
import os
import re
import subprocess
import sys
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import pytest

import envsched_jax as es
from envsched_jax import graph, testing
from envsched_jax.integrations.slime import process, scheduled

SIZE, GROUP = 4, 2
PAGE = Path(__file__).parents[1] / "docs/trainers/slime.md"


@dataclass
class Sample:
    group_index: int | None = None
    index: int | None = None
    reward: object = None
    response_length: int = 0
    loss_mask: list | None = None
    metadata: dict = field(default_factory=dict)

    class Status(enum.Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    status: Status = Status.PENDING

    def get_reward_value(self, args):
        return self.reward if not args.reward_key else self.reward[args.reward_key]

    @property
    def effective_response_length(self):
        return sum(self.loss_mask) if self.loss_mask is not None else self.response_length


@functools.cache
def pool():
    records = testing.synthetic_pool(24, 3)
    return records, graph.build(records, k=4, num_patterns=4)


class RolloutDataSource:
    """The surface of slime's class of this name."""

    def __init__(self, args):
        self.args = args
        rows = [Sample(metadata={"task_id": record.task_id}) for record in pool()[0]]
        self.dataset = SimpleNamespace(samples=rows[args.skip :]) if args.rollout_global_dataset else None


def make(args):
    recipe = es.make_scheduler("stratified", batch_size=SIZE, group_size=GROUP)
    return es.Dispatcher(pool()[0], recipe, group_size=GROUP, graph=pool()[1])


Source = scheduled(RolloutDataSource, make)


def arguments(folder=None, **changes):
    given = {"n_samples_per_prompt": GROUP, "reward_key": None, "partial_rollout": False, "skip": 0}
    return Namespace(**(given | {"rollout_global_dataset": True, "save": folder, "load": folder} | changes))


def tasks(groups):
    for group in groups:
        assert len(group) == GROUP and len({sample.group_index for sample in group}) == 1
        assert [sample.index for sample in group] == [group[0].group_index * GROUP + i for i in range(GROUP)]
    return [group[0].metadata["task_id"] for group in groups]


def finish(group, rewards=None, status=Sample.Status.COMPLETED):
    for i, sample in enumerate(group):
        sample.status, sample.response_length = status, 5
        sample.reward = float((sample.group_index + i) % 3 == 0) if rewards is None else rewards[i]
    return group


def rollout(source, keep=SIZE, ask=6):
    """What slime's function does: asks for more than it needs, aborts the rest; returns the tasks it asked for."""
    groups = source.get_samples(ask)
    process(source.args, [finish(group) for group in groups[:keep]], source.get_samples)
    if source.args.partial_rollout:
        source.add_samples(groups[keep:])
    return tasks(groups)


def test_importing_it_imports_no_trainer():
    code = "import sys, envsched_jax.integrations.slime; print(sorted({'slime', 'miles', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"


def test_groups_that_were_aborted_are_begun_anew_with_the_next_rollout():
    source = Source(arguments())
    first, second = rollout(source), rollout(source)
    assert second[:2] == first[SIZE:]
    counts = source.dispatcher.counts()
    assert counts["observed"] == 2 * SIZE and counts["open"] == 2
    assert len(source) == 24


def test_partial_groups_go_on_where_they_were():
    source = Source(arguments(partial_rollout=True))
    groups = source.get_samples(6)
    process(source.args, [finish(group) for group in groups[:4]], source.get_samples)
    for sample in groups[4]:
        sample.status, sample.response_length = Sample.Status.ABORTED, 2
    fanned = [[sample] for sample in groups[5]]
    source.add_samples([groups[4], fanned])
    again = source.get_samples(4)
    assert again[0] is groups[4] and again[0][0].response_length == 2
    assert tasks(again)[:2] == tasks(groups)[4:] and again[1][0].status == Sample.Status.PENDING
    source.observe([finish(group) for group in again])
    assert source.dispatcher.counts()["observed"] == 8 and source.dispatcher.counts()["open"] == 0


@pytest.mark.parametrize("partial", [False, True])
def test_resumed_it_goes_on_with_the_same_tasks(tmp_path, partial):
    source = Source(arguments(tmp_path / "a", partial_rollout=partial))
    whole = [rollout(source) for _ in range(4)]
    for stop in (1, 3):
        source = Source(arguments(tmp_path / "b", partial_rollout=partial))
        first = []
        for i in range(stop):
            first.append(rollout(source))
            source.save(i)
        rollout(source)  # goes on for a while before it dies
        source = Source(arguments(tmp_path / "b", partial_rollout=partial))
        source.load(stop - 1)
        assert first + [rollout(source) for _ in range(4 - stop)] == whole


def test_without_a_checkpoint_it_begins_anew(tmp_path, caplog):
    source = Source(arguments(tmp_path))
    source.load(-1)
    assert "begins anew" in caplog.text
    source.args.load = None
    source.load(7)
    assert rollout(source) == rollout(Source(arguments()))


def outcome(group, **changes):
    source = Source(arguments(**changes))
    (given,) = source.get_samples(1)
    source.observe([group(given)])
    (numbers,) = source.dispatcher.metrics()["environments"].values()
    return numbers


def fan_out(given, flat=False):
    groups = [[copy.deepcopy(sample) for _ in range(3)] for sample in given]
    for i, (siblings, sample) in enumerate(zip(groups, given, strict=True)):
        for k, sibling in enumerate(siblings):
            sibling.rollout_id = sample.index
            finish([sibling], [float(i) if i == 0 else k / 2])
    return [sample for siblings in groups for sample in siblings] if flat else groups


@pytest.mark.parametrize("flat", [False, True])
def test_a_rollout_that_fans_out_counts_once(flat):
    numbers = outcome(lambda given: fan_out(given, flat))
    assert numbers["reward"] == pytest.approx(0.25)  # 0 and the mean of 0, 1/2 and 1
    assert numbers["tokens"] == 15 and numbers["invalid_rollouts"] == 0


def test_what_samples_say():
    numbers = outcome(lambda given: finish(given, [1.0, 0.0], Sample.Status.TRUNCATED))
    assert numbers["reward"] == 0.5 and numbers["tokens"] == 5
    numbers = outcome(lambda given: finish(given, [{"acc": 1.0}, {"acc": 0.5}]), reward_key="acc")
    assert numbers["reward"] == 0.75
    for status in (Sample.Status.FAILED, Sample.Status.ABORTED, Sample.Status.PENDING):
        numbers = outcome(lambda given, status=status: finish(given, [0.0, 0.0], status))
        assert numbers["failed"] == 1 and numbers["reward"] is None
    numbers = outcome(lambda given: finish(given, [None, float("nan")]))
    assert numbers["failed"] == 1 and numbers["invalid_rollouts"] == 2


def test_mistakes_are_named():
    with pytest.raises(es.DispatchError, match="n_samples_per_prompt=3"):
        Source(arguments(n_samples_per_prompt=3))
    with pytest.raises(es.DispatchError, match=r"no row with metadata task_id=.*1 missing"):
        Source(arguments(skip=1))
    with pytest.raises(es.DispatchError, match="global data set"):
        Source(arguments(rollout_global_dataset=False))


# ----------------------------------------------------------------------------------------------------- miles itself


@pytest.mark.slow
def test_the_script_of_the_documentation_on_the_real_data_source(tmp_path):
    pytest.importorskip("miles", reason="miles is not installed here: see docs/trainers/slime.md")
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    (tmp_path / "script.py").write_text(code)

    def run(folder, rollouts):
        command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / folder), str(rollouts)]
        environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout.splitlines()

    whole = run("whole", 4)
    assert "'observed': 16" in whole[-1] and "'open': 2" in whole[-1]
    assert run("parts", 2)[:-1] + run("parts", 4) == whole
