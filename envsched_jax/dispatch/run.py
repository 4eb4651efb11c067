"""A run in memory: what is proposed next, and what every call changes. No files, no threads, no checks of arguments.

Whatever happens is an event, a JSON object. ``plan`` makes the event of a proposal without changing anything; ``apply``
lets an event happen. Applying the same events to the same state gives the same state, so a journal of them is enough.
"""

import copy
import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from envsched_jax.dispatch.engine import Change, Engine, Grown, Pick, Row
from envsched_jax.dispatch.ledger import Ledger, Limits
from envsched_jax.dispatch.tickets import DispatchError, Feedback, Ticket, whole
from envsched_jax.pool.records import parse_record
from envsched_jax.types import SchedulerState

FORMAT = 1
OLDEST = 2**31 - 1  # versions, the largest age that an outcome can have

Range = tuple[float, float]


class Run:
    """See the module.

    Attributes:
      engine: the scheduler and its pool.
      ledger: the books.
      version: of the latest proposal; None before the first.
      batches: proposals that chose anew.
    """

    def __init__(self, engine: Engine, limits: Limits, default: Range, ranges: Mapping[str, Range]) -> None:
        """Starts; ``ranges`` are of rewards by environment, ``default`` of the others."""
        self.engine, self.ledger = engine, Ledger(limits)
        self.version: int | None = None
        self.batches = 0
        self._draws = 0  # calls of the scheduler, the number of the random stream
        self._queue: list[Pick] = []  # chosen, not handed out
        self._buffer: list[tuple[Ticket, Feedback]] = []  # observed, not in the belief
        self._default, self._ranges = default, dict(ranges)

    def plan(self, count: int, version: int | None, fill: bool) -> tuple[dict[str, Any], SchedulerState]:
        """Works out a proposal without changing anything: the event, and the scheduler's state after it."""
        ledger, engine = self.ledger, self.engine
        now = time.time()
        if version is None:
            version = (-1 if self.version is None else self.version) + (count > len(self._queue))
        else:
            version = whole(version, "policy_version")
        if version < (self.version or 0):
            raise DispatchError(
                f"policy_version: expected at least {self.version}, got {version}: after going back to an older "
                "checkpoint call load_state_dict with the state of that time"
            )
        steps = 0 if self.version is None else version - self.version
        expired = ledger.overdue(version, now)
        state = engine.fold(engine.state, self._rows(version), steps) if steps else engine.state
        waiting, envs = ledger.waiting(version, expired, steps > 0)
        gone = set(expired)
        out = [ticket.task_id for number, ticket in ledger.open.items() if number not in gone]
        # Within a version the state does not know of what came back: rather other tasks now, and quotas count these.
        back = [] if steps else [t.task_id for t, given in self._buffer if any(r is not None for r in given.rewards)]
        drawn: list[Pick] = []
        draws = 0
        while len(self._queue) + len(drawn) < count:
            own = [*self._queue, *drawn]
            mine = [pick.task_id for pick in own]
            choices = [([*out, *mine, *waiting], envs)]
            if fill:  # tasks that wait, before tasks that are out, before the same task twice
                once = mine[len(mine) - len(mine) % int(engine.eligible().sum() or 1) :]
                choices += [([*out, *mine], []), (once, [])]
            mask, choice = self._mask(choices)
            if mask is None:
                break
            picks = self._draw(state, self._draws + draws, engine.rather(mask, back), [*out, *back, *mine], own)
            draws += 1
            if not picks:
                break
            drawn += picks[: count - len(own)] if choice else picks  # nothing beyond what was asked for
        event = {
            "kind": "propose",
            "time": now,
            "version": version,
            "steps": steps,
            "expired": expired,
            "drawn": [list(pick) for pick in drawn],
            "draws": draws,
            "issued": min(count, len(self._queue) + len(drawn)),
        }
        return event, state

    def apply(self, event: Mapping[str, Any], ready: Any = None) -> Any:
        """Lets an event happen.

        Args:
          event: of ``plan``, or of a call.
          ready: what it leads to, where that is worked out already: the scheduler's state after a proposal, the grown
            pool after an addition.
        """
        kind = event["kind"]
        if kind == "propose":
            return self._propose(event, ready)
        if kind == "add":
            return self._add(event, ready)
        return {"observe": self._observe, "cancel": self._cancel, "retire": self._retire}[kind](event)

    def save(self) -> dict[str, Any]:
        """Returns everything but the pool and the graph: JSON values, and under ``arrays`` NumPy arrays by name."""
        meta, arrays = self.engine.save()
        saved = {
            "format": FORMAT,
            "seed": self.engine.seed,
            "group_size": self.engine.group_size,
            "version": self.version,
            "draws": self._draws,
            "batches": self.batches,
            "queue": [list(pick) for pick in self._queue],
            "buffer": [[ticket.to_object(), given.to_object()] for ticket, given in self._buffer],
            "default": list(self._default),
            "ranges": {env_id: list(limits) for env_id, limits in self._ranges.items()},
            "ledger": self.ledger.to_object(),
            "engine": meta,
            "arrays": arrays,
        }
        return {**saved, "digest": _digest(saved)}

    def loaded(self, saved: Mapping[str, Any]) -> tuple["Run", Change]:
        """Returns a saved run in the settings of this one, and how the pools differ; this one stays as it is.

        What waits for tasks that this pool lacks is kept until ``drop``, since a journal may go on with it.

        Raises:
          DispatchError: the state is damaged or incomplete, or of another scheduler, seed or group size.
        """
        run = copy.copy(self)
        run.engine = copy.copy(self.engine)
        try:
            return run, run._load(saved)
        except DispatchError:
            raise
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise DispatchError(f"state: damaged or incomplete: {error!r}") from error

    def _load(self, saved: Mapping[str, Any]) -> Change:
        if saved["format"] != FORMAT:
            raise DispatchError(f"state: format {saved['format']!r}: expected {FORMAT}")
        if saved["digest"] != _digest(saved):
            raise DispatchError("state: damaged: its digest does not match: expected what state_dict returned")
        for name in ("seed", "group_size"):
            if saved[name] != getattr(self.engine, name):
                raise DispatchError(
                    f"state: its {name} is {saved[name]!r}, this dispatcher's is {getattr(self.engine, name)!r}"
                )
        change = self.engine.load(saved["engine"], saved["arrays"])
        self.ledger = Ledger.from_object(saved["ledger"], self.ledger.limits)
        self.version, self.batches, self._draws = saved["version"], saved["batches"], saved["draws"]
        self._queue = [Pick(*pick) for pick in saved["queue"]]
        self._buffer = [(Ticket(**ticket), Feedback.from_object(given)) for ticket, given in saved["buffer"]]
        lowest, highest = saved["default"]
        self._default = lowest, highest
        self._ranges = self._ranges | {env_id: (given[0], given[1]) for env_id, given in saved["ranges"].items()}
        return change

    def drop(self, gone: set[str]) -> None:
        """Lets go of what waits for tasks that the pool no longer has, and of what is kept of them."""
        self.ledger.forget(gone)
        self._queue = [pick for pick in self._queue if pick.task_id not in gone]
        self._buffer = [entry for entry in self._buffer if entry[0].task_id not in gone]
        for number in [n for n, ticket in self.ledger.open.items() if ticket.task_id in gone]:
            self.ledger.cancel(number, "removed", False)

    def _mask(self, choices: Sequence[tuple[list[str], list[str]]]) -> tuple[np.ndarray | None, int]:
        """Returns what may be picked, bool[N], by the first choice of tasks and environments to avoid that leaves any.

        With it comes the number of the choice.
        """
        everything = self.engine.eligible()
        if not everything.any():
            raise DispatchError("propose: every task is retired")
        for number, (tasks, envs) in enumerate(choices):
            mask = self.engine.without(everything, tasks, envs)
            if mask.any():
                return mask, number
        return None, 0

    def _draw(
        self, state: SchedulerState, draw: int, mask: np.ndarray, counted: Sequence[str], own: Sequence[Pick]
    ) -> list[Pick]:
        """Returns the picks of one batch; ``own`` are those before it in the same proposal."""
        engine = self.engine
        picks = engine.pick(state, draw, mask, counted)
        floor = self.ledger.limits.floor
        if floor is None:
            return picks

        def last(env_id: str) -> int:
            return max(0, tallies[env_id].last) if env_id in tallies else 0

        tallies = self.ledger.tallies
        here = {pick.env_id for pick in (*own, *picks)}
        late = [
            env_id
            for env_id in engine.environments()
            if env_id not in here and self.batches + 1 - last(env_id) >= floor
        ]
        late.sort(key=last)
        owed = engine.oldest(late[: max(1, len(picks) // 4)], mask, self.ledger.seen)
        kept = [pick for pick in picks if not pick.explore]
        dropped = {pick.task_id for pick in kept[len(kept) - min(len(owed), len(kept)) :]}
        return owed + [pick for pick in picks if pick.task_id not in dropped]

    def _rows(self, version: int) -> list[Row]:
        """Returns the buffered outcomes as the engine takes them, by ticket."""
        rows = []
        for ticket, given in sorted(self._buffer, key=lambda entry: entry[0].ticket_id):
            made = ticket.policy_version if given.policy_version is None else given.policy_version
            lowest, highest = self._ranges.get(ticket.env_id, self._default)
            rows.append(
                Row(
                    ticket.task_id,
                    ticket.explore,
                    tuple(None if r is None else (r - lowest) / (highest - lowest) for r in given.rewards),
                    given.status,
                    given.tokens,
                    given.seconds,
                    min(max(0, version - 1 - made), OLDEST),
                )
            )
        return rows

    def _propose(self, event: Mapping[str, Any], state: SchedulerState | None) -> None:
        if event["steps"]:
            if state is None:
                state = self.engine.fold(self.engine.state, self._rows(event["version"]), event["steps"])
            self.engine.state, self._buffer = state, []
        self.ledger.expire(event["expired"])
        if event["steps"]:
            self.ledger.settle(event["version"])
        self.version = event["version"]
        self._draws += event["draws"]
        self.batches += event["draws"] > 0
        self._queue += [Pick(*pick) for pick in event["drawn"]]
        issued, self._queue = self._queue[: event["issued"]], self._queue[event["issued"] :]
        for pick in issued:
            self.ledger.issue(self._ticket(pick, event), self.batches)

    def _observe(self, event: Mapping[str, Any]) -> list[bool]:
        counted = []
        for given in map(Feedback.from_object, event["outcomes"]):
            ticket = self.ledger.open.get(given.ticket_id) or self.ledger.expired.get(given.ticket_id)
            lowest = highest = 0.0
            if ticket is not None:
                lowest, highest = self._ranges.get(ticket.env_id, self._default)
                found = [reward for reward in given.rewards if reward is not None]
                if found and (min(found) < lowest or max(found) > highest):
                    lowest, highest = min(lowest, *found), max(highest, *found)
                    self._ranges[ticket.env_id] = (lowest, highest)
            ticket = self.ledger.observe(given, self.version or 0, lowest)
            if ticket is not None:
                self._buffer.append((ticket, given))
            counted.append(ticket is not None)
        return counted

    def _cancel(self, event: Mapping[str, Any]) -> bool:
        return self.ledger.cancel(event["ticket"], event["reason"], event["failed"])

    def _add(self, event: Mapping[str, Any], grown: Grown | None) -> None:
        if grown is None:
            new = [parse_record(obj, "journal") for obj in event["records"]]
            new = [record for record in new if record.task_id not in self.engine.fingerprints]
            if not new:
                return
            grown = self.engine.grown(new)
        self.engine.add(grown)

    def _retire(self, event: Mapping[str, Any]) -> None:
        gone = set(event["tasks"])
        self.engine.retire([task_id for task_id in event["tasks"] if task_id in self.engine.fingerprints])
        self._queue = [pick for pick in self._queue if pick.task_id not in gone]

    def _ticket(self, pick: Pick, event: Mapping[str, Any]) -> Ticket:
        lowest, highest = self._ranges.get(pick.env_id, self._default)
        width = highest - lowest
        return Ticket(
            ticket_id=self.ledger.counts["proposed"],
            task_id=pick.task_id,
            env_id=pick.env_id,
            group_size=self.engine.group_size,
            policy_version=event["version"],
            attempt=self.ledger.failing.get(pick.task_id, [0])[0],
            explore=pick.explore,
            predicted_mean=None if pick.mean is None else lowest + width * pick.mean,
            predicted_variance=None if pick.variance is None else width**2 * pick.variance,
            p_informative=pick.p_informative,
            issued=event["time"],
        )


def _digest(saved: Mapping[str, Any]) -> str:
    """Returns a digest of all values, whatever the containers and arrays they went through."""
    values = {name: value for name, value in saved.items() if name not in ("arrays", "digest")}
    digest = hashlib.sha256(json.dumps(values, sort_keys=True).encode())
    for name, array in sorted(saved["arrays"].items()):
        array = np.asarray(array)
        digest.update(json.dumps([name, array.dtype.str, array.shape]).encode())
        digest.update(np.ascontiguousarray(array).data)
    return digest.hexdigest()
