"""BFCL's tasks: reference solutions pass, nothing leaks between episodes, and hostile text reaches nothing."""

import builtins
import json
import os
import random
import socket
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from envsched_jax import graph
from envsched_jax.environments import bfcl
from envsched_jax.environments.bfcl import Episode
from envsched_jax.environments.calls import Call, CallError, parse

DATA = Path(__file__).parents[1].parent / "shared/data/bfcl_multiturn/tasks.jsonl"
needs_package = pytest.mark.skipif(not bfcl.available(), reason="bfcl-eval is not installed: `make bfcl` does it")


def test_calls_are_parsed_to_names_and_literals():
    assert parse("[mv(source='a', destination='b'), sort('c.txt')]") == [
        Call("mv", (), {"source": "a", "destination": "b"}),
        Call("sort", ("c.txt",), {}),
    ]
    assert parse("f(x=[1, -2.5, {'a': None}], y=True)") == [Call("f", (), {"x": [1, -2.5, {"a": None}], "y": True})]
    assert parse('{"name": "f", "arguments": {"x": 1}}') == [Call("f", (), {"x": 1})]
    assert parse('[{"function": {"name": "f", "arguments": "{\\"x\\": 1}"}}]') == [Call("f", (), {"x": 1})]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Sorry, I cannot do that.",
        "__import__('os').system('true')",
        "f(x=__import__('os'))",
        "f(x=open('/etc/passwd').read())",
        "f(g(1))",
        "[f(1) for f in x]",
        "lambda: f(1)",
        "f(**{'x': 1})",
        "f(*[1])",
        "a.b(1)",
        "(f)(1)(2)",
        "f(x=10**999999999)",
        "f(x=123456789012345678)",
        "f(x=" + "[" * 40 + "]" * 40 + ")",
        "f(" * 5000 + ")" * 5000,
        "[" + "f(1)," * 65 + "]",
        "f(x='" + "a" * 20_001 + "')",
        "f(x=b'bytes')",
        "f(x=1j)",
        "f(x=1",
        '{"name": "f"',
        '{"name": 3, "arguments": {}}',
        '{"name": "f", "arguments": [1]}',
        '{"arguments": {}}',
        '[{"name": "f"}, 3]',
        '{"function": "f"}',
        "[" * 3000,
        "\x00f(1)",
    ],
)
def test_what_is_no_list_of_calls_is_refused(text):
    with pytest.raises(CallError):
        parse(text)


ANSWERS = st.one_of(
    st.text(max_size=80),
    st.text(alphabet="f()[]{}=,.'\"\\_1ax:*-+ \n", max_size=60),
    st.builds(
        lambda name, inner: f"[{name}({inner})]",
        st.sampled_from(["cd", "rm", "exec", "__init__", "_load_scenario", "eval", "os.system"]),
        st.text(max_size=30),
    ),
)


@given(ANSWERS)
@settings(max_examples=1000, deadline=None)
def test_any_text_is_calls_or_refused(text):
    try:
        calls = parse(text)
    except CallError:
        return
    assert calls and all(isinstance(call.name, str) for call in calls)


def play(task, solution=None):
    episode = Episode(task)
    while not episode.done:
        for text in task.solution[episode.turn] if solution is None else solution:
            for call in parse(text):
                episode.call(call)
        episode.end_turn()
    return episode.score()


@needs_package
def test_every_reference_solution_passes_and_no_answer_does_not():
    tasks = bfcl.tasks()
    assert len(tasks) == 800
    order = list(tasks.values())
    random.Random(0).shuffle(order)
    with ThreadPoolExecutor(4) as together:  # episodes side by side, in an order that is not the file's
        scores = dict(zip((task.task_id for task in order), together.map(play, order), strict=True))
        assert {name: score for name, score in scores.items() if score != (1.0, True)} == {}
        empty = list(together.map(lambda task: play(task, []), order))
    assert not any(solved for _, solved in empty)


@needs_package
def test_an_episode_leaves_nothing_to_the_next():
    task = bfcl.tasks(["base"])["multi_turn_base_0"]
    first = Episode(task)
    before = json.loads(first.call(Call("ls", (), {})))
    first.call(Call("mkdir", (), {"dir_name": "left_behind"}))
    second = Episode(task)
    assert json.loads(second.call(Call("ls", (), {}))) == before
    assert task == bfcl.tasks(["base"])["multi_turn_base_0"]  # nor to the task
    assert play(task) == (1.0, True)


