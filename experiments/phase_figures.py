"""Figures of a phase diagram: where scheduling pays, and what the learning rate does to it."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from experiments import figures

NOT_PEERS = ("uniform", "envsched", "oracle")
LOSS, NOTHING, GAIN = "#e07b1a", "#ffffff", "#3b82f6"
Cells = Sequence[Mapping[str, Any]]


def _gain(cell: Mapping[str, Any], arm: str, measure: str, middle: int | None) -> float:
    """Mean gain of an arm in a cell: at one learning rate of the sweep, or at everybody's own where there is none."""
    place = cell["at_own_rates"] if middle is None else cell["at_equal_rates"][middle]
    return float(place["arms"][arm][measure]["mean"])


def rows_of(arms: Sequence[str]) -> dict[str, Callable[[Mapping[str, Any], str, int | None], float]]:
    """The rows of a heat map: EnvSched, the best of the peers in each cell, the oracle; those that there are.

    The best of several means is a little too good, so this row leans towards the peers.
    """

    def of(names: Sequence[str]) -> Callable[[Mapping[str, Any], str, int | None], float]:
        return lambda cell, measure, middle: max(_gain(cell, name, measure, middle) for name in names)

    peers = [name for name in arms if name not in NOT_PEERS]
    groups = {"envsched": ["envsched"], "best peer": peers, "oracle": ["oracle"]}
    return {label: of(names) for label, names in groups.items() if names and set(names) <= set(arms)}


def heat(
    cells: Cells,
    path: str | Path,
    *,
    axes: Mapping[str, Any],
    batch_sizes: Sequence[int],
    measure: str,
    middle: int | None,
    title: str,
) -> Path:
    """Gain over uniform by degenerate share (down) and structure (across); a panel per arm, optimiser and batch size.

    Args:
      cells: of the summary.
      path: the PNG to write.
      axes: of the summary.
      batch_sizes: in order.
      measure: `final` or `average`.
      middle: place of the learning rate, None for each arm's own.
      title: of the figure.
    """
    found = {(c["optimizer"], c["batch_size"], c["degenerate"], c["structure"]): c for c in cells}
    rows = rows_of(list(cells[0]["at_own_rates"]["arms"]))
    columns = [(o, b) for o in axes["optimizer"] for b in batch_sizes]
    tables = {
        (label, o, b): np.array(
            [[value(found[o, b, d, s], measure, middle) for s in axes["structure"]] for d in axes["degenerate"]]
        )
        for label, value in rows.items()
        for o, b in columns
    }
    top = max(float(np.abs(table).max()) for table in tables.values()) or 1.0
    tint = LinearSegmentedColormap.from_list("gain", [LOSS, NOTHING, GAIN])
    with matplotlib.rc_context(figures.STYLE | {"axes.grid": False}):
        height = 0.9 + len(rows) * (0.6 + 0.3 * len(axes["degenerate"]))
        figure = Figure(figsize=(max(2 * figures.WIDTH, 1.7 * len(columns)), height), layout="constrained")
        panels = figure.subplots(len(rows), len(columns), sharex=True, sharey=True, squeeze=False)
        for r, label in enumerate(rows):
            for c, (o, b) in enumerate(columns):
                panel, table = panels[r, c], tables[label, o, b]
                image = panel.imshow(table, aspect="auto", cmap=tint, vmin=-top, vmax=top)
                for (y, x), value in np.ndenumerate(table):
                    panel.text(x, y, f"{value:+.2f}", ha="center", va="center", fontsize=7, color="#24292f")
                if r == 0:
                    panel.set_title(f"{o}\nbatch {b}")
                if c == 0:
                    panel.set_ylabel(f"{label}\ndegenerate")
                if r == len(rows) - 1:
                    panel.set_xlabel("structure")
                panel.set_xticks(range(len(axes["structure"])), [f"{s:g}" for s in axes["structure"]])
                panel.set_yticks(range(len(axes["degenerate"])), [f"{d:g}" for d in axes["degenerate"]])
                panel.tick_params(length=0)
        figure.suptitle(title, fontsize=9)
        bar = figure.colorbar(image, ax=panels, shrink=0.8, pad=0.01)
        bar.outline.set_visible(False)
        return figures.save(figure, path)


def gain_by_rate(marginal: Mapping[str, Any], path: str | Path, *, axes: Mapping[str, Any], measure: str) -> Path:
    """Gain over uniform against the learning rate, averaged over all other axes, with 95 % bands over seeds.

    Args:
      marginal: `marginal.at_equal_rates` of the summary.
      path: the PNG to write.
      axes: of the summary.
      measure: `final` or `average`.
    """
    with matplotlib.rc_context(figures.STYLE):
        figure = Figure(figsize=(2 * figures.WIDTH, 2.9), layout="constrained")
        panels = figure.subplots(1, len(axes["optimizer"]), sharey=True, squeeze=False)[0]
        for panel, optimizer in zip(panels, axes["optimizer"], strict=True):
            table = marginal[f"learning_rate_{optimizer}"]
            names = list(next(iter(table.values())))
            rates = np.array([float(rate) for rate in table])
            for name, colour in figures.colours(names).items():
                entries = [row[name][measure] for row in table.values()]
                mean = figures.floats([entry["mean"] for entry in entries])
                band = figures.floats([entry["ci"] for entry in entries])
                panel.plot(rates, mean, "--" if name == "uniform" else "-", color=colour, label=name)
                panel.fill_between(rates, band[:, 0], band[:, 1], color=colour, alpha=0.15, linewidth=0)
            panel.set_xscale("log", base=2)
            panel.set_xticks(rates, [figures.short(rate) for rate in rates])
            panel.set(title=optimizer, xlabel="learning rate")
        panels[0].set_ylabel(f"{measure} score minus uniform's")
        figures.legend(figure, list(panels))
        return figures.save(figure, path)


def draw(
    summary: Mapping[str, Any], folder: Path, axes: Mapping[str, Any], batch_sizes: Sequence[int], middle: int
) -> list[Path]:
    """Draws all figures of a summary into a folder and returns their paths."""
    drawn = []
    for measure in ("final", "average"):
        for how, place in (("middle rate", middle), ("own best rate", None)):
            path = folder / f"gain_{measure}_{how.split()[0]}.png"
            title = (
                f"{measure} score minus uniform's, at {'the middle' if place is not None else 'everyone’s own best'}"
            )
            drawn.append(
                heat(
                    summary["cells"],
                    path,
                    axes=axes,
                    batch_sizes=batch_sizes,
                    measure=measure,
                    middle=place,
                    title=f"{title} learning rate",
                )
            )
        table = summary["marginal"]["at_equal_rates"]
        drawn.append(gain_by_rate(table, folder / f"gain_{measure}_by_rate.png", axes=axes, measure=measure))
    return drawn
