"""Checkpoints of a run: policy, optimiser, scheduler and keys, at the ends of chunks; the only user of orbax."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp

State = TypeVar("State")  # a pytree of arrays: `CycleState`, say


class CheckpointError(ValueError):
    """A checkpoint does not belong to this run; the message names what differs."""


class Checkpoints:
    """The newest checkpoint of one run in one folder. Use as a context manager."""

    def __init__(self, folder: str | Path, identity: dict[str, Any]):
        """Opens the folder; ``identity`` (plain JSON values) is what a checkpoint must agree with to be restored."""
        self._identity = identity
        options = ocp.CheckpointManagerOptions(max_to_keep=1, create=True)
        self._manager = ocp.CheckpointManager(Path(folder).absolute(), options=options)

    def save(self, step: int, state: State, progress: dict[str, Any]) -> None:
        """Writes the state and ``progress`` (plain JSON values, such as curves); atomic, replaces the one before."""
        meta = {"identity": self._identity, "progress": progress}
        self._manager.save(
            step, args=ocp.args.Composite(state=ocp.args.StandardSave(state), meta=ocp.args.JsonSave(meta))
        )

    def restore(self, like: State) -> tuple[State, dict[str, Any]] | None:
        """Returns the newest state and its progress, or None if there is no checkpoint.

        Args:
          like: a state of the same shapes.

        Raises:
          CheckpointError: if the checkpoint is of another pool or config; nothing is overwritten.
        """
        step = self._manager.latest_step()
        if step is None:
            return None
        meta = self._manager.restore(step, args=ocp.args.Composite(meta=ocp.args.JsonRestore()))["meta"]
        for key, value in self._identity.items():
            for name, found, wanted in _differences(key, meta["identity"].get(key), value):
                raise CheckpointError(
                    f"checkpoint of step {step} in {self._manager.directory}: its {name} is {found!r}, this run's is"
                    f" {wanted!r}; use another workdir, or what it was made with"
                )
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        state = self._manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract)))["state"]
        return state, meta["progress"]

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, *unused: object) -> None:
        self._manager.wait_until_finished()
        self._manager.close()


def _differences(name: str, found: Any, wanted: Any) -> Iterator[tuple[str, Any, Any]]:
    """Names the leaves in which two JSON values differ."""
    if isinstance(found, dict) and isinstance(wanted, dict):
        for key in sorted(found.keys() | wanted.keys()):
            yield from _differences(f"{name}.{key}", found.get(key), wanted.get(key))
    elif found != wanted:
        yield name, found, wanted
