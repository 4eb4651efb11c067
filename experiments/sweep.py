"""Asks one question: the same arms at every value of one setting. `python -m experiments.sweep --workdir=DIR`.

Every value is a run of `experiments.ablate` in a folder of its own, with its page; finished arms are kept. Here comes
what they say together: what each arm gains on uniform against the value and, where arms may choose it (a learning
rate), what each gains at its own best, chosen on one half of the evaluation tasks and scored on the other.
"""

import json
import time
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from ml_collections import ConfigDict

from envsched_jax.train import build
from experiments import ablate, common, figures, loop, paired, report
from experiments.headline import BASE

SUITE_SECTIONS = ("world", "audit", "graph", "policy", "warm_start", "evaluation")  # all that a suite is made of


def at_value(config: ConfigDict, label: str) -> ConfigDict:
    """The configuration of `experiments.ablate` at one value of the question.

    Raises:
      ValueError: the value names a setting that there is not.
    """
    changed = config.base.copy_and_resolve_references()
    for section, settings in config.axis[label].items():
        unknown = [key for key in settings if section not in changed or key not in changed[section]]
        if unknown:
            raise ValueError(f"config.axis.{label}.{section}: the base has no {', '.join(unknown)}")
        changed[section].update(settings)
    return changed


def read_curves(folder: Path) -> dict[str, loop.Curves]:
    """The curves of every arm in the workdir of an ablation."""
    stored = {path.stem: json.loads(path.read_text()) for path in sorted((folder / "arms").glob("*.json"))}
    return {name: loop.Curves(**arm["curves"]) for name, arm in stored.items()}


def compare(curves: dict[str, loop.Curves]) -> dict[str, Any]:
    """What every arm gains on uniform at one value, at equal rollouts and paired by seed.

    Returns:
      By arm ``final`` and ``mean`` (score minus uniform's, at the end and on average over the run), ``informative``
      (share of groups), ``share_of_oracle`` (of the oracle's gain in the final score, where the arm ``oracle`` is
      there and gains) and ``rollouts`` to uniform's best as a share of the budget, with intervals.
    """
    base = curves[BASE]
    grid = paired.rollout_grid(base)
    level = ablate.best_of(np.asarray(base.success, np.float64))
    reference = paired.at_equal_rollouts(base, grid)
    scores = {name: paired.at_equal_rollouts(arm, grid) for name, arm in curves.items()}
    room = (scores["oracle"] - reference)[-1].mean() if "oracle" in scores else 0.0
    found: dict[str, Any] = {}
    for name, arm in curves.items():
        spent, reached = ablate.rollouts_to(
            level, np.asarray(arm.success, np.float64), np.asarray(arm.rollouts, np.float64), float(grid[-1])
        )
        gain = scores[name] - reference
        found[name] = {
            "score": paired.spread(scores[name][-1]),
            "final": paired.spread(gain[-1]),
            "mean": paired.spread(gain.mean(axis=0)),
            "informative": paired.spread(np.asarray(arm.informative, np.float64).mean(axis=0)),
            "share_of_oracle": float(gain[-1].mean() / room) if room > 0 else None,
            "rollouts": paired.spread(spent / grid[-1]),
            "reached": int(reached.sum()),
        }
    return found


def at_best(values: dict[str, dict[str, loop.Curves]]) -> dict[str, Any]:
    """Every arm at the value that is best for it: the same choice for all, without the luck of choosing.

    The value is the one with the best final score on one half of the evaluation tasks, on average over seeds; scores
    are those of the other half.
    """
    found: dict[str, Any] = {}
    scored: dict[str, np.ndarray] = {}
    for name in next(iter(values.values())):
        final = {label: np.asarray(curves[name].success[-1], np.float64) for label, curves in values.items()}
        chooser, scorer = ablate.halves(next(iter(final.values())).shape[1])
        best = max(final, key=lambda label: float(final[label][:, chooser].mean()))
        scored[name] = final[best][:, scorer].mean(axis=1)
        # At an end of the axis the best may lie beyond it.
        found[name] = {"value": best, "at_an_end": best in (next(iter(values)), next(reversed(values)))}
    for name, score in scored.items():
        found[name] |= {"score": paired.spread(score), "final": paired.spread(score - scored[BASE])}
    return found


