"""Tickets for a trainer: what to roll out next, and what came of it, in any order, late, or never."""

import json
import logging
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from envsched_jax.dispatch import monitor
from envsched_jax.dispatch.engine import NOTHING, Change, Engine
from envsched_jax.dispatch.journal import Journal, JournalError
from envsched_jax.dispatch.ledger import Limits
from envsched_jax.dispatch.run import Run
from envsched_jax.dispatch.tickets import DispatchError, Feedback, Ticket, feedback, whole
from envsched_jax.graph import Index, build
from envsched_jax.pool.records import PoolError, Record, check_pool, parse_record, to_object
from envsched_jax.types import Graph, Scheduler, SchedulerState

_LOG = logging.getLogger(__name__)


class Dispatcher:
    """A scheduler with a memory that survives: it hands out tickets and takes back outcomes.

    Time is the policy version. Outcomes are buffered and enter the belief together, sorted by ticket, at the first
    ``propose`` of a later version, so the order in which they arrive changes nothing. Without versions from the
    trainer, every ``propose`` that needs a new batch is one. A batch of the scheduler is handed out in the order that
    keeps its mix of environments in every stretch; the next one is chosen when it is used up.

    With a ``folder``, every call is on disk when it returns. A process that dies at any instruction finds everything
    when it opens the folder again, and proposes what it would have proposed. Tickets that were out then are still
    open, see ``open_tickets``: roll them out, or cancel them. A trainer that goes back to an older checkpoint of its
    own keeps ``state_dict()`` in it and calls ``load_state_dict``.

    Always true: proposed = observed + cancelled + expired + open. Calls from several threads are served one by one.
    """

    def __init__(
        self,
        records: Sequence[Record],
        scheduler: Scheduler,
        *,
        group_size: int,
        graph: tuple[Graph, Index] | None = None,
        seed: int = 0,
        graph_seed: int = 0,
        limits: Limits | None = None,
        reward_range: tuple[float, float] | Mapping[str, tuple[float, float]] = (0.0, 1.0),
        folder: str | os.PathLike[str] | None = None,
        fsync: bool = True,
        snapshot_every: int = 1000,
    ) -> None:
        """Starts a run, or goes on with the one in ``folder``.

        Args:
          records: the pool.
          scheduler: any recipe. Choose its ``batch_size`` as large as what the trainer uses between two updates.
          group_size: G, rollouts asked for per ticket.
          graph: of these records, with its index; by default it is built here.
          seed: of all draws.
          graph_seed: as given to ``build_graph``.
          limits: deadlines, retries, quarantine, floor.
          reward_range: lowest and highest reward, of all environments or by environment; beliefs are about rewards
            scaled to [0, 1]. A reward beyond it widens the range of its environment.
          folder: for the journal and snapshots; None keeps everything in memory only.
          fsync: whether calls wait for the disk, so that they outlive a crash of the machine too.
          snapshot_every: calls between two snapshots, which bound the time it takes to open the folder.

        Raises:
          PoolError: the pool cannot be used.
          DispatchError: an argument is out of range, or the folder holds another run.
          JournalError: the folder cannot be read or written.
        """
        group_size = _at_least_one(group_size, "group_size")
        check_pool(records, "records")
        built = build(records, seed=graph_seed) if graph is None else graph
        if sorted(built[1].task_ids) != sorted(record.task_id for record in records):
            raise DispatchError("graph: expected one of these records: its tasks are others")
        everywhere = (0.0, 1.0) if isinstance(reward_range, Mapping) else _check_range(reward_range, "reward_range")
        by_env = reward_range if isinstance(reward_range, Mapping) else {}
        ranges = {env_id: _check_range(given, f"reward_range[{env_id!r}]") for env_id, given in by_env.items()}
        engine = Engine(records, *built, scheduler, group_size, seed, graph_seed)
        self._run = Run(engine, limits or Limits(), everywhere, ranges)
        self._exhausted = False
        self._lost = False  # a call was interrupted half-way
        self._mutex = threading.RLock()
        self._snapshot_every, self._since = snapshot_every, 0
        self._journal: Journal | None = None
        self.change = NOTHING  # how the pool differs from that of the state that was taken up last
        if folder is not None:
            self._journal = Journal(folder, fsync=fsync)
            try:
                self._recover(self._journal)
            except BaseException:
                self._journal.close()
                raise

    # ------------------------------------------------------------------------------------------ the trainer's calls

    def propose(self, n: int | None = None, *, policy_version: int | None = None, fill: bool = False) -> list[Ticket]:
        """Returns the next tickets.

        Args:
          n: how many; by default the scheduler's batch size.
          policy_version: of the policy that will make the rollouts, never falling.
          fill: where too few tasks are left, because the others are out or wait after failures, propose some of these
            again rather than fewer than ``n``.

        Returns:
          n tickets of different tasks; fewer, and ``exhausted`` is then true, where no more are eligible.

        Raises:
          DispatchError: n or the version is out of range, or every task is retired.
          JournalError: the call could not be written; nothing has changed.
        """
        with self._mutex:
            count = self._run.engine.batch_size if n is None else _at_least_one(n, "n")
            event, state = self._run.plan(count, policy_version, fill)
            first = self._run.ledger.counts["proposed"]
            self._commit(event, state)
            self._exhausted = event["issued"] < count
            return [self._run.ledger.open[number] for number in range(first, first + event["issued"])]

    def observe(
        self,
        ticket_id: int,
        rewards: Sequence[float | None],
        *,
        status: Any = None,
        tokens: Any = None,
        seconds: Any = None,
        policy_version: int | None = None,
    ) -> bool:
        """Takes back the outcome of one ticket; see ``feedback`` for the arguments.

        Returns:
          Whether it counts: false for a ticket that was never proposed or has its outcome already.

        Raises:
          DispatchError: a reward that should count is not a finite number, or lengths differ; nothing has changed.
          JournalError: the call could not be written; nothing has changed.
        """
        return self.observe_many([feedback(ticket_id, rewards, status, tokens, seconds, policy_version)])[0]

    def observe_many(self, outcomes: Iterable[Feedback]) -> list[bool]:
        """Takes back many outcomes, made by ``feedback``, in one write; returns for each whether it counts.

        Raises what ``observe`` raises, and then none of them has been taken.
        """
        given = list(outcomes)
        for outcome in given:
            if not isinstance(outcome, Feedback):
                raise DispatchError(f"observe_many: expected what feedback() returns, got {outcome!r}")
        checked = [feedback(*outcome.to_object()).to_object() for outcome in given]
        with self._mutex:
            return self._commit({"kind": "observe", "outcomes": checked}) if checked else []

    def cancel(self, ticket_id: int, reason: str = "cancelled", *, failed: bool = False) -> bool:
        """Closes a ticket without an outcome.

        Args:
          ticket_id: of the ticket.
          reason: for the metrics.
          failed: whether the task is to blame: then it is tried again later, and set aside after some failures.

        Returns:
          Whether the ticket was open.
        """
        event = {"kind": "cancel", "ticket": whole(ticket_id, "ticket"), "reason": str(reason), "failed": bool(failed)}
        with self._mutex:
            return self._commit(event)

    def add_tasks(self, records: Sequence[Record]) -> None:
        """Adds tasks, of old environments or new ones; what is known of the others stays.

        Raises:
          DispatchError: a task is there already, or the records do not fit the pool; nothing has changed.
        """
        with self._mutex:
            given = list(records)
            if not given:
                return
            try:  # as they will come back from the journal
                text = json.dumps([to_object(record) for record in given], allow_nan=False)
                new = [parse_record(obj, f"add_tasks: record {i + 1}") for i, obj in enumerate(json.loads(text))]
                check_pool(new, "add_tasks")
            except (AttributeError, TypeError, ValueError) as error:
                message = str(error) if isinstance(error, PoolError) else f"add_tasks: expected records: {error}"
                raise DispatchError(message) from error
            twice = sorted(r.task_id for r in new if r.task_id in self._run.engine.fingerprints)
            if twice:
                raise DispatchError(f"add_tasks: {twice[0]!r} is in the pool already ({len(twice)} are)")
            grown = self._run.engine.grown(new)
            self._commit({"kind": "add", "records": [to_object(record) for record in new]}, grown)

    def retire_tasks(self, task_ids: Iterable[str]) -> None:
        """Takes tasks out of the choice for good; outcomes that are under way still count.

        Raises:
          DispatchError: a task is unknown; nothing has changed.
        """
        with self._mutex:
            gone = [task_ids] if isinstance(task_ids, str) else list(dict.fromkeys(task_ids))
            unknown = sorted(t for t in gone if t not in self._run.engine.fingerprints)
            if unknown:
                raise DispatchError(f"retire_tasks: {unknown[0]!r} is not in the pool ({len(unknown)} are not)")
            if gone:
                self._commit({"kind": "retire", "tasks": gone})

    # ------------------------------------------------------------------------------------------------- looking in

    @property
    def batch_size(self) -> int:
        """Tasks that the scheduler chooses at once."""
        return self._run.engine.batch_size

    @property
    def group_size(self) -> int:
        """Rollouts asked for per ticket."""
        return self._run.engine.group_size

    @property
    def policy_version(self) -> int | None:
        """Of the latest proposal; None before the first."""
        return self._run.version

    @property
    def exhausted(self) -> bool:
        """Whether the latest ``propose`` returned fewer tickets than it was asked for."""
        return self._exhausted

    @property
    def records(self) -> dict[str, Record]:
        """The pool by task id, retired tasks too."""
        return {record.task_id: record for record in self._run.engine.records}

    @property
    def state(self) -> SchedulerState:
        """The scheduler's state, without the outcomes that are buffered."""
        return self._run.engine.state

    @property
    def graph(self) -> tuple[Graph, Index]:
        """The graph as it is now, with its index."""
        return self._run.engine.graph, self._run.engine.index

    def open_tickets(self) -> list[Ticket]:
        """Returns the tickets that are out, oldest first."""
        with self._mutex:
            return list(self._run.ledger.open.values())

    def counts(self) -> dict[str, int]:
        """Returns how many tickets were proposed, and what became of them."""
        with self._mutex:
            return {**self._run.ledger.counts, "open": len(self._run.ledger.open)}

    def metrics(self) -> dict[str, Any]:
        """Returns what there is to plot: see ``monitor.metrics``."""
        with self._mutex:
            return monitor.metrics(self._run.ledger, self._run.engine.shares(), len(self._run.engine.index.task_ids))

    def alarms(self) -> list[str]:
        """Returns what a person should look at now, one sentence each."""
        with self._mutex:
            return monitor.alarms(self._run.ledger, self._run.engine.environments(), self._run.batches)

    # ------------------------------------------------------------------------------------------------ state and disk

    def state_dict(self) -> dict[str, Any]:
        """Returns everything but the pool and the graph, as JSON values and, under ``arrays``, NumPy arrays by name."""
        with self._mutex:
            self._check()
            return self._run.save()

    def load_state_dict(self, state: Mapping[str, Any]) -> Change:
        """Goes back, or on, to a saved state; with a folder, the folder follows.

        Args:
          state: of ``state_dict``, from this pool or an earlier one: tasks are matched by id.

        Returns:
          How the pool that this dispatcher was made with, with what the state adds to it, differs from that of the
          state. Tickets of tasks that are gone are cancelled, reason 'removed'.

        Raises:
          DispatchError: the state is damaged, or of another scheduler, seed, group size or format; nothing has changed.
          JournalError: the state could not be written; nothing has changed.
        """
        with self._mutex:
            run, change = self._run.loaded(state)
            run.drop(set(change.removed))
            if self._journal is not None:
                lost, self._lost = self._lost, True
                try:
                    self._journal.start(run.save(), replaces=True)
                except JournalError:
                    self._lost = lost
                    raise
            self._run, self.change, self._since, self._lost = run, change, 0, False
            return change

    def close(self) -> None:
        """Lets go of the folder."""
        with self._mutex:
            if self._journal is not None:
                self._journal.close()

    def __enter__(self) -> "Dispatcher":
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()

    # --------------------------------------------------------------------------------------------------- inside

    def _commit(self, event: dict[str, Any], ready: Any = None) -> Any:
        """Writes an event, then lets it happen."""
        self._check()
        self._lost = True
        if self._journal is not None:
            try:
                self._journal.append(event)
            except JournalError:
                self._lost = False
                raise
        done = self._run.apply(event, ready)
        self._since += 1
        if self._journal is not None and self._since >= self._snapshot_every:
            self._since = 0
            try:
                self._journal.start(self._run.save())
            except JournalError as error:  # the call itself is on disk
                _LOG.warning("no snapshot for now, the journal grows on: %s", error)
        self._lost = False
        return done

    def _check(self) -> None:
        if self._lost:
            raise DispatchError(
                "an earlier call was interrupted half-way: expected the folder to be opened anew, or load_state_dict"
            )

    def _recover(self, journal: Journal) -> None:
        """Takes up what the folder holds, or begins it."""
        found = journal.found
        if found.state is None:
            journal.start(self._run.save())
            return
        try:
            self._run, change = self._run.loaded(found.state)
        except DispatchError as error:
            raise DispatchError(f"{journal.folder}: {error}") from error
        for where, event in found.events:
            try:
                self._run.apply(event)
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
                raise JournalError(f"{where}: makes no sense: {error!r}") from error
        self._run.drop(set(change.removed))
        added = {r["task_id"] for _, event in found.events if event["kind"] == "add" for r in event["records"]}
        self.change = change._replace(added=tuple(t for t in change.added if t not in added))
        if change == NOTHING and not found.events:
            return
        try:
            journal.start(self._run.save())
        except JournalError as error:
            if change != NOTHING:  # what goes on from here would not follow from what is on disk
                raise
            _LOG.warning("no snapshot for now, the journal grows on: %s", error)


def _at_least_one(value: Any, where: str) -> int:
    number = whole(value, where)
    if number < 1:
        raise DispatchError(f"{where}: expected at least 1, got {value!r}")
    return number


def _check_range(given: Sequence[float], where: str) -> tuple[float, float]:
    try:
        lowest, highest = map(float, given)
    except (TypeError, ValueError):
        raise DispatchError(f"{where}: expected a lowest and a highest reward, got {given!r}") from None
    if not -1e30 < lowest < highest < 1e30:
        raise DispatchError(f"{where}: expected a lowest below a highest reward, got {given!r}")
    return lowest, highest