@needs_package
def test_turns_messages_and_tools():
    task = bfcl.tasks(["miss_func"])["multi_turn_miss_func_0"]
    episode = Episode(task)
    (turn,) = task.missing
    names = []
    while not episode.done:
        names.append({tool["name"] for tool in episode.tools()})
        if not task.questions[episode.turn]:
            assert episode.messages() == [{"role": "user", "content": bfcl.ADDED}]
        assert all(tool["parameters"]["type"] == "object" for tool in episode.tools())
        episode.end_turn()
    assert not names[turn - 1] & set(task.missing[turn]) and set(task.missing[turn]) <= names[turn]
    assert not names[0] & task.excluded
    assert episode.score() == (0.0, False)
    with pytest.raises(CallError, match="no tool '_load_scenario'"):
        Episode(task).call(Call("_load_scenario", ({},), {}))
    assert "Error during execution" in Episode(task).call(Call("mkdir", (), {"no_such_argument": 1}))


@needs_package
def test_numbers_that_a_tool_would_not_come_back_from_are_refused():
    maths = next(task for task in bfcl.tasks(["base"]).values() if "MathAPI" in task.classes)
    episode = Episode(maths)
    for text in ("power(999999999999, 999999999)", "square_root(2, precision=99999999)", "power(base=2, exponent=1e9)"):
        with pytest.raises(CallError, match="expected at most"):
            episode.call(parse(text)[0])
    assert len(episode.call(parse("power(999999999999, 300)")[0])) > 3000
    assert "1.41" in episode.call(parse("square_root(2, precision=1000)")[0])
    for text in ("f(x=1e400)", "f(x=-1e13)", '{"name": "f", "arguments": {"x": NaN}}'):
        with pytest.raises(CallError, match="digits"):
            parse(text)
    assert parse(r"f(x='C:\d')") == [Call("f", (), {"x": "C:\\d"})]


@needs_package
def test_progress_counts_turns_before_the_first_failure():
    task = bfcl.tasks(["base"])["multi_turn_base_0"]
    episode = Episode(task)
    for number in range(len(task.questions)):
        for text in task.solution[number] if number != 2 else ():
            episode.call(parse(text)[0])
        episode.end_turn()
    assert episode.passed[:3] == [True, True, False] and episode.score() == (0.5, False)


@needs_package
def test_hostile_answers_reach_neither_files_nor_network(monkeypatch):
    def touched(*args, **kwargs):
        raise AssertionError(f"reached: {args}")

    tasks = list(bfcl.tasks(["base"]).values())[:40]
    episodes = [Episode(task) for task in tasks]
    for module, names in ((builtins, ["open", "eval", "exec"]), (os, ["remove", "system", "unlink", "listdir"])):
        for name in names:
            monkeypatch.setattr(module, name, touched)
    monkeypatch.setattr(socket, "socket", touched)
    monkeypatch.setattr(subprocess, "Popen", touched)
    rng = random.Random(0)
    words = ["../../etc/passwd", "; true", "$(id)", "__class__", "a" * 5000, "", "\n", "None", "-1", "é日本", "%s%n"]
    executed = 0
    for _ in range(10_000):
        episode = rng.choice(episodes)
        name = rng.choice([tool["name"] for tool in episode.tools()] + ["__class__", "_load_scenario", "eval"])
        values = [rng.choice([*words, 0, -1, 10**11, 1e308, None, [], {}, True]) for _ in range(rng.randrange(4))]
        text = f"[{name}({', '.join(map(repr, values))})]"
        try:
            for call in parse(text):
                assert isinstance(episode.call(call), str)
                executed += 1
        except CallError:
            continue
    assert executed > 5000


@needs_package
def test_the_pool_is_that_of_the_recorded_outcomes():
    pool = bfcl.pool(["base", "miss_func", "miss_param"])
    assert len(pool) == 600 and len({record.env_id for record in pool}) == 20
    g, index = graph.build(pool, k=8)
    assert len(index.task_ids) == 600 and bool(g.edges.mask.any())
    if not DATA.exists():
        pytest.skip("recorded outcomes are not here")
    recorded = {row["task_id"]: row for row in map(json.loads, DATA.read_text().splitlines())}
    assert set(recorded) == {record.task_id for record in pool}
    for record in pool:
        row = recorded[record.task_id]
        assert record.env_id == row["env_id"] and record.n_turns == row["n_turns"]
        assert row["gt_actions"] is None or list(record.gt_actions) == row["gt_actions"]
        assert set(record.tools_available) == set(row["tools_available"])
