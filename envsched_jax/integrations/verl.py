"""verl's data set and replay buffer (trainer V1, verl 0.8 and later), scheduled.

    data.custom_cls.path=pkg://envsched_jax.integrations.verl data.custom_cls.name=Dataset
    trainer.v1.sampler.custom_sampler.path=pkg://envsched_jax.integrations.verl
    trainer.v1.sampler.custom_sampler.name=Buffer        # BufferAsync unless trainer_mode is sync
    +data.envsched.dispatcher=my_module:make             # make(config.data) returns a Dispatcher
    data.shuffle=False data.dataloader_num_workers=0

Rows have a column ``task_id``, or that key in ``extra_info``; ``+data.envsched.key`` gives it another name. The path
has to be ``pkg://``: a file would be executed once for each of the two, and they would not share the dispatcher.

What it cannot do: rewards that a colocated reward model computes after sampling (there are no ``rm_scores`` yet);
telling truncated rollouts apart. Filtering of groups is asked for by ``sampler_kwargs``, see ``OPTIONS``.
"""

import functools
import importlib
import math
from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

from envsched_jax.dispatch import Dispatcher, DispatchError, Feedback, Ticket, feedback
from envsched_jax.types import Status

TICKET = "envsched_ticket"  # field of a row, which verl passes on to the trajectories
OPTIONS = (  # of verl's replay buffer, given to its own by its trainer
    *("filter_groups_metric", "train_batch_size", "gen_batch_size"),
    *("max_inflight_gen_batches", "sync_refill_failed_groups"),
)


class Link:
    """What the data set and the replay buffer of a process share."""

    def __init__(self) -> None:
        self.dispatcher: Dispatcher | None = None
        self.sync = True
        self.waiting: deque[Ticket] = deque()  # open, to be handed out

    def restart(self, again: bool) -> None:
        """Begins; ``again`` tells whether open tickets are handed out once more."""
        assert self.dispatcher is not None
        self.waiting = deque(self.dispatcher.open_tickets() if again else ())

    def draw(self) -> Ticket:
        """Returns the next ticket."""
        assert self.dispatcher is not None
        if not self.waiting:
            self.waiting.extend(self.dispatcher.propose(1, fill=True))
        return self.waiting.popleft()

    def observe(self, groups: Iterable[Feedback]) -> None:
        """Takes finished groups."""
        if self.dispatcher is None:
            raise DispatchError("data.custom_cls: expected pkg://envsched_jax.integrations.verl with name Dataset")
        self.dispatcher.observe_many(groups)

    def give_up(self) -> None:
        """Closes what was handed out and will not come back: groups that failed without any trajectory."""
        assert self.dispatcher is not None
        waiting = {ticket.ticket_id for ticket in self.waiting}
        for ticket in self.dispatcher.open_tickets():
            if ticket.ticket_id not in waiting:
                self.dispatcher.cancel(ticket.ticket_id, "no trajectory", failed=True)


LINK = Link()


def _is_training(data_files: Any, config: Any) -> bool:
    """Tells the training set from the validation set, which verl builds with the same class."""
    train, val, data_files = (
        [given] if isinstance(given, str) else [str(path) for path in given or ()]
        for given in (config.train_files, config.get("val_files"), data_files)
    )
    if train == val:
        raise DispatchError("data.val_files: expected other files than data.train_files: they tell the sets apart")
    return data_files == train


@functools.cache
def _dataset() -> type:
    import torch
    from verl.utils.dataset.rl_dataset import RLHFDataset

    base: Any = RLHFDataset

    class Dataset(base):
        """Rows of the tasks that a dispatcher proposes, whatever index is asked for; validation as usual."""

        def __init__(self, data_files: Any, tokenizer: Any, config: Any, processor: Any = None, max_samples: int = -1):
            super().__init__(data_files, tokenizer, config, processor=processor, max_samples=max_samples)
            self.scheduled = _is_training(data_files, config)
            if self.scheduled:
                self._connect(config)

        def _connect(self, config: Any) -> None:
            if config.get("dataloader_num_workers", 0):
                raise DispatchError("data.dataloader_num_workers: expected 0: workers would draw from a copy")
            options = config.get("envsched") or {}
            key, where = options.get("key", "task_id"), str(options.get("dispatcher", ""))
            module, _, function = where.partition(":")
            if not function:
                raise DispatchError(f"data.envsched.dispatcher: expected module:function, got {where!r}")
            found = self.dataframe[key] if key in self.dataframe.column_names else ()
            self._row = {name: row for row, name in enumerate(found or (i[key] for i in self.dataframe["extra_info"]))}
            LINK.dispatcher = getattr(importlib.import_module(module), function)(config)
            missing = [task_id for task_id in LINK.dispatcher.records if task_id not in self._row]
            if missing:
                raise DispatchError(f"data.train_files: no row for {missing[0]!r} ({len(missing)} tasks have none)")
            LINK.restart(again=True)

        def __getitem__(self, item: int) -> dict[str, Any]:
            if not self.scheduled:
                return super().__getitem__(item)
            ticket = LINK.draw()
            return super().__getitem__(self._row[ticket.task_id]) | {TICKET: torch.tensor([ticket.ticket_id])}

        def state_dict(self) -> dict[str, Any]:
            return LINK.dispatcher.state_dict() if self.scheduled and LINK.dispatcher else {}

        def load_state_dict(self, state: Mapping[str, Any]) -> None:
            if self.scheduled and LINK.dispatcher:
                LINK.dispatcher.load_state_dict(state)
                LINK.restart(again=LINK.sync)  # otherwise verl itself begins anew what was under way

    return _named(Dataset, "Dataset")


