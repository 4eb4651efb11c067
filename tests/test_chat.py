"""Conversations as ids say what the template says; calls are found, or refused by name, and never guessed."""

import json
import random

import hypothesis.strategies as st
import pytest
from chats import CHATML, MERGING, tokenizer
from hypothesis import given, settings

from envsched_jax.environments.calls import MOST_CALLS, Call, CallError
from envsched_jax.policy.chat import STYLES, Chat, signature
from envsched_jax.policy.load import ModelError

TOOLS = [
    {
        "name": name,
        "description": f"This tool is of a class. Tool description: {name} it.",
        "parameters": {
            "type": "object",
            "properties": {"path": {"type": "string"}, "depth": {"type": "integer"}, "any": {}},
            "required": ["path"],
        },
    }
    for name in ("find", "open", "move", "drop", "list")
]
SYSTEM, USER = {"role": "system", "content": "Be {brief}."}, {"role": "user", "content": "Move a.txt — please\n"}
ANSWERS = ["Which one?", "é日本", '<tool_call>{"name": "find", "arguments": {}}</tool_call>', ""]
RESULTS = [["a\nb"], ["{}", "Error: no such file", "日本"], [""]]


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize(("template", "more"), [(CHATML, {}), (MERGING, {}), (MERGING, {"enable_thinking": False})])
@pytest.mark.parametrize("first", [[USER], [SYSTEM, USER]])
def test_pieces_are_the_whole_conversation(style, template, more, first):
    chat = Chat(tokenizer(template), style, more)
    ids, messages = chat.opening(first, TOOLS), list(first)
    if style != "hermes":
        head = chat.tokenizer.decode(ids, special=True).split("<|im_start|>")[1]
        messages[:-1] = [{"role": "system", "content": head.removeprefix("system\n").removesuffix("<|im_end|>\n")}]
        assert all(tool["name"] in head for tool in TOOLS) and (SYSTEM not in first or "Be {brief}." in head)
    for number, (answer, texts) in enumerate(zip(ANSWERS, [*RESULTS, None], strict=True)):
        following = [USER] if texts is None else chat.results(texts)
        ids += [*chat.tokenizer.encode(f"{answer}<|im_end|>"), *chat.following(following)]
        messages += [{"role": "assistant", "content": answer}, *following]
        shown = [{"type": "function", "function": tool} for tool in TOOLS] if style == "hermes" else ()
        whole = chat.tokenizer.chat(messages, tools=shown, **more)
        if more:  # thoughts of earlier answers stay where they were read
            thought = "<think>\n\n</think>\n\n"
            for earlier in ANSWERS[: number + 1]:
                said = f"<|im_start|>assistant\n{earlier}<|im_end|>"
                whole = whole.replace(said, said.replace("assistant\n", f"assistant\n{thought}"))
        assert chat.tokenizer.decode(ids, special=True) == whole
        assert ids == chat.tokenizer.encode(whole)


def test_what_a_tool_says_is_no_mark():
    """A result that looks like what stands for an answer, which a model may have written to a file."""
    chat = Chat(tokenizer(), "list")
    for text in ("\u2063answer\u2063", "x\u2063answer\u2063<|im_end|>y", "assistant\n."):
        said = chat.tokenizer.decode(chat.following([{"role": "user", "content": text}]), special=True)
        assert said == f"\n<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}",
        "{% for m in messages %}{{ m.content }} <|im_end|>{% endfor %}",
        "{% for m in messages %}{{ m.role }}{% endfor %}",
    ],
)
def test_an_answer_that_is_not_closed_is_no_format(template):
    with pytest.raises(ModelError, match="does not close an answer"):
        Chat(tokenizer(template)).following([USER])


def test_what_a_template_refuses_is_named():
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    with pytest.raises(ModelError, match="no system"):
        Chat(tokenizer(refusing), "list").opening([USER], TOOLS)
    with pytest.raises(ModelError, match="no chat template"):
        Chat(tokenizer(None)).following([USER])


