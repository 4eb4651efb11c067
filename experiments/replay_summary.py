"""What a replay comes to: the figures of every arm of a data set, and how arms compare over data sets."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from experiments import common, metrics, replay_score
from experiments.replay_score import RANKED, SPLITS, WHOLE

BASE, TOP = "uniform", "oracle"
BOUNDS = (TOP, "clairvoyant")  # they know something that no scheduler can
OURS = "envsched"  # an arm is ours if its name begins so
ABLATIONS = ("no_graph", "env_mean")  # parts of ours


def role(arm: str) -> str:
    """What an arm is: `bound`, `ours`, `ablation` (of ours) or `peer`."""
    if arm in BOUNDS:
        return "bound"
    if arm.startswith(OURS):
        return "ours"
    return "ablation" if arm.startswith(ABLATIONS) else "peer"


def spread(values: Any) -> dict[str, Any]:
    """Mean and 95 % interval over seeds."""
    mean, low, high = common.interval(values)
    return {"mean": float(mean), "ci": [float(low), float(high)]}


def _mean(rows: list[tuple[int, int, dict[str, float]]], name: str) -> float:
    values = [row[name] for _, _, row in rows if name in row and row[name] is not None and math.isfinite(row[name])]
    return float(np.mean(values)) if values else metrics.NOTHING


def _room(per_1k: Mapping[str, np.ndarray]) -> float:
    """Mean live groups per 1,000 rollouts of the oracle above uniform; NaN where it is not above or one is missing."""
    if BASE not in per_1k or TOP not in per_1k:
        return metrics.NOTHING
    room = float(per_1k[TOP].mean() - per_1k[BASE].mean())
    return room if room > 0 else metrics.NOTHING


def _per_1k(results: Mapping[str, Mapping[str, Any]]) -> dict[str, np.ndarray]:
    return {arm: np.asarray(result["live_per_1k"], np.float64) for arm, result in results.items()}


def summarise(results: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The figures of every arm of one data set; what is not defined is NaN (null in the file).

    `gap_closed` is (arm - uniform) / (oracle - uniform) of the mean live groups per 1,000 rollouts; its interval takes
    the oracle's mean gain as given. `gain` is the difference from uniform, paired by seed.
    """
    per_1k = _per_1k(results)
    base, room = per_1k.get(BASE), _room(per_1k)
    arms = {}
    for arm, result in results.items():
        gain = spread(per_1k[arm] - (metrics.NOTHING if base is None else base))
        arms[arm] = {
            "live_per_1k": spread(per_1k[arm]),
            "gain": gain,
            "gap_closed": float(gain["mean"] / room),
            "gap_closed_ci": (np.array(gain["ci"]) / room).tolist(),
            **{name: {split: _mean(result["rows"], f"{name}_{split}") for split in SPLITS} for name in RANKED},
            **{name: _mean(result["rows"], name) for name in WHOLE},
            "envs_touched": float(np.mean(result["envs_touched"])),
            "gini_visits": float(np.mean(result["gini_visits"])),
            "rollouts": float(np.mean(result["rollouts"])),
            "live_curve": np.mean(result["live"], axis=0).tolist(),
            **_calibration(result),
        }
    return arms


def _calibration(result: Mapping[str, Any]) -> dict[str, Any]:
    """Reliability diagrams, and degenerate shares by window (mean over seeds) with the share of windows that agree."""
    rows = result["degenerate"]
    curves = {
        name: np.array([row[name] for row in rows], np.float64).mean(axis=0) for name in ("predicted", "realised")
    }
    sums = result["reliability"]
    diagrams = {} if sums is None else dict(zip(("mean", "p_informative"), map(np.asarray, sums), strict=True))
    return {
        "degenerate": {name: curve.tolist() for name, curve in curves.items()},
        "degenerate_within": replay_score.calibrated_share(rows),
        "reliability": {name: replay_score.diagram(values) for name, values in diagrams.items()} or None,
    }


def gaps(results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, np.ndarray]:
    """Share of the gap from uniform to the oracle that each arm closes, by seed: f64[seeds], the mean over data sets.

    A set where the oracle is not above uniform has no gap and is left out, for every arm alike; with no set left
    there is no gap at all (NaN).

    Args:
      results: `{data set: {arm: result}}`; every data set has the same arms and seeds.
    """
    found: dict[str, list[np.ndarray]] = {}
    for arms in results.values():
        per_1k = _per_1k(arms)
        room = _room(per_1k)
        for arm, values in per_1k.items():
            gap = (values - per_1k.get(BASE, values)) / room
            found.setdefault(arm, []).extend([gap] if math.isfinite(room) else [])
    count = {arm: len(np.atleast_1d(next(iter(results.values()))[arm]["live_per_1k"])) for arm in found}
    return {
        arm: np.mean(values, axis=0) if values else np.full(count[arm], metrics.NOTHING)
        for arm, values in found.items()
    }


def compare(results: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Compares every arm with the best peer, and with the best ablation of ours, over all data sets.

    The best is the one with the highest mean gap closed over data sets and seeds: one arm for all data sets, chosen
    on these same results, which favours it. Differences are paired by seed; a seed's figure is its mean over data sets.
    """
    by_seed = gaps(results)
    best = {kind: _best(by_seed, kind) for kind in ("peer", "ablation")}
    arms = {}
    for arm, gap in by_seed.items():
        entry: dict[str, Any] = {"role": role(arm), "gap_closed": spread(gap)}
        for kind, name in best.items():
            entry[f"over_{kind}"] = None if name is None or name == arm else spread(gap - by_seed[name])
        arms[arm] = entry
    return {"best_peer": best["peer"], "best_ablation": best["ablation"], "datasets": len(results), "arms": arms}


def _best(by_seed: Mapping[str, np.ndarray], kind: str) -> str | None:
    means = {arm: gap.mean() for arm, gap in by_seed.items() if role(arm) == kind and np.isfinite(gap).all()}
    return max(means, key=lambda arm: means[arm]) if means else None
