"""What a scheduler believes of every task at the end of an arm, as one figure."""

import base64
import io
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, PowerNorm
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import PathPatch
from matplotlib.path import Path
from PIL import Image

from experiments.figures import ACCENT, INK, NEUTRAL, STYLE, WIDTH, save

EDGE = 0.999  # predictions beyond are drawn as one band: nobody can tell 99.9 % from more
TICKS = (0.001, 0.01, 0.1, 0.5, 0.9, 0.99, 0.999)
BAND = 1.3  # height of such a band, in log odds
DPI = 150  # of the dots, which are pixels in the SVG too: as marks of their own they would be most of the page
PALETTE = 128  # colours of those pixels, which makes them a fifth as many bytes
ARCS = 2  # strongest other environments that are drawn of each environment
# Grey teaches nothing, on a white page and on a dark one.
HEAT = LinearSegmentedColormap.from_list("heat", ["#8d96a0", "#c79a5b", "#f08a1d", "#d6336c"])


def height_of(rate: np.ndarray) -> np.ndarray:
    """Where a predicted pass rate is drawn, f64[n]: log odds; what lies beyond EDGE is spread over a band."""
    kept = np.clip(rate, 1 - EDGE, EDGE)
    height = np.log(kept / (1 - kept))
    for side, beyond in ((1, rate > EDGE), (-1, rate < 1 - EDGE)):
        height[beyond] += side * BAND * (0.15 + 0.85 * (np.arange(beyond.sum()) * 0.7548776662 % 1))
    return height


def links(found: Mapping[str, np.ndarray], count: int) -> np.ndarray:
    """Weight of the edges between environments, both ways, f64[count, count], zero on the diagonal."""
    weight = np.zeros((count, count))
    np.add.at(weight, (found["env"][found["sender"]], found["env"][found["receiver"]]), found["weight"])
    np.fill_diagonal(weight, 0.0)
    return weight + weight.T


def beliefs(found: Mapping[str, np.ndarray], path: str | pathlib.Path) -> pathlib.Path:
    """Draws a belief: a column per environment, a dot per task at its predicted pass rate, links between environments.

    Columns go from the lowest predicted pass rate to the highest. Above them arcs join each environment with those
    that most of its borrowed evidence can come from; below them bars count how often its tasks were rolled out.

    Args:
      found: what `loop.save_beliefs` writes.
      path: the PNG to write.
    """
    names = [str(name) for name in found["env_ids"]]
    count = len(names)
    rate, variance, visits = (np.asarray(found[key], np.float64) for key in ("mean", "variance", "visits"))
    size = np.bincount(found["env"], minlength=count)
    height = height_of(rate)
    order = np.argsort(np.bincount(found["env"], height, count) / np.maximum(size, 1), kind="stable")
    column = np.argsort(order)
    with matplotlib.rc_context(STYLE | {"axes.grid": False}):
        figure = Figure(figsize=(2 * WIDTH, 6.0), layout="constrained", dpi=DPI)
        arcs, dots, bars = figure.subplots(3, 1, sharex=True, height_ratios=(0.8, 3.2, 0.7))
        _arcs(arcs, links(found, count)[np.ix_(order, order)])
        _dots(figure, dots, column[found["env"]], height, variance, visits)
        picked = np.bincount(found["env"], visits, count)[order]
        bars.bar(range(count), picked, width=0.7, color=ACCENT, alpha=0.85)
        bars.set(ylabel="picks", xlim=(-0.6, count - 0.4))
        named = count <= 64
        bars.set_xticks(range(count) if named else [], [names[i][:24] for i in order] if named else [], rotation=90)
        bars.tick_params(axis="x", length=0, labelsize=7)
        bars.set_xlabel("" if named else f"{count} environments")
        figure.align_ylabels([dots, bars])
        return _pack(save(figure, path))


