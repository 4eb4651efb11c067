"""prime-rl's curriculum on a dispatcher: a fake of its classes always, real episodes where verifiers is installed."""

import asyncio
import functools
import re
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest

import envsched_jax as es
from envsched_jax import graph
from envsched_jax.dispatch import load_state, save_state
from envsched_jax.integrations.verifiers import STATUS, TaskSampler, outcome, scheduled, to_records
from envsched_jax.types import Status

ENVS = {"alpha": 12, "beta": 6}
SIZE, GROUP = 4, 2
PAGE = Path(__file__).parents[1] / "docs/trainers/verifiers.md"


def task(env_id, i):
    data = SimpleNamespace(prompt=f"{env_id} number {i}", description=None, name=None)
    return SimpleNamespace(key=f"k{i}", data=data)


@functools.cache
def tasks(env_id):
    return [task(env_id, i) for i in range(ENVS[env_id])]


@functools.cache
def pool(*env_ids):
    records = [record for env_id in env_ids for record in to_records(env_id, tasks(env_id), ("run",))]
    return records, graph.build(records, k=3, num_patterns=2)


@functools.cache
def recipe():
    return es.make_scheduler("stratified", batch_size=SIZE, group_size=GROUP)


def dispatcher(*env_ids, **more):
    records, built = pool(*(env_ids or ENVS))
    return es.Dispatcher(records, recipe(), group_size=GROUP, graph=built, **more)


def span(seconds=0.5):
    return SimpleNamespace(duration=seconds)


def trace(reward=1.0, *, ok=True, stop="agent_completed", error=None, trainable=True, truncated=False):
    errors = [SimpleNamespace(type=error)] if error else []
    rewards = {} if reward is None else {"r": SimpleNamespace(value=reward)}
    return SimpleNamespace(
        ok=ok,
        stop_condition=stop,
        is_timeout=stop.endswith("_timeout"),
        errors=errors,
        last_error=errors[-1] if errors else None,
        rewards=rewards,
        reward=reward or 0.0,
        is_truncated=truncated,
        num_output_tokens=7,
        agent=SimpleNamespace(trainable=trainable),
        timing=SimpleNamespace(setup=span(), agent=span(), finalize=span(), scoring=span()),
    )


def episode(what, env_id="alpha", *traces, ok=None, error=None, late=False):
    return SimpleNamespace(
        task=SimpleNamespace(key=what.key),
        env=SimpleNamespace(name=env_id),
        traces=list(traces),
        ok=all(t.ok for t in traces) and not error and not late if ok is None else ok,
        is_timeout=late,
        last_error=SimpleNamespace(type=error) if error else None,
    )


@dataclass
class TaskRequest:
    env_name: str
    task: object
    step: int


class Curriculum:
    def __init__(self, sampler):
        self.sampler = sampler

    def on_result(self, group):
        self.sampler.observe(group)
        return any(t.ok for e in group for t in e.traces)


class TrainSource:
    """The surface of prime-rl's class of this name."""

    def __init__(self, envs):
        self.envs, self.resumed_groups = list(envs), []
        self.curricula = {env.name: Curriculum(None) for env in self.envs}

    def next_task(self, *, step):
        return self.resumed_groups.pop(0)

    def on_result(self, group):
        return self.curricula[group[0].env.name].on_result(group)

    def state_dict(self):
        return {"envs": {name: c.sampler.state_dict() for name, c in self.curricula.items()}}

    def load_state_dict(self, state_dict):
        assert set(state_dict) == {"envs"}
        for name, curriculum in self.curricula.items():
            curriculum.sampler.load_state_dict(state_dict["envs"][name])


@pytest.fixture
def prime(monkeypatch):
    modules = {name: types.ModuleType(name) for name in ("prime_rl", "prime_rl.orchestrator")}
    modules["prime_rl.orchestrator.types"] = SimpleNamespace(TaskRequest=TaskRequest)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


def envs():
    return [SimpleNamespace(name=name, num_tasks=n, tasks=iter(tasks(name))) for name, n in ENVS.items()]


def source(**more):
    return scheduled(TrainSource)(envs(), dispatcher=dispatcher(**more))


