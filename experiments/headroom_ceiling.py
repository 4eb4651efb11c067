"""How much a perfect scheduler could gain: the pass rates behind noisy groups, and the best tasks among them.

The best groups of a log are not what a perfect scheduler would get: many of them are lucky, and would not be mixed if
they were rolled out again. So the ceiling is worked out from what the log says of the *pass rates*, with the noise of a
group taken out. The assumption, an empirical Bayes one: pass rates are spread over the pool as one hill (a Beta or a
logit-normal distribution) beside a share of tasks that never pass and a share that always pass, and rollouts of a task
within one stretch of time are independent. All hills and shares that fit the log are weighed by how well they fit it,
simpler kinds (all tasks alike; no hill at all; no such shares) beside richer ones: before the log speaks, the first two
have half of the weight, so that differences between tasks must be shown. Of each, the pass rates of the pool's tasks
are drawn given their own rollouts, and may bend away from the hill where many rollouts say so; the best B of T make
the ceiling.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

LOGITS = np.linspace(-14.0, 14.0, 401)  # cells of pass rates
LOG_P, LOG_Q = -np.logaddexp(0, -LOGITS), -np.logaddexp(0, LOGITS)
DRAWS = 300
NEAR = 7.0  # in log-likelihood: what is this much worse than the best is not looked at more closely
FIRMNESS, SWEEPS = 20.0, 5  # tasks that the hill's form is worth, and sweeps of Gibbs sampling
REFINEMENTS = 2  # so that a long log, which says much, does not fall between the points of the grid
_PLACES, _WIDTHS, _SHARES = 23, 11, 9  # points of the grid


class Counts(NamedTuple):
    """What is known of tasks: P kinds of record."""

    trials: np.ndarray  # i64[P]
    hits: np.ndarray  # i64[P], of the trials
    tasks: np.ndarray  # i64[P], how many tasks have this record


class Spread(NamedTuple):
    """Draws of the pool's hit rates: R draws."""

    tasks: np.ndarray  # i64[R, cells + 2], tasks by hit rate: the cells, then never, then always
    never: np.ndarray  # f64[R], share of the tasks that never hit, as fitted
    always: np.ndarray  # f64[R]


def counts(trials: np.ndarray, hits: np.ndarray, unseen: int = 0) -> Counts:
    """Returns the records of tasks, i64[T] each, and of `unseen` tasks without any trial, with equal ones joined."""
    both = np.concatenate([np.stack([trials, hits], axis=1), np.zeros((unseen, 2), np.int64)]).astype(np.int64)
    kinds, tasks = np.unique(both, axis=0, return_counts=True)
    return Counts(kinds[:, 0], kinds[:, 1], tasks)


