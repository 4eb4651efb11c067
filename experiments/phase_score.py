"""What a phase diagram says of every arm: gains over uniform, at equal and at each arm's own learning rate.

Axes of every array, here and in ``experiments.phase``: optimiser, degenerate share, structure, learning rate, seed, and
then steps. Gains are paired by seed: both arms have the same pool and meet the same luck.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from experiments.headline import BASE
from experiments.paired import spread
from experiments.surrogate import NEW_ENV, POOL, SEEN_ENV

AXES = ("optimizer", "degenerate", "structure", "learning_rate")
RATE = 3  # the axis of learning rates
HALVES = 2


class Runs(NamedTuple):
    """All runs of one arm at one batch size; axes as in ``AXES``, then seeds, then as told."""

    rate: np.ndarray  # f32[..., S + 1, 3], as in surrogate.Trace
    expected: np.ndarray  # f32[..., S]
    informative: np.ndarray  # f32[..., S]
    drop: np.ndarray  # f32[...]
    degenerate: np.ndarray  # f32[...]


def score(rate: np.ndarray) -> np.ndarray:
    """Exact held-out score f64[..., S + 1]: the mean over both kinds of held-out tasks, which weigh the same."""
    return rate[..., [SEEN_ENV, NEW_ENV]].astype(np.float64).mean(axis=-1)


def share_to_reach(level: np.ndarray, curve: np.ndarray) -> np.ndarray:
    """Share of the budget until a curve f64[..., S + 1] first reaches a level f64[...]; 1 where it never does."""
    there = curve >= level[..., None]
    return np.where(there.any(axis=-1), there.argmax(axis=-1) / (curve.shape[-1] - 1), 1.0)


def gains(arm: Runs, base: Runs) -> dict[str, np.ndarray]:
    """Every measure of an arm beside uniform at the same place of the grid, f64 of the axes and seeds.

    Returns:
      `final` and `average` (over the run): score minus uniform's; `rollouts_share`: rollouts until the arm reaches the
      best score that uniform ever reaches with the same seed, as a share of uniform's budget; `informative_share`:
      exact P(informative) of the picks.
    """
    mine, theirs = score(arm.rate), score(base.rate)
    return {
        "final": mine[..., -1] - theirs[..., -1],
        "average": (mine - theirs)[..., 1:].mean(axis=-1),
        "rollouts_share": share_to_reach(theirs.max(axis=-1), mine),
        "informative_share": arm.expected.astype(np.float64).mean(axis=-1),
    }


def own_rate(value: np.ndarray) -> np.ndarray:
    """Place of the best learning rate for every seed, chosen on the seeds of the other half, i64[..., R].

    So no seed has a say in the rate at which it is scored, and the best of many rates is not luck.

    Args:
      value: f64[..., L, R]; seeds 0, 2, ... are one half, 1, 3, ... the other.

    Raises:
      ValueError: fewer than two seeds.
    """
    seeds = value.shape[-1]
    if seeds < HALVES:
        raise ValueError(f"at least {HALVES} seeds are needed to choose learning rates, got {seeds}")
    half = np.arange(seeds) % HALVES
    best = [value[..., half != h].mean(axis=-1).argmax(axis=-1) for h in range(HALVES)]
    return np.stack([best[h] for h in half], axis=-1)


def _at(place: np.ndarray, runs: Runs) -> Runs:
    """The runs at a learning rate by seed; the axis of rates is gone."""

    def take(values: np.ndarray) -> np.ndarray:
        index = place.reshape(*place.shape[:RATE], 1, *place.shape[RATE:], *[1] * (values.ndim - RATE - 2))
        return np.take_along_axis(values, index, axis=RATE).squeeze(RATE)

    return Runs(*map(take, runs))


def own_gains(arm: Runs, base: Runs) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Measures with both arms at learning rates of their own, f64 of the axes without rates, and seeds.

    Rates are chosen by the final score for `final`, by the average score for everything else.

    Returns:
      What ``gains`` returns, and the places of the arm's rates i64[..., R] by `final` and by `average`.
    """
    places, found = {}, {}
    for by in ("final", "average"):
        value = {
            who: score(runs.rate)[..., -1] if by == "final" else score(runs.rate)[..., 1:].mean(axis=-1)
            for who, runs in (("arm", arm), ("base", base))
        }
        places[by] = own_rate(value["arm"])
        found[by] = gains(_at(places[by], arm), _at(own_rate(value["base"]), base))
    return found["average"] | {"final": found["final"]["final"]}, places


