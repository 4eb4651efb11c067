"""What the figures of a log say, in words: the report, and a recommendation with the thresholds it rests on."""

import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.headroom_estimate import UNIFORM, Figures
from experiments.headroom_replay import ARMS, FEWEST_STEPS, SHIPPED

FEWEST_GROUPS = 100  # the interval of a share is wider than +-10 points below
ENOUGH = 0.7  # informative already: at most 1 / .7 = 1.43 times as many are possible
CROWDED = 0.5  # share of the pool in every batch, above which there is hardly a choice
LITTLE = 1.2  # times as many informative groups as the ceiling allows, at most
BARREN = 0.05  # a ceiling below this: the tasks, not their order, are the trouble
WORTH = 1.1  # times as many informative groups in replay, at least
MOST_ENVIRONMENTS = 12  # rows of the table
WIDE = 110  # characters of a line
NAMES = {
    UNIFORM: "uniform",
    ARMS[0]: "EnvSched's belief",
    ARMS[1]: "without the graph",
    SHIPPED: "as it ships",
}


def percent(entry: Mapping[str, Any] | float) -> str:
    """Returns a share, with its interval if it has one."""
    mean, ci = (entry["mean"], entry["ci"]) if isinstance(entry, Mapping) else (entry, None)
    if mean is None or not math.isfinite(mean):
        return "not known"
    if ci is None or not all(math.isfinite(end) for end in ci):
        return f"{100 * mean:.1f} %"
    return f"{100 * mean:.1f} % [{100 * ci[0]:.1f}, {100 * ci[1]:.1f}]"


def _times(entry: Mapping[str, Any]) -> str:
    if not math.isfinite(entry["mean"]):
        return "not known"
    return f"{entry['mean']:.2f} [{entry['ci'][0]:.2f}, {entry['ci'][1]:.2f}]"


def _points(entry: Mapping[str, Any]) -> str:
    low, high = entry["ci"]
    return f"{100 * entry['mean']:+.1f} points [{100 * low:+.1f}, {100 * high:+.1f}]"


