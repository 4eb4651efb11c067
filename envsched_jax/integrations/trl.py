"""TRL's ``GRPOTrainer``, scheduled.

    from envsched_jax.integrations.trl import scheduled

    trainer = scheduled(GRPOTrainer)(dispatcher=dispatcher, model=..., args=..., train_dataset=rows, reward_funcs=...)
    trainer.train(resume_from_checkpoint=last_checkpoint(args.output_dir))

Rows of the data set have a column ``task_id``. Sampling is what changes: generation, rewards and the update are TRL's.
On several processes each has a dispatcher of its own, fed with the same gathered rewards; give only that of the main
process a folder. TRL draws a batch before the update on the one before, so picks are one update behind.
"""

import json
import os
from pathlib import Path
from typing import Any

from envsched_jax.dispatch import Dispatcher, DispatchError, load_state, save_state
from envsched_jax.integrations.sampler import TicketSampler

FILE = "envsched.state"  # in every checkpoint folder


def last_checkpoint(output_dir: str | os.PathLike[str]) -> str | None:
    """Returns the newest checkpoint folder that was written to its end, None if there is none."""
    folders = [p for p in Path(output_dir).glob("checkpoint-*") if p.name.removeprefix("checkpoint-").isdigit()]
    for folder in sorted(folders, key=lambda p: -int(p.name.removeprefix("checkpoint-"))):
        try:
            json.loads((folder / "trainer_state.json").read_text())
            load_state(folder / FILE)
        except (OSError, ValueError):
            continue
        return str(folder)
    return None


def scheduled(trainer: type) -> type:
    """Returns a subclass of ``GRPOTrainer``, or of a subclass of yours, whose tasks a ``Dispatcher`` chooses.

    The constructor takes ``dispatcher`` beside TRL's arguments. The scheduler's ``batch_size`` should be the number of
    prompts per generation, ``generation_batch_size / num_generations``, and ``group_size`` is ``num_generations``.
    Every checkpoint holds the dispatcher's state, and ``train(resume_from_checkpoint=...)`` goes back to it.
    """
    base: Any = trainer

    class Scheduled(base):
        """GRPO on the tasks that a dispatcher proposes."""

        def __init__(self, *args: Any, dispatcher: Dispatcher, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.dispatcher = dispatcher
            _check(self)
            self.args.ignore_data_skip = True  # the dispatcher's state knows what comes next, nothing is skipped
            self._tickets: TicketSampler | None = None
            self._resumed: str | None = None

        def _get_train_sampler(self, dataset: Any = None) -> TicketSampler:
            rows = self.train_dataset if dataset is None else dataset
            drawn = self.args.max_steps * self.args.gradient_accumulation_steps * self.args.generation_batch_size
            self._tickets = TicketSampler(
                self.dispatcher,
                rows["task_id"],
                size=self.args.generation_batch_size // self.num_generations,
                copies=self.num_generations,
                passes=self.num_iterations * self.args.steps_per_generation,
                length=drawn if drawn > 0 else None,  # one epoch: a new one would shift the stream of random numbers
            )
            return self._tickets

        def _calculate_rewards(
            self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any
        ) -> Any:  # f32[rows of all processes, reward functions]
            import torch
            from accelerate.utils import gather, gather_object

            scores = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
            if self.model.training and self._tickets is not None:
                weighted = (scores * self.reward_weights.to(scores.device)[None, :]).nansum(dim=1)
                unknown = torch.isnan(scores).all(dim=1)
                lengths = torch.tensor([len(ids) for ids in completion_ids_list], device=scores.device)
                self._tickets.observe(
                    [None if bad else value for bad, value in zip(unknown.tolist(), weighted.tolist(), strict=True)],
                    task_ids=gather_object([row["task_id"] for row in inputs]),
                    tokens=gather(lengths).tolist(),
                )
            return scores

        def _prepare_inputs(self, generation_batch: Any) -> Any:
            if self._resumed is not None:  # starting the data loader took random numbers from the stream just restored
                self._load_rng_state(self._resumed)
                self._resumed = None
            return super()._prepare_inputs(generation_batch)

        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            if self.args.should_save:  # before TRL's files, of which the last one marks a whole checkpoint
                folder = Path(self._get_output_dir(trial=trial)) / f"checkpoint-{self.state.global_step}"
                folder.mkdir(parents=True, exist_ok=True)
                save_state(folder / FILE, self.dispatcher.state_dict())
            super()._save_checkpoint(model, trial)

        def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
            """Trains; True resumes from the newest whole checkpoint in the output folder."""
            folder = resume_from_checkpoint
            if folder is True:
                folder = last_checkpoint(self.args.output_dir)
                if folder is None:
                    raise DispatchError(f"{self.args.output_dir}: no whole checkpoint to resume from")
            self._resumed = folder or None
            if folder:
                self.dispatcher.load_state_dict(load_state(Path(folder) / FILE))
            return super().train(resume_from_checkpoint=folder or None, **kwargs)

    return Scheduled


def _check(trainer: Any) -> None:
    """Raises DispatchError for settings under which TRL would not train on what the dispatcher proposes."""
    if "task_id" not in (trainer.train_dataset.column_names or ()):
        raise DispatchError("train_dataset: expected a column 'task_id'; streamed data sets have no sampler")
    if trainer.args.dataloader_num_workers:
        raise DispatchError(
            f"dataloader_num_workers={trainer.args.dataloader_num_workers}: expected 0: workers draw from a copy"
        )
    if trainer.args.remove_unused_columns:
        raise DispatchError("remove_unused_columns: expected False: 'task_id' tells whose reward it is")
    if trainer.num_generations != trainer.dispatcher.group_size:
        raise DispatchError(
            f"num_generations={trainer.num_generations}: expected the dispatcher's group_size, "
            f"{trainer.dispatcher.group_size}"
        )
