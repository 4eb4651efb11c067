"""prime-rl's curriculum on verifiers tasks, scheduled. Imports neither: it works on verifiers' tasks and episodes.

    from envsched_jax.integrations.verifiers import scheduled, to_records

    records = [record for env in train_envs for record in to_records(env.name, env.tasks)]
    dispatcher = Dispatcher(records, make_scheduler("envsched", batch_size=32, group_size=16), group_size=16, ...)
    orchestrator.train_source = scheduled(TrainSource)(train_envs, dispatcher=dispatcher)

This chooses environments too. With an environment's share left to prime-rl, give each a dispatcher of its own:
``curriculum.sampler = TaskSampler(dispatcher, tasks, env.name)``.

What it cannot do: sets of tasks without an end; a reward per agent (an episode counts once, with the mean of its
trainable traces). Groups that prime-rl drops as stale, or cancels, are never reported:
give the dispatcher ``Limits(deadline_versions=...)`` beyond ``max_off_policy_steps``.
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from envsched_jax.dispatch import Dispatcher, DispatchError, Ticket
from envsched_jax.pool import Record
from envsched_jax.types import Status

STATUS = {
    "ProviderError": Status.INFRA_ERROR,
    "InterceptionError": Status.INFRA_ERROR,
    "TunnelError": Status.INFRA_ERROR,
    "HarnessError": Status.ENV_ERROR,
    "ToolsetError": Status.ENV_ERROR,
    "EnvError": Status.ENV_ERROR,
    "SandboxError": Status.ENV_ERROR,
    "TaskError": Status.VERIFIER_ERROR,
    "TimeoutError": Status.ENV_TIMEOUT,
}  # by the type that verifiers records; any other is an error of the infrastructure


def name(env_id: str, task: Any) -> str:
    """Returns the pool's name of a task, or of the task of an episode: keys are unique within an environment only."""
    if task.key is None:
        raise DispatchError(f"environment {env_id!r}: expected tasks with a key")
    return f"{env_id}/{task.key}"


def to_records(env_id: str, tasks: Iterable[Any], tools: Sequence[str] = ()) -> list[Record]:
    """Returns records of the tasks of an environment whose agent has ``tools``; add what else is known of them."""
    records = []
    for task in tasks:
        text = task.data.prompt or task.data.description or task.data.name or ""
        if not isinstance(text, str):  # messages
            text = "\n".join(str(message.content) for message in text)
        records.append(Record(name(env_id, task), env_id, text, tuple(tools)))
    return records


def outcome(episode: Any) -> tuple[float | None, Status, float, float]:
    """Returns reward, status, generated tokens and seconds of an episode.

    A stage that ran out of time leaves a trace that is ``ok``, and scoring still runs: a sum of rewards of 0 then says
    nothing, unless it was the agent that was too slow. Likewise rewards that were never computed add up to 0.
    """
    traces = [trace for trace in episode.traces if trace.agent.trainable]
    tokens = float(sum(trace.num_output_tokens for trace in episode.traces))
    stages = ("setup", "agent", "finalize", "scoring")
    seconds = float(sum(getattr(trace.timing, stage).duration for trace in episode.traces for stage in stages))
    late = {trace.stop_condition for trace in episode.traces if trace.is_timeout}
    if episode.is_timeout or late - {"agent_timeout"}:
        return None, Status.ENV_TIMEOUT, tokens, seconds
    if not episode.ok:
        types = [part.last_error.type for part in (episode, *episode.traces) if not part.ok and part.last_error]
        return None, STATUS.get((types or [""])[0], Status.INFRA_ERROR), tokens, seconds
    if not traces:
        return None, Status.ENV_ERROR, tokens, seconds
    if any(not t.rewards or None in t.rewards.values() or not math.isfinite(t.reward) for t in traces):
        return None, Status.VERIFIER_ERROR, tokens, seconds
    status = Status.TRUNCATED if any(trace.is_truncated for trace in traces) else Status.OK
    reward = float(sum(trace.reward for trace in traces) / len(traces))
    return reward, Status.POLICY_TIMEOUT if late else status, tokens, seconds


