"""verl's data set and replay buffer on a dispatcher's tasks: fakes of its classes always, real ones where installed."""

import functools
import json
import os
import re
import subprocess
import sys
import types
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import envsched_jax as es
from envsched_jax import graph, testing
from envsched_jax.integrations import verl
from envsched_jax.integrations.verl import TICKET

SIZE, GROUP = 4, 2
PAGE = Path(__file__).parents[1] / "docs/trainers/verl.md"


@functools.cache
def pool():
    records = testing.synthetic_pool(24, 3)
    return records, graph.build(records, k=4, num_patterns=4)


def make(config):
    recipe = es.make_scheduler("stratified", batch_size=SIZE, group_size=GROUP)
    return es.Dispatcher(pool()[0], recipe, group_size=GROUP, graph=pool()[1])


class Rows(list):
    column_names = ("task_id", "extra_info")

    def __getitem__(self, item):
        return [row[item] for row in self] if isinstance(item, str) else dict(super().__getitem__(item))


class RLHFDataset:
    """The surface of verl's class of this name."""

    def __init__(self, data_files, tokenizer, config, processor=None, max_samples=-1):
        ids = [record.task_id for record in pool()[0]][config.get("skip", 0) :]
        self.dataframe = Rows({"task_id": name, "extra_info": {"name": name}} for name in ids)

    def __getitem__(self, item):
        return self.dataframe[item]

    def __len__(self):
        return len(self.dataframe)


class Queue(types.ModuleType):
    """The part of TransferQueue that is used."""

    def __init__(self):
        super().__init__("transfer_queue")
        self.data = {}

    def kv_batch_get(self, keys, partition_id, select_fields=None):
        rows = [self.data[key] for key in keys]
        return {name: np.array([row[name] for row in rows]) for name in select_fields}


class ReplayBuffer:
    """The surface of verl's class of this name: groups that end are sampled or cleared."""

    def __init__(self, trainer_mode, sampler_kwargs, refill_fn=None, filter_groups_metric=None, train_batch_size=None):
        self.trainer_mode, self.filter_groups_metric = trainer_mode, filter_groups_metric
        self.partitions, self.drop = {"train": {}, "val": {}}, set()

    def _clear_groups(self, partition_id, uids):
        for key in [key for key in self.partitions[partition_id] if key.split("_")[0] in uids]:
            del self.partitions[partition_id][key]

    def sample(self, global_steps, partition_id, batch_size):
        self._clear_groups(partition_id, self.drop)
        tags = self.partitions[partition_id]
        batch = SimpleNamespace(keys=list(tags), tags=list(tags.values()))
        self.partitions[partition_id] = {}
        return batch, {}


@pytest.fixture
def fakes(monkeypatch):
    queue = Queue()
    given = {
        "torch": SimpleNamespace(tensor=np.array),
        "transfer_queue": queue,
        "verl.utils.dataset.rl_dataset": SimpleNamespace(RLHFDataset=RLHFDataset),
        "verl.trainer.ppo.v1": SimpleNamespace(
            replay_buffer=SimpleNamespace(ReplayBuffer=ReplayBuffer, ReplayBufferAsync=ReplayBuffer)
        ),
    }
    for name in ("verl", "verl.utils", "verl.utils.dataset", "verl.trainer", "verl.trainer.ppo"):
        given[name] = types.ModuleType(name)
    for name, module in given.items():
        monkeypatch.setitem(sys.modules, name, module)
    verl._dataset.cache_clear()
    verl._buffer.cache_clear()
    monkeypatch.setattr(verl, "LINK", verl.Link())
    yield queue
    verl._dataset.cache_clear()
    verl._buffer.cache_clear()


class Config(dict):
    __getattr__ = dict.__getitem__


def dataset(files="train.parquet", **changes):
    given = {"train_files": ["train.parquet"], "val_files": "val.parquet"}
    return verl.Dataset([files], None, Config(given | {"envsched": {"dispatcher": f"{__name__}:make"}} | changes))


def buffer(mode="sync", **options):
    name = "Buffer" if mode == "sync" else "BufferAsync"
    return getattr(verl, name)(trainer_mode=mode, sampler_kwargs=options, refill_fn=None)


def roll_out(queue, made, rows, uids=None, sessions=GROUP):
    """Puts what agent loops would: two outputs per session, of which the last one's reward is that of the session."""
    for i, row in enumerate(rows):
        uid, number = uids[i] if uids else f"u{int(row[TICKET][0])}", int(row[TICKET][0])
        queue.data[uid] = {TICKET: row[TICKET]}
        for session in range(sessions):
            for index in (1, 0):
                key, reward = f"{uid}_{session}_{index}", float((number + session) % 3 == 0) if index else 99.0
                queue.data[key] = {"rm_scores": np.array([0.0, reward]), TICKET: row[TICKET]}
                made.partitions["train"][key] = {"response_len": 5}


