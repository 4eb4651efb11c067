"""Conversations with tools as ids, and calls in what a model answers.

What a model has sampled is never encoded again: a conversation is its first prompt, and then in turns sampled ids and
what the template writes between them. So the ids that are trained on are those that were sampled. A template that
leaves earlier thoughts out of later prompts is not followed in that: they stay.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from envsched_jax.environments.calls import MOST_CALLS, Call, CallError, is_json, parse
from envsched_jax.policy.load import ModelError
from envsched_jax.policy.tokenizer import Tokenizer

Style = Literal["hermes", "list", "python"]
STYLES: tuple[Style, ...] = ("hermes", "list", "python")
EXAMPLES = 3  # tools that are shown in use, where asked for
_MARK = "\u2063answer\u2063"  # stands for an answer; occurs in no template, but may occur in what a tool says
_BLOCK = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)

_LIST = """You answer by calling tools. Write the calls as a JSON list between tags, for example

<tool_call>[{{"name": "find_file", "arguments": {{"name": "a.txt"}}}}]</tool_call>

and wait for their results. When nothing is left to do, answer in one short sentence without a call. The tools are:

{tools}"""

_PYTHON = """You answer by calling functions. Write nothing but a list of calls, for example

[find_file(name='a.txt'), open_file(name='a.txt')]

and wait for their results. When nothing is left to do, answer in one short sentence without a call. The functions are:

{tools}"""


class Chat(NamedTuple):
    """How a model talks with tools.

    Attributes:
      tokenizer: of the model.
      style: how calls are written. 'hermes': one JSON object per pair of ``tool_call`` tags, described by the model's
        own template (Qwen3, Hermes). 'list': a JSON list between such tags (SmolLM2), described in a system message.
        'python': ``[f(x=1)]``, as BFCL asks models that have no format of their own, described likewise.
      more: what the template reads besides, such as ``{"enable_thinking": False}``.
      brief: whether a system message describes tools by their signatures only.
      example: whether some of the tools are shown in use first, which makes a small model call more often than not. Not
        for 'hermes'.
    """

    tokenizer: Tokenizer
    style: Style = "hermes"
    more: Mapping[str, Any] = {}
    brief: bool = False
    example: bool = False

    def opening(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]) -> list[int]:
        """Returns the ids of the first prompt; raises ModelError where the template refuses it."""
        if self.style == "hermes":
            shown = [{"type": "function", "function": dict(tool)} for tool in tools]
            return self.tokenizer.encode(self.tokenizer.chat(messages, tools=shown, **self.more))
        described = "\n".join(signature(t) if self.brief else json.dumps(t, ensure_ascii=False) for t in tools)
        content = (_LIST if self.style == "list" else _PYTHON).format(tools=described)
        first = list(messages)
        if first and first[0]["role"] == "system":
            content = f"{first.pop(0)['content']}\n\n{content}"
        before = [{"role": "system", "content": content}, *(self._example(tools) if self.example else ())]
        return self.tokenizer.encode(self.tokenizer.chat([*before, *first], **self.more))

    def following(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Returns the ids between an answer, whose last id ended it, and the next one.

        Raises:
          ModelError: the template refuses them, or does not close an answer with an id that ends a turn.
        """
        earlier = [{"role": "user", "content": "."}, {"role": "assistant", "content": _MARK}]
        text = self.tokenizer.chat([*earlier, *messages], **self.more).partition(_MARK)[2]
        for eos in self.tokenizer.eos:
            end = self.tokenizer.decode([eos], special=True)
            if end and text.startswith(end):
                return self.tokenizer.encode(text[len(end) :])
        raise ModelError("the chat template does not close an answer with an id that ends a turn")

    def results(self, texts: Sequence[str]) -> list[dict[str, Any]]:
        """Returns the messages that show results of calls."""
        if self.style == "hermes":
            return [{"role": "tool", "content": text} for text in texts]
        shown = "\n".join(f"<tool_response>{text}</tool_response>" for text in texts)
        return [{"role": "user", "content": shown}]

    def _example(self, tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        messages = []
        for tool in tools[:: max(-(-len(tools) // EXAMPLES), 1)]:
            needed = {name: name for name in tool.get("parameters", {}).get("required", ())}
            text = f"<tool_call>{json.dumps([{'name': tool['name'], 'arguments': needed}])}</tool_call>"
            if self.style == "python":
                text = f"[{tool['name']}({', '.join(f'{name}={value!r}' for name, value in needed.items())})]"
            # BFCL's descriptions begin with what the class of the tool is.
            request = str(tool.get("description", "")).rpartition("Tool description: ")[2]
            messages += [{"role": "user", "content": request}, {"role": "assistant", "content": text}]
        return messages

    def calls(self, text: str) -> list[Call]:
        """Returns the calls in an answer, none where it speaks to the user.

        Raises:
          CallError: it tries to call and fails. Nothing is guessed.
        """
        text = text.rpartition("</think>")[2].strip()
        if "<think>" in text:
            return []  # a thought that was not finished
        if self.style == "python":
            return parse(text) if text.startswith("[") else []
        blocks = [block.strip() for block in _BLOCK.findall(text)]
        if "tool_call>" in _BLOCK.sub("", text):
            raise CallError("a tool call is not whole: expected <tool_call>, JSON, </tool_call>")
        if any(not is_json(block) for block in blocks):
            raise CallError('expected JSON between the tags, such as {"name": "tool", "arguments": {}}')
        found = [call for block in blocks for call in parse(block)]
        if len(found) > MOST_CALLS:
            raise CallError(f"expected up to {MOST_CALLS} calls, got {len(found)}")
        return found


def signature(tool: Mapping[str, Any]) -> str:
    """Returns a tool in one line: ``name(argument: type, optional?: type)``."""
    parameters = tool.get("parameters", {})
    needed = parameters.get("required", ())
    shown = (
        f"{name}{'' if name in needed else '?'}: {given.get('type', 'any')}"
        for name, given in parameters.get("properties", {}).items()
    )
    return f"{tool['name']}({', '.join(shown)})"
