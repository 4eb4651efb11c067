"""Pools as JSON lines: one record a line, UTF-8."""

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NoReturn

from envsched_jax.pool.records import PoolError, Record, check_pool, parse_record, to_object


def read_jsonl(path: str | os.PathLike[str]) -> list[Record]:
    """Reads and checks a pool.

    Args:
      path: a JSON-lines file; blank lines are skipped.

    Returns:
      The records in the order of the file.

    Raises:
      PoolError: names the file, the line, the field and what was expected.
    """
    records, lines = [], []
    for number, raw in enumerate(Path(path).read_bytes().split(b"\n"), start=1):
        if raw.strip():
            where = f"{os.fspath(path)}:{number}"
            records.append(parse_record(_decode(raw, where), where))
            lines.append(number)
    check_pool(records, os.fspath(path), lines)
    return records


def write_jsonl(path: str | os.PathLike[str], records: Iterable[Record]) -> None:
    """Writes a pool so that ``read_jsonl`` returns equal records.

    Args:
      path: the file to write; an existing one is replaced.
      records: a pool.

    Raises:
      PoolError: the pool is empty or has a ``task_id`` twice, or a value has no JSON form; nothing is written then.
    """
    records = list(records)
    check_pool(records, os.fspath(path))
    lines = [f"{_encode(to_object(r), f'{os.fspath(path)}: record {r.task_id!r}')}\n" for r in records]
    Path(path).write_text("".join(lines), encoding="utf-8")


def _decode(raw: bytes, where: str) -> Any:
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        bad = f"byte 0x{raw[error.start]:02x} at byte {error.start + 1} of the line"
        raise PoolError(f"{where}: expected UTF-8, got {bad}") from None
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise PoolError(f"{where}: expected one JSON object, got broken JSON: {error}") from None


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _encode(obj: Any, where: str) -> str:
    try:
        return json.dumps(obj, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise PoolError(f"{where}: expected values that JSON can hold: {error}") from None
