"""How good an arm's beliefs were on recorded outcomes: rankings by split, calibration, realised degenerate shares."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from envsched_jax.types import Belief
from experiments import metrics

SPLITS = ("never", "once", "more", "unseen_env", "unseen_group")
RANKED = ("spearman_variance", "spearman_mean", "auc_mixed", "top_quarter")
WHOLE = ("mae_variance", "mae_mean", "ece", "ece_mean", "nll")
SMALLEST_SPLIT = 8  # tasks; a rank correlation of fewer says nothing
BINS = 10  # of a reliability diagram
WINDOW = 10  # steps over which the realised share of degenerate groups is compared with the predicted one
CLOSE = 0.05  # a window is calibrated if it lies within this and two standard errors


class Truth(NamedTuple):
    """What the trials of one checkpoint say: T tasks."""

    trials: np.ndarray  # f64[T]
    mean: np.ndarray  # f64[T], NaN without trials
    variance: np.ndarray  # f64[T], unbiased; NaN with fewer than two trials
    share: np.ndarray  # f64[T], exact share of informative groups among all groups of G trials; NaN with fewer than G


def truth(reward: np.ndarray, group_size: int) -> Truth:
    """Returns the truth of one checkpoint from f64[T, K], NaN where there is no trial."""
    return Truth(*metrics.moments(reward), metrics.p_informative(reward, group_size))


def evaluation_steps(steps: int, checkpoints: int, evaluations: int) -> list[int]:
    """Steps before which beliefs are scored.

    These are first steps of a checkpoint, where everything observed comes from earlier checkpoints and the scheduler
    has not yet seen a trial that the truth is made of. Where there is but one checkpoint they are evenly spaced, and
    the truth of a visited task contains trials that the scheduler has seen.
    """
    place = np.arange(steps) * checkpoints // steps
    first = [s for s in range(1, steps) if place[s] != place[s - 1]] or list(range(1, steps))
    chosen = np.linspace(0, len(first) - 1, min(evaluations, len(first))).round().astype(int)
    return [first[i] for i in chosen]


def visits_before(node: np.ndarray, mask: np.ndarray, step: int, tasks: int) -> np.ndarray:
    """Times each task was picked in the steps before `step`: i64[T]; node and mask are [S, B]."""
    return np.bincount(node[:step][mask[:step]], minlength=tasks)


def splits(visits: np.ndarray, env: np.ndarray, scenario: np.ndarray) -> dict[str, np.ndarray]:
    """Which tasks belong to each split: bool[T] each.

    `unseen_env` and `unseen_group` are tasks of environments (scenarios, where known) none of whose tasks was picked.
    """
    group = np.where(scenario >= 0, scenario, 0)
    seen_env = np.bincount(env, visits)[env] > 0
    seen_group = np.bincount(group, np.where(scenario >= 0, visits, 0))[group] > 0
    return {
        "never": visits == 0,
        "once": visits == 1,
        "more": visits > 1,
        "unseen_env": ~seen_env,
        "unseen_group": (scenario >= 0) & ~seen_group,
    }


def score(belief: Belief, real: Truth, where: Mapping[str, np.ndarray]) -> dict[str, float]:
    """Compares a belief with the trials of one checkpoint.

    Args:
      belief: f[T] each.
      real: of the same tasks; those with fewer than two trials are left out.
      where: the splits, bool[T] each.

    Returns:
      `<metric>_<split>` for the ranked metrics, and the whole-pool ones under their own names.
    """
    mean, variance, share = (np.asarray(field, np.float64) for field in belief[:3])
    known = real.trials >= 2
    values: dict[str, float] = {}
    for name, inside in where.items():
        at = inside & known
        if at.sum() < SMALLEST_SPLIT:
            values |= {f"{metric}_{name}": metrics.NOTHING for metric in RANKED}
            continue
        values[f"spearman_variance_{name}"] = metrics.spearman(variance[at], real.variance[at])
        values[f"spearman_mean_{name}"] = metrics.spearman(mean[at], real.mean[at])
        values[f"auc_mixed_{name}"] = metrics.auc(share[at], real.variance[at] > 0)
        values[f"top_quarter_{name}"] = metrics.top_quarter(variance[at], real.variance[at])
    full = ~np.isnan(real.share)
    values["mae_variance"] = metrics.mae(variance[known], real.variance[known])
    values["mae_mean"] = metrics.mae(mean[known], real.mean[known])
    values["ece"] = metrics.calibration_error(share[full], real.share[full])
    values["ece_mean"] = metrics.calibration_error(mean[known], real.mean[known])
    values["nll"] = metrics.log_loss(share[full], real.share[full])
    return values


def reliability(belief: Belief, real: Truth) -> np.ndarray:
    """Sums behind the reliability diagrams of the mean and of P(informative): f64[2, 3, BINS].

    Rows are number of tasks, sum of predictions and sum of truths per equal bin of the prediction; they add up over
    beliefs.
    """
    known, full = real.trials >= 2, ~np.isnan(real.share)
    pairs = ((belief.mean, real.mean, known), (belief.p_informative, real.share, full))
    return np.stack([_bins(np.asarray(said, np.float64)[at], fact[at]) for said, fact, at in pairs])


def _bins(said: np.ndarray, fact: np.ndarray) -> np.ndarray:
    place = np.clip((said * BINS).astype(np.int64), 0, BINS - 1)
    return np.stack([np.bincount(place, weight, BINS) for weight in (np.ones_like(said), said, fact)])


def diagram(sums: np.ndarray) -> dict[str, list[float]]:
    """A reliability diagram from summed `reliability` of one quantity, f64[3, BINS]; empty bins are left out."""
    count, said, fact = sums[:, sums[0] > 0]
    return {
        "tasks": count.tolist(),
        "predicted": (said / count).tolist(),
        "realised": (fact / count).tolist(),
    }


def degenerate(predicted: np.ndarray, live: np.ndarray, full: np.ndarray) -> dict[str, Any]:
    """Predicted and realised share of degenerate groups per window of `WINDOW` steps.

    Only groups of G valid rollouts count, for P(informative) is about those. The standard error of a window is that of
    a share of independent groups whose chances are the predicted ones.

    Args:
      predicted: f[S, B], P(informative) of each pick; NaN where the recipe has no belief.
      live: bool[S, B], groups whose rewards differ.
      full: bool[S, B], groups of G valid rollouts.

    Returns:
      `predicted`, `realised` and `error`, f64[windows] each as lists; NaN where no group counts.
    """
    known = full & np.isfinite(predicted)
    start = np.arange(0, len(predicted), WINDOW)

    def windows(values: np.ndarray) -> np.ndarray:
        return np.add.reduceat(np.where(known, values, 0.0).sum(axis=1), start)

    count = windows(np.ones_like(predicted, np.float64))
    safe = np.where(count > 0, count, np.nan)
    p = np.clip(np.nan_to_num(predicted.astype(np.float64)), 0, 1)
    return {
        "predicted": (windows(1 - p) / safe).tolist(),
        "realised": (windows((~live).astype(np.float64)) / safe).tolist(),
        "error": (np.sqrt(windows(p * (1 - p))) / safe).tolist(),
    }


def calibrated_share(rows: list[dict[str, Any]]) -> float:
    """Share of windows, over all seeds, within `CLOSE` plus two standard errors; NaN where there is no belief."""
    said, fact, error = (
        np.array([row[name] for row in rows], np.float64) for name in ("predicted", "realised", "error")
    )
    known = np.isfinite(said)
    return float((np.abs(said - fact) <= CLOSE + 2 * error)[known].mean()) if known.any() else metrics.NOTHING
