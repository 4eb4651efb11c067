"""ACEBench-Agent's tasks from a checkout: end state and milestones count, nothing leaks, errors name the file."""

import json
import os
import sys

import pytest
from checkouts import clock

from envsched_jax.environments import acebench, users
from envsched_jax.environments.calls import Call, CallError
from envsched_jax.environments.conversation import Hosted
from envsched_jax.environments.users import STOPS, ScriptedUser
from envsched_jax.pool.records import PoolError

CHECKOUT = os.environ.get("ENVSCHED_ACEBENCH")
ON = Call("switch_on", (), {})
ALARM = Call("add_alarm", (), {"hour": 7, "days": [{"day": "Ann's"}]})


def begin(folder, name="agent_multi_step_0"):
    talk = acebench.start(folder, name, users.plain)
    talk.opening()
    return talk


def test_solutions_pass_and_nothing_else_does(tmp_path):
    clock(tmp_path)
    found = acebench.tasks(tmp_path)
    assert list(found) == [*(f"agent_multi_step_{i}" for i in range(3)), "agent_multi_turn_0"]
    for name in found:
        talk = begin(tmp_path, name)
        assert talk.score() == (0.0, False)
        for call in (ON, ALARM):
            talk.call(call)
        assert talk.score() == (1.0, True)
    assert found["agent_multi_step_0"].solution == found["agent_multi_turn_0"].solution == (ON, ALARM)
    assert found == acebench.tasks(tmp_path)


def test_progress_is_the_share_of_milestones_before_one_is_missing(tmp_path):
    clock(tmp_path)
    talk = begin(tmp_path)
    assert json.loads(talk.call(ON)) == {"status": True} and talk.score() == (0.5, False)
    assert talk.call(Call("add_alarm", (8.5, []), {})) == "1 set" and talk.score() == (0.5, False)
    assert talk.call(Call("add_alarm", (7,), {"days": [{"day": "Ann's"}]})) == "2 set"
    assert talk.score() == (1.0, False)  # every milestone, and yet a wrong end
    talk = begin(tmp_path)
    assert "switched off" in talk.call(ALARM)
    assert talk.score() == (0.0, False)  # the first is missing
    talk.call(ON)
    assert talk.score() == (0.5, False)
    talk.call(ALARM)
    assert talk.score() == (1.0, True)
    talk = begin(tmp_path, "agent_multi_step_1")  # one way of two
    talk.call(ON)
    assert talk.score() == (0.5, False)
    assert talk.call(Call("ring", (), {})).startswith("Error during execution") and talk.score() == (1.0, False)
    talk = begin(tmp_path, "agent_multi_step_2")  # a milestone that is no Python
    with pytest.raises(CallError, match="at most 0 arguments"):
        talk.call(Call("ring", ("Ann's",), {}))
    talk.call(Call("ring", (), {"x": "Ann's"}))
    assert talk.score() == (1.0, False)
    talk = begin(tmp_path, "agent_multi_turn_0")  # a milestone of two calls
    talk.call(ON)
    assert talk.score() == (0.5, False)


def test_a_conversation_without_a_user(tmp_path):
    talk = acebench.start(clock(tmp_path), "agent_multi_step_0")
    (system, user), tools = talk.opening()
    assert STOPS[1] in system["content"] and user == {"role": "user", "content": "Set an alarm."}
    assert [tool["name"] for tool in tools] == ["switch_on", "add_alarm", "ring"]
    parameters = tools[1]["parameters"]
    assert parameters["type"] == "object" and parameters["properties"]["hour"] == {"type": "number"}
    assert parameters["properties"]["days"] == {"type": "array", "items": {"type": "object"}}
    for name in ("secret", "__class__", "_load_scenario"):
        with pytest.raises(CallError, match=f"no tool '{name}'"):
            talk.call(Call(name, (), {}))
    assert talk.call(Call("add_alarm", (), {"nothing": 1})).startswith("Error during execution")
    assert talk.reply("Which hour?")[0]["role"] == "user" and not talk.done()
    assert talk.reply(f"I {STOPS[1]}.") == [] and talk.done()
    with pytest.raises(CallError, match="over"):
        talk.call(ON)
    assert talk.score() == (0.0, False)


def test_a_conversation_with_a_user(tmp_path):
    clock(tmp_path)
    for stop in STOPS:
        talk = acebench.start(tmp_path, "agent_multi_turn_0", lambda _, s=stop: ScriptedUser(["Hi.", "At 7.", s]))
        messages, _ = talk.opening()
        assert [m["content"] for m in messages] == ["It is June. Ask for the hour.", "Hi."]
        assert talk.reply("Which hour?") == [{"role": "user", "content": "At 7."}]
        assert talk.reply("Done.") == [] and talk.done()
    with pytest.raises(ValueError, match="agent_multi_turn_0: a multi_turn task needs a user"):
        acebench.start(tmp_path, "agent_multi_turn_0")