def _pack(path: pathlib.Path) -> pathlib.Path:
    """Gives the pixels in the SVG beside `path` a palette; returns `path`."""

    def smaller(found: re.Match[str]) -> str:
        file = io.BytesIO()
        pixels = Image.open(io.BytesIO(base64.b64decode(found.group())))
        pixels.quantize(PALETTE, Image.Quantize.FASTOCTREE).save(file, "PNG", optimize=True)
        return base64.b64encode(file.getvalue()).decode()

    svg = path.with_suffix(".svg")
    svg.write_text(re.sub(r"(?<=base64,)[^\"]+", smaller, svg.read_text(encoding="utf-8")), encoding="utf-8")
    return path


def _arcs(axes: Axes, weight: np.ndarray) -> None:
    """Half ellipses between columns; the wider, the more similarity the edges carry together."""
    count = len(weight)
    strongest = np.argsort(-weight, axis=1, kind="stable")[:, : min(ARCS, count - 1)]
    pairs = {(min(i, j), max(i, j)) for i in range(count) for j in strongest[i].tolist() if weight[i, j] > 0}
    top = weight.max() if pairs else 1.0
    for i, j in pairs:
        strength, rise = weight[i, j] / top, 4 / 3 * (j - i) ** 0.5
        curve = Path([(i, 0), (i, rise), (j, rise), (j, 0)], [Path.MOVETO, *3 * [Path.CURVE4]])
        look = {"alpha": 0.25 + 0.5 * strength, "linewidth": 0.4 + 2 * strength}
        axes.add_patch(PathPatch(curve, edgecolor=INK, fill=False, **look))
    axes.set_ylim(0, 1.03 * max((j - i for i, j in pairs), default=1) ** 0.5)
    axes.set_ylabel("alike")
    axes.set_yticks([])
    axes.tick_params(axis="x", length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _dots(
    figure: Figure, axes: Axes, column: np.ndarray, height: np.ndarray, variance: np.ndarray, visits: np.ndarray
) -> None:
    """Tasks within their columns, those of high variance in front; a ring was never rolled out."""
    # Tasks of nearly the same height stand apart: steps of the golden ratio along the order by height.
    place = np.empty(len(height))
    place[np.lexsort((height, column))] = np.arange(len(height)) * 0.6180339887 % 1
    x = column + 0.8 * (place - 0.5)
    area = _area(visits)
    most = max(0.05, float(variance.max(initial=0)))
    norm = PowerNorm(0.5, vmin=0, vmax=most)
    for tried in (False, True):
        which = np.flatnonzero((visits > 0) == tried)
        which = which[np.argsort(variance[which], kind="stable")]
        colour = HEAT(norm(variance[which]))
        face = colour if tried else "none"
        axes.scatter(
            x[which],
            height[which],
            area[which],
            facecolors=face,
            edgecolors=colour,
            linewidths=0.7,
            alpha=0.8,
            rasterized=True,
        )
    ticks = {np.log(t / (1 - t)): f"{100 * t:g} %" for t in TICKS}
    ticks |= {-max(ticks) - BAND / 2: "less", max(ticks) + BAND / 2: "more"}
    low, high = height.min(initial=0) - 0.5, height.max(initial=0) + 0.5
    axes.set_yticks([y for y in ticks if low <= y <= high], [text for y, text in ticks.items() if low <= y <= high])
    axes.set(ylim=(low, high), ylabel="predicted pass rate")
    axes.grid(axis="y", visible=True)
    axes.tick_params(axis="x", length=0)
    bar = figure.colorbar(ScalarMappable(norm, HEAT), ax=axes, pad=0.01, aspect=30, format="%g")
    bar.set_ticks([v for v in (0, 0.01, 0.05, 0.1, 0.15, 0.2, 0.25) if v <= most])
    bar.outline.set_visible(False)
    bar.set_label("predicted variance")
    ring = Line2D(
        [], [], marker="o", linestyle="", markerfacecolor="none", markeredgecolor=NEUTRAL, markersize=_area(0) ** 0.5
    )
    discs = [Line2D([], [], marker="o", linestyle="", color=NEUTRAL, markersize=_area(v) ** 0.5) for v in (1, 9, 36)]
    labels = ["never rolled out", "once", "9 times", "36 times"]
    figure.legend([ring, *discs], labels, loc="outside upper left", ncols=4, handletextpad=0.2)


def _area(visits: Any) -> Any:
    """Size of a dot in square points."""
    return 5 + 5 * visits**0.5
