"""How good a belief is, in float64 on the host.

Every function takes one-dimensional arrays over tasks and returns a float; NaN says that the quantity is not defined
on these tasks (too few, or nothing varies). Nothing here depends on the order of the tasks: ties share their rank.
"""

import math

import numpy as np

NOTHING = float("nan")


def ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1, ties get the mean of theirs: f64[n]."""
    _, inverse, count = np.unique(np.asarray(values, np.float64), return_inverse=True, return_counts=True)
    last = np.cumsum(count)
    return (last - (count - 1) / 2)[inverse]


def spearman(score: np.ndarray, truth: np.ndarray) -> float:
    """Spearman's rank correlation, with mean ranks for ties; NaN where either side is constant."""
    if len(score) < 2:
        return NOTHING
    a, b = ranks(score), ranks(truth)
    a, b = a - a.mean(), b - b.mean()
    scale = math.sqrt((a @ a) * (b @ b))
    return float(a @ b) / scale if scale > 0 else NOTHING


def auc(score: np.ndarray, label: np.ndarray) -> float:
    """Probability that a random positive scores above a random negative, ties count half (Mann-Whitney U)."""
    label = np.asarray(label, bool)
    positive, negative = int(label.sum()), int((~label).sum())
    if not positive or not negative:
        return NOTHING
    return float((ranks(score)[label].sum() - positive * (positive + 1) / 2) / (positive * negative))


def mae(predicted: np.ndarray, truth: np.ndarray) -> float:
    """Mean absolute error."""
    return float(np.abs(np.asarray(predicted, np.float64) - truth).mean()) if len(truth) else NOTHING


def top_quarter(score: np.ndarray, truth: np.ndarray) -> float:
    """Mean truth of the quarter with the highest scores, over the mean of all; 1 says that the score tells nothing.

    The quarter holds n/4 tasks, not rounded; tasks that tie at its edge share what is left of it.
    """
    truth = np.asarray(truth, np.float64)
    if not len(truth) or truth.mean() <= 0:
        return NOTHING
    quarter = len(truth) / 4
    below = len(truth) - ranks(score)  # tasks strictly above, plus half of the other ties
    _, inverse, count = np.unique(score, return_inverse=True, return_counts=True)
    ties = count[inverse]
    above = below - (ties - 1) / 2
    share = np.clip((quarter - above) / ties, 0, 1)
    return float(share @ truth / quarter / truth.mean())


def calibration_error(predicted: np.ndarray, truth: np.ndarray, bins: int = 10) -> float:
    """Expected calibration error: |mean predicted - mean truth| in equal bins of the prediction, weighted by size.

    Args:
      predicted: probabilities, f[n].
      truth: what happened, 0 or 1, or its known probability, f[n].
      bins: equal bins of [0, 1].
    """
    predicted, truth = np.asarray(predicted, np.float64), np.asarray(truth, np.float64)
    if not len(truth):
        return NOTHING
    place = np.clip((predicted * bins).astype(np.int64), 0, bins - 1)
    gap = np.bincount(place, predicted - truth, minlength=bins)
    return float(np.abs(gap).sum() / len(truth))


def log_loss(predicted: np.ndarray, truth: np.ndarray, floor: float = 1e-4) -> float:
    """Mean negative log-likelihood in nats; `truth` may be a probability. Predictions are kept `floor` from 0 and 1."""
    if not len(truth):
        return NOTHING
    p = np.clip(np.asarray(predicted, np.float64), floor, 1 - floor)
    return float(-(truth * np.log(p) + (1 - truth) * np.log1p(-p)).mean())


def gini(count: np.ndarray) -> float:
    """Gini coefficient of non-negative counts: 0 when all are equal, near 1 when one has them all."""
    x = np.sort(np.asarray(count, np.float64))
    if not len(x) or x.sum() <= 0:
        return NOTHING
    return float((2 * np.arange(1, len(x) + 1) - len(x) - 1) @ x / (len(x) * x.sum()))


def p_informative(reward: np.ndarray, group_size: int) -> np.ndarray:
    """Exact probability that `group_size` of the recorded trials, drawn without replacement, are not all equal.

    `1 - sum_v C(n_v, G) / C(n, G)` over the values v that a task's trials took, n_v times each.

    Args:
      reward: f[n, K], NaN where there is no trial.
      group_size: G >= 1.

    Returns:
      f64[n], NaN for tasks with fewer than G trials.
    """
    reward = np.asarray(reward, np.float64)
    trials = (~np.isnan(reward)).sum(axis=-1)
    choose = np.array([math.comb(n, group_size) for n in range(reward.shape[-1] + 1)], np.float64)
    equal = np.zeros(len(reward))
    for value in np.unique(reward[~np.isnan(reward)]):
        equal += choose[(reward == value).sum(axis=-1)]
    return np.where(trials >= group_size, 1 - equal / np.maximum(choose[trials], 1), np.nan)


def moments(reward: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Number, mean and unbiased variance of each task's trials.

    Args:
      reward: f[..., K], NaN where there is no trial.

    Returns:
      `(count, mean, variance)`, f64[...]; the mean is NaN without trials, the variance with fewer than two.
    """
    reward = np.asarray(reward, np.float64)
    there = ~np.isnan(reward)
    count = there.sum(axis=-1)
    total = np.where(there, reward, 0).sum(axis=-1)
    mean = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    squares = np.where(there, (np.where(there, reward, 0) - mean[..., None]) ** 2, 0).sum(axis=-1)
    return count.astype(np.float64), mean, np.where(count > 1, squares / np.maximum(count - 1, 1), np.nan)
