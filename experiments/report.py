"""Figures and one HTML page from a finished run: `python -m experiments.report --workdir=W` writes `W/report.html`.

The page stands alone: figures are inline SVG, nothing is fetched, nothing needs JavaScript, light and dark follow the
reader's system. It opens with what the numbers say about EnvSched against uniform, also when that is "not better".
"""

import argparse
import html
import zipfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments import common, figures, headline, replay_score
from experiments.headline import BASE, MAIN, known, number, percent

Cell = str
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
TRAINING = {"reward_mean": "mean reward", "entropy": "entropy", "loss": "loss", "grad_norm": "gradient norm"}
STYLE = """
:root{color-scheme:light dark;--ink:#1f2328;--soft:#656d76;--line:#d8dee4;--page:#fff;--wash:#f6f8fa;--mark:#e8f0fe;
--good:#1a7f37;--bad:#b35900}
@media(prefers-color-scheme:dark){:root{--ink:#dfe4ea;--soft:#939ba5;--line:#30363d;--page:#0f1318;--wash:#171c23;
--mark:#1b2a44;--good:#4ac26b;--bad:#e3944a}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:62rem;padding:1.6rem 1.2rem 3rem;background:var(--page);color:var(--ink);
font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
.kind{margin:0;color:var(--soft);font-size:.8rem;letter-spacing:.06em;text-transform:uppercase}
h1{margin:.1rem 0 .5rem;font-size:1.45rem;line-height:1.25;letter-spacing:-.01em;text-wrap:balance}
h1.better{color:var(--good)}h1.not-better{color:var(--bad)}
h2{margin:2rem 0 .5rem;font-size:1.05rem}
p{margin:.4rem 0;max-width:46rem}
.note,figcaption,footer{color:var(--soft);font-size:.85rem}
.figures{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,24rem),1fr));gap:1.2rem 1.6rem}
figure{margin:0;min-width:0}figure.wide{grid-column:1/-1}
figure svg{display:block;width:100%;height:auto;font-family:inherit}
figcaption{margin-top:.2rem}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-size:.84rem;font-variant-numeric:tabular-nums}
th,td{padding:.28rem .5rem;text-align:right;white-space:nowrap;border-bottom:1px solid var(--line)}
th{font-weight:600;color:var(--soft);vertical-align:bottom;white-space:normal}
th:first-child,td:first-child{white-space:normal;text-align:left;padding-left:.4rem}
tr.envsched td{background:var(--mark)}
td small{color:var(--soft);font-size:.9em}
table.narrow{width:auto;min-width:16rem}
details{margin:.8rem 0;border:1px solid var(--line);border-radius:6px;padding:.4rem .8rem;background:var(--wash)}
summary{cursor:pointer;font-weight:600;font-size:.9rem}
details table{margin:.5rem 0}details.config td{white-space:normal;overflow-wrap:anywhere;text-align:left}
footer{margin-top:2rem;border-top:1px solid var(--line);padding-top:.6rem;overflow-wrap:anywhere}
"""


def spread(entry: Any, sign: bool = False, show: Callable[[float], str] = number) -> Cell:
    """Mean and interval of `{mean, ci}` (or of a bare number) for a table cell; a missing mean is a dash."""
    mean, ci = (entry.get("mean"), entry.get("ci")) if isinstance(entry, Mapping) else (entry, None)
    if mean is None:
        return "–"
    text = ("+" if sign and mean > 0 else "") + show(mean)
    return f"{text} <small>[{show(ci[0])}, {show(ci[1])}]</small>" if known(ci) else text


def table(headers: Sequence[str], rows: Mapping[str, Sequence[Cell]], look: str = "") -> str:
    """An HTML table with a row per arm; cells are HTML, names and headers are text."""
    head = "".join(f"<th>{html.escape(name)}</th>" for name in headers)
    lines = []
    for name, cells in rows.items():
        mark = ' class="envsched"' if name == MAIN else ""
        texts = "".join(f"<td>{cell}</td>" for cell in cells)
        lines.append(f"<tr{mark}><td>{html.escape(name)}</td>{texts}</tr>")
    data = "\n".join(lines)
    body = f"<thead><tr>{head}</tr></thead><tbody>\n{data}\n</tbody>"
    return f'<div class="scroll"><table class="{look}">{body}</table></div>'


def figure(path: Path, caption: str, wide: bool = False) -> str:
    """A figure element with the SVG that lies beside `path`."""
    mark = ' class="wide"' if wide else ""
    return f"<figure{mark}>{figures.inline_svg(path, caption)}<figcaption>{html.escape(caption)}</figcaption></figure>"


def _panel(items: Sequence[str]) -> str:
    return f'<div class="figures">{"".join(items)}</div>' if items else ""