def played(request):
    """A group of episodes of a request, in which the same task always earns the same."""
    number = int(request.task.key[1:])
    return [episode(request.task, request.env_name, trace(float((number + i) % 3 == 0))) for i in range(GROUP)]


def test_importing_it_imports_no_trainer():
    assert "prime_rl" not in sys.modules and "envsched_jax.integrations.verifiers" in sys.modules


def drive(given, steps, first=0):
    """Two batches under way at any time; results come in another order than requests."""
    asked = []
    for step in range(first, first + steps):
        requests = [given.next_task(step=step) for _ in range(SIZE)]
        asked.append([(r.env_name, r.task.key, r.step) for r in requests])
        for request in reversed(requests):
            assert isinstance(given.on_result(played(request)), bool)
    return asked


def test_environments_and_tasks_are_the_dispatchers(prime):
    given = source()
    asked = drive(given, 4)
    assert {name for batch in asked for name, _, _ in batch} == set(ENVS)
    assert given.tickets.dispatcher.counts()["observed"] == 4 * SIZE
    assert given.tickets.dispatcher.policy_version == 3
    assert given.curricula["alpha"].sampler.metrics()["observed"] > 0


def test_resumed_it_asks_for_what_it_would_have_asked_for(prime, tmp_path):
    whole = drive(source(), 5)
    given = source()
    first = drive(given, 2)
    state = given.state_dict()
    assert state["envs"] == {"alpha": {}, "beta": {}}
    save_state(tmp_path / "state", state["envsched"])
    drive(given, 1, first=2)
    again = source()
    again.load_state_dict(state | {"envsched": load_state(tmp_path / "state")})
    assert first + drive(again, 3, first=2) == whole
    with pytest.raises(es.DispatchError, match="no 'envsched'"):
        again.load_state_dict({"envs": state["envs"]})


def test_groups_under_way_come_first_again_unless_the_trainer_brings_them_itself(prime):
    given = source()
    under_way = [given.next_task(step=0) for _ in range(SIZE)]
    again = source()
    again.load_state_dict(given.state_dict())
    again.resumed_groups = [under_way[1]]
    drawn = [again.next_task(step=0) for _ in range(SIZE)]
    assert [r.task.key for r in drawn] == [under_way[i].task.key for i in (1, 0, 2, 3)]
    for request in drawn:
        again.on_result(played(request))
    counts = again.tickets.dispatcher.counts()
    assert counts["observed"] == SIZE and counts["open"] == 0


def test_a_group_that_never_came_back_does_not_take_the_outcome_of_the_next(prime):
    given = scheduled(TrainSource)(envs(), dispatcher=dispatcher(limits=es.Limits(deadline_versions=2)))
    lost = given.next_task(step=0)
    seen = [given.next_task(step=step) for step in range(1, 60)]
    same = next(r for r in seen if r.task is lost.task and r.env_name == lost.env_name)
    open_before = {t.ticket_id for t in given.tickets.dispatcher.open_tickets() if t.task_id.endswith(same.task.key)}
    given.on_result(played(same))
    open_after = {t.ticket_id for t in given.tickets.dispatcher.open_tickets() if t.task_id.endswith(same.task.key)}
    assert len(open_before) == len(open_after) + (len(open_before) > 0)
    assert given.tickets.dispatcher.counts()["expired"] > 0


