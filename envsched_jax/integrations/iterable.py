"""Batches of rows for trainers that take any iterable: your own loop, tunix, MaxText. Imports none of them.

    stream = TicketBatches(dispatcher, {row["task_id"]: row for row in rows}, size=8)
    trainer = Learner(..., reward_fns=stream.rewarding(my_reward))
    trainer.train(stream)

Every row gets a column ``ticket_id``. Trainers hand the columns of a row to their reward functions, once per rollout,
so a wrapped reward function is all it takes to bring the outcomes back.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from envsched_jax.dispatch import Dispatcher, DispatchError, Feedback, feedback
from envsched_jax.integrations.sampler import batches, require_rows

Row = Mapping[str, Any]


class TicketBatches:
    """Endless batches, each a dictionary of columns; open tickets of an earlier run come first."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        rows: Mapping[str, Row],
        *,
        size: int | None = None,
        skip: int = 0,
        collate: Callable[[list[Row]], Any] | None = None,
    ) -> None:
        """Connects rows and tasks.

        Args:
          dispatcher: of the tasks.
          rows: by task id, all with the same columns.
          size: rows per batch, by default those that the scheduler chooses at once.
          skip: batches at the start that ask for no tickets and hold the first row only, with ticket_id -1: for
            trainers that resume by drawing as many batches as they had trained on, and throw them away.
          collate: what becomes of a list of rows; by default a dictionary of lists.

        Raises:
          DispatchError: a task of the pool has no row.
        """
        require_rows(dispatcher, rows, "rows")
        self.dispatcher, self.size, self._rows = dispatcher, size or dispatcher.batch_size, rows
        self._skip, self._collate = skip, collate or columns

    def __iter__(self) -> Iterator[Any]:
        if self._skip:
            first = {**next(iter(self._rows.values())), "ticket_id": -1}
            for _ in range(self._skip):
                yield self._collate([first] * self.size)
        for tickets in batches(self.dispatcher, self.size):
            yield self._collate([{**self._rows[t.task_id], "ticket_id": t.ticket_id} for t in tickets])

    def rewarding(self, reward: Callable[..., Sequence[float | None]]) -> Callable[..., Sequence[float | None]]:
        """Returns the reward function with its outcomes reported.

        The wrapped function is called with keywords, of which ``ticket_id`` holds one number per rollout. Rollouts of
        one ticket may come in one call only; in any order, and mixed with others.

        Raises:
          DispatchError: when called, without ``ticket_id`` or with another number of them than of rewards.
        """

        @functools.wraps(reward)
        def wrapped(*args: Any, **kwargs: Any) -> Sequence[float | None]:
            rewards = reward(*args, **kwargs)
            if "ticket_id" not in kwargs or len(kwargs["ticket_id"]) != len(rewards):
                raise DispatchError("ticket_id: expected a column with one number per rollout")
            self.dispatcher.observe_many(grouped([int(number) for number in kwargs["ticket_id"]], rewards))
            return rewards

        return wrapped


def grouped(ticket_ids: Sequence[int], rewards: Sequence[float | None]) -> list[Feedback]:
    """Returns feedback by ticket, of one reward per rollout; tickets below 0 are left out."""
    groups: dict[int, list[float | None]] = {}
    for number, reward in zip(ticket_ids, rewards, strict=True):
        if number >= 0:
            groups.setdefault(number, []).append(reward)
    return [feedback(number, group) for number, group in groups.items()]


def columns(rows: Sequence[Row]) -> dict[str, list[Any]]:
    """Returns a list per column."""
    return {name: [row[name] for row in rows] for name in rows[0]}
