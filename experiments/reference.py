"""Simple predictors in NumPy that a belief has to beat: environment means, neighbours, a Gaussian process, own records.

Every predictor is a function `Observed -> Estimate`, made from the records of all tasks; it sees what was observed of
some of them and nothing else. Mean, variance and share of informative groups are predicted on their own, never one from
another, unless no variance was observed at all (single rollouts): then it is m(1-m) of the predicted mean.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from envsched_jax.pool import Record

NEIGHBOURS = 10
SHARPNESS = 3  # power of the similarity that neighbours count by
SHRINK = 1.0  # pseudo-rollouts of the pool's mean behind an environment's, and of the prior behind a task's own record
BLOCK, BLOCKS = 64, 4  # tasks on which the Gaussian process fits its kernel; larger blocks would use more threads
TUNING_STEPS = 25
COUNTS = "n_params n_files n_spans n_hunks lines_added lines_removed n_fail_to_pass n_pass_to_pass n_outputs".split()
COUNTS += ["verifier.loc", "text_chars"]
SETS = ("tools_used", "classes", "gt_spans", "tags")  # never `ref_*`: those were made from rollouts


class View(NamedTuple):
    """What is known of n tasks before any rollout."""

    env: np.ndarray  # i64[n]
    text: np.ndarray  # f64[n, n], cosine of TF-IDF vectors
    structure: np.ndarray  # f64[n, n], mean similarity of tools, action n-grams and counts


class Observed(NamedTuple):
    """What was observed of n tasks; NaN where nothing was."""

    rollouts: np.ndarray  # f64[n]
    mean: np.ndarray  # f64[n]
    dof: np.ndarray  # f64[n], degrees of freedom within groups
    variance: np.ndarray  # f64[n], within groups
    groups: np.ndarray  # f64[n], groups of at least G rollouts
    share: np.ndarray  # f64[n], chance that G of a group's rollouts differ
    last: np.ndarray  # f64[n], mean of the newest group


class Estimate(NamedTuple):
    """Predictions for n tasks, f64[n] each; `share` is None where the method gives none."""

    mean: np.ndarray
    variance: np.ndarray
    share: np.ndarray | None


Predictor = Callable[[Observed], Estimate]
Regress = Callable[[np.ndarray, np.ndarray], np.ndarray]  # weights f[n] and values f[n] -> f[n]


# ------------------------------------------------------------------------------------------------ similarities


def view(records: Sequence[Record], env: np.ndarray) -> View:
    """Returns what the records say, in their order."""
    words = [Counter(re.findall(r"\w+", record.text.lower())) for record in records]
    tools = [Counter([*record.tools_available, *_sets(record)]) for record in records]
    grams = [_grams(record.gt_actions or ()) for record in records]
    numbers = np.array([_numbers(record) for record in records], np.float64)
    parts = [_cosine(tools), _cosine(grams), _near(numbers)]
    return View(np.asarray(env), _cosine(words), np.mean([part for part in parts if part.any()], axis=0))


def _sets(record: Record) -> list[str]:
    found = (record.extra.get(name) for name in SETS)
    return [str(item) for items in found if isinstance(items, list) for item in items]


def _grams(actions: Sequence[str]) -> Counter[str]:
    return Counter(actions) + Counter(f"{a} {b}" for a, b in pairwise(("^", *actions, "$")) if actions)


def _numbers(record: Record) -> list[float]:
    checks = None if record.verifier is None else record.verifier.n_checks
    actions = None if record.gt_actions is None else len(record.gt_actions)
    distinct = None if record.gt_actions is None else len(set(record.gt_actions))
    values = [record.n_turns, checks, actions, distinct, len(record.tools_available)]
    values += [record.extra.get(name) for name in COUNTS]
    return [np.nan if v is None else float(v) for v in values]


def _cosine(bags: Sequence[Mapping[str, int]]) -> np.ndarray:
    """Cosines of sublinear TF-IDF vectors, f64[n, n]; words of a single task are left out."""
    df = Counter(word for bag in bags for word in bag)
    column = {word: i for i, word in enumerate(sorted(w for w, n in df.items() if n > 1))}
    rows = np.zeros((len(bags), max(len(column), 1)), np.float32)
    for row, bag in zip(rows, bags, strict=True):
        for word, n in bag.items():
            if word in column:
                row[column[word]] = (1 + np.log(n)) * (1 + np.log((1 + len(bags)) / (1 + df[word])))
    rows /= np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-9)
    return (rows @ rows.T).astype(np.float64)


def _near(numbers: np.ndarray) -> np.ndarray:
    """Similarity of counts, f64[n, n]: a Gaussian of the distance of standardised logarithms, per known count."""
    logs = np.log1p(np.maximum(numbers, 0))
    logs = logs[:, ~np.isnan(logs).any(axis=0)]
    logs = logs[:, np.ptp(logs, axis=0) > 0]
    if not logs.size:
        return np.zeros((len(numbers), len(numbers)))
    logs = (logs - logs.mean(axis=0)) / logs.std(axis=0)
    square = (logs**2).sum(axis=1)
    return np.exp(-np.maximum(square[:, None] + square - 2 * logs @ logs.T, 0) / (2 * logs.shape[1]))


# ------------------------------------------------------------------------------------------------ regressions


def pool_mean(weight: np.ndarray, value: np.ndarray) -> float:
    """The mean of what was observed, 1/2 where nothing was."""
    total = weight.sum()
    return float(weight @ np.where(weight > 0, value, 0) / total) if total > 0 else 0.5


def by_environment(env: np.ndarray) -> Regress:
    """Means of the environments, shrunk to the pool's."""

    def regress(weight: np.ndarray, value: np.ndarray) -> np.ndarray:
        total = np.bincount(env, weight * np.where(weight > 0, value, 0))
        return ((total + SHRINK * pool_mean(weight, value)) / (np.bincount(env, weight) + SHRINK))[env]

    return regress


