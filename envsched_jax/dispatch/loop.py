"""The loop of a trainer that has none of its own: propose, roll out, observe."""

import asyncio
import inspect
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from envsched_jax.dispatch.dispatcher import Dispatcher
from envsched_jax.dispatch.executor import Executor
from envsched_jax.dispatch.tickets import Feedback, Ticket

_LOG = logging.getLogger(__name__)


async def drive(
    dispatcher: Dispatcher,
    executor: Executor,
    *,
    batches: int,
    policy_version: Callable[[], int] | None = None,
    on_batch: Callable[[list[Feedback]], Any] | None = None,
) -> None:
    """Rolls out batches, and enters every outcome as soon as it is there.

    Tickets that an earlier process left open come first, as a batch that is not counted. A ticket whose rollouts fail
    to start is cancelled. When the task is cancelled, as by Ctrl-C under ``asyncio.run``, rollouts under way are
    ended, all groups that are complete have been observed, and the other tickets stay open: the next ``drive`` with
    this dispatcher, or with one on the same folder, begins with them.

    Args:
      dispatcher: not used by anyone else meanwhile.
      executor: remains open.
      batches: how many to propose.
      policy_version: called before each proposal; by default every batch is a version.
      on_batch: called with the feedback of each batch, by ticket: the place to train. It may be async.

    Raises:
      Exception: of the executor, where it could not start a single ticket of a batch.
      JournalError: an outcome could not be written.
    """
    left = dispatcher.open_tickets()
    for number in range(batches + bool(left)):
        if number == 0 and left:
            tickets = left
        else:
            version = None if policy_version is None else policy_version()
            tickets = dispatcher.propose(policy_version=version)
        done = await _batch(dispatcher, executor, tickets)
        if on_batch is not None:
            waited = on_batch(sorted(done, key=lambda given: given.ticket_id))
            if inspect.isawaitable(waited):
                await waited


async def _batch(dispatcher: Dispatcher, executor: Executor, tickets: Sequence[Ticket]) -> list[Feedback]:
    records = dispatcher.records
    running = {asyncio.create_task(executor.run(t, records[t.task_id])): t for t in tickets}
    observed: list[Feedback] = []
    failure: BaseException | None = None

    def settle(finished: Iterable[asyncio.Task[Feedback]]) -> None:
        nonlocal failure
        entered = []
        for future in finished:
            ticket = running.pop(future)
            if future.cancelled():
                continue  # stays open
            error = future.exception()
            if error is None:
                entered.append(future.result())
            else:
                _LOG.warning("ticket %d of task %r does not start: %r", ticket.ticket_id, ticket.task_id, error)
                dispatcher.cancel(ticket.ticket_id, "not started")
                failure = error
        dispatcher.observe_many(entered)
        observed.extend(entered)

    try:
        while running:
            settle((await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED))[0])
    finally:
        if running:
            for future in running:
                future.cancel()
            await asyncio.wait(running)
            settle(list(running))
    if failure is not None and not observed:
        raise failure
    return observed
