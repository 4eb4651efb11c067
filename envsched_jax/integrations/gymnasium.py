"""Gymnasium environments as a pool: what is a task, and how one is played.

    pool = [task("FrozenLake-v1", f"map-{i}", kwargs={"desc": desc}) for i, desc in enumerate(maps)]

    def rollout(record, seed, ticket):  # for `dispatch.ProcessExecutor`
        return play(record, lambda observation, info: policy(observation), seed=seed)

A task is what tells one episode of an environment from another: keywords of ``gymnasium.make``, options of ``reset``,
or a seed. What it cannot do: vector environments, and a graph that knows more of a task than its text and its actions.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from envsched_jax.dispatch import DispatchError, Rollout
from envsched_jax.pool import Record

FIELD = "gymnasium"


def task(
    env_id: str,
    name: str,
    *,
    text: str = "",
    actions: Sequence[str] = (),
    kwargs: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    seed: int | None = None,
    **fields: Any,
) -> Record:
    """Returns the record of one task.

    Args:
      env_id: as ``gymnasium.make`` knows it.
      name: unique in its environment.
      text: describes the task, for the graph; by default name and settings.
      actions: names of the actions.
      kwargs: of ``gymnasium.make``.
      options: of ``reset``.
      seed: of ``reset``; by default every rollout has its own, so the episode is not fixed.
      **fields: further fields of the record, such as ``domain`` or ``gt_actions``.

    Raises:
      DispatchError: the settings are not JSON.
    """
    settings = {"kwargs": dict(kwargs or {}), "options": dict(options or {}), "seed": seed}
    try:
        described = json.dumps({k: v for k, v in settings.items() if v})
    except (TypeError, ValueError) as error:
        raise DispatchError(f"task {name!r} of {env_id}: settings that are not JSON: {error}") from error
    return Record(
        task_id=f"{env_id}/{name}",
        env_id=env_id,
        text=text or f"{name} {described}",
        tools_available=tuple(f"{env_id}.{action}" for action in actions),
        extra={FIELD: settings},
        **fields,
    )


def play(
    record: Record | Mapping[str, Any],
    act: Callable[[Any, dict[str, Any]], Any],
    *,
    seed: int,
    max_steps: int = 10_000,
    make: Callable[..., Any] | None = None,
) -> Rollout:
    """Plays one episode.

    Args:
      record: of ``task``, or its JSON object, as executors hand it out.
      act: (observation, info) to action; the policy.
      seed: of this rollout, where the task fixes none.
      max_steps: after which the episode is truncated.
      make: in place of ``gymnasium.make``.

    Returns:
      The sum of rewards; ``truncated`` where the environment or ``max_steps`` ended the episode; steps as tokens.
      What the environment raises goes through: executors make an env_error of it.
    """
    if make is None:
        import gymnasium

        make = gymnasium.make
    fields = record.extra if isinstance(record, Record) else record
    env_id = record.env_id if isinstance(record, Record) else record["env_id"]
    settings, begun = fields[FIELD], time.monotonic()
    env = make(env_id, **settings["kwargs"])
    try:
        fixed = seed if settings["seed"] is None else settings["seed"]
        observation, info = env.reset(seed=fixed, options=settings["options"] or None)
        env.action_space.seed(seed)
        total, steps, status = 0.0, 0, "truncated"
        while steps < max_steps:
            steps += 1
            observation, reward, terminated, truncated, info = env.step(act(observation, info))
            total += float(reward)
            if terminated or truncated:
                status = "ok" if terminated else "truncated"
                break
    finally:
        env.close()
    return Rollout(total, status, tokens=steps, seconds=time.monotonic() - begun)
