"""tau-bench's tasks from a checkout: solutions pass, nothing leaks, nothing heavy is loaded, errors name the file."""

import json
import os
import sys
from pathlib import Path

import pytest
from checkouts import rental

from envsched_jax.environments import taubench, users
from envsched_jax.environments.calls import Call, CallError
from envsched_jax.environments.conversation import Hosted
from envsched_jax.environments.users import STOPS, ScriptedUser
from envsched_jax.pool.records import PoolError

DATA = Path(__file__).parents[1].parent / "shared/data/taubench/tasks.jsonl"
CHECKOUT = os.environ.get("ENVSCHED_TAUBENCH")
LEND = Call("lend_bike", (), {"bike": "b1", "rider": "ann", "notes": ["bell"]})


def scripted(*lines):
    return lambda instruction: ScriptedUser(lines)


def solve(talk, task):
    """Plays the reference solution, says what must be said, and lets the user stop."""
    talk.opening()
    for call in task.solution:
        talk.call(call)
    if not talk.done():
        talk.reply(f"Here you are: {' '.join(task.outputs)}")
    return talk.score()


def test_solutions_pass_and_nothing_else_does(tmp_path):
    rental(tmp_path)
    found = taubench.tasks(tmp_path, ["retail"])
    assert list(found) == ["retail/0", "retail/1"]
    for _ in range(2):  # the second time as the first: nothing is left behind, nor in the task
        for name, task in found.items():
            assert solve(taubench.start(tmp_path, name, users.plain), task) == (1.0, True)
        assert found == taubench.tasks(tmp_path, ["retail"])
    empty = taubench.start(tmp_path, "retail/0", users.plain)
    empty.opening()
    assert empty.score() == (0.0, False)
    assert empty.reply("It costs 1,200.") == [] and empty.done() and empty.score() == (0.0, False)
    with pytest.raises(CallError, match="over"):
        empty.call(LEND)


@pytest.mark.parametrize(
    ("said", "solved"), [("It costs 1,200 a day.", True), ("It costs 1200.", True), ("It costs 12.00", False)]
)
def test_outputs_must_be_said(tmp_path, said, solved):
    talk = taubench.start(rental(tmp_path), "retail/0", users.plain)
    talk.opening()
    assert talk.call(LEND) == "lent" and talk.call(LEND) == "Error: not free"
    assert talk.score() == (0.0, False)  # not over yet
    talk.reply(said)
    assert talk.score() == (float(solved), solved)


def test_numbers_of_another_type_are_other_data(tmp_path):
    talk = taubench.start(rental(tmp_path), "retail/dev/0", users.plain)
    talk._data["bikes"]["b1"]["price"] = 1200.0
    talk.reply("Bye.")
    assert talk.score() == (0.0, False)


def test_a_conversation(tmp_path):
    talk = taubench.start(rental(tmp_path), "retail/0", scripted("Hi.", "b1, please."))
    messages, tools = talk.opening()
    assert [m["role"] for m in messages] == ["system", "user"] and messages[0]["content"].startswith("# Rental")
    assert messages[1]["content"] == "Hi."
    assert [tool["name"] for tool in tools] == ["transfer_to_human_agents", "lend_bike", "show_bike"]
    assert all(set(tool) == {"name", "description", "parameters"} for tool in tools)
    assert talk.reply("Which one?") == [{"role": "user", "content": "b1, please."}]
    assert json.loads(talk.call(Call("show_bike", ("b1",), {})))["free"]
    assert talk.call(Call("show_bike", (), {"bike": "b2"})) == "Error: 'b2'"
    assert talk.call(Call("show_bike", (), {})).startswith("Error: ")
    for name in ("fly", "__class__", "load_data"):
        with pytest.raises(CallError, match=f"no tool '{name}'"):
            talk.call(Call(name, (), {}))
    assert not talk.done() and talk.reply("Bye.") == [] and talk.done()
    for stop in STOPS:
        talk = taubench.start(tmp_path, "retail/0", scripted("Hi.", f"Thanks! {stop}"))
        talk.opening()
        assert talk.reply("Bye.") == [] and talk.done()


def test_nothing_leaks_between_conversations(tmp_path):
    rental(tmp_path)
    before = {key: value for key, value in sys.modules.items() if key.startswith("tau_bench")}
    sys.modules["tau_bench"] = before["tau_bench"] = sys  # another version, already there
    first, second = (taubench.start(tmp_path, "retail/0", users.plain) for _ in range(2))
    try:
        assert {key: value for key, value in sys.modules.items() if key.startswith("tau_bench")} == before
    finally:
        del sys.modules["tau_bench"]
    assert first.call(LEND) == "lent"
    assert json.loads(second.call(Call("show_bike", ("b1",), {})))["free"]
    assert second.call(LEND) == "lent" and LEND.kwargs["notes"] == ["bell"]
    assert not list(tmp_path.rglob("__pycache__"))  # nor in the user's folder
    first.opening()[1][0]["name"] = "changed"
    assert second.opening()[1][0]["name"] == "transfer_to_human_agents"


