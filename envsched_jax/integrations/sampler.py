"""The order of a trainer's data set: a sampler for `torch.utils.data` and everything built on it. Imports no torch.

Use it with ``num_workers=0``: a worker process would draw from a copy of the dispatcher, which hears of no outcome.
"""

from collections import deque
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

from envsched_jax.dispatch import Dispatcher, DispatchError, Feedback, Ticket, feedback


def batches(dispatcher: Dispatcher, size: int) -> Iterator[list[Ticket]]:
    """Yields tickets for ever, ``size`` at a time: first those that are open when it starts, then new ones.

    So a trainer that died, or that ended an epoch with a batch drawn in advance, meets every ticket once more that it
    had not brought an outcome of, in the same order. Where too few tasks are left a task may be there twice.
    """
    waiting = deque(dispatcher.open_tickets())
    while True:
        if len(waiting) < size:
            waiting.extend(dispatcher.propose(size - len(waiting), fill=True))
        else:
            yield [waiting.popleft() for _ in range(size)]


def require_rows(dispatcher: Dispatcher, rows: Container[str], where: str) -> None:
    """Raises DispatchError, which begins with ``where``, unless every task of the pool is among the rows."""
    missing = [task_id for task_id in dispatcher.records if task_id not in rows]
    if missing:
        raise DispatchError(f"{where}: no row for {missing[0]!r} ({len(missing)} tasks of the pool have none)")


class TicketSampler:
    """Row numbers of a map-style data set in the order in which the dispatcher wants the tasks.

    Each batch of ``size`` tasks comes ``passes`` times, and within it each task ``copies`` times in a row, as trainers
    do that expect a group as adjacent rows and use one generation for several updates.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        task_ids: Sequence[str],
        *,
        size: int | None = None,
        copies: int = 1,
        passes: int = 1,
        length: int | None = None,
    ) -> None:
        """Connects rows and tasks.

        Args:
          dispatcher: of the tasks.
          task_ids: of every row of the data set; rows of unknown tasks are never drawn.
          size: tasks per batch, by default those that the scheduler chooses at once.
          copies: of each task.
          passes: over each batch.
          length: rows that an epoch claims to have; by default those of the data set, as often as they come.

        Raises:
          DispatchError: a task of the pool has no row.
        """
        self.dispatcher, self.size = dispatcher, size or dispatcher.batch_size
        self._copies, self._passes = copies, passes
        self._row: dict[str, int] = {}
        for row, task_id in enumerate(task_ids):
            self._row.setdefault(task_id, row)
        require_rows(dispatcher, self._row, "task_ids")
        self._length = len(task_ids) * copies * passes if length is None else length
        self.delivered: deque[Ticket] = deque()  # drawn, without an outcome, oldest first

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[int]:
        self.delivered.clear()
        for tickets in batches(self.dispatcher, self.size):
            self.delivered.extend(tickets)
            for _ in range(self._passes):
                for ticket in tickets:
                    for _ in range(self._copies):
                        yield self._row[ticket.task_id]

    def observe(
        self,
        rewards: Sequence[float | None],
        *,
        task_ids: Sequence[str] | None = None,
        status: Sequence[Any] | None = None,
        tokens: Sequence[float] | None = None,
    ) -> None:
        """Takes the outcomes of the oldest rows that were drawn, in the order in which they were drawn.

        Args:
          rewards: one per row, a whole number of groups of ``copies``; None where there is none.
          task_ids: of the rows, to check that the trainer did not shuffle them.
          status: one per row, see ``dispatch.feedback``.
          tokens: one per row.

        Raises:
          DispatchError: the rows are not those that were drawn; nothing has changed.
        """
        groups, rest = divmod(len(rewards), self._copies)
        if rest or groups > len(self.delivered):
            raise DispatchError(
                f"rewards: {len(rewards)} rows: expected up to {len(self.delivered)} groups of {self._copies}"
            )
        found: list[Feedback] = []
        for i in range(groups):
            ticket, part = self.delivered[i], slice(i * self._copies, (i + 1) * self._copies)
            if task_ids is not None and set(task_ids[part]) != {ticket.task_id}:
                raise DispatchError(
                    f"rows {part.start} to {part.stop - 1} are of {sorted(set(task_ids[part]))}: expected "
                    f"{ticket.task_id!r}: the trainer reordered what the sampler drew; switch its shuffling off"
                )
            states, counts = (None if column is None else column[part] for column in (status, tokens))
            found.append(feedback(ticket.ticket_id, rewards[part], states, counts))
        self.dispatcher.observe_many(found)
        for _ in range(groups):
            self.delivered.popleft()

    def state_dict(self) -> dict[str, Any]:
        """Returns the dispatcher's state: keep it in the trainer's checkpoint."""
        return self.dispatcher.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes back to a state; iterate anew afterwards."""
        self.dispatcher.load_state_dict(state)
        self.delivered.clear()
