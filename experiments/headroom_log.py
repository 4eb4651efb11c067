"""Reading a log of rollouts: JSON lines with a task, perhaps an environment and a step, and a reward."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ONE_ENVIRONMENT = "all"  # what tasks belong to where the log names no environment
_MOST = 1e15  # whole numbers up to here are exact
MOST_STEPS = 500  # more are joined with their neighbours: a step of replay costs as much as one of training


class LogError(ValueError):
    """A log that cannot be used; the message is one line that names file, line and field."""


@dataclass(frozen=True)
class Log:
    """Groups of rollouts in order of time: g groups of T tasks.

    Attributes:
      tasks: their ids, sorted.
      env: environment of each task.
      task: i64[g], place in `tasks`.
      step: i64[g], from 0 without gaps, ascending; all 0 where the log has no steps.
      size: i64[g], rollouts, at least 1.
      reward: f64[g, most], between 0 and 1, NaN behind the group's rollouts.
      low: the reward that became 0.
      high: the reward that became 1.
      stepped: whether the log has steps.
      joined: how many neighbouring steps became one.
    """

    tasks: tuple[str, ...]
    env: tuple[str, ...]
    task: np.ndarray
    step: np.ndarray
    size: np.ndarray
    reward: np.ndarray
    low: float
    high: float
    stepped: bool
    joined: int

    @property
    def steps(self) -> int:
        """Returns the number of steps."""
        return int(self.step[-1]) + 1

    @property
    def binary(self) -> bool:
        """Whether rewards take at most two values."""
        return bool(np.isin(self.reward[~np.isnan(self.reward)], (0.0, 1.0)).all())

    @property
    def hits(self) -> np.ndarray:
        """Returns the sum of the rewards of each group, f64[g]."""
        return np.nansum(self.reward, axis=1)

    @property
    def informative(self) -> np.ndarray:
        """Returns which groups have rewards that differ, bool[g]; never one of a single rollout."""
        return np.nanmax(self.reward, axis=1) > np.nanmin(self.reward, axis=1)

    @property
    def group_size(self) -> int:
        """Returns the most common size of the groups that have at least two rollouts, 0 if there is none."""
        sizes = Counter(self.size[self.size > 1].tolist())
        return max(sizes, key=lambda size: (sizes[size], size)) if sizes else 0


def read(path: str | Path, group_size: int | None = None) -> Log:
    """Reads a log.

    Args:
      path: JSON lines; blank ones are skipped. Rollouts of one task at one step, or of one task where no line has a
        step, are a group.
      group_size: where given, groups with more rollouts are cut into groups of so many, in order of the lines.

    Raises:
      LogError: the file is missing or holds no rollout, or a line is not as it should be.
    """
    path = Path(path)
    if not path.is_file():
        raise LogError(f"{path}: no such file")
    if group_size is not None and group_size < 2:
        raise LogError(f"group_size must be at least 2, got {group_size}")
    groups: dict[tuple[int, str], list[float]] = {}
    env: dict[str, tuple[str, int]] = {}
    stepped: tuple[bool, int] | None = None
    for number, raw in enumerate(path.read_bytes().split(b"\n"), start=1):
        if not raw.strip():
            continue
        where = f"{path}:{number}"
        row = _decode(raw, where)
        task, reward, step = _text(row, "task", where), _reward(row, where), _step(row, where)
        stepped = stepped or (step is not None, number)
        if (step is not None) != stepped[0]:
            there, here = ("one", "none") if stepped[0] else ("none", "one")
            raise LogError(
                f"{where}: field 'step': line {stepped[1]} has {there}, {here} here: expected all lines or none"
            )
        place = _text(row, "environment", where) if row.get("environment") is not None else ONE_ENVIRONMENT
        first, line = env.setdefault(task, (place, number))
        if first != place:
            raise LogError(
                f"{where}: field 'environment': task {task!r} is of {place!r} here and of {first!r} in line {line}: "
                "expected one environment for every task"
            )
        groups.setdefault((step or 0, task), []).append(reward)
    if stepped is None:
        raise LogError(f"{path}: the log is empty: expected one rollout a line, with 'task' and 'reward'")
    return _assemble(groups, {task: place for task, (place, _) in env.items()}, stepped[0], group_size)


def _assemble(
    groups: Mapping[tuple[int, str], Sequence[float]], env: Mapping[str, str], stepped: bool, group_size: int | None
) -> Log:
    tasks = sorted(env)
    place = {task: i for i, task in enumerate(tasks)}
    cut = [
        (step, place[task], rewards[at : at + (group_size or len(rewards))])
        for (step, task), rewards in sorted(groups.items())
        for at in range(0, len(rewards), group_size or len(rewards))
    ]
    steps = {step: i for i, step in enumerate(sorted({step for step, *_ in cut}))}
    joined = math.ceil(len(steps) / MOST_STEPS)
    reward = np.full((len(cut), max(len(rewards) for *_, rewards in cut)), np.nan)
    for row, (*_, rewards) in zip(reward, cut, strict=True):
        row[: len(rewards)] = rewards
    low, high = _ends(np.unique(reward[~np.isnan(reward)]))
    return Log(
        tasks=tuple(tasks),
        env=tuple(env[task] for task in tasks),
        task=np.array([task for _, task, _ in cut]),
        step=np.array([steps[step] // joined for step, *_ in cut]),
        size=np.array([len(rewards) for *_, rewards in cut]),
        reward=(reward - low) / (high - low),
        low=low,
        high=high,
        stepped=stepped,
        joined=joined,
    )


def _ends(values: np.ndarray) -> tuple[float, float]:
    """Returns the rewards that become 0 and 1: of two values they themselves, else 0 and 1 or the extremes."""
    low, high = float(values[0]), float(values[-1])
    if len(values) != 2 and 0.0 <= low <= high <= 1.0:
        return 0.0, 1.0
    if low == high:  # a reward above 0 is taken for passing
        return (low - 1.0, low) if low > 0.0 else (low, low + 1.0)
    return low, high


def _decode(raw: bytes, where: str) -> Mapping[str, Any]:
    try:
        row = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise LogError(f"{where}: expected one JSON object, got broken JSON: {error}") from None
    if not isinstance(row, dict):
        raise LogError(f"{where}: expected a JSON object, got {_show(row)}")
    return row


def _text(row: Mapping[str, Any], field: str, where: str) -> str:
    value = row.get(field)
    if not isinstance(value, str) or not value:
        raise LogError(f"{where}: field '{field}': expected a non-empty string, got {_show(value)}")
    return value


def _reward(row: Mapping[str, Any], where: str) -> float:
    value = row.get("reward")
    if not isinstance(value, bool | int | float) or not abs(value) < _MOST:  # true and false are 1 and 0; NaN fails
        hint = "" if isinstance(value, str | list | dict) else ": leave out rollouts that failed"
        raise LogError(f"{where}: field 'reward': expected a finite number, got {_show(value)}{hint}")
    return float(value)


def _step(row: Mapping[str, Any], where: str) -> int | None:
    value = row.get("step")
    if value is None:
        return None
    whole = isinstance(value, int | float) and abs(value) < _MOST and value == int(value)
    if isinstance(value, bool) or not whole:
        raise LogError(f"{where}: field 'step': expected an integer, got {_show(value)}")
    return int(value)


def _show(value: Any) -> str:
    if value is None:
        return "nothing"
    text = json.dumps(value)
    return text if len(text) <= 40 else text[:37] + "..."