def test_in_a_process_of_its_own(tmp_path):
    talk = Hosted(taubench.start, rental(tmp_path), "retail/1", users.plain)
    try:
        answers = []
        for request in (("opening",), ("call", Call("transfer_to_human_agents", (), {})), ("done",), ("score",)):
            talk.ask(*request)
            answers.append(talk.answer())
        assert answers[0][0][1] == {"role": "user", "content": "You want to talk to a person."}
        assert answers[1:] == ["handed over", True, (1.0, True)]
    finally:
        talk.close()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("tool.py", None, r"envs/tool.py: no such file"),
        ("retail/wiki.md", None, r"retail/wiki.md: no such file"),
        ("retail/data/__init__.py", None, r"retail/data/__init__.py: no such file"),
        ("retail/data/__init__.py", "data = {}", r"retail/data/__init__.py: expected a function 'load_data'"),
        ("retail/tasks_test.py", None, r"retail/tasks_test.py: no such file"),
        ("retail/tasks_test.py", "OTHER = []", r"retail/tasks_test.py: expected 'TASKS' or 'TASKS_TEST'"),
        ("retail/tasks_test.py", "TASKS = [7]", r"tasks_test.py: task 0: field 'instruction': expected str"),
        ("retail/tools/lend_bike.py", None, r"retail/tools/lend_bike.py: no such file, and .*tools/__init__.py needs"),
        ("retail/tools/lend_bike.py", "def (", r"retail/tools/lend_bike.py: SyntaxError"),
        ("retail/tools/lend_bike.py", "import nobody_has_it", r"needs the package 'nobody_has_it'"),
        ("retail/tools/__init__.py", "ALL_TOOLS = 3", r"tools/__init__.py: expected a list 'ALL_TOOLS'"),
        ("retail/tools/__init__.py", "ALL_TOOLS = [3]", r"tools/__init__.py: tool 3: get_info\(\): AttributeError"),
    ],
)
def test_a_broken_checkout_names_the_file(tmp_path, name, text, message):
    path = rental(tmp_path) / "tau_bench/envs" / name
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(PoolError, match=message):
        taubench.start(tmp_path, "retail/0", users.plain)


def test_unknown_tasks_are_refused(tmp_path):
    rental(tmp_path)
    for name in ("retail/7", "retail", "retail/"):
        with pytest.raises(PoolError, match="expected <domain>/<number>"):
            taubench.start(tmp_path, name, users.plain)
    with pytest.raises(PoolError, match=r"envs/airline/tools/__init__.py: no such file"):
        taubench.pool(tmp_path)


def test_the_pool(tmp_path):
    first, second = taubench.pool(rental(tmp_path), ["retail"])
    assert (first.task_id, first.env_id, first.domain) == ("retail/0", "retail", "retail")
    assert first.text == "You are Ann and want b1 and its price."
    assert first.gt_actions == ("show_bike", "lend_bike") and first.state_writes == ("bikes", "riders")
    assert first.tools_available == ("lend_bike", "show_bike", "transfer_to_human_agents")
    assert (first.verifier.kind, first.verifier.n_checks) == ("db_state_match+output_check", 2)
    assert (second.verifier.kind, second.verifier.n_checks, second.state_reads) == ("db_state_match", 1, ())
    assert [record.task_id for record in taubench.pool(tmp_path, ["retail"], "dev")] == ["retail/dev/0"]


needs_checkout = pytest.mark.skipif(not CHECKOUT, reason="ENVSCHED_TAUBENCH does not name a checkout of tau-bench")


@needs_checkout
@pytest.mark.slow
def test_every_real_solution_passes():
    scores = {}
    for name, task in taubench.tasks(CHECKOUT).items():
        scores[name] = solve(taubench.Talk(CHECKOUT, task, users.plain), task)
    assert {name: score for name, score in scores.items() if score != (1.0, True)} == {}


@needs_checkout
def test_the_pool_is_that_of_the_recorded_outcomes():
    if not DATA.exists():
        pytest.skip("recorded outcomes are not here")
    recorded = {row["task_id"]: row for row in map(json.loads, DATA.read_text().splitlines())}
    pool = taubench.pool(CHECKOUT)
    assert {record.task_id for record in pool} == set(recorded)
    for record in pool:
        row = recorded[record.task_id]
        assert record.env_id == row["env_id"] and list(record.gt_actions) == row["gt_actions"]
        assert list(record.tools_available) == row["tools_available"]
        assert (record.verifier.kind, record.verifier.n_checks) == tuple(row["verifier"].values())


def test_ids_are_made_as_those_of_the_recorded_outcomes(tmp_path):
    if not DATA.exists():
        pytest.skip("recorded outcomes are not here")
    recorded = [json.loads(line) for line in DATA.read_text().splitlines()]
    numbers = dict.fromkeys(taubench.DOMAINS, 0)
    for row in recorded:  # <domain>/<number in the benchmark's order>, the domain as environment
        assert row["task_id"] == f"{row['env_id']}/{numbers[row['env_id']]}"
        numbers[row["env_id"]] += 1
    ours = taubench.pool(rental(tmp_path), ["retail"])
    assert [r.task_id for r in ours] == [r["task_id"] for r in recorded if r["env_id"] == "retail"][: len(ours)]
    kinds = {row["verifier"]["kind"] for row in recorded}
    assert {record.verifier.kind for record in ours} == kinds
