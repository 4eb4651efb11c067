"""The parts of the page for runs over many settings: one question at several values, and the phase diagram."""

import html
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.headline import BASE, MAIN, Headline, number, percent, side
from experiments.page import figure, panel, spread, table

ABOUT = {
    "optimizer": "optimiser",
    "batch_size": "batch size",
    "degenerate": "share of degenerate groups at the start",
    "structure": "share of the variance of difficulty that structure explains",
}


def _count(signs: Sequence[int], of: str, where: str) -> Headline:
    """What gains and losses beyond their intervals say; ``signs`` are those of ``headline.side``."""
    gains, losses, total = signs.count(1), signs.count(-1), len(signs)
    verdict = "better" if gains == total else "not-better" if not gains else "mixed"
    if not total:
        return "unknown", f"This run does not compare {MAIN} with {BASE}", ""
    title = f"EnvSched gains on uniform in {gains} of {total} {of}{where}"
    text = f"A gain or a loss is one whose 95 % interval, paired by seed, leaves out zero. Losses: {losses} of {total}."
    return verdict, title, text


def judge_sweep(summary: Mapping[str, Any]) -> Headline:
    """In how many values EnvSched ends above uniform, as ``headline.ablate``."""
    arms = [value[MAIN] for value in summary["values"].values() if MAIN in value]
    verdict, title, text = _count([side(arm["final"]["ci"]) for arm in arms], "values", " in the final score")
    best = summary.get("at_best", {}).get(MAIN)
    if best is not None:
        gain = best["final"]
        text += (
            f" With its own best value for every arm, chosen on other tasks than it is scored on, the difference is"
            f" {number(gain['mean'])} ({number(gain['ci'][0])} to {number(gain['ci'][1])})."
        )
    return verdict, title, text


def sweep(workdir: Path, summary: Mapping[str, Any]) -> list[str]:
    """Table and figure of a question, and the way to the page of each value."""
    headers = ("arm", "final score", f"minus {BASE}", "average over the run", "informative", "rollouts to its best")
    drawn = workdir / "figures" / "gains.png"
    parts = [panel([figure(drawn, "Final score minus uniform's, paired by seed, against the value.")])]
    for label, arms in summary["values"].items():
        rows = {
            name: [
                spread(arm["score"]),
                "–" if name == BASE else spread(arm["final"], sign=True),
                "–" if name == BASE else spread(arm["mean"], sign=True),
                percent(arm["informative"]["mean"]),
                spread(arm["rollouts"], show=percent),
            ]
            for name, arm in arms.items()
        }
        text = html.escape(label)
        parts += [f'<h2>{text} <small class="note"><a href="{text}/report.html">its page</a></small></h2>']
        parts += [table(headers, rows)]
    if "at_best" in summary:
        rows = {
            name: [
                html.escape(arm["value"]) + (" (an end of the sweep)" if arm["at_an_end"] else ""),
                spread(arm["score"]),
                "–" if name == BASE else spread(arm["final"], sign=True),
            ]
            for name, arm in summary["at_best"].items()
        }
        parts += ["<h2>Each arm at its own best</h2>", table(("arm", "value", "final score", f"minus {BASE}"), rows)]
    return parts


def judge_phase(summary: Mapping[str, Any]) -> Headline:
    """In how many cells EnvSched gains over the run, every arm at its own best learning rate."""
    arms = [cell["at_own_rates"]["arms"].get(MAIN) for cell in summary["cells"]]
    signs = [side(arm["average"]["ci"]) for arm in arms if arm is not None]
    return _count(signs, "regimes", ", every arm at its own best learning rate")


def phase(workdir: Path, summary: Mapping[str, Any]) -> list[str]:
    """Figures and marginal tables of a phase diagram."""
    folder = workdir / "figures"
    shown = {
        "gain_average_by_rate": "Average score over the run minus uniform's, against the learning rate of all arms.",
        "gain_average_own": "The same by regime, every arm at its own best learning rate.",
        "gain_average_middle": "The same by regime, all arms at the learning rate in the middle.",
    }
    drawn = [figure(folder / f"{name}.png", text, wide=True) for name, text in shown.items()]
    parts = ["<h2>Where it pays</h2>", panel(drawn)]
    for how, title in (("at_equal_rates", "equal learning rates"), ("at_own_rates", "own learning rates")):
        for axis, values in summary["marginal"][how].items():
            names = [name for name in next(iter(values.values())) if name != BASE]
            rows = {
                value: [spread(arms[name]["average"], sign=True) for name in names] for value, arms in values.items()
            }
            note = f"average score over the run minus uniform's, at {title}"
            parts.append(f'<h2>{ABOUT.get(axis, axis.replace("_", " "))} <small class="note">{note}</small></h2>')
            parts.append(table(("", *names), rows))
    return parts