def advise(found: Figures) -> tuple[str, list[str]]:
    """Returns a verdict in one word and what it rests on, in sentences.

    Verdicts: `unknown` (roll out more first), `not_needed`, `no_choice`, `barren`, `little_room`, `untested` (room, but
    no replay), `pays`, `small_gain` and `not_shown` (room, but replay shows no gain).
    """
    was = found["as_it_was"]["informative"]
    share, best = was["mean"], found["ceiling"]
    if was["groups"] < FEWEST_GROUPS:
        return "unknown", [
            f"Roll out more first: {was['groups']} groups of at least two rollouts say too little (asked for: "
            f"{FEWEST_GROUPS}, by which a share is known to about 10 points)."
        ]
    if was["ci"][0] >= ENOUGH:
        return "not_needed", [
            f"Do not bother: {percent(was)} of the groups are informative already. Above {100 * ENOUGH:.0f} % not even "
            f"a perfect scheduler could give more than {1 / ENOUGH:.2f} times as many."
        ]
    if found["batch"] > CROWDED * found["pool"]:
        return "no_choice", [
            f"Nothing to choose: a step takes {found['batch']} of {found['pool']} tasks. Above {100 * CROWDED:.0f} % "
            "of the pool there is hardly a choice; scheduling needs a larger pool, or smaller batches."
        ]
    if best is None:
        return "unknown", [
            "Roll out more first: rewards are not all or nothing, and tasks are repeated too rarely to tell a task "
            "that is often informative from a lucky one."
        ]
    if best["ci"][1] < BARREN:
        return "barren", [
            f"Change the tasks, not their order: even a perfect scheduler would reach {percent(best)} only. Nearly all "
            "tasks always fail or always pass."
        ]
    if best["ci"][1] < LITTLE * share:
        return "little_room", [
            f"Little to gain: a perfect scheduler would have {percent(best)} informative groups instead of "
            f"{percent(was)}, less than {LITTLE} times as many."
        ]
    room = (
        f"There is room: a perfect scheduler would have {percent(best)} informative groups instead of {percent(was)}"
        + (f", {best['mean'] / share:.1f} times as many." if share > 0 else ".")
    )
    replay = found["replay"]
    if replay is None:
        return "untested", [
            room,
            f"What a belief would reach of it the log cannot say: that needs informative groups and at least "
            f"{FEWEST_STEPS} steps.",
        ]
    ours, base = replay[ARMS[0]], replay[UNIFORM]["informative"]["mean"]
    low, ratio = base + ours["gain"]["ci"][0], ours["informative"]["mean"] / base if base > 0 else math.nan
    told = (
        f"In replay EnvSched's belief picks {percent(ours['informative'])} where uniform selection has "
        f"{percent(base)}: {_points(ours['gain'])}, {ratio:.2f} times as many."
    )
    graph = replay["graph_gain"]
    if graph["ci"][0] > 0:
        about = f"The graph adds {_points(graph)} to own records and environment means."
    else:
        about = f"The graph adds nothing that this log could show ({_points(graph)})"
        tip = found["graph_from"] != "the pool"
        about += "; it knew ids and environments only: give --pool=FILE with texts and tools." if tip else "."
    if low > WORTH * base:
        needed = ours["rollouts_needed"]
        return "pays", [
            room,
            told,
            f"It pays: as many informative groups for {_times(needed)} of the rollouts (asked for: at least {WORTH} "
            "times as many informative groups at the lower end of the interval).",
            about,
        ]
    if ours["gain"]["ci"][0] > 0:
        return "small_gain", [room, told, f"A gain, but perhaps less than {WORTH} times: worth a short trial.", about]
    return "not_shown", [
        room,
        told,
        "Replay shows no gain: what is known of these tasks does not tell which are next. More repeats of each task, "
        "or a pool with texts and tools, could change that; without, do not expect one.",
        about,
    ]


def facts(found: Figures) -> list[tuple[str, str]]:
    """Returns the report's lines: what, and how much."""
    was, best, replay = found["as_it_was"], found["ceiling"], found["replay"]
    size = f"mostly {found['group_size']} rollouts" if found["group_size"] else "single rollouts"
    steps = "no steps" if found["steps"] is None else f"{found['steps']} steps"
    lines = [
        (
            "log",
            f"{found['rollouts']:,} rollouts, {found['groups']:,} groups, {found['tasks']:,} tasks, "
            f"{found['environments']} environments, {steps}",
        ),
        ("group, batch", f"{size}; {found['batch']} tasks of {found['pool']:,} a step"),
        ("informative as it was", percent(was["informative"])),
        ("never / always passes", f"{percent(was['never_passes'])} / {percent(was['always_passes'])} of the groups"),
    ]
    if was["equal_between"] > 0:
        lines.append(("equal, in between", f"{percent(was['equal_between'])} of the groups"))
    if best is not None:
        lines.append(("ceiling", f"{percent(best)}, the best {percent(best['share'])} of the tasks at every step"))
    if replay is not None:
        lines.append(
            (
                "replay",
                f"{replay['decisions']} choices of {percent(replay['selectivity'])} of the {replay['candidates']:.0f} "
                f"groups of the next {replay['window']} steps",
            )
        )
        for arm in (UNIFORM, *ARMS):
            needed = "" if arm == UNIFORM else f", rollouts needed: {_times(replay[arm]['rollouts_needed'])}"
            lines.append((f"  {NAMES[arm]}", percent(replay[arm]["informative"]) + needed))
        if replay["ceiling"] is not None:
            lines.append(("  perfect", percent(replay["ceiling"])))
        free = replay["free"]
        lines.append(
            (
                "  free choice",
                f"{percent(free['supported'])} of {free['picks']:,} picks were logged soon after (uniform: "
                f"{percent(free['supported_uniform'])}); of these informative: {percent(free['informative'])}",
            )
        )
    return lines


