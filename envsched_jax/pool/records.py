"""The pool record: one task of one environment, checked field by field."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

_MAX_INT = 2**31 - 1
_VERIFIER_FIELDS = ("kind", "n_checks", "partial")


class PoolError(ValueError):
    """A pool that cannot be used. The message names the place, the field and what was expected."""


@dataclass(frozen=True)
class Verifier:
    """How a task is scored.

    Attributes:
      kind: name of the kind of check, such as ``unit_tests``.
      n_checks: how many checks the verifier makes, if known.
      partial: whether passing some of the checks gives part of the reward, if known.
    """

    kind: str
    n_checks: int | None = None
    partial: bool | None = None


@dataclass(frozen=True)
class Record:
    """One task of the pool. ``None`` means unknown, which is not the same as empty.

    Attributes:
      task_id: unique in the pool.
      env_id: the environment that the task is an instance of.
      text: the instruction.
      tools_available: names of the tools that the agent may call.
      gt_actions: names of the actions of a reference solution, in order.
      n_turns: user turns.
      state_reads: state attributes that the verifier reads.
      state_writes: state attributes that the solution writes.
      verifier: how the task is scored.
      domain: a group of environments.
      group_id: shared by the variants of one scenario.
      embedding: the user's own text vector, of one length over the pool.
      extra: every other field as it was read; unknown fields of the verifier are under ``verifier.<name>``.
    """

    task_id: str
    env_id: str
    text: str
    tools_available: tuple[str, ...]
    gt_actions: tuple[str, ...] | None = None
    n_turns: int | None = None
    state_reads: tuple[str, ...] | None = None
    state_writes: tuple[str, ...] | None = None
    verifier: Verifier | None = None
    domain: str | None = None
    group_id: str | None = None
    embedding: tuple[float, ...] | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)


def parse_record(obj: Mapping[str, Any], where: str) -> Record:
    """Makes a record of a decoded JSON object.

    Args:
      obj: field name to value; ``None`` counts as missing, unknown names go to ``extra``.
      where: the place of the object for error messages, such as ``tasks.jsonl:3``.

    Returns:
      The record.

    Raises:
      PoolError: a needed field is missing, or a field has the wrong type or value.
    """
    if not isinstance(obj, Mapping):
        raise PoolError(f"{where}: expected a JSON object, got {_show(obj)}")
    for name in _NEEDED:
        if obj.get(name) is None:
            raise PoolError(f"{where}: field '{name}' is missing: expected {_EXPECTED[_FIELDS[name]]}")
    known = {n: check(obj[n], f"{where}: field '{n}'") for n, check in _FIELDS.items() if obj.get(n) is not None}
    extra = {n: value for n, value in obj.items() if n not in _FIELDS}
    if isinstance(obj.get("verifier"), Mapping):
        extra |= {f"verifier.{n}": v for n, v in obj["verifier"].items() if n not in _VERIFIER_FIELDS}
    return Record(**known, extra=extra)


def to_object(record: Record) -> dict[str, Any]:
    """Returns the JSON object of a record, the inverse of ``parse_record``; unknown fields are left out.

    Raises:
      PoolError: an extra field has the name of a field of the record.
    """
    clash = sorted(set(record.extra) & set(_FIELDS))
    if clash:
        raise PoolError(f"record {record.task_id!r}: extra field '{clash[0]}': expected a name that no field has")
    obj: dict[str, Any] = {n: getattr(record, n) for n in _FIELDS if getattr(record, n) is not None}
    obj = {n: list(v) if isinstance(v, tuple) else v for n, v in obj.items()}
    if record.verifier is not None:
        known = {n: getattr(record.verifier, n) for n in _VERIFIER_FIELDS}
        obj["verifier"] = {n: v for n, v in known.items() if v is not None}
    for name, value in record.extra.items():
        prefix, _, rest = name.partition("verifier.")
        if record.verifier is not None and prefix == "" and rest and rest not in _VERIFIER_FIELDS:
            obj["verifier"][rest] = value
        else:
            obj[name] = value
    return obj


def check_pool(records: Sequence[Record], where: str, lines: Sequence[int] | None = None) -> None:
    """Checks what one record cannot tell alone.

    Args:
      records: the whole pool.
      where: the pool's name for error messages, such as its path.
      lines: the line of each record; without it messages count records from 1.

    Raises:
      PoolError: no record, a ``task_id`` used twice, or embeddings of different lengths.
    """
    if not records:
        raise PoolError(f"{where}: the pool is empty: expected at least one record")
    unit, numbers = ("lines", lines) if lines is not None else ("records", range(1, len(records) + 1))
    first: dict[str, int] = {}
    size: tuple[int, int] | None = None
    for record, number in zip(records, numbers, strict=True):
        earlier = first.setdefault(record.task_id, number)
        if earlier != number:
            raise PoolError(
                f"{where}: {unit} {earlier} and {number}: field 'task_id': both are {record.task_id!r}: "
                "expected a different one for every task"
            )
        if record.embedding is None:
            continue
        size = size or (len(record.embedding), number)
        if len(record.embedding) != size[0]:
            raise PoolError(
                f"{where}: {unit} {size[1]} and {number}: field 'embedding': {size[0]} and "
                f"{len(record.embedding)} numbers: expected one length for the whole pool"
            )


def _show(value: Any) -> str:
    names = {dict: "an object", list: "a list", tuple: "a list", type(None): "null"}
    name = names.get(type(value))
    text = json.dumps(value) if isinstance(value, str | bool | int | float) else repr(value)
    return name or (text if len(text) <= 40 else text[:37] + "...")


def _fail(value: Any, where: str, check: Callable[[Any, str], Any]) -> PoolError:
    return PoolError(f"{where}: expected {_EXPECTED[check]}, got {_show(value)}")


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise _fail(value, where, _text)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise PoolError(f"{where}: expected valid Unicode, got a lone surrogate in {_show(value)}") from None
    return value


def _name(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise _fail(value, where, _name)
    return _text(value, where)


def _names(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        raise _fail(value, where, _names)
    return tuple(_text(item, f"{where}, item {i}") for i, item in enumerate(value))


def _count(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_INT:
        raise _fail(value, where, _count)
    return value


def _flag(value: Any, where: str) -> bool:
    if not isinstance(value, bool):
        raise _fail(value, where, _flag)
    return value


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _fail(value, where, _number)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _fail(value, where, _number)
    return number


def _vector(value: Any, where: str) -> tuple[float, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise _fail(value, where, _vector)
    return tuple(_number(item, f"{where}, item {i}") for i, item in enumerate(value))


def _verifier(value: Any, where: str) -> Verifier:
    if not isinstance(value, Mapping):
        raise _fail(value, where, _verifier)
    if value.get("kind") is None:
        raise PoolError(f"{where}: 'kind' is missing: expected {_EXPECTED[_text]}")
    checks: dict[str, Callable[[Any, str], Any]] = {"kind": _text, "n_checks": _count, "partial": _flag}
    known = {n: check(value[n], f"{where}, '{n}'") for n, check in checks.items() if value.get(n) is not None}
    return Verifier(**known)


_EXPECTED: dict[Callable[[Any, str], Any], str] = {
    _text: "a string",
    _name: "a non-empty string",
    _names: "a list of strings",
    _count: f"an integer from 0 to {_MAX_INT}",
    _flag: "true or false",
    _number: "a finite number",
    _vector: "a non-empty list of numbers",
    _verifier: "an object with 'kind', and perhaps 'n_checks' and 'partial'",
}
_FIELDS: dict[str, Callable[[Any, str], Any]] = {
    "task_id": _name,
    "env_id": _name,
    "text": _text,
    "tools_available": _names,
    "gt_actions": _names,
    "n_turns": _count,
    "state_reads": _names,
    "state_writes": _names,
    "verifier": _verifier,
    "domain": _text,
    "group_id": _text,
    "embedding": _vector,
}
_NEEDED = ("task_id", "env_id", "text", "tools_available")
