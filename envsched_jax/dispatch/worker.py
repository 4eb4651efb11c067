"""What runs in a worker process of ``ProcessExecutor``: the user's function in a loop, one JSON line in, one out.

The file is run as a script and imports the standard library only: importing the package would bring JAX into every
worker, which takes a second and some hundred megabytes. Only plain values cross the pipe, so nothing that a rollout
returns or raises can break the other side.
"""

import importlib
import json
import math
import os
import queue
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

COUNTED = ("ok", "truncated", "policy_timeout")  # their reward stands
LOST = ("env_timeout", "env_error", "verifier_error", "infra_error")
MAX_MESSAGE = 2000  # characters of an error that are kept: the end, where a traceback names it


def reply(result: Any) -> dict[str, Any]:
    """Returns what a rollout function returned as plain values, checked.

    Args:
      result: a ``Rollout``, or a plain tuple of its fields in order, of which the last may be missing.

    Returns:
      ``reward``, ``status``, ``tokens``, ``seconds``; of anything else, the status infra_error and an ``error``.
    """
    try:
        if not isinstance(result, tuple) or not 1 <= len(result) <= 4:
            raise TypeError("expected a Rollout")
        reward, status, tokens, seconds = result + (None, "ok", 0.0, None)[len(result) :]
        if status not in COUNTED + LOST:
            raise ValueError(f"expected a status of {', '.join(COUNTED + LOST)}")
        return {
            "reward": _number(reward) if status in COUNTED else None,
            "status": str(status),
            "tokens": _number(tokens, 0.0),
            "seconds": None if seconds is None else _number(seconds, 0.0),
        }
    except Exception as error:
        return lost("infra_error", f"{error}, got {_show(result)}")


def lost(status: str, error: str) -> dict[str, Any]:
    """Returns the reply of a rollout that has no reward."""
    return {"reward": None, "status": status, "tokens": 0.0, "seconds": None, "error": error[-MAX_MESSAGE:]}


def _number(value: Any, lowest: float = -math.inf) -> float:
    if isinstance(value, str | bytes) or not math.isfinite(float(value)) or float(value) < lowest:
        raise ValueError(f"expected a finite number{' of at least 0' if lowest == 0.0 else ''}")
    return float(value)


def _show(value: Any) -> str:
    try:
        return repr(value)[:200]
    except Exception:
        return f"a {type(value).__name__}"


def _find(target: Mapping[str, Any]) -> Callable[..., Any]:
    """Returns the user's function, under the parent's import path."""
    sys.path[:] = target["path"]
    if target["script"] is None:
        found: Any = importlib.import_module(target["module"])
        for name in target["name"].split("."):
            found = getattr(found, name)
        return found
    # A function of the script that started the program: run it under the name that multiprocessing uses.
    return runpy.run_path(target["script"], run_name="__mp_main__")[target["name"]]


def _call(function: Callable[..., Any], job: list[Any]) -> dict[str, Any]:
    try:
        result = function(*job)
    except BaseException:  # SystemExit too: whatever a rollout raises is its own affair
        return lost("env_error", traceback.format_exc())
    return reply(result)


class _Parent:
    """The other end: lines are read ahead by a thread, so that the end of the parent is noticed during a rollout."""

    def __init__(self) -> None:
        # The pipes move away from 0 and 1, so that what a rollout prints or starts cannot touch them.
        self._lines = os.fdopen(os.dup(0), "r", encoding="utf-8")
        self._answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
        with open(os.devnull) as nothing:
            os.dup2(nothing.fileno(), 0)
        os.dup2(2, 1)
        self._queue: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._asked = self._answered = 0
        threading.Thread(target=self._read, daemon=True).start()

    def ask(self) -> Any:
        """Returns the next thing to do, None at the end."""
        line = self._queue.get()
        return json.loads(line) if line else None

    def answer(self, value: Mapping[str, Any]) -> None:
        """Answers what was asked last."""
        self._answered += 1
        self._answers.write(json.dumps(value) + "\n")
        self._answers.flush()

    def _read(self) -> None:
        for line in self._lines:
            self._asked += 1
            self._queue.put(line)
        if self._asked > self._answered:  # nobody waits for this rollout any more
            die()
        self._queue.put("")


def die() -> NoReturn:
    """Ends this process and all that it started."""
    if hasattr(os, "killpg") and os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _serve() -> None:
    parent = _Parent()
    try:
        function = _find(parent.ask())
    except BaseException:
        parent.answer({"error": traceback.format_exc()[-MAX_MESSAGE:]})
        return
    parent.answer({})
    while (job := parent.ask()) is not None:
        parent.answer(_call(function, job))


if __name__ == "__main__":
    _serve()
