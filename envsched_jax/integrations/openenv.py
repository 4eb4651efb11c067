"""OpenEnv environments that list their tasks, as a pool.

    pool = tasks(environment, "coding", split="train")  # an Environment, or anything with TaskProvider's methods

    def rollout(record, seed, ticket):  # for `dispatch.ProcessExecutor`
        with CodingEnv(base_url=url).sync() as client:
            return play(record, client, act, seed=seed)

What it cannot do: environments without the task methods (make records by hand), and tools that are not in the task's
description.
"""

import inspect
import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from envsched_jax.dispatch import DispatchError, Rollout
from envsched_jax.pool import Record

FIELD = "openenv"
TEXTS = ("text", "instruction", "prompt", "question", "description", "task")  # of a task, in order of preference


def tasks(provider: Any, env_id: str, *, split: str, tools: tuple[str, ...] = ()) -> list[Record]:
    """Returns a record for every task of a split.

    Args:
      provider: has ``num_tasks(split)`` and ``get_task(split, index)``, as OpenEnv's ``TaskProvider``.
      env_id: what to call the environment.
      split: of tasks.
      tools: names of its tools.

    Raises:
      DispatchError: the methods are missing or asynchronous, or the split is empty.
    """
    for name in ("num_tasks", "get_task"):
        method = getattr(provider, name, None)
        if method is None or inspect.iscoroutinefunction(method):
            raise DispatchError(f"{env_id}: expected a method {name} that is not async: its tasks cannot be listed")
    count = provider.num_tasks(split)
    if not count:
        raise DispatchError(f"{env_id}: split {split!r} has no task")
    return [_record(provider.get_task(split, i), env_id, split, i, tools) for i in range(count)]


def _record(spec: Any, env_id: str, split: str, index: int, tools: tuple[str, ...]) -> Record:
    dump = getattr(spec, "model_dump", None)
    spec = dump() if dump is not None else spec
    fields = dict(spec) if isinstance(spec, Mapping) else {"text": str(spec)}
    text = next((str(fields[name]) for name in TEXTS if fields.get(name)), json.dumps(fields, default=str))
    return Record(
        task_id=f"{env_id}/{split}/{fields.get('id', index)}",
        env_id=env_id,
        text=text,
        tools_available=tools,
        extra={FIELD: {"split": split, "index": index}},
    )


def play(
    record: Record | Mapping[str, Any],
    env: Any,
    act: Callable[[Any], Any],
    *,
    seed: int,
    max_steps: int = 1000,
) -> Rollout:
    """Plays one episode.

    Args:
      record: of ``tasks``, or its JSON object, as executors hand it out.
      env: an ``Environment``, or a client whose ``reset`` and ``step`` are not async.
      act: result of ``reset`` or ``step`` to action; the policy.
      seed: of this rollout.
      max_steps: after which the episode is truncated.

    Returns:
      The sum of rewards, ``truncated`` where ``max_steps`` ended the episode; steps as tokens. A step without a reward
      (None) adds nothing; an episode without any is a verifier_error.
    """
    where, begun = (record.extra if isinstance(record, Record) else record)[FIELD], time.monotonic()
    result = env.reset(seed=seed, split=where["split"], index=where["index"])
    rewards, steps = [], 0
    while not result.done and steps < max_steps:
        result, steps = env.step(act(result)), steps + 1
        if result.reward is not None:
            rewards.append(float(result.reward))
    seconds = time.monotonic() - begun
    if not rewards:
        return Rollout(None, "verifier_error", steps, seconds)
    return Rollout(sum(rewards), "ok" if result.done else "truncated", steps, seconds)
