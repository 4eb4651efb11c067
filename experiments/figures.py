"""Figures of a run, each written as PNG for papers and as SVG that takes the colours of the page it stands in.

Every function draws one figure, writes `path` (a PNG) and an SVG beside it, and returns `path`. Figures are made
without pyplot, so nothing is left behind in the process.
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

Arms = Mapping[str, Mapping[str, Any]]

INK = "#24292f"  # every text and axis; the SVG has currentColor in its place
WIDTH = 4.6  # inches, half of the report's page; twice that for a row of panels
LEGEND = 1.75  # inches, a column of a legend with the longest name that is not cut
ACCENT = "#3b82f6"
NEUTRAL = "#808891"
STRONG = ("envsched", "uniform")  # drawn thicker, in front
FEW = 8  # arms up to which every curve has a band
# Bright enough for a dark page, dark enough for a white one.
OTHERS = tuple(
    "#e07b1a #2e9e5b #9b6cd6 #d9534f #1a9ba1 #d0609f #8f8f2a #a0785a #c9a400 #7cb342 #5c6bc0 #ff8a65 "
    "#26c6da #ba4fc8 #8fb996 #ad1457".split()
)
STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.labelsize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.facecolor": "none",
    "axes.linewidth": 0.8,
    "grid.color": INK,
    "grid.alpha": 0.12,
    "grid.linewidth": 0.7,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "lines.linewidth": 1.5,
    "svg.fonttype": "none",
    "text.parse_math": False,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), INK),
}


_NO_METADATA: Any = dict.fromkeys(("Date", "Creator", "Type", "Format"))


def colours(names: Sequence[str]) -> dict[str, str]:
    """One colour per arm, the same in every figure: `envsched` stands out, `uniform` is grey."""
    others = iter(OTHERS * (1 + len(names) // len(OTHERS)))
    fixed = {"envsched": ACCENT, "uniform": NEUTRAL}
    return {name: fixed[name] if name in fixed else next(others) for name in names}


def floats(values: Any) -> np.ndarray:
    """Numbers of a summary as float64 of the same shape, null as NaN."""
    return np.asarray(np.asarray(values, dtype=object), dtype=np.float64)


def short(value: float, _position: int = 0) -> str:
    """A number for an axis or a bar: 950, 12k, 1.5M."""
    for size, unit in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.3g}{unit}"
    return f"{value:.3g}"


def save(figure: Figure, path: str | Path) -> Path:
    """Writes a figure as PNG and, beside it, as SVG; returns the path of the PNG."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=160, facecolor="white")
    with matplotlib.rc_context({"svg.hashsalt": path.stem}):
        figure.savefig(path.with_suffix(".svg"), transparent=True, metadata=_NO_METADATA)
    return path


def inline_svg(path: str | Path, label: str) -> str:
    """The SVG beside the PNG `path` as an element for an HTML page: no addresses, page font, page text colour.

    Args:
      path: what a function of this module returned.
      label: what the figure shows, for screen readers.
    """
    text = Path(path).with_suffix(".svg").read_text(encoding="utf-8")
    text = text[text.index("<svg") :]
    head, body = text.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', head)
    body = body.replace("xlink:href", "href").replace(INK, "currentColor")
    body = re.sub(r"<g id=\"[^\"]*\"", "<g", body)
    body = re.sub(r"font: (\d+ )?([\d.]+px) [^;\"]*", _font, body)
    label = label.replace("&", "&amp;").replace("<", "&lt;").replace('"', "&quot;")
    return f'<svg role="img" aria-label="{label}" {box.group() if box else ""}>{body.strip()}'


def _font(found: re.Match[str]) -> str:
    return f"font-size: {found.group(2)}" + (f"; font-weight: {found.group(1).strip()}" if found.group(1) else "")