def main(config: ConfigDict, workdir: Path) -> None:
    """Runs every value and leaves summary.json, a table, a figure and a page in the workdir."""
    started = time.time()
    suite, made_of = None, None
    values: dict[str, dict[str, loop.Curves]] = {}
    for label in config.order:
        changed = at_value(config, label)
        sections = common.plain({name: changed[name] for name in SUITE_SECTIONS})
        if sections != made_of:
            suite, made_of = build.build_suite(changed), sections
        print(f"{config.question} = {label}", flush=True)
        ablate.main(changed, workdir / label, suite)
        values[label] = {name: arm for name, arm in read_curves(workdir / label).items() if name in changed.arms}
    summary: dict[str, Any] = {"values": {label: compare(curves) for label, curves in values.items()}}
    if config.tune:
        summary["at_best"] = at_best(values)
    common.write_summary(workdir, "sweep", config, summary, started)
    text = table(config.question, summary)
    (workdir / "table.md").write_text(text, encoding="utf-8")
    draw(config.question, summary["values"], workdir / "figures" / "gains.png")
    print(f"{text}\nreport: {report.build(workdir)}")


def _cell(entry: dict[str, Any], sign: bool = True) -> str:
    mean, (low, high) = entry["mean"], entry["ci"]
    return f"{mean:{'+' if sign else ''}.3f} [{low:.3f}, {high:.3f}]"


def table(question: str, summary: dict[str, Any]) -> str:
    """The results in Markdown: a row per value and arm."""
    lines = [
        f"| {question} | arm | final score | minus uniform | on average | informative | rollouts to uniform's best |",
        "|---|---|---|---|---|---|---|",
    ]
    for label, arms in summary["values"].items():
        for name, arm in arms.items():
            gains = ("–", "–") if name == BASE else (_cell(arm["final"]), _cell(arm["mean"]))
            lines.append(
                f"| {label} | `{name}` | {arm['score']['mean']:.3f} | {gains[0]} | {gains[1]} |"
                f" {arm['informative']['mean']:.1%} | {arm['rollouts']['mean']:.0%} ({arm['reached']}) |"
            )
    if "at_best" in summary:
        lines += [
            "",
            "| arm | its best value | final score, other tasks | minus uniform at its best |",
            "|---|---|---|---|",
        ]
        for name, arm in summary["at_best"].items():
            edge = " (an end)" if arm["at_an_end"] else ""
            gain = "–" if name == BASE else _cell(arm["final"])
            lines.append(f"| `{name}` | {arm['value']}{edge} | {_cell(arm['score'], sign=False)} | {gain} |")
    return "\n".join(lines) + "\n"


def draw(question: str, values: dict[str, Any], path: Path) -> Path:
    """Gain of every arm on uniform in the final score, with its interval, against the value."""
    arms = next(iter(values.values()))
    with matplotlib.rc_context(figures.STYLE):
        figure = Figure(figsize=(figures.WIDTH, 2.9), layout="constrained")
        axes = figure.add_subplot()
        palette, place = figures.colours(list(arms)), np.arange(len(values), dtype=np.float64)
        for i, name in enumerate(arms):
            if name == BASE:
                continue
            means = np.array([arm[name]["final"]["mean"] for arm in values.values()])
            ends = np.array([arm[name]["final"]["ci"] for arm in values.values()], np.float64)
            axes.errorbar(
                place + 0.06 * (i - len(arms) / 2),
                means,
                np.abs(ends.T - means),
                fmt="o-",
                color=palette[name],
                label=name,
                markersize=4,
                linewidth=1.3,
            )
        axes.axhline(0.0, color=figures.INK, alpha=0.6, linewidth=1, linestyle=":")
        axes.set_xticks(place, list(values))
        axes.set(xlabel=question.replace("_", " "), ylabel="final score minus uniform's")
        figure.legend(loc="outside upper left", ncols=4)
        return figures.save(figure, path)


if __name__ == "__main__":
    common.run_app(main, "configs/sweep.py")
