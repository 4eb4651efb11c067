"""Rollouts in worker processes, each on a pipe of its own."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from envsched_jax.dispatch import worker
from envsched_jax.dispatch.executor import ExecutorError, GroupExecutor, RolloutFunction

START_SECONDS = 300.0  # for a worker to import the rollout function; more is a mistake
GRACE = 1.0  # seconds between the request to end and the kill


class ProcessExecutor(GroupExecutor):
    """Rollouts in worker processes, started anew (never forked) and reused, each on a pipe of its own.

    A worker that ends, whatever the reason, costs the rollout that it was making, and the next one starts another. At
    the deadline it is asked to end (SIGTERM, so that a handler can clean up) and killed after a second, with every
    process that it started. Workers import the module of the function and nothing of this library; where the function
    is in the script that was started, they run that script, so keep its main part under ``if __name__ ==
    "__main__"``. Ctrl-C does not reach them.
    """

    def __init__(
        self,
        rollout: RolloutFunction,
        *,
        workers: int,
        deadline: float,
        per_env: int | Mapping[str, int] | None = None,
        retries: int = 0,
    ) -> None:
        """Starts nothing yet.

        Args:
          rollout: importable function of (record, seed, ticket): the task as the JSON object of the pool, a seed in
            [0, 2**32), and the ticket as a JSON object. Returns a ``Rollout`` or a plain tuple of its fields. What it
            raises is an env_error; the end of its process, or anything else that it returns, an infra_error.
          workers: processes, that is rollouts at once.
          deadline: seconds of one rollout, beyond which it is an env_timeout. Starting a worker does not count.
          per_env: rollouts at once of one environment, for all or by env_id.
          retries: times that a rollout which is an infra_error is made again, with the same seed.

        Raises:
          DispatchError: an argument is out of range.
          ExecutorError: the function cannot be imported by name.
        """
        super().__init__(workers, deadline, per_env, retries)
        self._target = _target(rollout)
        self._idle: list[_Worker] = []
        self._all: set[_Worker] = set()

    async def close(self) -> None:
        """Ends all workers; those at rest run their exit handlers. A ``run`` under way raises ExecutorError."""
        await super().close()
        await asyncio.gather(*(each.stop(kindly=each in self._idle) for each in list(self._all)))
        self._all.clear()
        self._idle.clear()

    async def _roll(self, task: dict[str, Any], seed: int, asked: dict[str, Any]) -> dict[str, Any]:
        one = await self._worker()
        try:
            async with asyncio.timeout(self._deadline):
                made = await one.ask([task, seed, asked])
            if made is not None:
                self._idle.append(one)
                return made
            await self._end(one)
            self._check_open()
            return worker.lost("infra_error", f"its process ended with exit status {one.exit_status}")
        except TimeoutError:
            await self._end(one)
            return self._late()
        except BaseException:  # cancelled, say: an answer that nobody waits for must not meet the next question
            await self._end(one)
            raise

    async def _worker(self) -> "_Worker":
        while self._idle:
            one = self._idle.pop()
            if one.exit_status is None:
                return one
            await self._end(one)  # died at rest, such as for lack of memory: nobody's rollout
        one = _Worker()
        self._all.add(one)
        try:
            await one.start(self._target)
            self._check_open()
        except BaseException as error:
            await self._end(one)
            if isinstance(error, ExecutorError):
                self._check_open()  # that is why it did not start
            raise
        return one

    async def _end(self, one: "_Worker") -> None:
        ending = asyncio.ensure_future(one.stop())
        try:
            await asyncio.shield(ending)
        except asyncio.CancelledError:  # by a rollout of the group that failed, say: the process must end all the same
            await ending
            raise
        finally:
            self._all.discard(one)


class _Worker:
    """A process that runs ``worker.py``."""

    _process: asyncio.subprocess.Process | None = None

    @property
    def exit_status(self) -> int | None:
        return None if self._process is None else self._process.returncode

    async def start(self, target: Mapping[str, Any]) -> None:
        """Returns when the function is imported; raises ExecutorError where it cannot be."""
        # Without -P the script's folder would hide modules of these names; a session of its own makes a group of
        # all that it starts, and keeps Ctrl-C from it.
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            worker.__file__,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        try:
            async with asyncio.timeout(START_SECONDS):
                answer = await self.ask(target)
        except TimeoutError:
            answer = {"error": f"not done after {START_SECONDS:g} s"}
        if answer is None:
            answer = {"error": "the process ended"}
        if "error" in answer:
            raise ExecutorError(f"a worker cannot import {target['module']}.{target['name']}: {answer['error']}")

    async def ask(self, what: Any) -> dict[str, Any] | None:
        """Returns the answer, None where the process ended first."""
        assert self._process is not None and self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps(what).encode() + b"\n")
            await self._process.stdin.drain()
            line = await self._process.stdout.readline()
        except ConnectionError:
            line = b""
        return json.loads(line) if line.endswith(b"\n") else None

    async def stop(self, kindly: bool = False) -> None:
        """Ends the process and all that it started; ``kindly`` lets one that is at rest end by itself."""
        if self._process is None:
            return
        assert self._process.stdin is not None and self._process.stdout is not None
        if kindly:
            self._process.stdin.close()
        else:
            self._signal(signal.SIGTERM)
        with suppress(TimeoutError):
            async with asyncio.timeout(GRACE):
                await self._process.wait()
        self._signal(signal.SIGKILL if sys.platform != "win32" else signal.SIGTERM)
        self._process.stdin.close()
        await self._process.wait()
        with suppress(RuntimeError):  # someone waits for an answer, and reads the end of the stream instead
            await self._process.stdout.read()

    def _signal(self, number: int) -> None:
        assert self._process is not None
        with suppress(ProcessLookupError, PermissionError):
            if sys.platform == "win32":
                self._process.send_signal(number)
            else:
                os.killpg(self._process.pid, number)


def _target(rollout: RolloutFunction) -> dict[str, Any]:
    """Returns how a new process finds the function."""
    module, name = getattr(rollout, "__module__", None), getattr(rollout, "__qualname__", "<>")
    script = None
    if module == "__main__":
        main = sys.modules["__main__"]
        spec = getattr(main, "__spec__", None)
        script = getattr(main, "__file__", None) if spec is None else None
        module = module if spec is None else spec.name
        if spec is None and script is None:
            module = None
    if module is None or "<" in name or asyncio.iscoroutinefunction(rollout):
        raise ExecutorError(
            f"rollout: expected a function at the top of a module, which worker processes can import, got {rollout!r}"
        )
    return {"path": sys.path, "module": module, "name": name, "script": script and os.path.abspath(script)}
