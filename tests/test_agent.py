"""Rollouts are the same whoever is under way with them, keep their limits, and leave no environment open."""

import random

import jax
import numpy as np
import pytest
from chats import CONFIG, tokenizer
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from envsched_jax.environments.calls import Call, CallError
from envsched_jax.environments.conversation import ConversationError
from envsched_jax.policy.chat import Chat
from envsched_jax.policy.transformer import Transformer
from envsched_jax.rollout.agent import Agent
from envsched_jax.rollout.script import Limits, summarise


class Babble(Chat):
    """A chat in which random text calls, or fails to, or speaks; many bytes end a turn."""

    def calls(self, text):
        kind = sum(text.encode()) % 5
        if kind == 0:
            raise CallError("refused")
        return [Call("press", (), {"x": len(text)})] * (0, 1, 2, 0, 0)[kind]


BABBLE = Babble(tokenizer(more_eos=tuple(range(60, 100))))
MODEL = Transformer(CONFIG, rngs=nnx.Rngs(0))
LIMITS = Limits(context=300, answer=24, answers=3, result=20)
MADE = []


class Room:
    """A fake of `Requests` in this process: answers late, or fails, as it is told."""

    def __init__(self, task, late=0, fails=None, raises=None):
        self.task, self.late, self.fails, self.raises = task, late, fails, raises
        self.value, self.looks, self.calls, self.replies, self.closed = None, 0, 0, 0, 0
        MADE.append(self)

    def ask(self, method, *args):
        assert not self.closed
        self.looks = self.late
        self.value = getattr(self, f"_{method}")(*args)
        if self.fails == method:
            self.value = ConversationError("env_timeout", f"too slow: {method}")
        if self.raises == method:
            self.value = KeyError(method)

    def _opening(self):
        words = f"Do {self.task}. " + "Now. " * (len(self.task) % 3)
        return [{"role": "user", "content": words}], [{"name": "press"}]

    def _call(self, call):
        self.calls += 1
        if call.kwargs["x"] % 5 == 0:
            return CallError("no")
        return "pressed " * (call.kwargs["x"] % 4)

    def _reply(self, text):
        self.replies += 1
        return [] if self.replies == 3 else [{"role": "user", "content": f"{len(text)}!"}]

    def _done(self):
        return self.calls > 4

    def _score(self):
        return self.calls / 8, self.calls == 2

    def ready(self):
        self.looks -= 1
        return self.looks < 0

    def answer(self):
        assert not self.closed
        if isinstance(self.value, Exception):
            raise self.value
        return self.value

    def close(self):
        self.closed += 1


JOBS = [(task, member) for task in ("ab", "c", "defg") for member in range(3)]


def play(jobs=JOBS, make=Room, *, limits=LIMITS, slots=4, chunk=8, model=MODEL, key=1, **more):
    MADE.clear()
    agent = Agent(BABBLE, limits, slots=slots, chunk=chunk, **more)
    made = agent.play(model, jax.random.key(key), jobs, make)
    assert [(one.task_id, one.member) for one in made] == list(jobs)
    assert MADE and all(room.closed for room in MADE)
    return made


def told(made):
    """What must not depend on who shares the slots."""
    return {
        (one.task_id, one.member): (one.prompt, one.ids, one.mask, one.status, one.progress, one.calls, one.refused)
        for one in made
    }


@pytest.fixture(scope="module")
def alone():
    return play(slots=1)


def check(one, limits=LIMITS):
    """What holds for every rollout."""
    assert len(one.prompt) + len(one.ids) <= limits.context
    assert len(one.ids) == len(one.mask) == len(one.log_prob)
    assert all(odds < 0 if mask else odds == 0 for odds, mask in zip(one.log_prob, one.mask, strict=True))
    runs = "".join("x" if mask else " " for mask in one.mask).split()
    assert len(runs) == one.answers and all(len(run) <= limits.answer for run in runs)
    assert one.tokens == sum(map(len, runs)) and (not one.ids or one.mask[0])
    ends = [i for i, id in enumerate(one.ids) if one.mask[i] and id in BABBLE.tokenizer.eos]
    assert all(i + 1 == len(one.ids) or not one.mask[i + 1] for i in ends)  # what ends an answer is its last id


def test_who_shares_the_slots_changes_nothing(alone):
    for one in alone:
        check(one)
    statuses = {one.status for one in alone}
    assert statuses == {"ok", "truncated"} and sum(one.calls for one in alone) > 5
    assert sum(one.refused for one in alone) > 2 and max(one.answers for one in alone) > 4
    odds = {(one.task_id, one.member): one.log_prob for one in alone}
    mixed = random.Random(0).sample(JOBS, len(JOBS))
    for other in (
        {},
        {"slots": 9, "ahead": 0},
        {"jobs": mixed},
        {"chunk": 5},
        {"chunk": 24, "slots": 3},
        {"make": lambda task: Room(task, late=len(task))},
        {"jobs": JOBS[3:5]},
    ):
        again = play(**other)
        assert told(again) == {job: told(alone)[job] for job in other.get("jobs", JOBS)}, other
        for one in again:
            np.testing.assert_allclose(one.log_prob, odds[one.task_id, one.member], atol=1e-4)
    assert told(play(key=2)) != told(alone)


