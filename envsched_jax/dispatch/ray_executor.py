"""Rollouts as Ray tasks, on as many machines as the cluster has."""

import asyncio
import traceback
from collections.abc import Mapping
from typing import Any

from envsched_jax.dispatch import worker
from envsched_jax.dispatch.executor import ExecutorError, GroupExecutor, RolloutFunction


class RayExecutor(GroupExecutor):
    """One Ray task per rollout, never retried by Ray; see ``ProcessExecutor`` for the function and what counts as what.

    Needs ``pip install 'envsched-jax[ray]'``. Call ``ray.init`` first; otherwise Ray starts a cluster of its own.
    """

    def __init__(
        self,
        rollout: RolloutFunction,
        *,
        concurrency: int,
        deadline: float,
        per_env: int | Mapping[str, int] | None = None,
        retries: int = 0,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Starts nothing yet.

        Args:
          rollout: as for ``ProcessExecutor``; found by name on the workers, or sent by value from a notebook.
          concurrency: rollouts at once. More than the cluster can run wait there, which counts against the deadline.
          deadline: seconds of one rollout, the start of a worker of Ray included.
          per_env: rollouts at once of one environment, for all or by env_id.
          retries: times that a rollout which is an infra_error is made again, with the same seed.
          options: of the Ray task, such as ``{"num_cpus": 1, "runtime_env": ...}``.

        Raises:
          DispatchError: an argument is out of range.
          ExecutorError: Ray is not installed.
        """
        super().__init__(concurrency, deadline, per_env, retries)
        try:
            import ray
        except ImportError as error:
            raise ExecutorError("RayExecutor needs Ray: pip install 'envsched-jax[ray]'") from error
        self._ray = ray
        self._task = ray.remote(_kept(rollout)).options(**{"max_retries": 0, **(options or {})})

    async def _roll(self, task: dict[str, Any], seed: int, asked: dict[str, Any]) -> dict[str, Any]:
        made = self._task.remote(task, seed, asked)
        try:
            async with asyncio.timeout(self._deadline) as limit:
                result, raised = await made
        except self._ray.exceptions.RayError as error:
            return worker.lost("infra_error", f"{type(error).__name__}: {error}")
        except TimeoutError:
            if not limit.expired():
                raise
            self._ray.cancel(made, force=True)
            return self._late()
        except asyncio.CancelledError:
            self._ray.cancel(made, force=True)
            raise
        return worker.lost("env_error", raised) if raised else worker.reply(result)


def _kept(rollout: RolloutFunction) -> Any:
    """Returns the function with what it raises as text: not every exception outlives the way back.

    Ray sends functions that are made inside another one by value, so its workers need nothing of this library.
    """

    def task(record: dict[str, Any], seed: int, ticket: dict[str, Any]) -> tuple[Any, str]:
        try:
            return rollout(record, seed, ticket), ""
        except BaseException:
            return None, traceback.format_exc()

    return task