def by_neighbours(similarity: np.ndarray, k: int = NEIGHBOURS) -> Regress:
    """Mean of the k most similar other tasks that were observed, weighted by similarity ** SHARPNESS."""
    jitter = np.random.default_rng(0).random(similarity.shape) * 1e-6  # equal neighbours in no particular order
    likeness = np.maximum(similarity, 0) ** SHARPNESS + 1e-6 + jitter
    np.fill_diagonal(likeness, 0)

    @lru_cache(maxsize=2)  # mean, variance and share are mostly known of the same tasks
    def nearest(known: bytes) -> tuple[np.ndarray, np.ndarray]:
        seen = np.flatnonzero(np.frombuffer(known, bool))
        near = likeness[:, seen]
        first = np.argpartition(-near, min(k, len(seen)) - 1, axis=1)[:, :k]
        share = np.take_along_axis(near, first, axis=1)
        return seen[first], share / share.sum(axis=1, keepdims=True)

    def regress(weight: np.ndarray, value: np.ndarray) -> np.ndarray:
        if (weight > 0).sum() < 2:
            return np.full(len(weight), pool_mean(weight, value))
        task, share = nearest((weight > 0).tobytes())
        return (share * value[task]).sum(axis=1)

    return regress


def with_own(regress: Regress, weight: np.ndarray, value: np.ndarray) -> np.ndarray:
    """A task's own record over what the others say of it."""
    prior = regress(weight, value)
    return (weight * np.where(weight > 0, value, 0) + SHRINK * prior) / (weight + SHRINK)


def by_process(kernels: np.ndarray) -> Regress:
    """Gaussian process with kernel `sum_k w_k K_k + w I` and noise `s / weight`, fitted by marginal likelihood.

    Args:
      kernels: f64[k, n, n].
    """

    def regress(weight: np.ndarray, value: np.ndarray) -> np.ndarray:
        seen = np.flatnonzero(weight > 0)
        centre = pool_mean(weight, value)
        scale = value[seen].std() if len(seen) > 1 else 0.0
        if scale == 0:
            return np.full(len(weight), centre)
        target = (value - centre) / scale
        theta = _fit(kernels, seen, weight, target)
        joint = np.tensordot(theta[: len(kernels)], kernels, 1)
        noisy = joint[np.ix_(seen, seen)] + np.tensordot(theta[len(kernels) :], _diagonals(weight[seen]), 1)
        solved = np.linalg.solve(noisy, target[seen])
        predicted = joint[:, seen] @ solved
        predicted[seen] += theta[len(kernels)] * solved  # the part of its own that a task's record tells
        return centre + scale * predicted

    return regress