def test_one_environment_alone():
    sampler = TaskSampler(dispatcher("alpha"), tasks("alpha"), "alpha")
    drawn = [next(sampler) for _ in range(SIZE)]
    for each in drawn:
        sampler.observe([episode(each, "alpha", trace(1.0)), episode(each, "alpha", trace(0.0))])
    sampler.observe([episode(drawn[0], "alpha", trace(1.0))])  # a second time: ignored
    state = sampler.state_dict()
    ahead = [next(sampler).key for _ in range(2 * SIZE)]
    again = TaskSampler(dispatcher("alpha"), tasks("alpha"), "alpha")
    again.load_state_dict(state)
    assert [next(again).key for _ in range(2 * SIZE)] == ahead
    assert sampler.metrics()["observed"] == SIZE


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (episode(task("alpha", 0), "alpha", trace(0.5)), (0.5, Status.OK)),
        (episode(task("alpha", 0), "alpha", trace(1.0), trace(0.0), trace(9.0, trainable=False)), (0.5, Status.OK)),
        (episode(task("alpha", 0), "alpha", trace(0.5, truncated=True)), (0.5, Status.TRUNCATED)),
        (episode(task("alpha", 0), "alpha", trace(0.5, stop="agent_timeout")), (0.5, Status.POLICY_TIMEOUT)),
        (episode(task("alpha", 0), "alpha", trace(0.0, stop="setup_timeout")), (None, Status.ENV_TIMEOUT)),
        (episode(task("alpha", 0), "alpha", trace(None, stop="scoring_timeout")), (None, Status.ENV_TIMEOUT)),
        (episode(task("alpha", 0), "alpha", late=True, error="TimeoutError"), (None, Status.ENV_TIMEOUT)),
        (episode(task("alpha", 0), "alpha", trace(None)), (None, Status.VERIFIER_ERROR)),
        (episode(task("alpha", 0), "alpha", trace(float("nan"))), (None, Status.VERIFIER_ERROR)),
        (episode(task("alpha", 0), "alpha", trace(9.0, trainable=False)), (None, Status.ENV_ERROR)),
        (episode(task("alpha", 0), "alpha", error="EnvError"), (None, Status.ENV_ERROR)),
        (episode(task("alpha", 0), "alpha", error="SomethingNew"), (None, Status.INFRA_ERROR)),
        (episode(task("alpha", 0), "alpha", trace(1.0, error="ProviderError")), (1.0, Status.OK)),  # tried again
        *(
            (episode(task("alpha", 0), "alpha", trace(1.0), trace(0.0, ok=False, error=kind)), (None, status))
            for kind, status in STATUS.items()
        ),
    ],
)
def test_what_an_episode_says(given, expected):
    reward, status, tokens, seconds = outcome(given)
    assert (reward, status) == expected
    assert tokens == 7 * len(given.traces) and seconds == 2 * len(given.traces)


def test_mistakes_are_named(prime):
    with pytest.raises(es.DispatchError, match="no task 'alpha/k0' \\(1 of the pool"):
        TaskSampler(dispatcher("alpha"), tasks("alpha")[1:], "alpha")
    with pytest.raises(es.DispatchError, match="expected a list of tasks"):
        TaskSampler(dispatcher("alpha"), iter(tasks("alpha")), "alpha")
    with pytest.raises(es.DispatchError, match="one named 'beta'"):
        scheduled(TrainSource)(envs()[:1], dispatcher=dispatcher())
    with pytest.raises(es.DispatchError, match="a key"):
        to_records("alpha", [SimpleNamespace(key=None, data=tasks("alpha")[0].data)])
    chat = SimpleNamespace(prompt=[SimpleNamespace(content="a"), SimpleNamespace(content="b")])
    assert to_records("alpha", [SimpleNamespace(key="k", data=chat)])[0].text == "a\nb"


# ------------------------------------------------------------------------------------------------ verifiers itself


def real():
    return pytest.importorskip("verifiers.v1", reason="verifiers is not installed here: see docs/trainers/verifiers.md")


def test_every_error_of_verifiers_has_a_status():
    vf = real()
    kinds = {vf.RolloutError.__name__}
    for kind in vars(vf).values():
        if isinstance(kind, type) and issubclass(kind, vf.RolloutError):
            kinds.add(kind.__name__)
    assert kinds - {"RolloutError"} == set(STATUS) - {"TimeoutError"}


