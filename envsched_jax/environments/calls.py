"""Calls of tools in what a model writes: parsed to names and literals, or refused. Nothing is ever executed here."""

import ast
import json
import threading
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

LONGEST = 20_000  # characters of one answer that are parsed
MOST_CALLS = 64  # of one answer
MOST_DIGITS = 12  # of one number: some tools would work on larger ones for ever
_ONE_AT_A_TIME = threading.Lock()  # up to Python 3.11 the parser counts its depth once for all threads


class CallError(ValueError):
    """Text that is no call of a tool, or a call that is not allowed. The message is what the model may be shown."""


class Call(NamedTuple):
    """One call of a tool with literal arguments."""

    name: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def is_json(text: str) -> bool:
    """Tells whether a text begins as a JSON object does, or a list of such: no list of calls in Python does."""
    return text.startswith("{") or (text.startswith("[") and text[1:].lstrip().startswith("{"))


def parse(text: str, *, trusted: bool = False) -> list[Call]:
    """Returns the calls in a model's answer: ``[f(x=1), g("a")]``, one call, or JSON with name and arguments.

    Nothing is executed: arguments are literals, or the answer is refused.

    Args:
      text: the answer.
      trusted: whether numbers may have any size.

    Raises:
      CallError: the text is no such thing.
    """
    text = text.strip()
    if not 0 < len(text) <= LONGEST:
        raise CallError(f"expected 1 to {LONGEST} characters, got {len(text)}")
    try:
        found = _json_calls(text) if is_json(text) else _python_calls(text)
    except (SyntaxError, ValueError, TypeError, KeyError, RecursionError, MemoryError) as error:
        if isinstance(error, CallError):
            raise
        raise CallError(f"not a list of calls with literal arguments: {type(error).__name__}") from None
    if not 0 < len(found) <= MOST_CALLS:
        raise CallError(f"expected 1 to {MOST_CALLS} calls, got {len(found)}")
    if not trusted:
        for call in found:
            _check_literals([*call.args, *call.kwargs.values()], depth=0)
    return found


def _python_calls(text: str) -> list[Call]:
    with _ONE_AT_A_TIME, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an escape that there is none of, in a path, say
        body = ast.parse(text, mode="eval").body
    found = []
    for node in body.elts if isinstance(body, ast.List | ast.Tuple) else [body]:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            raise CallError("expected calls such as [tool(argument=1)]")
        if any(keyword.arg is None for keyword in node.keywords):
            raise CallError("expected named arguments, got **")
        kwargs = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
        found.append(Call(node.func.id, tuple(ast.literal_eval(arg) for arg in node.args), kwargs))
    return found


def _json_calls(text: str) -> list[Call]:
    value = json.loads(text)
    found = []
    for item in value if isinstance(value, list) else [value]:
        item = item.get("function", item) if isinstance(item, dict) else None
        if not isinstance(item, dict):
            raise CallError("expected objects with a name and arguments")
        arguments = item.get("arguments", item.get("parameters", {}))
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
        if not isinstance(item["name"], str) or not isinstance(arguments, dict):
            raise CallError("expected objects with a name and arguments")
        found.append(Call(item["name"], (), arguments))
    return found


def _check_literals(values: Sequence[Any], depth: int) -> None:
    if depth > 16:
        raise CallError("arguments are nested too deeply")
    for value in values:
        if isinstance(value, dict):
            _check_literals([*value.keys(), *value.values()], depth + 1)
        elif isinstance(value, list | tuple | set | frozenset):
            _check_literals(list(value), depth + 1)
        elif isinstance(value, int | float) and not abs(value) < 10**MOST_DIGITS:  # NaN is not below it either
            raise CallError(f"a number has more than {MOST_DIGITS} digits, or is none")
        elif value is not None and not isinstance(value, str | int | float):
            raise CallError(f"an argument is {type(value).__name__}: expected text, numbers, lists or objects")