@functools.cache
def _buffer(name: str) -> type:
    import transfer_queue
    from verl.trainer.ppo.v1 import replay_buffer

    base: Any = {"Buffer": replay_buffer.ReplayBuffer, "BufferAsync": replay_buffer.ReplayBufferAsync}[name]

    class Buffer(base):
        """Reports every group that ends: those that are trained on, and those that are dropped."""

        def __init__(self, **kwargs: Any) -> None:
            given = kwargs.get("sampler_kwargs") or {}
            super().__init__(**kwargs | {option: given[option] for option in OPTIONS if option in given})
            LINK.sync = self.trainer_mode == "sync"

        def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[Any, dict[str, Any]]:
            batch, metrics = super().sample(global_steps, partition_id, batch_size)
            if partition_id != "val":
                self._report(partition_id, dict(zip(batch.keys, batch.tags, strict=True)))
                if LINK.sync:
                    LINK.give_up()
            return batch, metrics

        def _clear_groups(self, partition_id: str, uids: set[str]) -> None:
            if partition_id != "val" and uids:
                tags = {k: tag for k, tag in self.partitions[partition_id].items() if k.split("_")[0] in uids}
                self._report(partition_id, tags)
                empty = sorted(set(uids) - {key.split("_")[0] for key in tags})
                if empty and not LINK.sync:  # only then verl keeps the rows of prompts
                    data = transfer_queue.kv_batch_get(empty, partition_id, select_fields=[TICKET])
                    LINK.observe(group_feedback(int(ticket.sum()), {}) for ticket in list(data[TICKET]))
            super()._clear_groups(partition_id, uids)

        def _report(self, partition_id: str, tags: Mapping[str, Mapping[str, Any]]) -> None:
            if not tags:
                return
            data = transfer_queue.kv_batch_get(list(tags), partition_id, select_fields=["rm_scores", TICKET])
            groups: dict[int, dict[str, tuple[float, float]]] = {}
            rows = zip(tags.items(), list(data["rm_scores"]), list(data[TICKET]), strict=True)  # nested tensors
            for (key, tag), scores, ticket in sorted(rows, key=lambda row: int(row[0][0].rsplit("_", 1)[1])):
                sessions, session = groups.setdefault(int(ticket.sum()), {}), key.rsplit("_", 2)[1]
                spent = sessions[session][1] if session in sessions else 0.0  # the reward is that of the last output
                sessions[session] = float(scores.sum()), spent + float(tag.get("response_len") or 0)
            LINK.observe(group_feedback(ticket, sessions) for ticket, sessions in groups.items())

    return _named(Buffer, name)


def group_feedback(ticket_id: int, sessions: Mapping[str, tuple[float, float]]) -> Feedback:
    """Returns what a group says, of reward and tokens by session; sessions that are missing failed."""
    size = LINK.dispatcher.group_size if LINK.dispatcher else 1
    found = [*sessions.values(), *[(math.nan, 0.0)] * (size - len(sessions))]
    rewards = [reward if math.isfinite(reward) else None for reward, _ in found]
    status = [Status.VERIFIER_ERROR if reward is None else Status.OK for reward in rewards[: len(sessions)]]
    status += [Status.ENV_ERROR] * (len(found) - len(sessions))
    return feedback(ticket_id, rewards, status, [tokens for _, tokens in found])


def _named(made: type, name: str) -> type:
    """Lets pickle find a class that is made when it is first asked for."""
    made.__name__ = made.__qualname__ = name
    return made


def __getattr__(name: str) -> type:
    if name == "Dataset":
        return _dataset()
    if name in ("Buffer", "BufferAsync"):
        return _buffer(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