def notes(found: Figures) -> list[str]:
    """Returns what a reader must know to trust the figures or not."""
    told = []
    if found["single"]:
        told.append(f"{found['single']:,} groups of one rollout cannot be informative and are left out of all shares.")
    if found["steps"] is None:
        told.append("The log has no steps: groups were taken in random order, as of one policy that does not change.")
    if found["steps_joined"] > 1:
        told.append(f"Each step here is {found['steps_joined']} of the log's.")
    if found["graph_from"] != "the pool":
        told.append("No --pool: the graph knows ids and environments, not texts and tools.")
    if not found["binary"]:
        told.append("Rewards are not all or nothing: the ceiling rests on how often a task's groups were informative.")
    told.append(
        "The ceiling takes pass rates for one hill beside tasks that never or always pass, and tasks without a rollout "
        "for tasks like the others. Both fail where the log itself was a selection."
    )
    whole = found["ceiling_of_all"]
    if whole is not None and max(whole["ci"][0] - whole["seen"]["ci"][1], whole["seen"]["ci"][0] - whole["ci"][1]) > 0:
        told.append(
            f"The fitted pass rates would make {percent(whole)} of all groups informative; {percent(whole['seen'])} "
            "were: rollouts of a group are not independent, or rates moved within a stretch. So far off is the ceiling."
        )
    if found["replay"] is not None:
        told.append(
            "Replay changes no policy: what training on other tasks would have done is not in a log. Groups up to "
            f"{found['replay']['window']} steps after a choice stand for it, which is against the belief. As it ships "
            "EnvSched also explores and keeps quotas, which no replay can reward."
        )
    return told


def environments(found: Figures) -> list[tuple[str, ...]]:
    """Returns a table of the environments with most groups: name, tasks, groups, informative, never, always passes."""
    rows = sorted(found["as_it_was"]["environments"].items(), key=lambda item: (-item[1]["groups"], item[0]))
    return [
        (
            name,
            str(row["tasks"]),
            str(row["groups"]),
            percent(row),
            percent(row["never_passes"]),
            percent(row["always_passes"]),
        )
        for name, row in rows[:MOST_ENVIRONMENTS]
    ]


HEADERS = ("environment", "tasks", "groups", "informative", "never passes", "always passes")


def text(found: Figures) -> str:
    """Returns the report for a terminal."""
    verdict, reasons = advise(found)
    lines = facts(found)
    width = max(len(name) for name, _ in lines)
    table = [HEADERS, *environments(found)]
    widths = [max(len(row[i]) for row in table) for i in range(len(HEADERS))]
    left_out = found["environments"] - len(table) + 1
    return "\n".join(
        [
            *(f"{name:<{width}}  {value}" for name, value in lines),
            "",
            *("  ".join(cell.ljust(size) for cell, size in zip(row, widths, strict=True)).rstrip() for row in table),
            *([f"and {left_out} more"] if left_out > 0 else []),
            "",
            *(textwrap.fill(f"note: {note}", WIDE, subsequent_indent="  ") for note in notes(found)),
            "",
            textwrap.fill(f"{verdict.replace('_', ' ')}: {' '.join(reasons)}", WIDE),
        ]
    )


def markdown(found: Figures, name: str) -> str:
    """Returns the report as a page."""
    verdict, reasons = advise(found)

    def table(rows: Sequence[Sequence[str]]) -> list[str]:
        return ["| " + " | ".join(cell.strip().replace("|", "\\|") for cell in row) + " |" for row in rows]

    return "\n".join(
        [
            f"# Would scheduling pay? {name}",
            "",
            f"**{verdict.replace('_', ' ').capitalize()}.** {' '.join(reasons)}",
            "",
            *table([("what", "how much"), ("---", "---"), *facts(found)]),
            "",
            *table([HEADERS, ("---",) * len(HEADERS), *environments(found)]),
            "",
            *(f"- {note}" for note in notes(found)),
            "",
        ]
    )