def _diagonals(weight: np.ndarray) -> np.ndarray:
    return np.stack([np.eye(len(weight)), np.diag(1 / weight)])


def _fit(kernels: np.ndarray, seen: np.ndarray, weight: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Weights of the kernels and diagonals that maximise the marginal likelihood: Adam on their logarithms, f64[k + 2].

    The likelihood is that of `BLOCKS` random blocks of at most `BLOCK` tasks, taken as independent.
    """
    order = np.random.default_rng(0).permutation(seen)
    size = min(BLOCK, len(seen))
    blocks = order[: min(BLOCKS, len(seen) // size) * size].reshape(-1, size)
    parts = np.stack(
        [np.concatenate([kernels[:, rows[:, None], rows], _diagonals(weight[rows])]) for rows in blocks]
    )  # [blocks, k + 2, size, size]
    start = -np.log(parts.shape[1])
    log = np.full(parts.shape[1], start)
    first, second = np.zeros_like(log), np.zeros_like(log)
    for step in range(1, TUNING_STEPS + 1):
        theta = np.exp(log)
        inverse = np.linalg.inv(np.einsum("k,bkij->bij", theta, parts) + 1e-6 * np.eye(size))
        solved = np.einsum("bij,bj->bi", inverse, target[blocks])
        slope = np.einsum("bkij,bi,bj->k", parts, solved, solved, optimize=True)
        slope = 0.5 * theta * (slope - np.einsum("bij,bkij->k", inverse, parts))
        slope -= 0.1 * (log - start)  # a weak prior keeps unused parts finite
        first, second = 0.7 * first + 0.3 * slope, 0.9 * second + 0.1 * slope**2
        log += 0.4 * (first / (1 - 0.7**step)) / (np.sqrt(second / (1 - 0.9**step)) + 1e-8)
        log = np.clip(log, -9, 3)
    return np.exp(log)


# ------------------------------------------------------------------------------------------------ methods


def estimate(regress: Regress, seen: Observed, *, own: bool) -> Estimate:
    """Predicts mean, variance and share with one regression; `own` blends in each task's own record."""

    def solve(weight: np.ndarray, value: np.ndarray) -> np.ndarray:
        return with_own(regress, weight, value) if own else regress(weight, value)

    mean = np.clip(solve(seen.rollouts, seen.mean), 0, 1)
    variance = solve(seen.dof, seen.variance) if seen.dof.any() else mean * (1 - mean)
    share = np.clip(solve(seen.groups, seen.share), 0, 1) if seen.groups.any() else None
    return Estimate(mean, np.maximum(variance, 0), share)


def _constant(weight: np.ndarray, value: np.ndarray) -> np.ndarray:
    return np.full(len(weight), pool_mean(weight, value))


def own_last(seen: Observed) -> Estimate:
    """The newest group of the task itself, over the pool's mean; its variance by all of the task's groups."""
    last = seen._replace(mean=seen.last, rollouts=np.minimum(seen.rollouts, 1.0))
    return estimate(_constant, last, own=True)


OWN = ("ref_own_last", "ref_all_past")  # say nothing of a task without a record of its own


def predictors(view: View) -> dict[str, Predictor]:
    """All reference methods, by name.

    Where a task has been observed itself, the neighbours and the environment only give the prior of its own record.
    """
    same = (view.env[:, None] == view.env).astype(np.float64)
    near = np.exp(-4 * np.maximum(1 - np.stack([view.text, view.structure]), 0))
    process = by_process(np.stack([same, *near, same * near[1], near[0] * near[1]]))
    return {
        "ref_env_mean": partial(estimate, by_environment(view.env), own=True),
        "ref_knn_text": partial(estimate, by_neighbours(view.text), own=True),
        "ref_knn_structure": partial(estimate, by_neighbours(view.structure), own=True),
        "ref_knn_both": partial(estimate, by_neighbours((view.text + view.structure) / 2), own=True),
        "ref_gp": partial(estimate, process, own=False),
        "ref_own_last": own_last,
        "ref_all_past": partial(estimate, _constant, own=True),
    }
