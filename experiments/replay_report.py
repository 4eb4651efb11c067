"""Table and figures of a replay summary. Matplotlib is imported only where something is drawn."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

COLOURS = {"uniform": "#8c8c8c", "oracle": "#222222", "envsched": "#d1495b"}
OTHERS = ("#30638e", "#edae49", "#00798c", "#7b5ea7", "#8d6b4f", "#5b8c5a", "#b56576", "#4f5d75")


def mean_gap(datasets: Mapping[str, Any]) -> dict[str, float]:
    """Mean over data sets of the share of the gap from uniform to the oracle that each arm closes."""
    gaps: dict[str, list[float]] = {}
    for data in datasets.values():
        for arm, figures in data["arms"].items():
            gaps.setdefault(arm, []).append(figures["gap_closed"])
    return {arm: float(np.mean(values)) for arm, values in gaps.items()}


def table(summary: Mapping[str, Any]) -> str:
    """Live groups per 1,000 rollouts (gap closed) by data set and arm, as text."""
    datasets = summary["datasets"]
    arms = list(summary["gap_closed"])
    lines = ["live groups per 1,000 rollouts (share of the gap from uniform to the oracle)"]
    lines.append(" " * 20 + "".join(f"{arm:>18}" for arm in [*arms, "clairvoyant"]))
    for name, data in datasets.items():
        cells = [data["arms"][arm] for arm in arms] + [data["clairvoyant"]]
        texts = [f"{c['live_per_1k']['mean']:.1f} ({c['gap_closed']:+.2f})" for c in cells]
        lines.append(f"{name:<20}" + "".join(f"{text:>18}" for text in texts))
    lines.append(f"{'mean gap closed':<20}" + "".join(f"{summary['gap_closed'][arm]:>+18.3f}" for arm in arms))
    return "\n".join(lines)


def colours(arms: list[str]) -> dict[str, str]:
    """One colour per arm: fixed for the arms that every figure shows, in order for the others."""
    others = [arm for arm in arms if arm not in COLOURS]
    return COLOURS | {arm: OTHERS[i % len(OTHERS)] for i, arm in enumerate(others)}


def draw(workdir: Path, summary: Mapping[str, Any]) -> list[Path]:
    """Writes `figures/gap_closed.png` and `figures/live_groups.png` and returns their paths."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    folder = workdir / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    datasets = summary["datasets"]
    arms = list(summary["gap_closed"])
    colour = colours(arms)
    bars = [arm for arm in arms if arm not in ("uniform", "oracle")]

    figure, axes = plt.subplots(figsize=(1.5 + 1.8 * len(datasets), 3.6), layout="constrained")
    width = 0.8 / max(len(bars), 1)
    for i, arm in enumerate(bars):
        gap = np.array([data["arms"][arm]["gap_closed"] for data in datasets.values()], float)
        ends = np.array([data["arms"][arm]["gap_closed_ci"] for data in datasets.values()], float)
        error = np.nan_to_num(np.abs(ends.T - gap), nan=0.0)
        place = np.arange(len(gap)) + (i - (len(bars) - 1) / 2) * width
        axes.bar(place, gap, width, yerr=error, color=colour[arm], label=arm, error_kw={"linewidth": 1, "capsize": 2})
    axes.axhline(0, color=colour["uniform"], linewidth=1)
    axes.set_xticks(range(len(datasets)), list(datasets))
    axes.set_ylabel("gap closed\n(0 uniform, 1 oracle)")
    if bars:
        axes.legend(frameon=False, ncols=len(bars), loc="upper center", bbox_to_anchor=(0.5, 1.15))
    paths = [folder / "gap_closed.png"]
    figure.savefig(paths[0], dpi=150)
    plt.close(figure)

    figure, grid = plt.subplots(
        1, len(datasets), figsize=(3.2 * len(datasets), 3.2), layout="constrained", squeeze=False
    )
    for axes, (name, data) in zip(grid[0], datasets.items(), strict=True):
        for arm in arms:
            curve = data["arms"][arm]["live_curve"]
            axes.plot(range(1, len(curve) + 1), curve, color=colour[arm], label=arm, linewidth=1.5)
        axes.set_title(name)
        axes.set_xlabel("step")
    grid[0][0].set_ylabel("live groups so far")
    grid[0][0].legend(frameon=False, fontsize="small")
    paths.append(folder / "live_groups.png")
    figure.savefig(paths[1], dpi=150)
    plt.close(figure)
    return paths
