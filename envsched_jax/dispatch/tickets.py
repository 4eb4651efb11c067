"""What a trainer is handed and what it brings back, checked field by field."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from envsched_jax.types import Status

STATUSES = {status.name.lower(): status for status in Status if status != Status.ABSENT}
MAX_GROUP = 4096  # rollouts in one feedback; more is a mistake
LARGEST = 1e30  # of rewards and costs, so that sums of them stay finite in float32


class DispatchError(ValueError):
    """A call that cannot be served. The message names the ticket or argument and what was expected; nothing changed."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """One group of rollouts to be made.

    Attributes:
      ticket_id: 0, 1, 2, ... in the order of proposal.
      task_id: of the pool.
      env_id: of the task.
      group_size: rollouts asked for, G; any number may come back.
      policy_version: at the time of the proposal.
      attempt: groups of this task that brought nothing since the last one that did.
      explore: drawn whatever is believed.
      predicted_mean: expected reward, in units of the rewards; None where the recipe believes nothing.
      predicted_variance: expected within-task variance of the reward, likewise.
      p_informative: probability that the rewards of the group differ, likewise.
      issued: seconds since the epoch.
    """

    ticket_id: int
    task_id: str
    env_id: str
    group_size: int
    policy_version: int
    attempt: int = 0
    explore: bool = False
    predicted_mean: float | None = None
    predicted_variance: float | None = None
    p_informative: float | None = None
    issued: float = 0.0

    def to_object(self) -> dict[str, Any]:
        """Returns the JSON object, the inverse of ``Ticket(**obj)``."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Feedback:
    """What came back for one ticket; use ``feedback``, which checks.

    Attributes:
      ticket_id: of the ticket.
      rewards: one per rollout; None where there is none, whatever the reason.
      status: one per rollout.
      tokens: generated tokens per rollout.
      seconds: per rollout.
      policy_version: that made the rollouts; None is that of the proposal.
    """

    ticket_id: int
    rewards: tuple[float | None, ...]
    status: tuple[int, ...]
    tokens: tuple[float, ...]
    seconds: tuple[float, ...]
    policy_version: int | None = None

    def to_object(self) -> list[Any]:
        """Returns the JSON value, the inverse of ``Feedback(*value)`` but for lists in place of tuples."""
        return [self.ticket_id, self.rewards, self.status, self.tokens, self.seconds, self.policy_version]

    @staticmethod
    def from_object(value: Sequence[Any]) -> "Feedback":
        """Returns the feedback of ``to_object``."""
        number, rewards, status, tokens, seconds, version = value
        return Feedback(number, tuple(rewards), tuple(status), tuple(tokens), tuple(seconds), version)


def feedback(
    ticket_id: int,
    rewards: Sequence[float | None],
    status: Any = None,
    tokens: Any = None,
    seconds: Any = None,
    policy_version: int | None = None,
) -> Feedback:
    """Returns checked feedback.

    Args:
      ticket_id: of the ticket.
      rewards: one per rollout, in any range; None where a rollout has none. Never a made-up 0.
      status: a ``Status`` or its name in small letters, for all rollouts or one each. By default OK where there is a
        reward and VERIFIER_ERROR where there is none.
      tokens: generated tokens, one number for every rollout or one each; 0 where unknown.
      seconds: likewise.
      policy_version: that made the rollouts.

    Raises:
      DispatchError: a reward that counts is not a finite number (or beyond 1e30), or lengths differ.
    """
    where = f"ticket {ticket_id!r}"
    number = whole(ticket_id, where)
    version = None if policy_version is None else whole(policy_version, f"{where}: policy_version")
    try:
        given = list(rewards)
    except TypeError:
        raise DispatchError(f"{where}: rewards: expected one number per rollout, got {rewards!r}") from None
    if not 1 <= len(given) <= MAX_GROUP:
        raise DispatchError(f"{where}: rewards: expected 1 to {MAX_GROUP} of them, got {len(given)}")
    if status is None:
        codes = [Status.VERIFIER_ERROR if reward is None else Status.OK for reward in given]
    else:
        codes = [_status(s, f"{where}: status") for s in _each(status, len(given), f"{where}: status")]
    found: list[float | None] = []
    for i, (reward, code) in enumerate(zip(given, codes, strict=True)):
        if not Status.OK <= code <= Status.POLICY_TIMEOUT:
            found.append(None)  # whatever stands there, it says nothing about the policy
        elif reward is None:
            raise DispatchError(
                f"{where}: rewards[{i}] is None, yet its status is {code.name.lower()}: expected a number, or a status "
                "such as 'env_error'"
            )
        else:
            found.append(_number(reward, f"{where}: rewards[{i}]", ", or None with a status such as 'env_error'"))
    spent = [
        _costs(column, len(given), f"{where}: {name}") for name, column in (("tokens", tokens), ("seconds", seconds))
    ]
    return Feedback(number, tuple(found), tuple(int(code) for code in codes), spent[0], spent[1], version)


def _costs(given: Any, count: int, where: str) -> tuple[float, ...]:
    numbers = [0.0] * count if given is None else [_number(value, where) for value in _each(given, count, where)]
    if min(numbers) < 0.0:
        raise DispatchError(f"{where}: expected at least 0, got {min(numbers)}")
    return tuple(numbers)


def whole(value: Any, where: str) -> int:
    """Returns a whole number of at least 0, of any integer type; raises DispatchError for anything else."""
    try:
        number = value.__index__()
    except (AttributeError, TypeError):
        number = None
    if number is None or isinstance(value, bool) or not 0 <= number < 2**53:
        raise DispatchError(f"{where}: expected a whole number of at least 0, got {value!r}")
    return number


def _number(value: Any, where: str, more: str = "") -> float:
    try:
        number = math.nan if isinstance(value, str | bytes | complex) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not abs(number) <= LARGEST:
        raise DispatchError(f"{where}: expected a finite number, at most {LARGEST:g}{more}, got {value!r}")
    return number


def _each(value: Any, count: int, where: str) -> list[Any]:
    """Returns one value per rollout, of one for all or one each."""
    if isinstance(value, str) or not hasattr(value, "__len__") or getattr(value, "shape", None) == ():
        return [value] * count
    if len(value) != count:
        raise DispatchError(f"{where}: expected one for all rollouts or {count}, got {len(value)}")
    return list(value)


def _status(value: Any, where: str) -> Status:
    if isinstance(value, str) and value in STATUSES:
        return STATUSES[value]
    try:
        status = Status(value)
    except ValueError:
        status = Status.ABSENT
    if status == Status.ABSENT or isinstance(value, bool):
        raise DispatchError(f"{where}: expected one of {', '.join(STATUSES)}, got {value!r}")
    return status