def test_importing_it_imports_no_trainer():
    code = "import sys, envsched_jax.integrations.verl; print(sorted({'verl', 'ray', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        getattr(verl, "Oth" + "er")


def step(queue, rows, made, number=SIZE):
    drawn = [rows[0] for _ in range(number)]
    roll_out(queue, made, drawn)
    made.sample(0, "train", number)
    return [row["task_id"] for row in drawn]


def test_rows_are_the_dispatchers_and_rewards_come_back(fakes):
    rows, made = dataset(), buffer()
    for _ in range(3):
        assert len(set(step(fakes, rows, made))) == SIZE
    counts = verl.LINK.dispatcher.counts()
    assert counts["observed"] == 3 * SIZE and counts["open"] == 0
    numbers = verl.LINK.dispatcher.metrics()["environments"].values()
    assert all(env["tokens"] == 10 and 0 <= env["reward"] <= 1 for env in numbers)
    assert dataset("val.parquet")[3]["task_id"] == pool()[0][3].task_id
    assert verl.LINK.dispatcher.counts()["proposed"] == 3 * SIZE


def test_groups_that_are_dropped_are_reported_too(fakes):
    rows, made = dataset(), buffer(filter_groups_metric="reward", train_batch_size=SIZE)
    assert made.filter_groups_metric == "reward"
    drawn = [rows[0] for _ in range(SIZE)]
    roll_out(fakes, made, drawn)
    made.drop = {"u0", "u3"}
    batch, _ = made.sample(0, "train", SIZE)
    assert {key.split("_")[0] for key in batch.keys} == {"u1", "u2"}
    assert verl.LINK.dispatcher.counts()["observed"] == SIZE


def test_sessions_and_groups_that_failed(fakes):
    rows, made = dataset(), buffer()
    drawn = [rows[0] for _ in range(SIZE)]
    roll_out(fakes, made, drawn[:1], sessions=1)
    roll_out(fakes, made, drawn[1:3])
    fakes.data["u1_0_1"]["rm_scores"] = np.array([float("nan"), 0.0])
    made.sample(0, "val", SIZE)
    assert verl.LINK.dispatcher.counts()["observed"] == 0
    made.sample(0, "train", SIZE)
    counts = verl.LINK.dispatcher.counts()
    assert counts["observed"] == 3 and counts["cancelled"] == 1 and counts["open"] == 0
    assert sum(env["invalid_rollouts"] for env in verl.LINK.dispatcher.metrics()["environments"].values()) == 2


def test_asynchronous_trainers_keep_the_rows_of_groups_that_failed(fakes):
    rows, made = dataset(), buffer("separate_async")
    drawn = [rows[0] for _ in range(SIZE)]
    roll_out(fakes, made, drawn[:1], sessions=0)
    made.drop = {"u0"}
    made.sample(0, "train", SIZE)
    counts = verl.LINK.dispatcher.counts()
    assert counts["observed"] == 1 and counts["open"] == SIZE - 1
    state = rows.state_dict()
    again = dataset()
    again.load_state_dict(state)
    new = {again[0][TICKET][0] for _ in range(SIZE)}
    assert new.isdisjoint({row[TICKET][0] for row in drawn})  # verl itself begins anew what was under way


def test_resumed_it_goes_on_with_the_same_rows(fakes):
    rows, made = dataset(), buffer()
    whole = [step(fakes, rows, made) for _ in range(5)]
    rows, made = dataset(), buffer()
    first = [step(fakes, rows, made) for _ in range(2)]
    state = rows.state_dict()
    ahead = [rows[0]["task_id"] for _ in range(2)]
    under_way = rows.state_dict()
    rows, made = dataset(), buffer()
    rows.load_state_dict(state)
    assert first + [step(fakes, rows, made) for _ in range(3)] == whole
    rows = dataset()
    rows.load_state_dict(under_way)
    assert [rows[0]["task_id"] for _ in range(2)] == ahead


def test_mistakes_are_named(fakes):
    with pytest.raises(es.DispatchError, match="they tell the sets apart"):
        dataset(val_files="train.parquet")
    with pytest.raises(es.DispatchError, match="expected 0: workers"):
        dataset(dataloader_num_workers=2)
    with pytest.raises(es.DispatchError, match="expected module:function, got ''"):
        dataset(envsched=None)
    with pytest.raises(es.DispatchError, match="1 tasks have none"):
        dataset(skip=1)
    assert dataset(envsched={"key": "name", "dispatcher": f"{__name__}:make"})[0]["task_id"]
    verl.LINK.dispatcher = None
    made = buffer()
    made.partitions["train"]["u_0_0"] = {}
    fakes.data["u_0_0"] = {"rm_scores": np.array([1.0]), TICKET: np.array([0])}
    with pytest.raises(es.DispatchError, match=r"data\.custom_cls"):
        made.sample(0, "train", 1)


