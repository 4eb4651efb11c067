"""slime's (and miles') data source, scheduled.

    # my_source.py
    from slime.rollout.data_source import RolloutDataSource  # or miles.rollout.data_source
    from envsched_jax.integrations.slime import scheduled

    def dispatcher(args):
        return Dispatcher(records, make_scheduler("envsched", ...), group_size=args.n_samples_per_prompt)

    Source = scheduled(RolloutDataSource, dispatcher)

with ``--data-source-path my_source.Source`` and, for what comes back,
``--rollout-all-samples-process-path envsched_jax.integrations.slime.process``. Rows of ``--prompt-data`` have the task
in their metadata, under ``task_id``. A group's ``group_index`` is its ticket.

What it cannot do: rollout functions that keep groups under way from one rollout to the next without ``add_samples``, as
the fully asynchronous example does; there, call ``source.observe(groups)`` yourself and leave ``process`` out.
"""

import copy
import logging
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from envsched_jax.dispatch import Dispatcher, DispatchError, Feedback, feedback, load_state, save_state
from envsched_jax.integrations.sampler import batches
from envsched_jax.types import Status

_LOG = logging.getLogger(__name__)

STATUS = {
    "completed": Status.OK,
    "truncated": Status.TRUNCATED,
    "failed": Status.ENV_ERROR,
    "aborted": Status.INFRA_ERROR,
    "pending": Status.INFRA_ERROR,
}  # by the value of ``Sample.Status``


def process(args: Any, all_samples: list[Any], data_source: Any) -> None:
    """Takes the groups of a rollout, those too that a filter dropped: slime's hook for all samples.

    Groups that were aborted stay open. They come back through ``add_samples`` where rollouts are partial, and are begun
    anew with the next rollout where they are not.

    Args:
      args: slime's.
      all_samples: groups, of samples or of lists of them.
      data_source: the data source, or, as slime has it, its method ``get_samples``.
    """
    source = getattr(data_source, "__self__", data_source)
    source.observe(all_samples)
    if not getattr(args, "partial_rollout", False):
        source.restart()


def scheduled(source: type, dispatcher: Callable[[Any], Dispatcher], key: str = "task_id") -> type:
    """Returns a subclass of ``RolloutDataSource`` whose prompts a dispatcher chooses.

    Args:
      source: slime's or miles' class, which reads ``--prompt-data``.
      dispatcher: makes it of slime's arguments, in the process of the data source.
      key: of the task in the metadata of a row.
    """
    base: Any = source

    class Scheduled(base):
        """Prompts that a dispatcher proposes."""

        def __init__(self, args: Any) -> None:
            super().__init__(args)
            if self.dataset is None:
                raise DispatchError("prompt_data: expected a global data set")
            self.dispatcher, self.buffer = dispatcher(args), list[list[Any]]()
            if self.dispatcher.group_size != args.n_samples_per_prompt:
                raise DispatchError(
                    f"n_samples_per_prompt={args.n_samples_per_prompt}: expected the dispatcher's group_size, "
                    f"{self.dispatcher.group_size}"
                )
            self._rows = {(row.metadata or {}).get(key): row for row in self.dataset.samples}
            missing = [task_id for task_id in self.dispatcher.records if task_id not in self._rows]
            if missing:
                raise DispatchError(f"prompt_data: no row with metadata {key}={missing[0]!r} ({len(missing)} missing)")
            self.restart()

        def restart(self) -> None:
            """Begins every group anew that is under way."""
            self._tickets = batches(self.dispatcher, 1)

        def get_samples(self, num_samples: int) -> list[list[Any]]:
            groups = self.buffer[:num_samples]
            del self.buffer[:num_samples]
            while len(groups) < num_samples:
                (ticket,) = next(self._tickets)
                groups.append(self._group(ticket.ticket_id, ticket.task_id))
            return groups

        def _group(self, ticket_id: int, task_id: str) -> list[Any]:
            size, group = self.dispatcher.group_size, []
            for i in range(size):
                sample = copy.deepcopy(self._rows[task_id])
                sample.group_index, sample.index = ticket_id, ticket_id * size + i
                group.append(sample)
            return group

        def add_samples(self, samples: list[list[Any]]) -> None:
            """Keeps partial groups for the next rollout; one whose rollouts fanned out is begun anew."""
            still_open = {ticket.ticket_id: ticket.task_id for ticket in self.dispatcher.open_tickets()}
            for group in samples:
                ticket_id = _flat(group)[0].group_index
                if ticket_id in still_open:
                    fanned = any(isinstance(member, list) for member in group)
                    self.buffer.append(self._group(ticket_id, still_open[ticket_id]) if fanned else group)

        def observe(self, groups: Iterable[list[Any]]) -> None:
            """Takes finished groups."""
            self.dispatcher.observe_many([_feedback(group, self.args) for group in groups])

        def save(self, rollout_id: int) -> None:
            path = _file(self.args.save, rollout_id)
            path.parent.mkdir(parents=True, exist_ok=True)
            save_state(path, self.dispatcher.state_dict())

        def load(self, rollout_id: int | None = None) -> None:
            if self.args.load is None:
                return
            path = _file(self.args.load, rollout_id)
            if not path.exists():
                _LOG.warning("%s is not there: the dispatcher begins anew", path)
                return
            self.dispatcher.load_state_dict(load_state(path))
            self.buffer.clear()
            self.restart()

        def __len__(self) -> int:
            return len(self.dataset.samples)

    return Scheduled


def _file(folder: Any, rollout_id: int | None) -> Path:
    return Path(folder) / "rollout" / f"envsched_{rollout_id}.state"


def _flat(group: list[Any]) -> list[Any]:
    return [sample for member in group for sample in (member if isinstance(member, list) else [member])]


def _feedback(group: list[Any], args: Any) -> Feedback:
    """Returns what a group says: samples that share a rollout are one, with their mean reward."""
    rollouts: dict[Any, list[Any]] = {}
    for position, member in enumerate(group):
        for sample in _flat([member]):
            shared = getattr(sample, "rollout_id", None)
            rollouts.setdefault(("position", position) if shared is None else shared, []).append(sample)
    found = [_outcome(samples, args) for samples in rollouts.values()]
    tokens = [float(sum(sample.effective_response_length for sample in samples)) for samples in rollouts.values()]
    return feedback(_flat(group)[0].group_index, [reward for reward, _ in found], [code for _, code in found], tokens)


def _outcome(samples: list[Any], args: Any) -> tuple[float | None, Status]:
    status = max(STATUS[sample.status.value] for sample in samples)
    if status > Status.POLICY_TIMEOUT:
        return None, status
    rewards = [None if sample.reward is None else sample.get_reward_value(args) for sample in samples]
    known = [float(reward) for reward in rewards if reward is not None]
    value = sum(known) / len(known) if known else math.nan
    return (value, status) if math.isfinite(value) else (None, Status.VERIFIER_ERROR)