def test_a_conversation_is_at_most_so_long(tmp_path):
    talk = begin(clock(tmp_path))
    for _ in range(acebench.MOST_MESSAGES // 2):
        assert not talk.done()
        talk.call(ON)
    assert talk.done()


def test_nothing_leaks_between_conversations(tmp_path):
    clock(tmp_path)
    first, second = begin(tmp_path), begin(tmp_path)
    assert not [name for name in sys.modules if name.startswith("model_inference")]
    assert not list(tmp_path.rglob("__pycache__"))
    first.call(ON), first.call(ALARM)
    assert "switched off" in second.call(ALARM)
    second.call(ON)
    assert second.call(ALARM) == "1 set"
    first.opening()[1][1]["parameters"]["properties"].clear()
    assert second.opening()[1][1]["parameters"]["properties"]
    ALARM.kwargs["days"].append("changed later")
    try:
        assert first.score() == (1.0, True)
    finally:
        ALARM.kwargs["days"].pop()


def test_in_a_process_of_its_own(tmp_path):
    talk = Hosted(acebench.start, clock(tmp_path), "agent_multi_turn_0", users.plain)
    try:
        for request in (("opening",), ("call", ON), ("call", ALARM), ("reply", "Done."), ("score",)):
            talk.ask(*request)
            last = talk.answer()
        assert last == (1.0, True)
    finally:
        talk.close()


DATA = "data_all/data_en/data_agent_multi_step.json"
ANSWERS = "data_all/data_en/possible_answer/data_agent_multi_step.json"
UTILS = "model_inference/multi_step/multi_step_utils.py"
SAVED = "model_inference/apimodel_inference.py"
CLOCK = "model_inference/multi_step/scenariosen/clock.py"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        (DATA, None, "data_en/data_agent_multi_step.json: no such file"),
        (DATA, "[]", "data_agent_multi_step.json:1: expected a JSON object"),
        (DATA, "\n{", "data_agent_multi_step.json:2: not JSON"),
        (DATA, '{"id": "agent_multi_step_0"}', "data_agent_multi_step.json: task 1: field 'question': expected str"),
        (ANSWERS, None, "possible_answer/data_agent_multi_step.json: no such file"),
        (ANSWERS, "", "expected an answer to task 'agent_multi_step_0'"),
        (ANSWERS, '{"id": "agent_multi_step_0"}', "field 'ground_truth': expected a list of objects"),
        (ANSWERS, '{"id": "agent_multi_step_0", "ground_truth": []}', "field 'mile_stone': expected list"),
        (UTILS, None, "multi_step_utils.py: no such file"),
        (UTILS, "x = 1", "multi_step_utils.py: expected 'CLASS_FILE_PATH_MAPPING_EN' with a literal"),
        (UTILS, "CLASS_FILE_PATH_MAPPING_EN = {}", "CLASS_FILE_PATH_MAPPING_EN: expected class 'BaseApi'"),
        (SAVED, None, "apimodel_inference.py: no such file"),
        (SAVED, "SAVED_CLASS = {}", "apimodel_inference.py: SAVED_CLASS: expected class 'BaseApi'"),
        (SAVED, "SAVED_CLASS = f()", "apimodel_inference.py: expected 'SAVED_CLASS' with a literal"),
        (SAVED, "def (", "apimodel_inference.py: SyntaxError"),
        (CLOCK, None, "scenariosen/clock.py: no such file"),
        (CLOCK, "x = 1", "scenariosen/clock.py: expected class 'ClockApi'"),
        ("model_inference/multi_turn/scenariosen/base_api.py", None, "scenariosen/base_api.py: no such file"),
    ],
)
def test_a_broken_checkout_names_the_file(tmp_path, name, text, message):
    path = clock(tmp_path) / name
    path.unlink() if text is None else path.write_text(text)
    with pytest.raises(PoolError, match=message):
        acebench.start(tmp_path, "agent_multi_step_0")


def test_unknown_tasks_are_refused(tmp_path):
    clock(tmp_path)
    for name in ("agent_multi_step_9", "agent_step_0", ""):
        with pytest.raises(PoolError, match=r"expected agent_<multi_step\|multi_turn>"):
            acebench.start(tmp_path, name)
    with pytest.raises(PoolError, match="kind 'step': expected one of multi_step, multi_turn"):
        acebench.tasks(tmp_path, ["step"])
    with pytest.raises(PoolError, match=r"data_zh/data_agent_multi_step.json: no such file"):
        acebench.pool(tmp_path, language="zh")


def test_the_pool(tmp_path):
    pool = acebench.pool(clock(tmp_path))
    first, last = pool[0], pool[-1]
    assert (first.task_id, first.env_id, first.domain) == ("agent_multi_step_0", "BaseApi+ClockApi", "ClockApi")
    assert first.gt_actions == ("switch_on", "add_alarm") and first.n_turns == 1 and last.n_turns is None
    assert first.state_reads == first.state_writes == ("BaseApi", "ClockApi")
    assert first.tools_available == ("add_alarm", "ring", "switch_on")
    assert (first.verifier.kind, first.verifier.n_checks) == ("end_state_match", 2)
    assert [r.group_id for r in pool] == ["agent_multi_step_0"] * 3 + ["agent_multi_turn_0"]
    assert pool[2].gt_actions == ("ring",)


@pytest.mark.skipif(not CHECKOUT, reason="ENVSCHED_ACEBENCH does not name a checkout of ACEBench")
@pytest.mark.slow
def test_every_real_task_runs_and_its_milestones_count():
    found, scores = acebench.tasks(CHECKOUT), {}
    assert len(acebench.pool(CHECKOUT)) == len(found) == 50
    for name, task in found.items():
        talk = acebench.Talk(CHECKOUT, task, users.plain)
        talk.opening()
        assert talk.score() == (0.0, False)
        for call in task.solution:
            talk.call(call)
        scores[name] = talk.score()
    # Milestones are hints: some answers hold another text or product, and some milestones are no Python.
    print(sum(solved for _, solved in scores.values()), "of", len(scores), "tasks are solved by their milestones")
    readable = [name for name, task in found.items() if len(task.solution) >= len(task.milestones[0])]
    assert {name: scores[name] for name in readable if scores[name][0] != 1.0} == {}
