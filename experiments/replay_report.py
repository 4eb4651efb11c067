"""Table and figures of a replay summary. Matplotlib is imported only where something is drawn."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def mean_gap(datasets: Mapping[str, Any]) -> dict[str, float]:
    """Mean over data sets of the share of the gap from uniform to the oracle that each arm closes.

    A set where the oracle is not above uniform has no gap (NaN) and is left out, for every arm alike.
    """
    gaps: dict[str, list[float]] = {}
    for data in datasets.values():
        for arm, figures in data["arms"].items():
            gaps.setdefault(arm, []).append(figures["gap_closed"])
    kept = {arm: [value for value in values if np.isfinite(value)] for arm, values in gaps.items()}
    return {arm: float(np.mean(values)) if values else float("nan") for arm, values in kept.items()}


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


def draw(workdir: Path, summary: Mapping[str, Any]) -> list[Path]:
    """Writes `figures/gap_closed.png` and `figures/live_groups.png` and returns their paths."""
    from matplotlib import rc_context

    from experiments import figures

    folder = workdir / "figures"
    folder.mkdir(parents=True, exist_ok=True)
    datasets = summary["datasets"]
    palette = figures.colours(sorted(summary["gap_closed"]))
    with rc_context(figures.STYLE):
        drawn = {"gap_closed.png": _gaps(datasets, palette), "live_groups.png": _curves(datasets, palette)}
        for name, figure in drawn.items():
            figure.savefig(folder / name, dpi=160, facecolor="white")
    return [folder / name for name in drawn]


def _gaps(datasets: Mapping[str, Any], palette: Mapping[str, str]) -> "Figure":
    from matplotlib.figure import Figure

    from experiments import figures

    bars = [arm for arm in palette if arm not in ("uniform", "oracle")]
    figure = Figure(figsize=(max(figures.WIDTH, 1.5 + 1.6 * len(datasets)), 3.0), layout="constrained")
    axes = figure.add_subplot()
    width = 0.8 / max(len(bars), 1)
    for i, arm in enumerate(bars):
        gap = np.array([data["arms"][arm]["gap_closed"] for data in datasets.values()], float)
        ends = np.array([data["arms"][arm]["gap_closed_ci"] for data in datasets.values()], float)
        place = np.arange(len(gap)) + (i - (len(bars) - 1) / 2) * width
        axes.bar(place, gap, 0.92 * width, color=palette[arm], label=arm)
        axes.vlines(place, ends[:, 0], ends[:, 1], color="#24292f", linewidth=1.1)
    axes.axhline(0, color=palette["uniform"] if "uniform" in palette else "#808891", linewidth=1)
    axes.set_xticks(range(len(datasets)), list(datasets))
    axes.grid(axis="x", visible=False)
    axes.set_ylabel("gap closed (0 uniform, 1 oracle)")
    figures.legend(figure, [axes])
    return figure


def _curves(datasets: Mapping[str, Any], palette: Mapping[str, str]) -> "Figure":
    from matplotlib.figure import Figure

    from experiments import figures

    figure = Figure(figsize=(max(figures.WIDTH, 3.0 * len(datasets)), 2.8), layout="constrained")
    panels = figure.subplots(1, len(datasets), squeeze=False)[0]
    for axes, (name, data) in zip(panels, datasets.items(), strict=True):
        for arm, colour in palette.items():
            curve = data["arms"][arm]["live_curve"]
            axes.plot(range(1, len(curve) + 1), curve, color=colour, label=arm)
        axes.set(title=name, xlabel="step")
    panels[0].set_ylabel("live groups so far")
    figures.legend(figure, panels)
    return figure
