"""Figures and one HTML page from a finished run: `python -m experiments.report --workdir=W` writes `W/report.html`.

The page stands alone: figures are inline SVG, nothing is fetched, nothing needs JavaScript, light and dark follow the
reader's system. It opens with what the numbers say about EnvSched against uniform, also when that is "not better".
"""

import argparse
import html
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from experiments import common, figures, headline, replay_score, report_loop, report_sweep
from experiments.headline import number, percent
from experiments.page import STYLE, Cell, figure, panel, spread, table

SPLITS = {
    "never": "never tried",
    "once": "tried once",
    "more": "tried more",
    "unseen_env": "unseen env.",
    "unseen_group": "unseen scenario",
}
RANKINGS = {
    "spearman_variance": "Spearman, variance",
    "spearman_mean": "Spearman, mean",
    "auc_mixed": "AUC, mixed or not",
    "top_quarter": "top quarter / mean",
}
PREDICTIONS = {
    "spearman_mean": "Spearman, mean",
    "spearman_variance": "Spearman, variance",
    "auc_mixed": "AUC, mixed or not, by variance",
    "auc_informative": "AUC, mixed or not, by P(informative)",
    "top_quarter": "top quarter / mean",
    "ece": "ECE of P(informative)",
    "nll": "NLL of P(informative)",
}


def replay(workdir: Path, summary: Mapping[str, Any]) -> list[str]:
    """The parts of the page for a replay: comparison, figures, and per data set tables of results and predictions."""
    datasets = summary["datasets"]
    folder = workdir / "figures"
    path = figures.replay_bars(datasets, folder / "replay.png")
    drawn = [figure(path, "Live groups per 1,000 rollouts, 95 % intervals; more is better.", len(datasets) > 1)]
    parts = [*_comparison(summary.get("comparison")), panel(drawn + _trust(datasets, folder))]
    headers = ("scheduler", "live / 1,000 rollouts", "gap closed", "Spearman of variance, never tried", "ECE", "NLL")
    for name, data in datasets.items():
        rows = {
            arm: [
                spread(entry.get("live_per_1k")),
                percent(entry.get("gap_closed")),
                spread((entry.get("spearman_variance") or {}).get("never")),
                number(entry.get("ece")),
                number(entry.get("nll")),
                number(entry.get("ece_mean")),
                percent(entry.get("degenerate_within")),
                number(entry.get("envs_touched")),
            ]
            for arm, entry in data["arms"].items()
        }
        results = table((*headers, "ECE of the mean", "calibrated windows", "envs touched"), rows)
        parts += [f"<h2>{html.escape(name)}</h2>", results, _rankings(data["arms"])]
        parts.append(_predictions(data.get("prediction") or {}))
    return parts


def _comparison(comparison: Any) -> list[str]:
    """The table over all data sets: gap closed, and the paired gain over the best peer and the best ablation."""
    if not comparison:
        return []
    best = {kind: comparison.get(f"best_{kind}") or "none" for kind in ("peer", "ablation")}
    rows = {
        arm: [
            entry["role"],
            spread(entry["gap_closed"]),
            *(spread(entry[f"over_{kind}"] or {}, sign=True) for kind in best),
        ]
        for arm, entry in comparison["arms"].items()
    }
    title = (
        f"All data sets <small class='note'>mean over {comparison['datasets']} sets, 95 % interval over seeds</small>"
    )
    headers = ("scheduler", "is", "share of the gap closed", *(f"over {best[kind]} (best {kind})" for kind in best))
    return [f"<h2>{title}</h2>", table(headers, rows)]


def _trust(datasets: Mapping[str, Any], folder: Path) -> list[str]:
    """Figures of calibration, where an arm has a belief."""
    arms = [arm for data in datasets.values() for arm in data["arms"].values()]
    if not any(arm.get("reliability") for arm in arms):
        return []
    drawn = []
    for quantity, what in (("mean", "mean reward"), ("p_informative", "P(informative)")):
        path = figures.reliability(datasets, quantity, folder / f"reliability_{quantity}.png")
        drawn.append(
            figure(path, f"Reliability of the {what}: tasks in bins of what was predicted of them.", wide=True)
        )
    path = figures.degenerate(datasets, folder / "degenerate.png", replay_score.WINDOW, replay_score.CLOSE)
    caption = "Share of degenerate groups among the picks, predicted minus realised, by window of steps; band: ±0.05."
    return [*drawn, figure(path, caption, wide=True)]