def _axes(width: float = WIDTH, height: float = 2.9) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _clip(name: str) -> str:
    return name if len(name) <= 20 else f"{name[:19]}…"


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    if not labels:
        return
    labels = list(map(_clip, labels))
    columns = max(2, min(4, 76 // (6 + max(map(len, labels)))))
    figure.set_figheight(figure.get_figheight() + 0.16 * ((len(labels) - 1) // columns))  # the axes keep their height
    figure.legend(handles, labels, loc="outside upper left", ncols=columns, handlelength=1.4, columnspacing=1.2)


def _line(axes: Axes, name: str, colour: str, x: np.ndarray, y: np.ndarray, band: np.ndarray | None = None) -> None:
    strong = name in STRONG
    dashes = "--" if name == "uniform" else "-"
    front = 3.0 if strong else 2.0
    axes.plot(x, y, dashes, color=colour, label=name, linewidth=2.0 if strong else 1.3, zorder=front)
    if band is not None and np.isfinite(band).any():
        alpha = 0.2 if strong else 0.1
        axes.fill_between(x, band[:, 0], band[:, 1], color=colour, alpha=alpha, linewidth=0, zorder=front - 1)


def learning_curves(arms: Arms, path: str | Path, x: str = "steps", uniform_best: float | None = None) -> Path:
    """Held-out score with 95 % bands over seeds, against `x`: a curve of each arm, `steps`, `rollouts` or `tokens`.

    Of many arms only envsched and uniform have a band: more would hide the curves.
    """
    with matplotlib.rc_context(STYLE):
        figure, axes = _axes()
        for name, colour in colours(list(arms)).items():
            arm = arms[name]
            shown = arm.get("score_ci") is not None and (len(arms) <= FEW or name in STRONG)
            band = floats(arm["score_ci"]).reshape(-1, 2) if shown else None
            _line(axes, name, colour, floats(arm[x]), floats(arm["score_mean"]), band)
        if uniform_best is not None:
            axes.axhline(uniform_best, color=INK, alpha=0.6, linewidth=1, linestyle=":", label="best of uniform")
        axes.set(xlabel="rollouts, discarded ones included" if x == "rollouts" else x, ylabel="held-out score")
        axes.xaxis.set_major_formatter(FuncFormatter(short))
        _legend(figure, axes)
        return save(figure, path)


def series(rows: Sequence[Mapping[str, Any]], names: Mapping[str, str], path: str | Path, ylabel: str) -> Path:
    """Metrics of a single run over its steps; `names` maps a metric to what the legend, if needed, calls it."""
    with matplotlib.rc_context(STYLE):
        figure, axes = _axes(height=2.4)
        for (metric, label), colour in zip(names.items(), (ACCENT, *OTHERS), strict=False):
            points = [(row["step"], row[metric]) for row in rows if row.get(metric) is not None]
            if points:
                axes.plot(*np.asarray(points, np.float64).T, color=colour, label=label)
        axes.set(xlabel="steps", ylabel=ylabel)
        axes.xaxis.set_major_formatter(FuncFormatter(short))
        if len(names) > 1:
            _legend(figure, axes)
        return save(figure, path)


def informative_share(arms: Arms, path: str | Path) -> Path:
    """Share of groups whose rewards differ, per evaluation interval, over steps."""
    with matplotlib.rc_context(STYLE):
        figure, axes = _axes()
        for name, colour in colours(list(arms)).items():
            curve = floats(arms[name].get("informative_curve", []))
            steps = floats(arms[name]["steps"])
            count = min(len(curve), len(steps))
            if count:
                _line(axes, name, colour, steps[-count:], curve[-count:])
        axes.set(xlabel="steps", ylabel="informative groups")
        axes.yaxis.set_major_formatter(FuncFormatter(_percent))
        axes.set_ylim(bottom=0)
        axes.xaxis.set_major_formatter(FuncFormatter(short))
        _legend(figure, axes)
        return save(figure, path)


def _percent(value: float, _position: int = 0) -> str:
    return f"{100 * value:.3g} %"


def _bars(axes: Axes, values: Mapping[str, tuple[float, np.ndarray, str]], palette: Mapping[str, str]) -> None:
    """Horizontal bars from the top down; a value is (length, [low, high], text behind the bar)."""
    names = list(values)
    reach = max((np.nanmax([length, *band]) for length, band, _ in values.values()), default=1.0)
    for row, name in enumerate(names):
        length, band, text = values[name]
        axes.barh(row, length, height=0.66, color=palette[name], alpha=0.85)
        if np.isfinite(band).all():
            axes.plot(band, [row, row], color=INK, linewidth=1.2, solid_capstyle="butt")
        end = np.nanmax([length, *band])
        axes.text(end + 0.015 * reach, row, text, va="center", fontsize=8)
    axes.set_yticks(range(len(names)), list(map(_clip, names)))
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, 1.22 * reach if reach > 0 else 1)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
    axes.xaxis.set_major_formatter(FuncFormatter(short))


def rollouts_to_best(arms: Arms, path: str | Path) -> Path:
    """Rollouts until an arm reaches the best score of uniform, with intervals and reached/seeds; the least on top."""
    found: dict[str, tuple[float, np.ndarray, str]] = {}
    for name, arm in arms.items():
        entry = arm.get("rollouts_to_uniform_best") or {}
        if entry.get("mean") is not None:
            text = f"{short(entry['mean'])}  ({entry['reached']}/{entry['seeds']})"
            found[name] = (float(entry["mean"]), floats(entry.get("ci") or [None, None]), text)
    with matplotlib.rc_context(STYLE):
        figure, axes = _axes(height=float(np.clip(0.6 + 0.27 * len(found), 2.2, 5.0)))
        _bars(axes, dict(sorted(found.items(), key=lambda item: item[1][0])), colours(list(arms)))
        axes.set_xlabel("rollouts (seeds that reached it)")
        return save(figure, path)


def schedule(counts: Mapping[str, np.ndarray], path: str | Path, env_ids: Sequence[str] = ()) -> Path:
    """Who was scheduled when: share of the picks per environment (rows) and evaluation interval (columns), per arm.

    Args:
      counts: picks per arm, i32[evaluations, E]; the first arm orders the environments, the earliest scheduled on top.
      path: the PNG to write.
      env_ids: names of the environments, shown where they fit.
    """
    shares = {name: c / np.maximum(c.sum(axis=1, keepdims=True), 1) for name, c in counts.items()}
    first = next(iter(shares.values()))
    when = np.arange(len(first)) @ first / np.maximum(first.sum(axis=0), 1e-9)
    order = np.argsort(np.where(first.sum(axis=0) > 0, when, np.inf), kind="stable")
    top = max(float(np.quantile(share, 0.99)) for share in shares.values()) or 1.0
    tint = LinearSegmentedColormap.from_list("tint", [(0.23, 0.51, 0.96, 0.0), (0.23, 0.51, 0.96, 1.0)])
    with matplotlib.rc_context(STYLE | {"axes.grid": False}):
        height = float(np.clip(0.9 + 0.13 * len(order), 2.9, 6.1))
        figure = Figure(figsize=(WIDTH * min(2, len(shares)), height), layout="constrained")
        panels = figure.subplots(1, len(shares), sharey=True, squeeze=False)[0]
        for axes, (name, share) in zip(panels, shares.items(), strict=True):
            image = axes.imshow(share[:, order].T, aspect="auto", cmap=tint, vmin=0, vmax=top, interpolation="nearest")
            axes.set(title=name, xlabel="evaluation")
            axes.tick_params(axis="y", labelsize=7, length=0)
            axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
        named = len(env_ids) == len(order) <= 40
        panels[0].set_yticks(range(len(order)) if named else [], [env_ids[i] for i in order] if named else [])
        panels[0].set_ylabel("" if named else f"{len(order)} environments")
        bar = figure.colorbar(image, ax=panels, format=FuncFormatter(_percent), shrink=0.8, pad=0.01)
        bar.outline.set_visible(False)
        return save(figure, path)


def calibration(
    pairs: Mapping[str, np.ndarray], path: str | Path, bins: int = 8, arms: Sequence[str] | None = None
) -> Path:
    """Predicted against realised share of informative groups: one dot per step, the line joins means of equal bins.

    Args:
      pairs: per arm f64[steps, 2], predicted and realised.
      path: the PNG to write.
      bins: number of bins with equally many steps.
      arms: all arms of the run in their order, to give each its colour of the other figures; by default those of pairs.
    """
    palette = colours(list(pairs if arms is None else arms))
    with matplotlib.rc_context(STYLE):
        figure, axes = _axes()
        axes.plot([0, 1], [0, 1], color=INK, alpha=0.5, linewidth=1, linestyle=":")
        for name, found in pairs.items():
            points, colour = found[np.argsort(found[:, 0])], palette[name]
            axes.plot(*points.T, "o", color=colour, markersize=2.5, alpha=0.2, markeredgewidth=0)
            means = np.array([part.mean(axis=0) for part in np.array_split(points, min(bins, len(points)))])
            axes.plot(*means.T, "o-", color=colour, markersize=4.5, label=name)
        axes.set(xlabel="predicted informative share", ylabel="realised informative share")
        limits = np.concatenate([np.ravel(p) for p in pairs.values()]) if pairs else np.array([0.0, 1.0])
        edge = float(np.clip(1.05 * limits.max(), 0.1, 1.0))
        axes.set(xlim=(0, edge), ylim=(0, edge))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(FuncFormatter(_percent))
        _legend(figure, axes)
        return save(figure, path)


def replay_bars(datasets: Mapping[str, Mapping[str, Any]], path: str | Path) -> Path:
    """Live groups per 1,000 rollouts with intervals: one panel per data set, one bar per scheduler, the best on top."""
    names = sorted({name for data in datasets.values() for name in data["arms"]})
    palette = colours(names)
    columns = min(2, len(datasets))
    rows = -(-len(datasets) // columns)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH * columns, rows * (0.7 + 0.24 * len(names))), layout="constrained")
        panels = figure.subplots(rows, columns, squeeze=False).ravel()
        for axes, (title, data) in zip(panels, datasets.items(), strict=False):
            live = {name: arm["live_per_1k"] for name, arm in data["arms"].items() if arm.get("live_per_1k")}
            ranked = sorted((entry["mean"], name) for name, entry in live.items() if entry["mean"] is not None)
            bars = {
                name: (mean, floats(live[name].get("ci") or [None] * 2), short(mean)) for mean, name in ranked[::-1]
            }
            _bars(axes, bars, palette)
            axes.set(title=title, xlabel="live groups per 1,000 rollouts")
        for axes in panels[len(datasets) :]:
            axes.set_visible(False)
        return save(figure, path)


def _columns(count: int, height: float) -> tuple[Figure, list[Axes]]:
    """Panels in rows of at most three, those left over hidden."""
    columns = min(3, count)
    rows = -(-count // columns)
    figure = Figure(figsize=(max(WIDTH, 2 * WIDTH * columns / 3), rows * height), layout="constrained")
    panels = list(figure.subplots(rows, columns, squeeze=False).ravel())
    for axes in panels[count:]:
        axes.set_visible(False)
    return figure, panels[:count]


def reliability(datasets: Mapping[str, Mapping[str, Any]], quantity: str, path: str | Path) -> Path:
    """Reliability diagrams, a panel per data set and a curve per arm: what was predicted against what came.

    Args:
      datasets: `arms.<name>.reliability.<quantity>`: {`tasks`, `predicted`, `realised`}, one entry per bin.
      quantity: `mean` or `p_informative`.
      path: the PNG to write.
    """
    palette = colours(sorted({name for data in datasets.values() for name in data["arms"]}))
    with matplotlib.rc_context(STYLE):
        figure, panels = _columns(len(datasets), 2.7)
        for axes, (title, data) in zip(panels, datasets.items(), strict=True):
            axes.plot([0, 1], [0, 1], color=INK, alpha=0.5, linewidth=1, linestyle=":")
            for name, arm in data["arms"].items():
                bins = (arm.get("reliability") or {}).get(quantity)
                if bins:
                    _line(axes, name, palette[name], floats(bins["predicted"]), floats(bins["realised"]))
            axes.set(title=title, xlim=(0, 1), ylim=(0, 1), xlabel="predicted")
        panels[0].set_ylabel("realised")
        legend(figure, panels)
        return save(figure, path)


def degenerate(datasets: Mapping[str, Mapping[str, Any]], path: str | Path, window: int, close: float) -> Path:
    """Predicted minus realised share of degenerate groups by window of steps; the band is plus and minus `close`."""
    palette = colours(sorted({name for data in datasets.values() for name in data["arms"]}))
    with matplotlib.rc_context(STYLE):
        figure, panels = _columns(len(datasets), 2.4)
        for axes, (title, data) in zip(panels, datasets.items(), strict=True):
            axes.axhspan(-close, close, color=NEUTRAL, alpha=0.2, linewidth=0)
            for name, arm in data["arms"].items():
                curves = arm.get("degenerate") or {"predicted": [], "realised": []}
                gap = floats(curves["predicted"]) - floats(curves["realised"])
                if np.isfinite(gap).any():
                    _line(axes, name, palette[name], window * (np.arange(len(gap)) + 0.5), gap)
            axes.set(title=title, xlabel="steps")
        panels[0].set_ylabel("predicted - realised")
        legend(figure, panels)
        return save(figure, path)


def legend(figure: Figure, panels: Sequence[Axes]) -> None:
    """One legend over all panels, in as many columns as the figure is wide; the panels keep their height."""
    found = {label: line for axes in panels for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    if found:
        columns = int(figure.get_figwidth() / LEGEND)
        figure.set_figheight(figure.get_figheight() + 0.18 * (1 + (len(found) - 1) // columns))
        figure.legend(found.values(), map(_clip, found), loc="outside upper left", ncols=columns, handlelength=1.4)