class Tickets:
    """The tickets of a dispatcher one by one, those first that are open when it starts, found again by task."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self.dispatcher, self.waiting = dispatcher, deque(dispatcher.open_tickets())
        self.out: dict[str, deque[Ticket]] = {}

    def draw(self, policy_version: int | None = None) -> Ticket:
        """Returns the next ticket."""
        if not self.waiting:
            self.waiting.extend(self.dispatcher.propose(1, policy_version=policy_version, fill=True))
        ticket = self.waiting.popleft()
        self.out.setdefault(ticket.task_id, deque()).append(ticket)
        return ticket

    def claim(self, task_id: str) -> None:
        """Notes that the trainer itself brought back a task that was under way."""
        for ticket in [ticket for ticket in self.waiting if ticket.task_id == task_id][:1]:
            self.waiting.remove(ticket)
            self.out.setdefault(task_id, deque()).append(ticket)

    def observe(self, env_id: str, group: Sequence[Any]) -> bool:
        """Takes back the outcome of a group, for the oldest open ticket of its task; returns whether it counts."""
        found = self.out.get(name(env_id, group[0].task))
        if not found:
            return False
        still_open = self.dispatcher.open_tickets()
        ticket = next((ticket for ticket in found if ticket in still_open), found[0])
        rewards, status, tokens, seconds = zip(*map(outcome, group), strict=True)
        while found and found[0].ticket_id <= ticket.ticket_id:
            found.popleft()
        return self.dispatcher.observe(ticket.ticket_id, rewards, status=status, tokens=tokens, seconds=seconds)

    def load(self, state: Mapping[str, Any]) -> None:
        """Goes back to a state of the dispatcher."""
        self.dispatcher.load_state_dict(state)
        self.waiting, self.out = deque(self.dispatcher.open_tickets()), {}


class TaskSampler(Iterator[Any]):
    """prime-rl's interface of this name: the tasks of one environment, from a dispatcher of them alone.

    With ``tickets``, which the samplers of several environments share, it has no state of its own.
    """

    def __init__(self, dispatcher: Dispatcher, tasks: Sequence[Any], env_id: str, tickets: Tickets | None = None):
        if not isinstance(tasks, Sequence):
            raise DispatchError(f"environment {env_id!r}: expected a list of tasks, got {type(tasks).__name__}")
        self.env_id, self.tasks = env_id, {name(env_id, task): task for task in tasks}
        pool = [r.task_id for r in dispatcher.records.values() if tickets is None or r.env_id == env_id]
        missing = [task_id for task_id in pool if task_id not in self.tasks]
        if missing:
            raise DispatchError(f"environment {env_id!r}: no task {missing[0]!r} ({len(missing)} of the pool are not)")
        self._shared, self._tickets = tickets is not None, tickets or Tickets(dispatcher)

    def __next__(self) -> Any:
        return self.tasks[self._tickets.draw().task_id]

    def observe(self, group: Sequence[Any]) -> None:
        """Takes back a finished group of episodes of one task."""
        self._tickets.observe(self.env_id, group)

    def state_dict(self) -> dict[str, Any]:
        """Returns the dispatcher's state."""
        return {} if self._shared else self._tickets.dispatcher.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Goes back to a state; tasks that were under way come first again."""
        if not self._shared:
            self._tickets.load(state_dict)

    def metrics(self) -> dict[str, float]:
        """Returns the dispatcher's numbers of this environment."""
        numbers = self._tickets.dispatcher.metrics()["environments"].get(self.env_id, {})
        return {what: float(value) for what, value in numbers.items() if isinstance(value, int | float)}


def scheduled(source: type) -> type:
    """Returns a subclass of prime-rl's ``TrainSource`` with an argument ``dispatcher``, which chooses environments too.

    Gates, and what the class measures, stay prime-rl's; the environments' ratios no longer matter.
    """
    base: Any = source

    class Scheduled(base):
        """The tasks that a dispatcher proposes."""

        def __init__(self, *args: Any, dispatcher: Dispatcher, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.tickets = Tickets(dispatcher)
            unknown = {record.env_id for record in dispatcher.records.values()} - set(self.curricula)
            if unknown:
                raise DispatchError(f"environments: expected one named {min(unknown)!r}, as in the pool")
            for env in self.envs:
                tasks = env.tasks if env.num_tasks is None else list(env.tasks)
                self.curricula[env.name].sampler = TaskSampler(dispatcher, tasks, env.name, self.tickets)

        def next_task(self, *, step: int, **unused: Any) -> Any:
            from prime_rl.orchestrator.types import TaskRequest

            if getattr(self, "resumed_groups", None):  # of a restart, in later versions
                request = super().next_task(step=step, **unused)
                self.tickets.claim(name(request.env_name, request.task))
                return request
            ticket = self.tickets.draw(step)
            task = self.curricula[ticket.env_id].sampler.tasks[ticket.task_id]
            return TaskRequest(env_name=ticket.env_id, task=task, step=step)

        def state_dict(self) -> dict[str, Any]:
            return super().state_dict() | {"envsched": self.tickets.dispatcher.state_dict()}

        def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
            if "envsched" not in state_dict:
                raise DispatchError("checkpoint: expected one of a run with a dispatcher, found no 'envsched' in it")
            super().load_state_dict({key: value for key, value in state_dict.items() if key != "envsched"})
            self.tickets.load(state_dict["envsched"])

    return Scheduled
