"""The books of a dispatcher: which tickets are out, what came of the others, who fails, what each environment got.

Plain Python, keyed by task and environment *names*, so a change of the pool moves nothing, and everything has a JSON
form. Every method is a function of the books and its arguments alone: replaying a journal repeats it.
"""

import copy
import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from envsched_jax.belief.history import SAME_REWARD
from envsched_jax.dispatch.tickets import DispatchError, Feedback, Ticket

KEPT_EXPIRED = 10_000  # expired tickets whose late outcome is still welcome
KEPT_REASONS = 32  # different reasons by environment that are told apart; all further ones are OTHER
OTHER = "other"
WINDOW = 512  # groups that "lately" means
FINAL = ("observed", "cancelled", "expired")

Verdict = tuple[int, str, str, bool]


@dataclass(frozen=True)
class Limits:
    """When to give up on a ticket, a task or an environment, for a while. Times are policy versions.

    Attributes:
      deadline_versions: a ticket that is older expires; None never.
      deadline_seconds: likewise, by the clock.
      retries: groups in a row that brought nothing until a task is quarantined; before that it waits 1, 2, 4, ...
        versions.
      env_retries: the same for an environment, over all its tasks.
      quarantine: how long; then one more try.
      floor: an environment that had no ticket for so many batches gets one, whatever is believed; None is no floor
        beyond that of the recipe.
    """

    deadline_versions: int | None = None
    deadline_seconds: float | None = None
    retries: int = 3
    env_retries: int = 16
    quarantine: int = 64
    floor: int | None = None

    def __post_init__(self) -> None:
        """Raises DispatchError for a limit out of range."""
        for item in fields(self):
            value = getattr(self, item.name)
            number = isinstance(value, int | float if item.name == "deadline_seconds" else int)
            if not (value is None and item.default is None) and not (
                number and not isinstance(value, bool) and value >= 1 - (item.name == "deadline_seconds")
            ):
                raise DispatchError(f"limits.{item.name}: expected a number of at least 1, got {value!r}")


@dataclass
class Tally:
    """What became of one environment's tickets; sums over the whole run."""

    proposed: int = 0
    observed: int = 0
    failed: int = 0  # observed without any valid rollout
    informative: int = 0
    groups: int = 0  # with at least two valid rollouts
    rollouts: int = 0  # valid
    invalid: int = 0
    reward: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    lag: int = 0  # policy versions between rollout and observation, summed over tickets
    last: int = -1  # number of the batch that last had a task of it
    zeros: int = 0  # groups in a row that earned the lowest reward in all rollouts
    hoped: float = 0.0  # predicted mean reward, summed over these groups
    discards: dict[str, int] = field(default_factory=dict)  # tickets that were not observed, by reason


