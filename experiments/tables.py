"""The arms of an ablation as tables for papers and spreadsheets, from its summary: Markdown, CSV and LaTeX.

Differences are paired by seed, intervals are 95 %; a value that a summary does not have is a dash, or empty in CSV.
"""

import csv
import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from experiments.figures import short
from experiments.headline import BASE, MAIN, known, number, percent

Summary = Mapping[str, Any]
NOTHING = "–"
ENDS = ("", "_low", "_high")


class Column(NamedTuple):
    """One measure of every arm."""

    key: str  # in CSV; its interval is in <key>_low and <key>_high
    title: str
    read: Callable[[Summary, str], Any]  # summary, arm -> {mean, ci}, a number, a text or None
    show: Callable[[float], str] = number
    sign: bool = False  # whether a gain gets a plus
    interval: bool = True  # whether CSV has its ends


def _arm(key: str) -> Callable[[Summary, str], Any]:
    return lambda summary, name: summary["arms"][name].get(key)


def _final(summary: Summary, name: str) -> Any:
    arm = summary["arms"][name]
    return {"mean": arm["score_mean"][-1], "ci": arm["score_ci"][-1] if arm.get("score_ci") else None}


def _reached(summary: Summary, name: str) -> str:
    goal = summary["arms"][name]["rollouts_to_uniform_best"]
    return f"{goal['reached']}/{goal['seeds']}"


def _difference(section: str, key: str) -> Callable[[Summary, str], Any]:
    return lambda summary, name: summary.get(section, {}).get(name, {}).get(key)


_FINAL, _MEAN = "score_final_minus_uniform", "score_mean_minus_uniform"
RESULTS = (
    Column("score_final", "final score", _final),
    Column("final_minus_uniform", f"minus {BASE}", _difference("paired", _FINAL), sign=True),
    Column("score_average", "average over the run", _arm("score_average")),
    Column("informative_share", "informative groups", _arm("informative_share"), percent, interval=False),
    Column("rollouts_to_uniform_best", f"rollouts to {BASE}'s best", _arm("rollouts_to_uniform_best"), short),
    Column("reached", "reached", _reached, interval=False),
)
AGAINST_BASE = (
    Column("final_minus_uniform_at_tokens", "final, equal tokens", _difference("paired_tokens", _FINAL), sign=True),
    Column("average_minus_uniform", "average", _difference("paired", _MEAN), sign=True),
    Column("average_minus_uniform_at_tokens", "average, equal tokens", _difference("paired_tokens", _MEAN), sign=True),
    Column("tasks_minus_uniform", "final, unseen tasks", _difference("paired", "score_tasks_minus_uniform"), sign=True),
    Column(
        "envs_minus_uniform", "final, unseen environments", _difference("paired", "score_envs_minus_uniform"), sign=True
    ),
)
MAIN_AGAINST = (
    Column("envsched_minus_final", "final", _difference("envsched_minus", "final"), sign=True),
    Column("envsched_minus_average", "average", _difference("envsched_minus", "mean"), sign=True),
    Column(
        "envsched_minus_final_at_tokens",
        "final, equal tokens",
        _difference("envsched_minus_tokens", "final"),
        sign=True,
    ),
    Column(
        "envsched_minus_average_at_tokens",
        "average, equal tokens",
        _difference("envsched_minus_tokens", "mean"),
        sign=True,
    ),
)
SECTIONS = {
    "Arms": RESULTS,
    f"Arm minus {BASE}": AGAINST_BASE,
    f"{MAIN} minus arm": MAIN_AGAINST,
}


def parts(column: Column, summary: Summary, name: str) -> tuple[str, str]:
    """A value and its interval as texts, ("+0.067", "[0.059, 0.076]"); a dash and "" where there is none."""
    entry = column.read(summary, name)
    if isinstance(entry, str):
        return entry, ""
    mean, ci = (entry.get("mean"), entry.get("ci")) if isinstance(entry, Mapping) else (entry, None)
    if mean is None:
        return NOTHING, ""
    text = ("+" if column.sign and mean > 0 else "") + column.show(mean)
    return text, f"[{column.show(ci[0])}, {column.show(ci[1])}]" if known(ci) else ""


class Section(NamedTuple):
    """One table: arms by columns; a cell is (value, interval) as texts."""

    columns: list[str]
    rows: dict[str, list[tuple[str, str]]]


def sections(summary: Summary) -> dict[str, Section]:
    """The tables by title; columns and rows without any value are left out, and tables without any row."""
    found = {}
    for title, columns in SECTIONS.items():
        cells = {name: [parts(column, summary, name) for column in columns] for name in summary["arms"]}
        kept = [i for i in range(len(columns)) if any(row[i][0] != NOTHING for row in cells.values())]
        rows = {name: [row[i] for i in kept] for name, row in cells.items() if any(v != NOTHING for v, _ in row)}
        if rows:
            found[title] = Section([columns[i].title for i in kept], rows)
    return found


def markdown(summary: Summary) -> str:
    """All sections as Markdown tables."""
    lines = []
    for title, (columns, rows) in sections(summary).items():
        lines += [f"**{title}**, mean and 95 % interval over {summary['seeds']} seeds", ""]
        lines += [f"| arm | {' | '.join(columns)} |", "|---" * (len(columns) + 1) + "|"]
        lines += [
            f"| {name} | {' | '.join(' '.join(cell).strip() for cell in cells)} |" for name, cells in rows.items()
        ]
        lines.append("")
    return "\n".join(lines)


def latex(summary: Summary) -> str:
    """All sections as `tabular` environments, which need no package."""
    lines = []
    for title, (columns, rows) in sections(summary).items():
        head = " & ".join(_escape(text) for text in ("arm", *columns))
        lines += [f"% {title}, mean and 95 % interval over {summary['seeds']} seeds"]
        lines += [rf"\begin{{tabular}}{{l{'r' * len(columns)}}}", r"\hline", rf"{head} \\", r"\hline"]
        for name, cells in rows.items():
            texts = [_escape(value) + (rf" {{\scriptsize {_escape(ci)}}}" if ci else "") for value, ci in cells]
            texts = [text.replace("-", "$-$") for text in texts]
            lines.append(rf"{' & '.join([_escape(name), *texts])} \\")
        lines += [r"\hline", r"\end{tabular}", ""]
    return "\n".join(lines)


def _escape(text: str) -> str:
    for character in "&%_#":
        text = text.replace(character, f"\\{character}")
    return text


def comma_separated(summary: Summary) -> str:
    """One row per arm with every column of every section, unrounded, and the ends of its interval."""
    columns = [column for columns in SECTIONS.values() for column in columns]
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(["arm", *(column.key + end for column in columns for end in ENDS[: 3 if column.interval else 1])])
    for name in summary["arms"]:
        cells = []
        for column in columns:
            entry = column.read(summary, name)
            mean, ci = (entry.get("mean"), entry.get("ci")) if isinstance(entry, Mapping) else (entry, None)
            cells += [mean, *(ci or (None, None))] if column.interval else [mean]
        writer.writerow([name, *cells])
    return file.getvalue()


def write(workdir: str | Path, summary: Summary) -> list[Path]:
    """Writes `arms.md`, `arms.csv` and `arms.tex` to `workdir/tables`.

    Args:
      workdir: the run's folder.
      summary: of an ablation, also one of an earlier version, which has fewer differences.

    Returns:
      The three paths.
    """
    folder = Path(workdir) / "tables"
    folder.mkdir(parents=True, exist_ok=True)
    texts = {"arms.md": markdown(summary), "arms.csv": comma_separated(summary), "arms.tex": latex(summary)}
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]