def cells(runs: Mapping[int, Mapping[str, Runs]], axes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One entry per optimiser, batch size, degenerate share and structure.

    Args:
      runs: by batch size and arm; every batch size has ``uniform``.
      axes: the values of every axis; `learning_rate` by optimiser.
    """
    found = []
    for batch_size, arms in runs.items():
        base = arms[BASE]
        curve = score(base.rate)
        fixed = {name: gains(arm, base) for name, arm in arms.items()}
        own = {name: own_gains(arm, base) for name, arm in arms.items()}
        for o, optimizer in enumerate(axes["optimizer"]):
            rates = axes["learning_rate"][optimizer]
            for d, degenerate in enumerate(axes["degenerate"]):
                for s, structure in enumerate(axes["structure"]):
                    at = (o, d, s)
                    rows = [
                        {
                            "learning_rate": rate,
                            "uniform_start": float(curve[(*at, i)][:, 0].mean()),
                            "uniform_final": float(curve[(*at, i)][:, -1].mean()),
                            "arms": {n: {k: spread(v[(*at, i)]) for k, v in g.items()} for n, g in fixed.items()},
                        }
                        for i, rate in enumerate(rates)
                    ]
                    best = {
                        name: {k: spread(v[at]) for k, v in measured.items()}
                        | {"learning_rates": sorted({rates[i] for i in np.ravel(places["average"][at])})}
                        for name, (measured, places) in own.items()
                    }
                    settings = {"optimizer": optimizer, "batch_size": batch_size}
                    settings |= {"degenerate": degenerate, "structure": structure}
                    found.append(settings | {"at_equal_rates": rows, "at_own_rates": {"arms": best}})
    return found


def marginals(runs: Mapping[int, Mapping[str, Runs]], axes: Mapping[str, Any]) -> dict[str, Any]:
    """Gains by axis, value and arm, averaged over all other axes: `at_equal_rates` and `at_own_rates`."""
    out: dict[str, Any] = {}
    batches = list(runs)
    for how in ("at_equal_rates", "at_own_rates"):
        tables: dict[str, dict[str, dict[str, Any]]] = {}
        for name in runs[batches[0]]:
            per_batch = [
                gains(arms[name], arms[BASE]) if how == "at_equal_rates" else own_gains(arms[name], arms[BASE])[0]
                for arms in runs.values()
            ]
            for measure in per_batch[0]:
                values = np.stack([gained[measure] for gained in per_batch])  # [batch, optimiser, ..., seeds]
                names = ("batch_size", *AXES) if how == "at_equal_rates" else ("batch_size", *AXES[:RATE])
                for axis, label in enumerate(names):
                    if label == "learning_rate":
                        continue
                    of = batches if label == "batch_size" else axes[label]
                    rows = np.moveaxis(values, axis, 0).reshape(len(of), -1, values.shape[-1]).mean(axis=1)
                    for value, row in zip(of, rows, strict=True):
                        tables.setdefault(label, {}).setdefault(str(value), {}).setdefault(name, {})[measure] = spread(
                            row
                        )
                if how == "at_equal_rates":
                    for o, optimizer in enumerate(axes["optimizer"]):
                        part = values[:, o].mean(axis=(0, 1, 2))  # [rates, seeds]
                        for rate, row in zip(axes["learning_rate"][optimizer], part, strict=True):
                            table = tables.setdefault(f"learning_rate_{optimizer}", {}).setdefault(str(rate), {})
                            table.setdefault(name, {})[measure] = spread(row)
        out[how] = tables
    return out


def edges(runs: Mapping[int, Mapping[str, Runs]]) -> dict[str, dict[str, float]]:
    """Share of the choices of a learning rate that fell on the smallest or the largest of the sweep, by arm.

    Where many fall on the largest, a wider sweep would find better ones, and the comparison is about speed only.
    """
    out = {}
    for name in next(iter(runs.values())):
        places = np.stack([own_gains(arms[name], arms[BASE])[1]["average"] for arms in runs.values()])
        last = next(iter(runs.values()))[name].rate.shape[RATE] - 1
        out[name] = {"smallest": float((places == 0).mean()), "largest": float((places == last).mean())}
    return out


def transfer(base: Runs, place: tuple[int, int, int, int], step: int) -> dict[str, float]:
    """Rise of the pass rate under uniform selection until a step: of tasks of the pool, and of those that are held out.

    Args:
      base: uniform's runs.
      place: on the axes.
      step: at which; about one epoch.
    """
    rise = (base.rate[place][:, step] - base.rate[place][:, 0]).mean(axis=0)
    return {
        "step": step,
        "trained": float(rise[POOL]),
        "held_out": float(rise[SEEN_ENV]),
        "new_environments": float(rise[NEW_ENV]),
    }
