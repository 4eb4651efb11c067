"""The parts of the page for runs of the training loop: ablations and single runs."""

import html
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments import common, figures, figures_belief, tables
from experiments.headline import BASE, MAIN, number
from experiments.page import figure, panel, table

TRAINING = {"reward_mean": "mean reward", "entropy": "entropy", "loss": "loss", "grad_norm": "gradient norm"}
EQUAL = (
    "At equal rollouts, unless it says at equal tokens: then two arms are compared up to the tokens that every seed of"
    " both, and uniform on average, had. An average over the run is one over rollouts or tokens, not over steps."
)
BELIEFS = (
    "What {name} predicts of every task when its first seed ends. A dot is a task: its height is the predicted pass"
    " rate (log odds), its colour the predicted variance of rewards (grey: nothing to learn), its size how often it was"
    " rolled out; rings never were, what is known of them is borrowed. Columns are environments, the hardest on the"
    " left; bars count their picks; arcs join each with the two environments whose tasks are most like its own."
)


def ablate(workdir: Path, summary: Mapping[str, Any]) -> list[str]:
    """The parts of the page for an ablation: tables, which are also written for papers, and figures."""
    arms = summary["arms"]
    tables.write(workdir, summary)
    (_, results), *differences = tables.sections(summary).items()
    extra = {
        name: (number(a.get("spearman_variance"), 2), number(a.get("seconds_per_step"), 2)) for name, a in arms.items()
    }
    rows = {name: [*cells, *extra[name]] for name, cells in _cells(results).items()}
    headers = ("arm", *results.columns, "Spearman of v", "s / step")
    folder = workdir / "figures"
    best = summary["uniform_best"]
    drawn = [
        figure(
            figures.learning_curves(arms, folder / f"learning_{x}.png", x, best),
            f"Held-out score against {x}, 95 % bands.",
        )
        for x in ("rollouts", "tokens", "steps")
        if all(x in arm for arm in arms.values())
    ]
    if any(len(arm.get("informative_curve", [])) for arm in arms.values()):
        path = figures.informative_share(arms, folder / "informative.png")
        drawn.append(figure(path, "Share of groups with differing rewards: the ones an update learns from."))
    if any(arm["rollouts_to_uniform_best"]["mean"] is not None for arm in arms.values()):
        path = figures.rollouts_to_best(arms, folder / "rollouts_to_best.png")
        drawn.append(
            figure(path, "Rollouts to uniform's best score of the same seed, 95 % intervals; fewer is better.")
        )
    title = f"Arms <small class='note'>mean and 95 % interval over {summary['seeds']} seeds</small>"
    drawn += _calibration(workdir, list(arms)) + _schedules(workdir, list(arms)) + beliefs(workdir, list(arms))
    parts = [f"<h2>{title}</h2>", table(headers, rows), "<h2>Curves</h2>", panel(drawn)]
    for title, section in differences:
        note = "<small class='note'>difference of held-out scores, paired by seed</small>"
        parts.append(f"<h2>{html.escape(title)} {note}</h2>")
        parts.append(table(("arm", *section.columns), _cells(section)))
    return [*parts, f'<p class="note">{EQUAL}</p>'] if differences else parts


def _cells(section: tables.Section) -> dict[str, list[str]]:
    """The cells of a table as HTML."""
    return {
        name: [f"{value} <small>{ci}</small>" if ci else value for value, ci in row]
        for name, row in section.rows.items()
    }


def _arrays(path: Path) -> dict[str, np.ndarray]:
    try:
        with path.open("rb") as file, np.load(file) as stored:
            return dict(stored)
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise common.RunError(f"{path}: not readable ({error})") from error


def _schedules(workdir: Path, arms: Sequence[str]) -> list[str]:
    counts: dict[str, np.ndarray] = {}
    env_ids: list[str] = []
    for name in sorted(arms, key=lambda arm: (arm != MAIN, arm != BASE)):
        path = workdir / f"schedule_{name}.npz"
        if not path.exists() or len(counts) == 3:
            continue
        stored = _arrays(path)
        counts[name] = stored["counts"]
        env_ids = [str(env) for env in stored["env_ids"]] if "env_ids" in stored else env_ids
    if not counts or min(c.size for c in counts.values()) == 0:
        return []
    path = figures.schedule(counts, workdir / "figures" / "schedule.png", env_ids)
    caption = "Who was scheduled when: share of the picks per environment and evaluation interval."
    return [figure(path, caption, wide=len(counts) > 1)]


def beliefs(workdir: Path, arms: Sequence[str]) -> list[str]:
    """The figure of what envsched believes at its end, or else the first of the arms that left a belief; none: [].

    Raises:
      common.RunError: the file of the belief is damaged.
    """
    for name in sorted(arms, key=lambda arm: arm != MAIN):
        path = workdir / f"beliefs_{name}.npz"
        if path.exists():
            drawn = figures_belief.beliefs(_arrays(path), workdir / "figures" / "beliefs.png")
            return [figure(drawn, BELIEFS.format(name=name), wide=True)]
    return []


def _calibration(workdir: Path, arms: Sequence[str]) -> list[str]:
    found: dict[str, list[list[Any]]] = {}
    for row in common.read_metrics(workdir):
        pair = [row.get("predicted_informative_share"), row.get("informative_share")]
        if None not in pair and row.get("arm") in arms:
            found.setdefault(row["arm"], []).append(pair)
    if not found:
        return []
    pairs = {name: np.asarray(points, np.float64) for name, points in found.items()}
    path = figures.calibration(pairs, workdir / "figures" / "calibration.png", arms=arms)
    return [figure(path, "Predicted against realised share of informative groups; the dotted line is perfect.")]


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
    shown = [str(row["arm"]) for row in rows[:1] if "arm" in row]
    drawn += _calibration(workdir, shown) + _schedules(workdir, shown) + beliefs(workdir, shown)
    return ["<h2>Curves</h2>", panel(drawn), "<h2>Time</h2>", table(("part", "seconds per step"), times, "narrow")]
