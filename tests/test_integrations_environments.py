"""Gymnasium and OpenEnv environments as pools, played through a dispatcher."""

import dataclasses

import pytest

import envsched_jax as es
from envsched_jax import graph
from envsched_jax.integrations import gymnasium as gym_pool
from envsched_jax.integrations import openenv as open_pool
from envsched_jax.pool import records as pool_records


class Corridor:
    """Gymnasium's interface: walk right ``length`` times."""

    class action_space:  # only what `play` uses
        seed = staticmethod(lambda seed: None)

    def __init__(self, length):
        self.length, self.closed = length, False

    def reset(self, *, seed, options):
        self.at, self.seed, self.options = 0, seed, options
        return self.at, {}

    def step(self, action):
        self.at += action
        return self.at, float(self.at == self.length), self.at == self.length, False, {}

    def close(self):
        self.closed = True


def corridor(**given):
    return gym_pool.task("Corridor-v0", "short", actions=("stay", "right"), kwargs={"length": 3}, **given)


def test_an_episode_of_a_task():
    made = []

    def make(env_id, **kwargs):
        made.append(Corridor(**kwargs))
        return made[-1]

    won = gym_pool.play(corridor(), lambda at, info: 1, seed=5, make=make)
    assert won[:3] == (1.0, "ok", 3) and won.seconds >= 0.0
    assert made[0].closed and made[0].seed == 5 and made[0].options is None
    lost = gym_pool.play(corridor(seed=7, options={"a": 1}), lambda at, info: 0, seed=5, max_steps=4, make=make)
    assert lost[:3] == (0.0, "truncated", 4)
    assert made[1].seed == 7 and made[1].options == {"a": 1}
    with pytest.raises(ZeroDivisionError):
        gym_pool.play(corridor(), lambda at, info: 1 // 0, seed=5, make=make)
    assert made[2].closed


def test_a_task_survives_the_pool_file(tmp_path):
    es.write_jsonl(tmp_path / "pool.jsonl", [corridor(domain="games")])
    (record,) = es.read_jsonl(tmp_path / "pool.jsonl")
    assert record == corridor(domain="games")
    won = gym_pool.play(pool_records.to_object(record), lambda at, info: 1, seed=0, make=lambda _, **k: Corridor(**k))
    assert won.reward == 1.0
    with pytest.raises(es.DispatchError, match="not JSON"):
        gym_pool.task("Corridor-v0", "odd", kwargs={"length": object()})


def test_gymnasium_itself():
    gymnasium = pytest.importorskip("gymnasium", reason="gymnasium is not installed here")
    maps = [["SFFF", "FFFF", "FFFF", "FFFG"], ["SFFH", "FFFF", "FHFF", "FFFG"], ["SHHH", "HHHH", "HHHH", "HHHG"]]
    pool = [
        gym_pool.task("FrozenLake-v1", f"map{i}-{j}", kwargs={"desc": desc, "is_slippery": False}, actions=("go",))
        for i, desc in enumerate(maps)
        for j in range(4)
    ]
    scheduler = es.make_scheduler("envsched", belief="diffusion", batch_size=4, group_size=4)
    dispatcher = es.Dispatcher(pool, scheduler, group_size=4, graph=graph.build(pool, k=2, num_patterns=2))
    records = dispatcher.records
    for _ in range(6):
        for ticket in dispatcher.propose():
            space = gymnasium.spaces.Discrete(4, seed=ticket.ticket_id)
            outcomes = [
                gym_pool.play(records[ticket.task_id], lambda *_, space=space: int(space.sample()), seed=i)
                for i in range(4)
            ]
            assert all(outcome.status in ("ok", "truncated") for outcome in outcomes)
            dispatcher.observe(
                ticket.ticket_id,
                [outcome.reward for outcome in outcomes],
                status=[outcome.status for outcome in outcomes],
                tokens=[outcome.tokens for outcome in outcomes],
            )
    found = dispatcher.metrics()["environments"]["FrozenLake-v1"]
    assert found["observed"] == 24 and found["tokens"] >= 1.0


@dataclasses.dataclass
class Result:
    done: bool
    reward: float | None


class Sums:
    """OpenEnv's interface: say the index."""

    def num_tasks(self, split):
        return {"train": 3}.get(split, 0)

    def get_task(self, split, index):
        return {"id": f"sum-{index}", "question": f"what is {index} + 0?"}

    def reset(self, *, seed, split, index):
        self.index, self.said = index, 0
        return Result(False, None)

    def step(self, action):
        self.said += 1
        right = action == self.index
        return Result(right, 1.0 if right else None)


def test_openenv_tasks_and_episodes():
    pool = open_pool.tasks(Sums(), "sums", split="train")
    assert [record.task_id for record in pool] == ["sums/train/sum-0", "sums/train/sum-1", "sums/train/sum-2"]
    assert pool[2].text == "what is 2 + 0?"
    assert open_pool.play(pool[2], Sums(), lambda result: 2, seed=0)[:3] == (1.0, "ok", 1)
    assert open_pool.play(pool[2], Sums(), lambda result: 9, seed=0, max_steps=5)[:3] == (None, "verifier_error", 5)
    with pytest.raises(es.DispatchError, match="no task"):
        open_pool.tasks(Sums(), "sums", split="test")
    with pytest.raises(es.DispatchError, match="num_tasks"):
        open_pool.tasks(object(), "sums", split="train")


def test_openenv_itself():
    interfaces = pytest.importorskip("openenv.core.env_server.interfaces", reason="openenv is not installed here")
    types = pytest.importorskip("openenv.core.env_server.types")

    class Environment(interfaces.Environment):
        def list_splits(self):
            return ["train"]

        def list_tasks(self, split):
            return [self.get_task(split, i) for i in range(self.num_tasks(split))]

        def num_tasks(self, split):
            return 3

        def get_task(self, split, index):
            return {"id": index, "prompt": f"say {index}"}

        def get_task_range(self, split, start=None, stop=None):
            return self.list_tasks(split)[start:stop]

        def reset(self, seed=None, episode_id=None, *, split="train", index=0, **unused):
            self.index = index
            return types.Observation(done=False, reward=None)

        def step(self, action, timeout_s=None, **unused):
            right = action.metadata["said"] == self.index
            return types.Observation(done=True, reward=float(right))

        @property
        def state(self):
            return types.State()

    env = Environment()
    assert {name for name in dir(interfaces.TaskProvider) if name.startswith(("list", "num", "get"))} <= set(dir(env))
    pool = open_pool.tasks(env, "say", split="train")
    assert [record.text for record in pool] == ["say 0", "say 1", "say 2"]
    for said, reward in ((1, 1.0), (2, 0.0)):
        outcome = open_pool.play(pool[1], env, lambda _, said=said: types.Action(metadata={"said": said}), seed=0)
        assert outcome[:3] == (reward, "ok", 1)