def test_any_id_that_ends_a_turn_closes_it():
    chat = Chat(tokenizer(more_eos=(65, 66)), "list")
    assert chat.following([USER]) == Chat(tokenizer(), "list").following([USER])


CALLS = [Call("find", (), {"path": "a"}), Call("open", (), {"path": "b", "depth": 2})]
WRITTEN = {
    "hermes": "\n".join(
        f"<tool_call>\n{json.dumps({'name': c.name, 'arguments': c.kwargs})}\n</tool_call>" for c in CALLS
    ),
    "list": f"<tool_call>{json.dumps([{'name': c.name, 'arguments': c.kwargs} for c in CALLS])}</tool_call>",
    "python": "[find(path='a'), open(path='b', depth=2)]",
}


@pytest.mark.parametrize("style", STYLES)
def test_calls_are_read(style):
    chat, text = Chat(tokenizer(), style), WRITTEN[style]
    assert chat.calls(text) == CALLS
    assert chat.calls(f" \n{text}\n ") == CALLS
    assert chat.calls(f"<think>\nI could [drop(path='x')] or <tool_call>\n</think>\n\n{text}") == CALLS
    assert chat.calls(f"prompted to think, then\n</think>{text}") == CALLS
    assert chat.calls(f"<think> {text}") == []  # thought only
    assert chat.calls("It is done.") == chat.calls("") == chat.calls("<think>\n\n</think>") == []
    if style != "python":
        assert chat.calls(f"I look.\n{text}\nThen more.") == CALLS
        code = 'print("[1]")\nif a < b: f(\'{"x": [1]}\')  # é'
        call = json.dumps([{"name": "find", "arguments": {"path": code}}])
        assert chat.calls(f"<tool_call>{call}</tool_call>") == [Call("find", (), {"path": code})]
        many = json.dumps([{"name": c.name, "arguments": c.kwargs} for c in CALLS], indent=1)
        assert chat.calls(f"<tool_call>{many}</tool_call>") == CALLS


@pytest.mark.parametrize("style", ["hermes", "list"])
@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>",
        '<tool_call>{"name": "find", "arguments": {}}',
        '{"name": "find", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "find", "arguments": {}}</tool_call><tool_call>',
        '<tool_call>{"name": "find", "arguments": {"path": "</think>"}}</tool_call>',
        '<tool_call>{"name": "find", "arguments": {"path": "</tool_call>"}}</tool_call>',
        '<tool_call>{"name": "find", "arguments": {}</tool_call>',
        '<tool_call>{"name": "find", "arguments": {"path": [1, 2}}</tool_call>',
        "<tool_call></tool_call>",
        "<tool_call>find</tool_call>",
        "<tool_call>find(path='a')</tool_call>",
        "<tool_call>[]</tool_call>",
        '<tool_call>{"name": "find", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "find", "arguments": null}</tool_call>',
        '<tool_call>{"name": ["find"], "arguments": {}}</tool_call>',
        '<tool_call>{"function": "find"}</tool_call>',
        '<tool_call>{"function": null}</tool_call>',
        '<tool_call>[{"name": "find", "arguments": {}}, 5]</tool_call>',
        '<tool_call>[{"name": "find", "arguments": {}}, [{"name": "find"}]]</tool_call>',
        '<tool_call>{"name": "find", "arguments": {"depth": 12345678901234567}}</tool_call>',
        '<tool_call>{"name": "find"}</tool_call>' * (MOST_CALLS + 1),
        "<tool_call>" + '{"a":' * 10_000 + "1" + "}" * 10_000 + "</tool_call>",
        "<tool_call>" + '{"a":' * 3000 + "1" + "}" * 3000 + "</tool_call>",
        "<tool_call>[{" + "[" * 9000 + "]" * 9000 + "}]</tool_call>",
    ],
)
def test_what_is_no_call_is_refused(style, text):
    with pytest.raises(CallError):
        Chat(tokenizer(), style).calls(text)


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        "[find]",
        "[find(path='a'",
        "[find(path='a')] and so on",
        "[find(path=open('/etc/passwd'))]",
        "[__import__('os').system('true')]",
        "[1].pop()",
        "[" * 10_000 + "]" * 10_000,
        "[find(" + "(" * 9000 + ")" * 9000 + ")]",
        "[find(path=" + "-" * 10_000 + "1)]",
        '[{"name": "find"}, 5]',
        '[{"function": 3}]',
    ],
)
def test_what_is_no_list_of_calls_is_refused(text):
    with pytest.raises(CallError):
        Chat(tokenizer(), "python").calls(text)


