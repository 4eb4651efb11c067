"""One rollout by hand: every branch of a conversation between a model and its environment."""

import numpy as np
import pytest
from chats import MERGING, tokenizer

from envsched_jax.environments.calls import Call, CallError
from envsched_jax.environments.conversation import ConversationError
from envsched_jax.policy.chat import Chat
from envsched_jax.rollout.script import Ask, Limits, Said, Say, Transcript, script, summarise

HERMES = Chat(tokenizer(MERGING))
CALL = '<tool_call>{"name": "press", "arguments": {"x": 1}}</tool_call>'
USER, TOOLS = [{"role": "user", "content": "Light it."}], [{"name": "press"}]
ROOMY = Limits(context=2000, answer=200, answers=5, result=50)


def conduct(turns, limits=ROOMY, chat=HERMES):
    """Plays a script by hand.

    `turns` has what comes next, in order: an answer for the model (text), or (method, what the environment returns or
    raises). Opening and score may be left out. Returns the transcript and what the model read before each answer.
    """
    transcript, read = Transcript("a", 0), []
    steps, left = script(transcript, chat, limits), list(turns)
    usual = {"opening": (USER, TOOLS), "score": (0.5, True)}
    try:
        wanted = next(steps)
        while True:
            if isinstance(wanted, Say):
                read.append(chat.tokenizer.decode(wanted.ids, special=True))
                text = left.pop(0)
                ids = chat.tokenizer.encode(text)
                wanted = steps.send(Said(ids, [-0.5] * len(ids), text.endswith("<|im_end|>")))
                continue
            assert isinstance(wanted, Ask)
            if wanted.method in usual and (not left or left[0][0] != wanted.method):
                value = usual[wanted.method]
            else:
                method, value = left.pop(0)
                assert wanted.method == method
            assert wanted.args == {"call": (Call("press", (), {"x": 1}),)}.get(wanted.method, wanted.args)
            wanted = steps.throw(value) if isinstance(value, Exception) else steps.send(value)
    except StopIteration:
        assert not left
    return transcript, read


def pieces(transcript):
    """What was sampled and what was read, in turns."""
    out = []
    for id, mask in zip(transcript.ids, transcript.mask, strict=True):
        if not out or out[-1][0] != mask:
            out.append((mask, []))
        out[-1][1].append(id)
    return [(mask, HERMES.tokenizer.decode(ids, special=True)) for mask, ids in out]


def test_a_reply_ends_it():
    made, read = conduct(["It is lit.<|im_end|>", ("reply", [])])
    assert read == [HERMES.tokenizer.chat(USER, tools=[{"type": "function", "function": TOOLS[0]}])]
    assert made.prompt == HERMES.opening(USER, TOOLS)
    assert pieces(made) == [(True, "It is lit.<|im_end|>")]
    assert (made.status, made.progress, made.success) == ("ok", 0.5, True)
    assert (made.answers, made.calls, made.attempts, made.refused) == (1, 0, 0, 0)
    assert made.tokens == len(made.ids) == len(made.log_prob) and set(made.log_prob) == {-0.5}


def test_a_user_may_go_on():
    more = [{"role": "user", "content": "And now?"}]
    made, read = conduct(["Yes.<|im_end|>", ("reply", more), "No.<|im_end|>", ("reply", [])])
    said = "\n<|im_start|>user\nAnd now?<|im_end|>\n<|im_start|>assistant\n"
    assert read[1] == said
    assert pieces(made) == [(True, "Yes.<|im_end|>"), (False, said), (True, "No.<|im_end|>")]
    assert made.log_prob.count(0.0) == len(HERMES.tokenizer.encode(said)) == len(made.ids) - made.tokens