@dataclass
class Ledger:
    """See the module.

    Attributes:
      limits: as configured.
      open: tickets by id, in order.
      expired: whose outcome may still come.
      counts: proposed, observed, cancelled, expired; and feedback that was ignored: unknown, repeated.
      failing: by task, failures in a row and the version from which it may be tried again.
      failing_envs: by environment, likewise.
      verdicts: of this version: ticket, task, environment, and whether it brought anything. They count from the next
        version on, in the order of tickets, so that the order in which they came changes nothing.
      tallies: by environment.
      seen: by task, the number of the batch that last had it.
      recent: of the latest groups, the predicted probability of being informative (None if none) and whether it was.
    """

    limits: Limits = field(default_factory=Limits)
    open: dict[int, Ticket] = field(default_factory=dict)
    expired: dict[int, Ticket] = field(default_factory=dict)
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("proposed", *FINAL, "unknown", "repeated"), 0)
    )
    failing: dict[str, list[int]] = field(default_factory=dict)
    failing_envs: dict[str, list[int]] = field(default_factory=dict)
    verdicts: list[Verdict] = field(default_factory=list)
    tallies: dict[str, Tally] = field(default_factory=dict)
    seen: dict[str, int] = field(default_factory=dict)
    recent: deque[tuple[float | None, bool]] = field(default_factory=lambda: deque(maxlen=WINDOW))

    def issue(self, ticket: Ticket, batch: int) -> None:
        """Enters a proposed ticket."""
        self.open[ticket.ticket_id] = ticket
        self.counts["proposed"] += 1
        tally = self.tallies.setdefault(ticket.env_id, Tally())
        tally.proposed += 1
        tally.last = batch
        self.seen[ticket.task_id] = batch

    def overdue(self, version: int, now: float) -> list[int]:
        """Returns the open tickets that are past a deadline."""
        versions, seconds = self.limits.deadline_versions, self.limits.deadline_seconds
        return [
            number
            for number, ticket in self.open.items()
            if (versions is not None and version - ticket.policy_version > versions)
            or (seconds is not None and now - ticket.issued > seconds)
        ]

    def expire(self, ticket_ids: Iterable[int]) -> None:
        """Closes tickets that are past a deadline; a task that does so again and again is set aside."""
        for number in ticket_ids:
            ticket = self.expired[number] = self.open.pop(number)
            self.counts["expired"] += 1
            self._discard(ticket, "expired")
            self.verdicts.append(_verdict(ticket, False))
        while len(self.expired) > KEPT_EXPIRED:
            del self.expired[next(iter(self.expired))]

    def cancel(self, ticket_id: int, reason: str, failed: bool) -> bool:
        """Closes a ticket that will bring nothing; returns false if it is not open."""
        ticket = self.open.pop(ticket_id, None)
        if ticket is None:
            self._ignored(ticket_id)
            return False
        self.counts["cancelled"] += 1
        self._discard(ticket, reason)
        if failed:
            self.verdicts.append(_verdict(ticket, False))
        return True

    def observe(self, feedback: Feedback, version: int, lowest: float) -> Ticket | None:
        """Closes a ticket by its outcome, also one that had expired.

        Args:
          feedback: what came back.
          version: now.
          lowest: the lowest reward of the environment.

        Returns:
          The ticket; None if it is unknown or closed, and then only a counter changes.
        """
        number = feedback.ticket_id
        ticket = self.open.pop(number, None)
        if ticket is None:
            ticket = self.expired.pop(number, None)
            if ticket is None:
                self._ignored(number)
                return None
            self.counts["expired"] -= 1
            self._discard(ticket, "expired", -1)
        self.counts["observed"] += 1
        tally = self.tallies[ticket.env_id]
        rewards = [reward for reward in feedback.rewards if reward is not None]
        tally.observed += 1
        tally.invalid += len(feedback.rewards) - len(rewards)
        tally.tokens += math.fsum(feedback.tokens)
        tally.seconds += math.fsum(feedback.seconds)
        made = ticket.policy_version if feedback.policy_version is None else feedback.policy_version
        tally.lag += max(0, version - made)
        self.verdicts.append(_verdict(ticket, bool(rewards)))
        if not rewards:
            tally.failed += 1
            return ticket
        tally.rollouts += len(rewards)
        tally.reward += math.fsum(rewards)
        hopeless = max(rewards) - lowest <= SAME_REWARD
        tally.zeros = tally.zeros + 1 if hopeless else 0
        tally.hoped = tally.hoped + ((ticket.predicted_mean or lowest) - lowest) if hopeless else 0.0
        if len(rewards) > 1:
            informative = max(rewards) - min(rewards) > SAME_REWARD
            tally.groups += 1
            tally.informative += informative
            self.recent.append((ticket.p_informative, informative))
        return ticket

    def settle(self, version: int) -> None:
        """Lets the verdicts count: this version has begun."""
        self.failing, self.failing_envs = self._judged(self.verdicts, version)
        self.verdicts = []

    def waiting(self, version: int, overdue: Iterable[int], begins: bool) -> tuple[list[str], list[str]]:
        """Returns the tasks and the environments that are not to be tried at this version.

        Args:
          version: now.
          overdue: open tickets that are about to expire.
          begins: whether this version begins now, so that the verdicts of the latest one count.
        """
        verdicts = [*self.verdicts, *(_verdict(self.open[number], False) for number in overdue)]
        failing, failing_envs = self._judged(verdicts if begins else [], version)
        tasks = [name for name, (_, until) in failing.items() if version < until]
        if not begins:
            tasks += [task_id for _, task_id, _, brought in verdicts if not brought]
        return tasks, [name for name, (_, until) in failing_envs.items() if version < until]

    def forget(self, tasks: set[str]) -> None:
        """Drops what is kept by task, of tasks that are gone."""
        self.failing = {name: entry for name, entry in self.failing.items() if name not in tasks}
        self.seen = {name: batch for name, batch in self.seen.items() if name not in tasks}

    def check(self) -> None:
        """Raises AssertionError unless every ticket is in exactly one place."""
        closed = sum(self.counts[kind] for kind in FINAL)
        assert self.counts["proposed"] == closed + len(self.open), (self.counts, len(self.open))
        assert sum(t.proposed for t in self.tallies.values()) == self.counts["proposed"]
        assert sum(t.observed for t in self.tallies.values()) == self.counts["observed"]
        discarded = sum(sum(t.discards.values()) for t in self.tallies.values())
        assert discarded == self.counts["cancelled"] + self.counts["expired"]

    def to_object(self) -> dict[str, Any]:
        """Returns the books as a JSON object, all but the limits."""
        return {
            "open": [ticket.to_object() for ticket in self.open.values()],
            "expired": [ticket.to_object() for ticket in self.expired.values()],
            "counts": dict(self.counts),
            "failing": {name: list(entry) for name, entry in self.failing.items()},
            "failing_envs": {name: list(entry) for name, entry in self.failing_envs.items()},
            "verdicts": [list(entry) for entry in self.verdicts],
            "tallies": {name: asdict(tally) for name, tally in self.tallies.items()},
            "seen": dict(self.seen),
            "recent": [list(entry) for entry in self.recent],
        }

    @staticmethod
    def from_object(obj: Mapping[str, Any], limits: Limits) -> "Ledger":
        """Returns the books of ``to_object``, which they leave alone whatever happens later."""
        obj = copy.deepcopy(obj)
        tickets = {name: [Ticket(**ticket) for ticket in obj[name]] for name in ("open", "expired")}
        return Ledger(
            limits=limits,
            open={ticket.ticket_id: ticket for ticket in tickets["open"]},
            expired={ticket.ticket_id: ticket for ticket in tickets["expired"]},
            counts=obj["counts"],
            failing=obj["failing"],
            failing_envs=obj["failing_envs"],
            verdicts=[(number, task_id, env_id, brought) for number, task_id, env_id, brought in obj["verdicts"]],
            tallies={name: Tally(**tally) for name, tally in obj["tallies"].items()},
            seen=obj["seen"],
            recent=deque(((p, bool(informative)) for p, informative in obj["recent"]), maxlen=WINDOW),
        )

    def _discard(self, ticket: Ticket, reason: str, by: int = 1) -> None:
        discards = self.tallies[ticket.env_id].discards
        if reason not in discards and len(discards) >= KEPT_REASONS:
            reason = OTHER  # reasons may be error messages, each of its own
        discards[reason] = discards.get(reason, 0) + by

    def _ignored(self, ticket_id: int) -> None:
        self.counts["repeated" if ticket_id < self.counts["proposed"] else "unknown"] += 1

    def _judged(self, verdicts: Iterable[Verdict], version: int) -> tuple[dict[str, list[int]], dict[str, list[int]]]:
        """Returns ``failing`` and ``failing_envs`` after these verdicts.

        A task that brought nothing is set aside, longer every time, and its environment if this is all it does.
        """
        tasks, envs = dict(self.failing), dict(self.failing_envs)
        for _, task_id, env_id, brought in sorted(verdicts):
            for failing, name, retries, backs_off in (
                (tasks, task_id, self.limits.retries, True),
                (envs, env_id, self.limits.env_retries, False),
            ):
                if brought:
                    failing.pop(name, None)
                    continue
                count = failing.get(name, [0, 0])[0] + 1
                wait = self.limits.quarantine if count >= retries else 2 ** (count - 1) if backs_off else 0
                failing[name] = [count, version + min(wait, self.limits.quarantine)]
        return tasks, envs


def _verdict(ticket: Ticket, brought: bool) -> Verdict:
    return ticket.ticket_id, ticket.task_id, ticket.env_id, brought