@pytest.mark.slow
def test_the_script_of_the_documentation_in_real_environments(tmp_path, monkeypatch):
    real()
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    (tmp_path / "toy.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    import toy

    counts, metrics = asyncio.run(toy.main(2))
    assert counts["observed"] == 8 and counts["open"] == 0
    assert metrics["invalid_rollouts"] == 0 and metrics["tokens"] == 1 and metrics["seconds"] > 0
    sys.modules.pop("toy")


FAULTY = """
import asyncio
import verifiers.v1 as vf


class Task(vf.Task[vf.TaskData]):
    @property
    def key(self):
        return self.data.name

    async def setup(self, trace, runtime):
        if self.data.name == "setup_raises":
            raise KeyError("x")
        await asyncio.sleep(9 * (self.data.name == "setup_late"))

    async def finalize(self, trace, runtime):
        await asyncio.sleep(9 * (self.data.name == "finalize_late"))

    @vf.reward
    async def half(self, trace) -> float:
        if self.data.name == "reward_raises":
            raise ZeroDivisionError
        await asyncio.sleep(9 * (self.data.name == "scoring_late"))
        return 0.5


class Tasks(vf.Taskset[Task]):
    def load(self):
        stages = ("setup", "agent", "finalize", "scoring")
        timeout = vf.TaskTimeout(**dict.fromkeys(stages, 1.0))
        for name in NAMES:
            yield Task(vf.TaskData(name=name, prompt="?", timeout=timeout))


class Harness(vf.Harness[vf.HarnessConfig]):
    NEEDS_CONTAINER = False
    EXECUTES_CODE = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, **unused):
        if data.name == "harness_raises":
            raise OSError("x")
        if data.name == "provider_down":
            import httpx
            async with httpx.AsyncClient(headers={"Authorization": f"Bearer {secret}"}, timeout=30) as client:
                body = {"model": ctx.model, "messages": [{"role": "user", "content": "?"}]}
                (await client.post(f"{endpoint}/chat/completions", json=body)).raise_for_status()
        await asyncio.sleep(9 * (data.name == "agent_late"))
        return vf.ProgramResult(int(data.name == "harness_exits"), "", "")


__all__ = ["Harness", "Tasks"]
"""

FAULTS = {
    "fine": (0.5, Status.OK),
    "setup_raises": (None, Status.VERIFIER_ERROR),
    "setup_late": (None, Status.ENV_TIMEOUT),
    "harness_raises": (None, Status.ENV_ERROR),
    "harness_exits": (None, Status.ENV_ERROR),
    "provider_down": (None, Status.INFRA_ERROR),
    "agent_late": (0.5, Status.POLICY_TIMEOUT),
    "finalize_late": (None, Status.ENV_TIMEOUT),
    "reward_raises": (None, Status.VERIFIER_ERROR),
    "scoring_late": (None, Status.ENV_TIMEOUT),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_every_failure_that_real_episodes_can_have(tmp_path, monkeypatch):
    vf = real()
    (tmp_path / "faulty.py").write_text(FAULTY.replace("NAMES", repr(list(FAULTS))))
    monkeypatch.syspath_prepend(tmp_path)
    client = vf.EvalClientConfig(base_url="http://127.0.0.1:9/v1", api_key_var="TOY_KEY")
    agent = vf.AgentConfig(runtime=vf.SubprocessConfig())
    env = vf.SingleAgentEnv(vf.SingleAgentEnvConfig(taskset={"id": "faulty"}, agent=agent))

    async def play():
        async with env.serving():
            policy = vf.ModelContext(model="toy", client=client)
            return [await env.run_episode(task, policy) for task in env.taskset]

    episodes = asyncio.run(play())
    assert {e.task.key: outcome(e)[:2] for e in episodes} == FAULTS
    late = next(e for e in episodes if e.task.key == "setup_late")
    assert late.ok and late.traces[0].ok  # the trap


# ------------------------------------------------------------------------------------------------- prime-rl itself


def test_the_train_source_of_prime_rl():
    real()
    train_source = pytest.importorskip("prime_rl.orchestrator.train_source", reason="prime-rl is not installed here")
    config = SimpleNamespace(curriculum=None, ratio=1.0, group_size=GROUP)

    def make():
        given = [SimpleNamespace(name=n, num_tasks=k, tasks=tasks(n), config=config) for n, k in ENVS.items()]
        return scheduled(train_source.TrainSource)(given, dispatcher=dispatcher())

    whole = drive(make(), 4)
    given = make()
    first = drive(given, 2)
    again = make()
    again.load_state_dict(given.state_dict())
    assert first + drive(again, 2, first=2) == whole
    assert {name for batch in whole for name, _, _ in batch} == set(ENVS)
    assert any("sampler/observed" in key for key in again.metrics())