def test_calls_and_their_results():
    made, read = conduct(
        [
            f"{CALL}\n{CALL}<|im_end|>",
            ("call", "lit"),
            ("call", "x" * 51),
            ("done", False),
            f"{CALL}<|im_end|>",
            ("call", CallError("no tool 'press'")),
            ("done", True),
        ]
    )
    shown = "<tool_response>\nlit\n</tool_response>\n<tool_response>\n" + "x" * 50 + " ... (cut)\n</tool_response>"
    assert read[1] == f"\n<|im_start|>user\n{shown}<|im_end|>\n<|im_start|>assistant\n"
    assert (made.status, made.answers, made.calls, made.attempts, made.refused) == ("ok", 2, 2, 2, 0)
    assert made.progress == 0.5 and pieces(made)[-1] == (True, f"{CALL}<|im_end|>")  # ended by a call: nothing is read


def test_the_model_is_told_what_is_wrong():
    made, read = conduct(
        [
            "<tool_call>{press}</tool_call><|im_end|>",
            f"{CALL}<|im_end|>",
            ("call", CallError("no tool 'press'")),
            ("done", False),
            "Sorry.<|im_end|>",
            ("reply", []),
        ]
    )
    assert "<tool_response>\nError: not a list of calls" in read[1]
    assert "<tool_response>\nError: no tool 'press'\n</tool_response>" in read[2]
    assert (made.status, made.answers, made.calls, made.attempts, made.refused) == ("ok", 3, 0, 2, 1)


def test_an_answer_that_is_cut_is_not_executed():
    made, _ = conduct([CALL])
    assert (made.status, made.progress, made.success) == ("truncated", 0.5, True)
    assert (made.answers, made.calls, made.attempts) == (1, 0, 0) and pieces(made) == [(True, CALL)]


def test_so_many_answers_in_a_turn():
    limits = ROOMY._replace(answers=2)
    call = [f"{CALL}<|im_end|>", ("call", "on"), ("done", False)]
    made, read = conduct([*call, *call], limits)
    assert (made.status, made.answers, made.calls) == ("truncated", 2, 2) and len(read) == 2
    assert [mask for mask, _ in pieces(made)] == [True, False, True]  # what cannot be answered is not kept
    more = ("reply", USER)
    made, _ = conduct([*call, "Well.<|im_end|>", more, *call, "Well.<|im_end|>", ("reply", [])], limits)
    assert (made.status, made.answers) == ("ok", 4)  # a user's words begin a new turn
    refused = "<tool_call><|im_end|>"
    made, _ = conduct([refused, refused], limits)
    assert (made.status, made.answers, made.refused) == ("truncated", 2, 2)


def test_what_does_not_fit_the_context():
    answer, more = "Yes.<|im_end|>", [{"role": "user", "content": "word " * 5}]
    used = len(HERMES.opening(USER, TOOLS)) + len(HERMES.tokenizer.encode(answer)) + len(HERMES.following(more))
    made, _ = conduct([answer, ("reply", more)], ROOMY._replace(context=used))
    assert made.status == "truncated" and made.progress == 0.5 and pieces(made) == [(True, answer)]
    made, read = conduct([answer, ("reply", more), "Z"], ROOMY._replace(context=used + 1))
    assert len(read) == 2 and made.status == "truncated" and len(made.prompt) + len(made.ids) == used + 1


def test_a_prompt_that_does_not_fit():
    size = len(HERMES.opening(USER, TOOLS))
    with pytest.raises(ConversationError, match=f"a prompt of {size} ids: the context is {size}") as caught:
        conduct([], ROOMY._replace(context=size))
    assert caught.value.status == "infra_error"
    assert conduct(["Z"], ROOMY._replace(context=size + 1))[0].status == "truncated"


def test_a_summary():
    made = [Transcript("a", 0, attempts=4, refused=1, answers=6, calls=3), Transcript("a", 1, status="truncated")]
    made += [Transcript("a", 2, status="env_error", ids=[1, 2, 3], mask=[True, False, True], attempts=1, refused=1)]
    made += [Transcript("a", 3, answers=2)]
    assert summarise(made) == {
        "rollouts": 4,
        "tokens": 2,
        "answers_per_rollout": 2.0,
        "calls": 3,
        "calling_answers": 5,
        "parsable_share": pytest.approx(0.6),
        "truncated_share": 0.25,
        "failed_share": 0.25,
    }
    assert np.isnan(summarise([])["parsable_share"])