# ------------------------------------------------------------------------------------------------------ verl itself


ASYNCHRONOUS = """
import json
import sys
from pathlib import Path

import numpy as np
import ray
import torch
import toy
import transfer_queue as tq
from omegaconf import OmegaConf
from verl.utils import tensordict_utils as tu
from verl.utils.dataset.rl_dataset import collate_fn
from verl.utils.import_utils import load_extern_object

import envsched_jax.integrations.verl as adapter

ray.init(num_cpus=8, include_dashboard=False)
tq.init()
adapter.LINK.dispatcher = toy.make(None)
adapter.LINK.restart(again=True)
refilled = []


def put(uid, status, step, rewards):
    ticket = torch.tensor([adapter.LINK.draw().ticket_id])
    prompt = {"is_prompt": True, "status": status, "global_steps": step}
    tq.kv_batch_put(keys=[uid], partition_id="train", tags=[prompt], fields=tu.list_of_dict_to_tensordict(
        [{"envsched_ticket": ticket, "dummy_tensor": torch.tensor([0])}]))
    if rewards:
        fields = [{"rm_scores": torch.tensor([0.0, r]), "envsched_ticket": ticket} for r in rewards]
        tq.kv_batch_put(keys=[f"{uid}_{i}_0" for i in range(len(rewards))], partition_id="train",
                        fields=tu.list_of_dict_to_tensordict(fields), tags=[{"response_len": 2}] * len(rewards))


def refill(count):
    refilled.append(count)
    for i in range(count):
        put(f"new{len(refilled)}x{i}", "finished", 5, [1.0, 0.0, 0.0, 1.0])


buffer = load_extern_object("pkg://envsched_jax.integrations.verl", "BufferAsync")(
    trainer_mode="separate_async", trainer_config=OmegaConf.create({}), max_off_policy_threshold=2,
    max_off_policy_strategy="drop", sampler_kwargs=OmegaConf.create({"filter_groups_metric": "reward"}),
    poll_interval=0.01, refill_fn=refill)
put("good", "finished", 5, [1.0, 0.0, 1.0, 1.0])
put("alike", "finished", 5, [1.0] * 4)
put("stale", "finished", 1, [0.0, 1.0, 1.0, 1.0])
put("broken", "failure", 5, [])
put("running", "running", 5, [])
batch, metrics = buffer.sample(5, "train", 4)
numbers = adapter.LINK.dispatcher.metrics()["environments"].values()
print("counts", json.dumps([adapter.LINK.dispatcher.counts(), sum(refilled), len(batch.keys),
      sum(n["failed"] for n in numbers), sum(n["invalid_rollouts"] for n in numbers)]))
tq.close()
ray.shutdown()
"""


def run_script(tmp_path, name, *arguments):
    command = [sys.executable, str(tmp_path / name), *map(str, arguments)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "RAY_AUTH_MODE": "disabled"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()


def page_script(tmp_path):
    pytest.importorskip("transfer_queue", reason="verl is not installed here: see docs/trainers/verl.md")
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    (tmp_path / "toy.py").write_text(code)


@pytest.mark.slow
def test_the_real_asynchronous_buffer_reports_what_it_drops(tmp_path):
    page_script(tmp_path)
    (tmp_path / "script.py").write_text(ASYNCHRONOUS)
    (line,) = [line for line in run_script(tmp_path, "script.py") if line.startswith("counts")]
    counts, refilled, keys, failed, invalid = json.loads(line.removeprefix("counts "))
    assert counts["observed"] == 7 and counts["open"] == 1  # all but the group that still runs
    assert refilled == 3 and keys == 16 and failed == 1 and invalid == 4


@pytest.mark.slow
def test_the_script_of_the_documentation_on_real_classes(tmp_path):
    page_script(tmp_path)

    def run(folder, steps):
        lines = run_script(tmp_path, "toy.py", tmp_path / folder, steps)
        return [line for line in lines if re.match(r"\d+ \[|tickets", line)]

    whole = run("whole", 8)  # the data set has 6 batches: an epoch ends in between
    assert len(whole) == 9 and "'observed': 32" in whole[-1] and "'open': 0" in whole[-1]
    assert run("parts", 3)[:-1] + run("parts", 8) == whole