def test_prompts_that_are_alike_are_read_once(alone):
    agent = Agent(BABBLE, LIMITS, slots=9, chunk=8, ahead=0)
    made = agent.play(MODEL, jax.random.key(1), JOBS, Room)
    assert told(made) == told(alone)
    heard = sum(len(one.ids) - one.tokens for one in made)
    assert agent.pace.ids_read == sum(len(one.prompt) - 1 for one in made[::3]) + heard
    assert agent.pace.ids_decoded == sum(one.tokens for one in made)
    assert agent.pace.read > 0 and agent.pace.decode > 0
    assert len({tuple(one.ids) for one in made}) == len(made)


def test_a_context_longer_than_the_first_capacity():
    small = told(play(JOBS[:4], piece=16, capacity=64))
    assert told(play(JOBS[:4])) == small


def test_slow_environments_hold_nobody_up(monkeypatch):
    """A room that never answers until all others are over: they are, though it waits with a slot."""
    over = []

    class Last(Room):
        def ready(self):
            return self.task != "slow" or self.calls + self.replies == 0 or len(over) == 3

        def close(self):
            super().close()
            if self.task != "slow":
                over.append(self.task)

    jobs = [("slow", 0), ("ab", 0), ("c", 0), ("defg", 0)]
    made = play(jobs, Last, slots=2, ahead=0)
    assert len(over) == 3 and all(one.status in ("ok", "truncated") for one in made)


@pytest.mark.parametrize("method", ["opening", "call", "reply", "done", "score"])
def test_failures_have_a_status_and_no_reward(method, alone):
    def make(task):
        return Room(task, fails=method if task == "c" else None, late=1)

    made = play(make=make)
    failed = [one for one in made if one.status == "env_timeout"]
    assert failed and all(one.task_id == "c" and one.error == f"too slow: {method}" for one in failed)
    assert all(one.progress is None and one.success is None for one in failed)
    rest = {(one.task_id, one.member) for one in made if one.status != "env_timeout"}
    assert all(told(made)[job] == told(alone)[job] for job in rest)  # the others go on
    assert summarise(made)["failed_share"] == pytest.approx(len(failed) / len(JOBS))


def test_a_prompt_that_does_not_fit_is_no_rollout():
    limits = LIMITS._replace(context=len(play(JOBS[:1])[0].prompt))
    (one,) = play(JOBS[:1], limits=limits)
    assert (one.status, one.progress, one.ids) == ("infra_error", None, [])


@pytest.mark.parametrize("method", ["opening", "reply", "score"])
def test_every_environment_is_closed_when_something_breaks(method):
    MADE.clear()
    agent = Agent(BABBLE, LIMITS, slots=2, chunk=8, ahead=2)
    with pytest.raises(KeyError, match=method):
        agent.play(MODEL, jax.random.key(1), JOBS, lambda task: Room(task, raises=method if task == "c" else None))
    assert len(MADE) >= 4 and all(room.closed for room in MADE)


def test_environments_are_closed_when_one_cannot_be_made_or_asked():
    class Mute(Room):
        def ask(self, method, *args):
            raise KeyError(method)

    def make(task):
        if task == "c":
            raise ValueError("cannot")
        return Room(task)

    for making, error in ((make, ValueError), (lambda task: (Mute if task == "c" else Room)(task), KeyError)):
        MADE.clear()
        with pytest.raises(error):
            Agent(BABBLE, LIMITS, slots=9).play(MODEL, jax.random.key(1), JOBS, making)
        assert len(MADE) >= 3 and all(room.closed for room in MADE)


def test_nothing_to_do():
    assert Agent(BABBLE, LIMITS, slots=2).play(MODEL, jax.random.key(0), [], Room) == []


@pytest.mark.parametrize("chunk", [2, 8])
def test_answers_are_cut(chunk):
    limits = LIMITS._replace(answer=5)
    made = play(limits=limits, chunk=chunk)
    for one in made:
        check(one, limits)
    cut = [one for one in made if one.ids[-1] not in BABBLE.tokenizer.eos]
    assert cut and all(one.status == "truncated" and one.mask[-5:] == [True] * 5 for one in cut)


@settings(max_examples=12, deadline=None)
@given(st.sampled_from([110, 150]), st.integers(1, 30), st.integers(1, 3), st.integers(0, 40), st.integers(0, 2**20))
def test_limits_hold(context, answer, answers, result, key):
    limits = Limits(context, answer, answers, result)
    for one in play(JOBS[:5], limits=limits, slots=3, key=key):
        if one.status == "infra_error":
            assert len(one.prompt) >= context
            continue
        check(one, limits)
        assert one.status in ("ok", "truncated") and one.progress is not None