def ablate(workdir: Path, summary: Mapping[str, Any]) -> list[str]:
    """The parts of the page for an ablation: table and figures."""
    arms = summary["arms"]
    paired = summary.get("paired", {})
    rows = {}
    for name, arm in arms.items():
        goal = arm["rollouts_to_uniform_best"]
        ci = arm["score_ci"][-1] if arm.get("score_ci") else None
        rows[name] = [
            spread({"mean": arm["score_mean"][-1], "ci": ci}),
            "–" if name == BASE else spread(paired.get(name, {}).get("score_final_minus_uniform"), sign=True),
            spread(goal, show=figures.short),
            f"{goal['reached']}/{goal['seeds']}",
            percent(arm.get("informative_share")),
            number(arm.get("spearman_variance"), 2),
            number(arm.get("seconds_per_step"), 2),
        ]
    headers = ("arm", "final score", "minus uniform", "rollouts to uniform's best", "reached", "informative groups")
    folder = workdir / "figures"
    best = summary["uniform_best"]
    drawn = [
        figure(
            figures.learning_curves(arms, folder / f"learning_{x}.png", x, best),
            f"Held-out score against {x}, 95 % bands.",
        )
        for x in ("rollouts", "steps")
    ]
    if any(len(arm.get("informative_curve", [])) for arm in arms.values()):
        path = figures.informative_share(arms, folder / "informative.png")
        drawn.append(figure(path, "Share of groups with differing rewards: the ones an update learns from."))
    if any(arm["rollouts_to_uniform_best"]["mean"] is not None for arm in arms.values()):
        path = figures.rollouts_to_best(arms, folder / "rollouts_to_best.png")
        drawn.append(figure(path, "Rollouts to reach the best score of uniform, 95 % intervals; fewer is better."))
    title = f"Arms <small class='note'>mean and 95 % interval over {summary['seeds']} seeds</small>"
    drawn += _schedules(workdir, list(arms)) + _calibration(workdir)
    return [
        f"<h2>{title}</h2>",
        table((*headers, "Spearman of v", "s / step"), rows),
        "<h2>Curves</h2>",
        _panel(drawn),
    ]


def _schedules(workdir: Path, arms: Sequence[str]) -> list[str]:
    counts: dict[str, np.ndarray] = {}
    env_ids: list[str] = []
    for name in sorted(arms, key=lambda arm: (arm != MAIN, arm != BASE)):
        path = workdir / f"schedule_{name}.npz"
        if not path.exists() or len(counts) == 3:
            continue
        try:
            with path.open("rb") as file, np.load(file) as stored:
                counts[name] = stored["counts"]
                env_ids = [str(env) for env in stored["env_ids"]] if "env_ids" in stored else env_ids
        except (OSError, ValueError, zipfile.BadZipFile) as error:
            raise common.RunError(f"{path}: not readable ({error})") from error
    if not counts or min(c.size for c in counts.values()) == 0:
        return []
    path = figures.schedule(counts, workdir / "figures" / "schedule.png", env_ids)
    caption = "Who was scheduled when: share of the picks per environment and evaluation interval."
    return [figure(path, caption, wide=len(counts) > 1)]


def _calibration(workdir: Path) -> list[str]:
    found: dict[str, list[list[Any]]] = {}
    for row in common.read_metrics(workdir):
        pair = [row.get("predicted_informative_share"), row.get("informative_share")]
        if None not in pair:
            found.setdefault(str(row.get("arm", "run")), []).append(pair)
    if not found:
        return []
    pairs = {name: np.asarray(points, np.float64) for name, points in found.items()}
    path = figures.calibration(pairs, workdir / "figures" / "calibration.png")
    return [figure(path, "Predicted against realised share of informative groups; the dotted line is perfect.")]


def replay(workdir: Path, summary: Mapping[str, Any]) -> list[str]:
    """The parts of the page for a replay: comparison, figures, and per data set tables of results and predictions."""
    datasets = summary["datasets"]
    folder = workdir / "figures"
    path = figures.replay_bars(datasets, folder / "replay.png")
    drawn = [figure(path, "Live groups per 1,000 rollouts, 95 % intervals; more is better.", len(datasets) > 1)]
    parts = [*_comparison(summary.get("comparison")), _panel(drawn + _trust(datasets, folder))]
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


def train(workdir: Path, summary: Mapping[str, Any]) -> list[str]:
    """The parts of the page for a training run: curves of its metrics and seconds per step."""
    rows = common.read_metrics(workdir)
    folder = workdir / "figures"
    wanted = (
        ({"score": "all", "score_tasks": "unseen tasks", "score_envs": "unseen environments"}, "held-out score"),
        ({"informative_share": "realised", "predicted_informative_share": "predicted"}, "informative groups"),
        *(({metric: ""}, name) for metric, name in TRAINING.items()),
    )
    drawn = []
    for names, ylabel in wanted:
        if any(row.get(metric) is not None for row in rows for metric in names):
            path = figures.series(rows, names, folder / f"{next(iter(names))}.png", ylabel)
            drawn.append(figure(path, f"{ylabel.capitalize()} over steps."))
    seconds = summary.get("seconds_per_step") or {}
    times = {part: [number(value)] for part, value in seconds.items()} if isinstance(seconds, Mapping) else {}
    drawn += _calibration(workdir) + _schedules(workdir, [str(row["arm"]) for row in rows[:1] if "arm" in row])
    return ["<h2>Curves</h2>", _panel(drawn), "<h2>Time</h2>", table(("part", "seconds per step"), times, "narrow")]


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
    "ablate": ("Ablation", headline.ablate, ablate),
    "replay": ("Replay of recorded outcomes", headline.replay, replay),
    "train": ("Training run", headline.train, train),
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
