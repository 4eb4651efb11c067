"""Throughput of propagation beside the alternatives and beside the copy bandwidth of the machine.

    python -m experiments.bench_propagation --config=configs/bench_propagation.py:cpu --workdir=W

Every variant computes `rounds` rounds of `x <- (1 - a) A x + a s` on the same graph. On one graph the variants take
turns, so that a disturbance meets all of them, and the figures are medians over the turns; warm-up is apart.
`gb_per_s` counts compulsory bytes only: index and weight of every edge, and x, s and the result once. The copy
bandwidth is that of scaling an array of as many bytes, by the same library in the same process, so it includes what
caches give; `copy_gb_per_s` of the summary is that of main memory. Compare variants within one run, not between runs.

A finished graph is kept in `W/results` and not measured again while the settings and the variants stay the same.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter
from ml_collections import ConfigDict

from experiments import bench_variants, common, figures
from experiments.bench_variants import Problem, Runner

CONFIG = "configs/bench_propagation.py"
PAUSE = 0.02  # seconds between two turns: threads of one library spin a while before they leave the cores to another
FEWEST = 3  # turns of every variant
TURN = tuple[float, float]  # wall and CPU seconds

Row = dict[str, Any]


def turn(run: Callable[[], Any]) -> TURN:
    """Wall and CPU seconds of one call; CPU seconds are those of all threads of this process."""
    time.sleep(PAUSE)
    cpu, wall = time.process_time(), time.perf_counter()
    run()
    return time.perf_counter() - wall, time.process_time() - cpu


def take_turns(runners: Mapping[str, Runner], repeats: int, seconds: float) -> dict[str, list[TURN]]:
    """Times all runners in turn: `repeats` times each, or until one has used up its seconds, but at least thrice."""
    turns: dict[str, list[TURN]] = {name: [] for name in runners}
    for count in range(max(repeats, FEWEST)):
        for name, run in runners.items():
            if count < FEWEST or sum(wall for wall, _ in turns[name]) < seconds:
                turns[name].append(turn(run))
    return turns


def copy_bandwidth(size: int, repeats: int = 7) -> float:
    """Bytes read and written per nanosecond when an array of `size` bytes is scaled; the best of `repeats`."""
    rounds = max(4, 2**28 // size)  # enough work in one call that starting it does not count

    def scale(x: jax.Array, factor: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, rounds, lambda _, y: factor * y, x)

    run = jax.jit(scale, donate_argnums=0)  # in place: fresh memory would be timed, page by page
    x, factor = jnp.ones(max(1, size // 4), jnp.float32), jnp.float32(1.0)
    walls = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        x = run(x, factor).block_until_ready()
        walls.append(time.perf_counter() - started)
    return 2.0 * size * rounds / min(walls[1:]) / 1e9  # the first call compiles


def compulsory_bytes(p: Problem) -> int:
    """What one round must move at least: index and weight of every edge, x, the signal and the result."""
    return p.table.size * (p.table.itemsize + p.weight.itemsize) + 3 * p.signal.size * p.signal.itemsize


def measure(names: Sequence[str], setting: Mapping[str, Any], *, repeats: int, seconds: float) -> list[Row]:
    """One row per variant for one graph; `setting` holds the arguments of `bench_variants.problem`."""
    p = bench_variants.problem(**setting)
    want = bench_variants.exact(p)
    runners: dict[str, Runner] = {}
    first, error = {}, {}
    for name in common.bar(names, "warm-up"):
        started = time.perf_counter()
        runners[name] = bench_variants.VARIANTS[name](p)
        error[name] = float(np.abs(np.asarray(runners[name]()) - want).max() / np.abs(want).max())
        first[name] = time.perf_counter() - started
    turns = take_turns(runners, repeats, seconds)
    size = compulsory_bytes(p)
    copy = copy_bandwidth(size)
    shown = {name: setting[name] for name in ("nodes", "k", "relations", "channels", "rounds", "order")}
    rows = []
    for name in names:
        wall, cpu = (np.asarray(x) / p.rounds for x in zip(*turns[name], strict=True))
        speed = size / float(np.median(wall)) / 1e9
        rows.append(
            {
                "variant": name,
                **shown,
                "ms_per_round": 1e3 * float(np.median(wall)),
                "ms_per_round_min": 1e3 * float(wall.min()),
                "cpu_ms_per_round": 1e3 * float(np.median(cpu)),
                "gb_per_s": speed,
                "copy_gb_per_s": copy,
                "fraction_of_copy": speed / copy,
                "max_rel_error": error[name],
                "first_call_s": first[name],
                "turns": len(turns[name]),
            }
        )
    return rows


def _run_or_keep(path: Path, mark: Any, run: Callable[[], list[Row]]) -> list[Row]:
    """Rows from their file if they are finished there and of the same mark, else by `run`."""
    mark = common.plain(mark)
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        kept = {}
    if kept.get("mark") != mark:
        kept = {"mark": mark, "rows": run()}
        common.write_json(path, kept)
    return list(kept["rows"])


def bench(
    workdir: Path,
    *,
    variants: Sequence[str],
    nodes: Sequence[int],
    rounds: Sequence[int],
    orders: Sequence[str],
    k: int,
    relations: int,
    channels: int,
    restart: float,
    seed: int,
    repeats: int,
    seconds: float,
    copy_mib: int,
) -> dict[str, Any]:
    """Measures everything and returns the summary; see `configs/bench_propagation.py` for the arguments."""
    if len(nodes) != len(rounds):
        raise ValueError(f"one number of rounds per size: {len(nodes)} sizes, {len(rounds)} rounds")
    left_out = {name: reason for name in variants if (reason := bench_variants.why_not(name)) is not None}
    for name, reason in left_out.items():
        print(f"left out: {name} ({reason})", flush=True)
    names = [name for name in variants if name not in left_out]
    graph = {"k": k, "relations": relations, "channels": channels, "restart": restart, "seed": seed}
    rows: list[Row] = []
    for size, count in zip(nodes, rounds, strict=True):
        for order in orders:
            setting = {"nodes": size, "rounds": count, "order": order, **graph}
            path = workdir / "results" / f"{size}.{order}.json"
            mark = [names, setting, repeats, seconds, common.commit(), common.versions()]
            run = partial(measure, names, setting, repeats=repeats, seconds=seconds)
            found = _run_or_keep(path, mark, run)
            print(table(found), flush=True)
            rows += found
    with common.MetricWriter(workdir, events=False) as writer:
        for row in rows:
            labels = {name: row[name] for name in ("variant", "order")}
            writer.write(row["nodes"], {n: v for n, v in row.items() if n not in labels}, **labels)
    return {"copy_gb_per_s": copy_bandwidth(copy_mib * 2**20), "rows": rows, "left_out": left_out}


# ------------------------------------------------------------------------------------------------ what is shown


def table(rows: Sequence[Row]) -> str:
    """The rows of one graph as text, `diffuse` being 1 in the column of ratios."""
    first = rows[0]
    base = next((row["ms_per_round"] for row in rows if row["variant"] == "diffuse"), float("nan"))
    lines = [
        f"{first['nodes']:,} nodes, {first['relations']} x {first['k']} neighbours, {first['channels']} channels, "
        f"order {first['order']}; copy {first['copy_gb_per_s']:.1f} GB/s",
        f"{'variant':20} {'ms':>9} {'min':>9} {'cpu ms':>9} {'ratio':>6} {'GB/s':>6} {'of copy':>7} {'error':>8}",
    ]
    for row in rows:
        times = " ".join(f"{row[name]:9.3f}" for name in ("ms_per_round", "ms_per_round_min", "cpu_ms_per_round"))
        lines.append(
            f"{row['variant']:20} {times} {row['ms_per_round'] / base:6.2f} {row['gb_per_s']:6.1f} "
            f"{row['fraction_of_copy']:7.2f} {row['max_rel_error']:8.1e}"
        )
    return "\n".join(lines)


def draw(workdir: Path, rows: Sequence[Row]) -> None:
    """Writes `figures/throughput.png` (edges per second) and `figures/roofline.png` (bytes beside a copy)."""
    orders = list(dict.fromkeys(row["order"] for row in rows))
    with matplotlib.rc_context(figures.STYLE):
        for name, label in (("throughput", "million edges per second"), ("roofline", "GB/s, compulsory bytes")):
            figure = Figure(figsize=(2 * figures.WIDTH, 3.4), layout="constrained")
            panels = figure.subplots(1, len(orders), squeeze=False, sharey=True)[0]
            for axes, order in zip(panels, orders, strict=True):
                _panel(axes, [row for row in rows if row["order"] == order], name)
                axes.set(title="numbered at random" if order == "random" else f"numbered by {order}", xlabel="nodes")
            panels[0].set_ylabel(label)
            figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper")
            figures.save(figure, workdir / "figures" / f"{name}.png")


def _panel(axes: Axes, rows: Sequence[Row], name: str) -> None:
    def value(row: Row) -> float:
        edges = row["nodes"] * row["k"] * row["relations"]
        return row["gb_per_s"] if name == "roofline" else edges / row["ms_per_round"] / 1e3

    names = list(dict.fromkeys(row["variant"] for row in rows))
    others = (name for name in names if name != "diffuse")
    palette = {"diffuse": figures.ACCENT} | dict(zip(others, figures.OTHERS, strict=False))
    for variant in names:
        mine = [row for row in rows if row["variant"] == variant]
        ours = variant.startswith("diffuse")
        how: dict[str, Any] = {"marker": "o" if ours else ".", "linewidth": 2.2 if ours else 1.2}
        axes.plot([r["nodes"] for r in mine], list(map(value, mine)), color=palette[variant], label=variant, **how)
    if name == "roofline":
        roof = {row["nodes"]: row["copy_gb_per_s"] for row in rows}
        axes.plot(list(roof), list(roof.values()), color=figures.INK, linestyle=":", label="copy of as many bytes")
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(sorted({row["nodes"] for row in rows}))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FuncFormatter(figures.short))
        axis.set_minor_formatter(NullFormatter())


def main(config: ConfigDict, workdir: Path) -> None:
    """Runs the program: `metrics.jsonl`, `summary.json`, figures and finished graphs go to `workdir`."""
    started = time.time()
    summary = bench(workdir, **common.plain(config))
    common.write_summary(workdir, "bench_propagation", config, summary, started)
    draw(workdir, summary["rows"])
    print(f"copy of main memory {summary['copy_gb_per_s']:.1f} GB/s; figures: {workdir / 'figures'}")


if __name__ == "__main__":
    common.run_app(main, CONFIG)
