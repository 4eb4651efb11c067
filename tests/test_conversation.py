"""Conversations in processes of their own: what goes through, what fails how, and that no process is left behind."""

import multiprocessing
import os
import time

import pytest

from envsched_jax.environments import conversation
from envsched_jax.environments.calls import Call, CallError
from envsched_jax.environments.conversation import ConversationError, Hosted


class Odd:
    """Can be sent, but not received."""

    def __reduce__(self):
        return int, ("x",)


class Lamp:
    """Does what it is told, also to fail."""

    def __init__(self, what="lamp"):
        self.what, self.heard = what, []
        if what == "broken":
            raise RuntimeError("no bulb")
        if what == "sleeping":
            time.sleep(60)

    def opening(self):
        return [{"role": "user", "content": f"Light the {self.what}: é"}], [{"name": "press"}]

    def call(self, call):
        self.heard.append(call)
        if call.name not in ("press", "raise", "hang", "exit", "die", "odd", "unpicklable", "long", "status", "pid"):
            raise CallError(f"no tool {call.name!r}")
        if call.name == "raise":
            raise {"key": KeyError, "exit": SystemExit}.get(*call.args, ZeroDivisionError)("wire")
        if call.name == "hang":
            time.sleep(60)
        if call.name == "die":
            os._exit(3)
        if call.name == "unpicklable":
            return lambda: 0
        if call.name == "odd":
            return Odd()
        if call.name == "status":
            raise ConversationError("env_timeout", "the user does not answer")
        if call.name == "pid":
            return os.getpid()
        return "x" * 10**6 if call.name == "long" else f"{call}"

    def reply(self, text):
        return [{"role": "user", "content": text[::-1]}]

    def done(self):
        if self.what == "refusing":
            raise CallError("no")
        return bool(self.heard)

    def score(self):
        return len(self.heard) / 4, False


def asked(talk, method, *args):
    talk.ask(method, *args)
    return talk.answer()


@pytest.fixture
def host():
    made = []

    def make(*args, **more):
        made.append(Hosted(Lamp, *args, **more))
        return made[-1]

    yield make
    for talk in made:
        talk.close()
        assert not talk._process.is_alive()
    assert not multiprocessing.active_children()


def test_values_go_through(host):
    talk = host("lantern")
    assert asked(talk, "opening") == ([{"role": "user", "content": "Light the lantern: é"}], [{"name": "press"}])
    assert asked(talk, "done") is False
    call = Call("press", (1, "a", None), {"x": [1.5, {"y": True}]})
    assert asked(talk, "call", call) == f"{call}"
    assert len(asked(talk, "call", Call("long", (), {}))) == 10**6
    assert asked(talk, "reply", "abc") == [{"role": "user", "content": "cba"}]
    assert asked(talk, "done") is True and asked(talk, "score") == (0.5, False)


def test_refused_calls_leave_it_alive(host):
    talk = host()
    for name in ("pull", "twist"):
        with pytest.raises(CallError, match=f"no tool '{name}'"):
            asked(talk, "call", Call(name, (), {}))
    assert asked(talk, "score") == (0.5, False)  # the same object heard both


@pytest.mark.parametrize(
    ("name", "args", "status", "message"),
    [
        ("raise", ("key",), "env_error", "KeyError: 'wire'"),
        ("raise", ("zero",), "env_error", "ZeroDivisionError: wire"),
        ("raise", ("exit",), "env_error", "its process ended"),
        ("die", (), "env_error", "its process ended"),
        ("unpicklable", (), "env_error", "pickle"),
        ("odd", (), "env_error", "its answer cannot be read: ValueError"),
        ("status", (), "env_timeout", "the user does not answer"),
    ],
)
def test_failures_have_names(host, name, args, status, message):
    talk = host()
    asked(talk, "opening")
    for attempt in range(3):  # then and ever after
        with pytest.raises(ConversationError, match=message) as caught:
            if attempt == 2:
                talk.answer()
            asked(talk, "call", Call(name, args, {}))
        assert caught.value.status == status
        assert talk.ready() and not talk._process.is_alive()


def test_what_cannot_be_made_is_an_error(host):
    with pytest.raises(ConversationError, match="RuntimeError: no bulb") as caught:
        asked(host("broken"), "opening")
    assert caught.value.status == "env_error"
    with pytest.raises(ConversationError, match="no") as caught:
        asked(host("refusing"), "done")  # only calls are refused
    assert caught.value.status == "env_error"
    with pytest.raises(ConversationError, match="AttributeError"):
        asked(host(), "opened")


def test_a_request_past_its_limit(host):
    talk = host(limit=0.5)
    asked(talk, "opening")
    talk.ask("call", Call("hang", (), {}))
    assert not talk.ready()
    begun = time.monotonic()
    with pytest.raises(ConversationError, match=r"no answer within 0\.5 s") as caught:
        talk.answer()
    assert caught.value.status == "env_timeout" and time.monotonic() - begun < 5
    assert not talk._process.is_alive() and talk.ready()


def test_ready_tells_when_the_limit_is_over(host):
    talk = host(limit=0.3)
    asked(talk, "opening")
    talk.ask("call", Call("hang", (), {}))
    while not talk.ready():
        time.sleep(0.01)
    begun = time.monotonic()
    with pytest.raises(ConversationError):
        talk.answer()
    assert time.monotonic() - begun < 5


def test_making_does_not_count_but_has_a_limit_of_its_own(host, monkeypatch):
    monkeypatch.setattr(conversation, "START_SECONDS", 1.0)
    talk = host("sleeping", limit=0.1)
    with pytest.raises(ConversationError) as caught:
        asked(talk, "opening")
    assert caught.value.status == "env_timeout"


def test_the_limit_is_of_each_request(host):
    talk = host(limit=30.0)
    asked(talk, "opening")
    time.sleep(0.2)
    talk._limit = 0.1
    assert asked(talk, "done") is False  # what passed between requests does not count


def test_it_can_be_closed_at_any_time(host):
    starting, waiting, hanging, idle, dead = host(), host(), host(), host(), host()
    waiting.ask("opening")
    asked(hanging, "opening")
    hanging.ask("call", Call("hang", (), {}))
    asked(idle, "opening")
    with pytest.raises(ConversationError):
        asked(dead, "call", Call("die", (), {}))
    for talk in (starting, waiting, hanging, idle, dead):
        for _ in range(2):
            talk.close()
        assert not talk._process.is_alive()
        assert talk.ready()
        for method in (talk.answer, lambda talk=talk: talk.ask("opening")):
            with pytest.raises(ConversationError):
                method()


def test_a_process_that_dies_between_requests(host):
    talk = host()
    pid = asked(talk, "call", Call("pid", (), {}))
    assert pid not in (os.getpid(), 0)
    talk._process.kill()
    talk._process.join()
    with pytest.raises(ConversationError, match="its process ended"):
        asked(talk, "done")


def test_many_at_once(host):
    talks = [host(f"lamp {i}") for i in range(5)]
    for talk in talks:
        talk.ask("opening")
    for i, talk in reversed(list(enumerate(talks))):
        assert talk.answer()[0][0]["content"] == f"Light the lamp {i}: é"
    pids = {asked(talk, "call", Call("pid", (), {})) for talk in talks}
    assert len(pids) == 5
