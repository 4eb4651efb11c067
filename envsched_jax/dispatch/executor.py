"""Who makes the rollouts of tickets: what every executor has in common, and the one in the event loop."""

import asyncio
import hashlib
import json
import logging
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple, Protocol

from envsched_jax.dispatch import worker
from envsched_jax.dispatch.tickets import DispatchError, Feedback, Ticket, feedback
from envsched_jax.dispatch.turns import Turns
from envsched_jax.pool.records import Record, to_object

_LOG = logging.getLogger(__name__)


class ExecutorError(RuntimeError):
    """Rollouts cannot be run at all: the function cannot be found or imported, or the executor is closed."""


class Rollout(NamedTuple):
    """What a rollout function returns. A plain tuple of the same does, too, and needs no import.

    Attributes:
      reward: a finite number in any range; None, with a status that says why, where there is none.
      status: name of a ``Status`` in small letters; ``ok``, ``truncated`` and ``policy_timeout`` have a reward.
      tokens: generated tokens.
      seconds: that the rollout took; None is the time that passed.
    """

    reward: float | None
    status: str = "ok"
    tokens: float = 0
    seconds: float | None = None


RolloutFunction = Callable[[dict[str, Any], int, dict[str, Any]], Any]


class Executor(Protocol):
    """Makes the rollouts of tickets; what ``drive`` needs."""

    async def run(self, ticket: Ticket, record: Record) -> Feedback:
        """Makes ``ticket.group_size`` rollouts of one task; many calls run at once.

        Raises:
          ExecutorError: not even one rollout could be started.
        """
        ...

    async def close(self) -> None:
        """Lets no further rollout begin, and lets go of processes."""
        ...


class GroupExecutor(ABC):
    """Groups, seeds, turns and retries; how one rollout is made is left to ``_roll``.

    Rollouts are independent of each other: one that fails in whatever way costs its own reward only. Use it in one
    event loop, as ``async with executor:``, or call ``close``.
    """

    def __init__(
        self, places: int, deadline: float, per_env: int | Mapping[str, int] | None = None, retries: int = 0
    ) -> None:
        """Starts nothing yet; see the subclasses."""
        if not isinstance(deadline, int | float) or not 0.0 < deadline < math.inf:
            raise DispatchError(f"deadline: expected seconds above 0, got {deadline!r}")
        if not isinstance(retries, int) or retries < 0:
            raise DispatchError(f"retries: expected at least 0, got {retries!r}")
        self._turns = Turns(places, per_env)
        self._deadline, self._retries = float(deadline), retries
        self._closed = False

    async def run(self, ticket: Ticket, record: Record) -> Feedback:
        """Makes ``ticket.group_size`` rollouts of one task.

        Args:
          ticket: of the dispatcher.
          record: of its task.

        Returns:
          The feedback, G rollouts in the order of their numbers.

        Raises:
          ExecutorError: rollouts cannot be run at all.
          TypeError: the record has extra fields that are not JSON.
        """
        task, asked = to_object(record), ticket.to_object()
        json.dumps(task)  # fails here, in every executor alike
        try:
            async with asyncio.TaskGroup() as group:
                made = [
                    group.create_task(self._one(ticket, number, task, asked)) for number in range(ticket.group_size)
                ]
        except ExceptionGroup as failures:
            raise failures.exceptions[0] from failures
        found = [rollout.result() for rollout in made]
        rewards, status, tokens, seconds = (
            [one[name] for one in found] for name in ("reward", "status", "tokens", "seconds")
        )
        return feedback(ticket.ticket_id, rewards, status, tokens, seconds)

    async def close(self) -> None:
        """Lets no further rollout begin: ``run`` raises ExecutorError."""
        self._closed = True

    async def __aenter__(self) -> "GroupExecutor":
        return self

    async def __aexit__(self, *unused: object) -> None:
        await self.close()

    @abstractmethod
    async def _roll(self, task: dict[str, Any], seed: int, asked: dict[str, Any]) -> dict[str, Any]:
        """Makes one rollout within the deadline; returns a reply as ``worker.reply`` does."""

    def _late(self) -> dict[str, Any]:
        """Returns the reply of a rollout that is past its deadline."""
        return worker.lost("env_timeout", f"over {self._deadline:g} s") | {"seconds": self._deadline}

    def _check_open(self) -> None:
        if self._closed:
            raise ExecutorError("the executor is closed")

    async def _one(self, ticket: Ticket, number: int, task: dict[str, Any], asked: dict[str, Any]) -> dict[str, Any]:
        seed = rollout_seed(ticket.ticket_id, number)
        async with self._turns.turn(ticket.env_id, ticket.ticket_id, number):
            for attempt in range(self._retries + 1):
                self._check_open()
                begun = time.monotonic()
                made = await self._roll(task, seed, asked)
                if made["seconds"] is None:
                    made["seconds"] = time.monotonic() - begun
                if "error" in made:
                    where = f"ticket {ticket.ticket_id} of task {ticket.task_id!r}, rollout {number}"
                    _LOG.warning("%s, attempt %d: %s: %s", where, attempt + 1, made["status"], made["error"])
                if made["status"] != "infra_error":
                    break
        return made


def rollout_seed(ticket_id: int, number: int) -> int:
    """Returns the seed of a rollout, in [0, 2**32): the same in every process and run."""
    return int.from_bytes(hashlib.blake2b(f"{ticket_id}/{number}".encode(), digest_size=4).digest())


class AsyncExecutor(GroupExecutor):
    """Rollouts in the event loop, for those that mostly wait for a network; see ``ProcessExecutor`` for the arguments.

    The function is ``async def``. At the deadline it is cancelled, so it must not hold the loop. A blocking one that
    cannot hang becomes one by ``return await asyncio.to_thread(rollout, record, seed, ticket)``.
    """

    def __init__(
        self,
        rollout: Callable[[dict[str, Any], int, dict[str, Any]], Awaitable[Any]],
        *,
        concurrency: int,
        deadline: float,
        per_env: int | Mapping[str, int] | None = None,
        retries: int = 0,
    ) -> None:
        """Starts nothing yet; ``concurrency`` is how many rollouts run at once.

        Raises:
          DispatchError: an argument is out of range.
        """
        super().__init__(concurrency, deadline, per_env, retries)
        self._rollout = rollout

    async def _roll(self, task: dict[str, Any], seed: int, asked: dict[str, Any]) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self._deadline) as limit:
                return worker.reply(await self._rollout(dict(task), seed, dict(asked)))
        except Exception as error:  # a TimeoutError may be the rollout's own
            if limit.expired():
                return self._late()
            return worker.lost("env_error", f"{type(error).__name__}: {error}")
