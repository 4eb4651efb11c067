"""Differences between arms, paired by seed: at equal rollouts and at equal tokens.

At equal rollouts the grid is what uniform had rolled out at its evaluations, and an average over the run is the mean
over them, as they are equally far apart. At equal tokens they are not, so there the average is the area under the
curve. Its grid ends where the first seed of the two arms, or uniform on average, has no more tokens: whatever came
later for the others was paid for with tokens that one side never had.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments import common, loop


def spread(values: Any) -> dict[str, Any]:
    """Mean and 95 % interval over seeds."""
    mean, low, high = common.interval(values)
    return {"mean": float(mean), "ci": [float(low), float(high)]}


def at(arm: loop.Curves, unit: str, grid: np.ndarray, tasks: np.ndarray | slice = slice(None)) -> np.ndarray:
    """Scores of every seed when it had spent what the grid says, between evaluations on a straight line.

    Args:
      arm: the curves.
      unit: what is spent, `rollouts` or `tokens`.
      grid: f64[points], in that unit; beyond the end of a curve its last score stands.
      tasks: bool[tasks], the evaluation tasks that count; all by default.

    Returns:
      f64[points, seeds].
    """
    score = np.asarray(arm.success, np.float64)[:, :, tasks].mean(axis=2)
    spent = np.asarray(getattr(arm, unit), np.float64)
    return np.stack([np.interp(grid, spent[:, i], score[:, i]) for i in range(score.shape[1])], axis=1)


def at_equal_rollouts(arm: loop.Curves, grid: np.ndarray) -> np.ndarray:
    """Scores of every seed over all evaluation tasks at the rollouts of the grid: f64[grid, seeds]."""
    return at(arm, "rollouts", grid)


def rollout_grid(base: loop.Curves) -> np.ndarray:
    """Rollouts of the base arm at its evaluations, mean over seeds: f64[evaluations]."""
    return np.asarray(base.rollouts, np.float64).mean(axis=1)


def token_grid(base: loop.Curves, arms: Sequence[loop.Curves]) -> np.ndarray:
    """Tokens of the base arm at its evaluations, mean over seeds, up to the most that every seed of ``arms`` spent.

    Returns:
      f64[points], ascending; the last point is that end, wherever it lies between evaluations.
    """
    tokens = np.asarray(base.tokens, np.float64).mean(axis=1)
    end = min(tokens[-1], *(np.min(arm.tokens[-1]) for arm in arms))
    return np.append(tokens[tokens < end], end)


def minus(ours: loop.Curves, theirs: loop.Curves, base: loop.Curves, unit: str) -> dict[str, Any]:
    """How much better one arm is than another with the same seeds.

    Args:
      ours: an arm.
      theirs: the arm it is compared with.
      base: the arm that gives the grid.
      unit: what both have spent equally much of, `rollouts` or `tokens`.

    Returns:
      `final` and `mean` (over the run), each {mean, ci}; `spent`, the end of the grid, in that unit.
    """
    grid = rollout_grid(base) if unit == "rollouts" else token_grid(base, (ours, theirs))
    gap = at(ours, unit, grid) - at(theirs, unit, grid)
    even = unit == "rollouts" or len(grid) == 1
    mean = gap.mean(axis=0) if even else np.trapezoid(gap, grid, axis=0) / (grid[-1] - grid[0])
    return {"final": spread(gap[-1]), "mean": spread(mean), "spent": float(grid[-1])}


def splits(arm: loop.Curves, base: loop.Curves, unseen_env: np.ndarray) -> dict[str, Any]:
    """Final difference to the base arm at equal rollouts, by kind of evaluation task.

    Args:
      arm: the arm.
      base: the arm it is compared with.
      unseen_env: bool[tasks], whether the environment of an evaluation task was never trained on.

    Returns:
      `score_tasks_minus_uniform` (unseen tasks of trained environments) and `score_envs_minus_uniform` (unseen
      environments), each {mean, ci}; a split without tasks is left out.
    """
    end = rollout_grid(base)[-1:]
    kinds = {"tasks": ~unseen_env, "envs": unseen_env}
    return {
        f"score_{kind}_minus_uniform": spread((at(arm, "rollouts", end, of) - at(base, "rollouts", end, of))[0])
        for kind, of in kinds.items()
        if of.any()
    }