class _Grid(NamedTuple):
    """Points of one model: where the hill lies, how wide it is, and the two shares; what is fixed has one point."""

    family: int  # of hills
    place: np.ndarray  # f64[A], log-odds of the middle
    width: np.ndarray  # f64[B], log of the strength (Beta) or of the deviation (logit-normal)
    never: np.ndarray  # f64[C]
    always: np.ndarray  # f64[D]; empty where there is no hill: all tasks that do not never hit always do

    @property
    def axes(self) -> tuple[np.ndarray, ...]:
        """Place, width and the shares."""
        return self.place, self.width, self.never, self.always

    def shape(self) -> tuple[int, ...]:
        """Returns A, B, C, D; D is 1 without a hill."""
        return tuple(max(len(axis), 1) for axis in self.axes)

    def log_size(self) -> float:
        """Returns the log of the volume that a point stands for."""
        return float(sum(np.log(axis[1] - axis[0]) for axis in self.axes if len(axis) > 1))

    def extent(self) -> float:
        """Returns the log of the volume of the whole grid, so that every model has as much weight before the log."""
        return float(sum(np.log(axis[-1] - axis[0]) for axis in self.axes if len(axis) > 1))

    def shares(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the two shares at every pair of points, f64[C, D] each."""
        if not len(self.always):
            return self.never[:, None], 1 - self.never[:, None]
        never, always = np.meshgrid(self.never, self.always, indexing="ij")
        return never, always


def _beta(place: np.ndarray, width: np.ndarray) -> np.ndarray:
    """Log-density over log-odds of Beta(mean, strength), up to a constant: f64[A, B, cells]."""
    mean = 1 / (1 + np.exp(-place))[:, None, None]
    return np.exp(width)[None, :, None] * (mean * LOG_P + (1 - mean) * LOG_Q)


def _normal(place: np.ndarray, width: np.ndarray) -> np.ndarray:
    return -0.5 * ((LOGITS - place[:, None, None]) / np.exp(width)[None, :, None]) ** 2


_FAMILIES: tuple[Callable[[np.ndarray, np.ndarray], np.ndarray], ...] = (_beta, _normal)
_WIDTHS_OF = ((0.15, 2000.0), (0.08, 8.0))  # strengths, deviations


def _models() -> list[_Grid]:
    """Returns the models, from simple to rich: simple ones win where the log does not need more."""
    place, share, none = np.linspace(-6, 6, _PLACES), np.linspace(0, 0.96, _SHARES), np.zeros(1)
    same = np.log([0.02])  # all tasks alike: all in a cell or two
    found = [_Grid(1, none, same, np.linspace(0, 1, 41), np.zeros(0)), _Grid(1, place, same, none, none)]
    for family, widths in enumerate(_WIDTHS_OF):
        width = np.log(np.geomspace(*widths, _WIDTHS))
        for never in (none, share):
            found += [_Grid(family, place, width, never, always) for always in (none, share)]
    return found


def _cells(grid: _Grid) -> np.ndarray:
    """Returns the hills of a grid, f64[A * B, cells]."""
    log = _FAMILIES[grid.family](grid.place, grid.width)
    mass = np.exp(log - log.max(axis=-1, keepdims=True))
    return (mass / mass.sum(axis=-1, keepdims=True)).reshape(-1, len(LOGITS))


def _likelihood(record: Counts) -> np.ndarray:
    """Likelihood of every record by hit rate, f64[cells + 2, P], scaled by record."""
    n, k = record.trials, record.hits
    log = k * LOG_P[:, None] + (n - k) * LOG_Q[:, None]
    return np.concatenate([np.exp(log - log.max(axis=0)), [k == 0], [k == n]])


def _score(cells: np.ndarray, grid: _Grid, like: np.ndarray, tasks: np.ndarray) -> np.ndarray:
    """Log-likelihood of every point of a grid: f64[A * B, C, D]; -inf where the shares exceed 1."""
    hill = cells @ like[:-2]  # [A * B, P]
    never, always = (share[..., None] for share in grid.shares())
    rest = 1 - never - always
    shares = never * like[-2] + always * like[-1]  # [C, D, P]
    score = np.empty((len(cells), *rest.shape[:2]))
    with np.errstate(divide="ignore"):
        for at, row in enumerate(hill):
            score[at] = np.log(np.maximum(rest * row + shares, 0.0)) @ tasks
    return np.where(rest[..., 0] > -1e-9, score, -np.inf)


def _closer(grid: _Grid, near: np.ndarray) -> _Grid:
    """Returns a grid of as many points around those that are `near`, bool[A, B, C, D]."""
    axes = []
    for place, axis in enumerate(grid.axes):
        inside = np.flatnonzero(near.any(axis=tuple(a for a in range(4) if a != place)))
        low, high = max(inside[0] - 1, 0), min(inside[-1] + 1, len(axis) - 1)
        axes.append(axis if len(axis) < 2 else np.linspace(axis[low], axis[high], len(axis)))
    return _Grid(grid.family, *axes)


def _fit(start: _Grid, like: np.ndarray, tasks: np.ndarray) -> tuple[_Grid, np.ndarray, np.ndarray]:
    """Returns a grid around what fits best, its hills, and the log of the weight of each of its points."""
    grid = start
    for left in range(REFINEMENTS, -1, -1):
        cells = _cells(grid)
        score = _score(cells, grid, like, tasks)
        if not left or not np.isfinite(score.max()):
            break
        grid = _closer(grid, (score > score.max() - NEAR).reshape(grid.shape()))
    return grid, cells, score.reshape(-1) + grid.log_size() - start.extent()


def spread(record: Counts, rng: np.random.Generator, draws: int = DRAWS) -> Spread:
    """Draws how the hit rates of the tasks are spread, given their records.

    Args:
      record: of all tasks; those without a trial are taken for tasks like the others.
      rng: of the draws.
      draws: R.
    """
    like = _likelihood(record)
    fits = [_fit(start, like, record.tasks) for start in _models()]
    simple = np.log((len(fits) - 2) / 2)  # more weight for each of the two simplest
    weight = np.concatenate([log + simple * (at < 2) for at, (*_, log) in enumerate(fits)])
    weight = np.exp(weight - weight.max())
    first = np.cumsum([0, *(len(log) for *_, log in fits)])
    found = np.zeros((draws, like.shape[0]), np.int64)
    shares = np.zeros((draws, 2))
    for at, point in enumerate(rng.choice(len(weight), size=draws, p=weight / weight.sum())):
        model = int(np.searchsorted(first, point, side="right")) - 1
        grid, cells, _ = fits[model]
        never, always = grid.shares()
        hill, pair = divmod(int(point - first[model]), never.size)
        shares[at] = never.reshape(-1)[pair], always.reshape(-1)[pair]
        prior = np.concatenate([cells[hill] * max(1 - shares[at].sum(), 0.0), shares[at]])
        found[at] = _bent(prior, like, record.tasks, rng)
    return Spread(found, *shares.T)


def _bent(prior: np.ndarray, like: np.ndarray, tasks: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Draws tasks by hit rate, i64[cells + 2], from a spread that is like `prior` but may bend where the log says so.

    A Dirichlet prior around the hill, worth `FIRMNESS` tasks: a few sweeps of Gibbs sampling, from the hill itself.
    """
    now = prior
    for sweep in range(SWEEPS + 1):
        posterior = np.maximum(now, 0.0)[:, None] * like + 1e-300 * like
        found = rng.multinomial(tasks, (posterior / posterior.sum(axis=0)).T).sum(axis=0)
        if sweep < SWEEPS:
            now = rng.standard_gamma(FIRMNESS * prior + found)
            now = now / now.sum()
    return found


def mixed(group_size: int) -> np.ndarray:
    """Returns the probability that a group of G has rewards that differ, by pass rate: f64[cells + 2]."""
    return np.concatenate([1 - np.exp(group_size * LOG_P) - np.exp(group_size * LOG_Q), [0.0, 0.0]])


def rate() -> np.ndarray:
    """Returns the hit rate itself: f64[cells + 2]."""
    return np.concatenate([np.exp(LOG_P), [0.0, 1.0]])


def best(tasks: np.ndarray, value: np.ndarray, share: float) -> np.ndarray:
    """Returns the mean value of the best `share` of the tasks in each draw, f64[R]; 1 gives the mean of all.

    Args:
      tasks: i64[R, cells + 2].
      value: f64[cells + 2].
      share: in (0, 1].
    """
    order = np.argsort(-value)
    there = tasks[:, order]
    wanted = share * tasks.sum(axis=1, keepdims=True)
    above = np.cumsum(there, axis=1) - there
    taken = np.clip(wanted - above, 0, there)
    return (taken * value[order]).sum(axis=1) / wanted[:, 0]