PIECES = (
    "<tool_call>",
    "</tool_call>",
    "<think>",
    "</think>",
    "[",
    "]",
    "{",
    "}",
    '"name"',
    ": ",
    ", ",
    '"function"',
    "find",
    "(",
    ")",
    "path=",
    "'a'",
    '"arguments"',
    "__import__('os')",
    "eval",
    "\\",
    '"',
    "\n",
    "null",
    "5",
    "1e999",
    "NaN",
    "**",
    "lambda: 0",
    "\x00",
    "é",
    '{"name": "find", "arguments": {}}',
    "find(path='a')",
    "<tool_call>[]</tool_call>",
    '<tool_call>{"name": "find"}</tool_call>',
    '[{"name": "find"}, 5]',
    "find(path='a')]",
)


def parsed(chat, text):
    try:
        calls = chat.calls(text)
    except CallError as error:
        assert str(error) and len(str(error)) < 300
        return None
    assert isinstance(calls, list)
    assert all(isinstance(call, Call) and isinstance(call.name, str) for call in calls)
    return calls


@pytest.mark.parametrize("style", STYLES)
def test_nothing_but_calls_or_a_refusal(style, monkeypatch):
    def touched(*args, **kwargs):
        raise AssertionError(f"executed: {args}")

    rng, chat = random.Random(0), Chat(tokenizer(), style)
    texts = ["".join(rng.choices(PIECES, k=rng.randrange(12))) for _ in range(10_000)]
    monkeypatch.setattr("builtins.eval", touched)
    monkeypatch.setattr("os.system", touched)
    outcomes = [parsed(chat, f"[{text}" if style == "python" else text) for text in texts]
    assert outcomes.count(None) > 1000 and sum(bool(calls) for calls in outcomes) > 20


@given(st.sampled_from(STYLES), st.text(max_size=200))
@settings(max_examples=300, deadline=None)
def test_any_text_is_read_or_refused(style, text):
    chat = Chat(tokenizer(), style)
    parsed(chat, text)
    parsed(chat, f"<tool_call>{text}</tool_call>")
    parsed(chat, f"[{{{text}}}]")


def test_signatures():
    assert signature(TOOLS[0]) == "find(path: string, depth?: integer, any?: any)"
    assert signature({"name": "stop"}) == "stop()"


@pytest.mark.parametrize("style", ["list", "python"])
def test_tools_in_short_and_in_use(style):
    chat = Chat(tokenizer(), style, brief=True, example=True)
    text = chat.tokenizer.decode(chat.opening([SYSTEM, USER], TOOLS), special=True)
    turns = text.split("<|im_start|>")[1:]
    assert "\n".join(map(signature, TOOLS)) in turns[0] and '"parameters"' not in text
    shown = {"list": '<tool_call>[{"name": "find", "arguments": {"path": "path"}}]</tool_call>'}
    assert turns[1] == "user\nfind it.<|im_end|>\n"
    assert turns[2] == f"assistant\n{shown.get(style, '''[find(path='path')]''')}<|im_end|>\n"
    assert chat.calls(turns[2].removeprefix("assistant\n").removesuffix("<|im_end|>\n")) == [
        Call("find", (), {"path": "path"})
    ]
    assert [turn.split("\n")[0] for turn in turns] == ["system", *["user", "assistant"] * 4]
    assert turns[-2] == f"user\n{USER['content']}<|im_end|>\n"
    assert len(chat.opening([USER], [])) > 0  # nothing to show