def _predictions(settings: Mapping[str, Mapping[str, Any]]) -> str:
    """Tables of how well outcomes that were not seen are predicted: a method per row, a setting per column."""
    methods = list(dict.fromkeys(name for found in settings.values() for name in found))
    parts = []
    for metric, title in PREDICTIONS.items():
        rows = {
            m: [number(((s.get(m) or {}).get(metric) or {}).get("mean")) for s in settings.values()] for m in methods
        }
        parts.append(table((title, *settings), rows))
    inside = "".join(parts)
    return f"<details><summary>Prediction of outcomes not seen</summary>{inside}</details>" if methods else ""


def _rankings(arms: Mapping[str, Any]) -> str:
    parts = []
    for metric, title in RANKINGS.items():
        splits = {name: arm[metric] for name, arm in arms.items() if isinstance(arm.get(metric), Mapping)}
        rows = {name: [spread(entry.get(split)) for split in SPLITS] for name, entry in splits.items()}
        rows = {name: cells for name, cells in rows.items() if set(cells) != {"–"}}
        if rows:
            parts.append(table((title, *SPLITS.values()), rows))
    inside = "".join(parts)
    return f"<details><summary>How well the beliefs rank tasks</summary>{inside}</details>" if parts else ""


def _flat(config: Any, prefix: str = "") -> dict[str, list[Cell]]:
    if not isinstance(config, Mapping) or not config:
        return {prefix: [f"<code>{html.escape(repr(config))}</code>"]}
    parts: dict[str, list[Cell]] = {}
    for name, value in config.items():
        parts |= _flat(value, f"{prefix}.{name}" if prefix else str(name))
    return parts


def _provenance(summary: Mapping[str, Any]) -> str:
    seconds = float(summary["wall_s"])
    wall = (
        f"{seconds / 3600:.1f} h"
        if seconds >= 3600
        else f"{seconds / 60:.1f} min"
        if seconds >= 60
        else f"{seconds:.0f} s"
    )
    device = summary["device"]
    device = f"{device['count']} × {device['kind']}" if isinstance(device, Mapping) else str(device)
    software = ", ".join(f"{name} {version}" for name, version in summary.get("versions", {}).items())
    config = table(("key", "value"), _flat(summary["config"]))
    facts = f"commit {summary['commit']} · {device} · {wall} · {software}"
    return (
        f'<details class="config"><summary>Configuration</summary>{config}</details>\n'
        f"<footer>{html.escape(facts)}</footer>"
    )


Headline = Callable[[Mapping[str, Any]], headline.Headline]
Body = Callable[[Path, Mapping[str, Any]], list[str]]
KINDS: dict[str, tuple[str, Headline, Body]] = {
    "ablate": ("Ablation", headline.ablate, report_loop.ablate),
    "replay": ("Replay of recorded outcomes", headline.replay, replay),
    "train": ("Training run", headline.train, report_loop.train),
    "sweep": ("One question", report_sweep.judge_sweep, report_sweep.sweep),
    "phase": ("When scheduling pays", report_sweep.judge_phase, report_sweep.phase),
}


def build(workdir: str | Path) -> Path:
    """Draws the figures of the finished run in `workdir` and writes `workdir/report.html`; returns its path.

    Raises:
      common.RunError: there is no finished run, it is of a kind without a report, or its summary lacks a key.
    """
    workdir = Path(workdir)
    summary = common.read_summary(workdir)
    if summary["kind"] not in KINDS:
        raise common.RunError(f"{workdir}: a run of kind {summary['kind']!r} has no report; kinds: {', '.join(KINDS)}")
    kind, judge, body = KINDS[summary["kind"]]
    try:
        verdict, title, text = judge(summary)
        parts = [*body(workdir, summary), _provenance(summary)]
    except KeyError as error:
        raise common.RunError(f"{workdir / common.SUMMARY}: the key {error} is missing") from error
    page = "\n".join(
        (
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{html.escape(f'{kind}: {title}')}</title><style>{STYLE}</style></head><body>",
            f'<p class="kind">{kind}</p><h1 class="{verdict}">{html.escape(title)}</h1><p>{html.escape(text)}</p>',
            *parts,
            "</body></html>\n",
        )
    )
    path = workdir / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m experiments.report", description="HTML report of a finished run.")
    parser.add_argument("--workdir", required=True, help="folder of the run")
    try:
        print(build(parser.parse_args().workdir))
    except (common.RunError, OSError) as error:
        common.fail(str(error))


if __name__ == "__main__":
    main()
