"""What the numbers of a run say about EnvSched against uniform, in a sentence; also when that is "not better".

A headline is `(verdict, title, text)`, plain text; the verdict is `better`, `mixed`, `not-better` or `unknown`.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

MAIN = "envsched"
BASE = "uniform"
Headline = tuple[str, str, str]


def number(value: Any, digits: int = 3) -> str:
    """A number as text with about `digits` figures: 0.412, 12,345; a dash for null."""
    if value is None or not math.isfinite(value):
        return "–"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.{digits}g}" if abs(value) >= 1 or value == 0 else f"{value:.{digits}f}"


def percent(value: Any) -> str:
    """A share as a whole percentage, a dash for null."""
    return "–" if value is None else f"{100 * value:.0f} %"


def bounds(ci: Sequence[float]) -> str:
    """The two ends of an interval as text."""
    return f"{number(ci[0])} to {number(ci[1])}"


def known(ci: Any) -> TypeGuard[Sequence[float]]:
    """Tells whether an interval exists: with one seed there is none."""
    return bool(ci) and None not in ci


def side(ci: Any) -> int:
    """1 where the whole interval is above zero, -1 where below, 0 where it holds zero or does not exist."""
    return 0 if not known(ci) else (ci[0] > 0) - (ci[1] < 0)


def ablate(summary: Mapping[str, Any]) -> Headline:
    """What an ablation says: (`better`, `not-better` or `unknown`; the headline; the numbers behind it).

    Better means that the 95 % interval of the final score (paired by seed) or of the rollouts to uniform's best score
    shows a gain and neither shows a loss.
    """
    arms, seeds = summary["arms"], summary["seeds"]
    if MAIN not in arms or BASE not in arms:
        return "unknown", f"This run does not compare {MAIN} with {BASE}", f"Its arms: {', '.join(arms)}."
    ours, theirs = (arms[name]["rollouts_to_uniform_best"] for name in (MAIN, BASE))
    final = summary.get("paired", {}).get(MAIN, {}).get("score_final_minus_uniform", {})
    signs = {side(final.get("ci")), _sooner(ours.get("ci"), theirs.get("ci"))}
    facts = [_rollouts_fact(ours, theirs, summary["uniform_best"])]
    if final.get("mean") is not None:
        word = "higher" if final["mean"] >= 0 else "lower"
        interval = f" (95 % interval {bounds(final['ci'])}, paired by seed)" if known(final.get("ci")) else ""
        facts.append(f"Its final score is {number(abs(final['mean']))} {word} than that of uniform{interval}.")
    shares = [arms[name].get("informative_share") for name in (MAIN, BASE)]
    if None not in shares:
        facts.append(f"{percent(shares[0])} of its groups were informative, {percent(shares[1])} of uniform's.")
    if not known(final.get("ci")) and not known(ours.get("ci")):
        return "unknown", "This run cannot tell whether EnvSched beats uniform: no intervals", " ".join(facts)
    if signs in ({1}, {0, 1}):
        return "better", _better_title(ours, theirs), " ".join(facts)
    reason = {frozenset({0}): "no difference outside the intervals", frozenset({1, -1}): "one gain and one loss"}
    return (
        "not-better",
        f"EnvSched does not beat uniform in this run: {reason.get(frozenset(signs), 'it is worse')} ({seeds} seeds)",
        " ".join(facts),
    )


def _sooner(ours: Any, theirs: Any) -> int:
    """1 where the interval of our rollouts lies below theirs, -1 above, else 0."""
    if not known(ours) or not known(theirs):
        return 0
    return (ours[1] < theirs[0]) - (ours[0] > theirs[1])


def _better_title(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    if _sooner(ours.get("ci"), theirs.get("ci")) == 1:
        fewer = 1 - ours["mean"] / theirs["mean"]
        return f"EnvSched beats uniform: the same score with {percent(fewer)} fewer rollouts"
    return "EnvSched beats uniform: a higher final score at the same number of steps"


def _rollouts_fact(ours: Mapping[str, Any], theirs: Mapping[str, Any], best: Any) -> str:
    goal = f"the best score of uniform ({number(best)})"
    if not ours["reached"]:
        return f"EnvSched never reached {goal} in {ours['seeds']} seeds."
    change = round(100 * (ours["mean"] / theirs["mean"] - 1)) if theirs["mean"] else 0
    compared = f": {abs(change)} % {'fewer' if change < 0 else 'more'}" if change else ""
    missed = ours["reached"] < ours["seeds"] or theirs["reached"] < theirs["seeds"]
    budget = " A seed that does not reach it counts with its whole budget." if missed else ""
    return (
        f"EnvSched reached {goal} after {number(ours['mean'])} rollouts in {ours['reached']} of {ours['seeds']} seeds, "
        f"uniform after {number(theirs['mean'])} in {theirs['reached']} of {theirs['seeds']}{compared}.{budget}"
    )


def replay(summary: Mapping[str, Any]) -> Headline:
    """What a replay says, as `ablate`; better on a data set means that the whole interval lies above uniform."""
    better, facts, compared = [], [], 0
    for name, data in summary["datasets"].items():
        arms = data["arms"]
        if MAIN not in arms or BASE not in arms:
            continue
        compared += 1
        ours, theirs = arms[MAIN]["live_per_1k"], arms[BASE]["live_per_1k"]
        gain = arms[MAIN].get("gain")
        sign = side(gain["ci"]) if gain else _sooner(theirs.get("ci"), ours.get("ci"))
        better += [name] if sign == 1 else []
        closed = arms[MAIN].get("gap_closed")
        gap = f", {percent(closed)} of the gap to the oracle" if closed is not None else ""
        facts.append(
            f"{name}: {number(ours['mean'])} live groups per 1,000 rollouts, uniform {number(theirs['mean'])}{gap}"
        )
    text = "; ".join(facts) + "."
    if not compared:
        return "unknown", f"This replay does not compare {MAIN} with {BASE}", ""
    if not better:
        return "not-better", f"EnvSched does not beat uniform on {_of('any', compared)}", text
    title = f"EnvSched finds more live groups than uniform on {_of(len(better), compared)}"
    if len(better) == compared:
        return "better", title, text
    return "mixed", f"{title} ({', '.join(better)}); on the rest it does not beat uniform", text


def _of(count: Any, total: int) -> str:
    return f"{count} of {total} recorded data set{'s' if total > 1 else ''}"


def train(summary: Mapping[str, Any]) -> Headline:
    """What a single training run says; it has nothing to compare with, and the text says so."""
    title = f"Best held-out score {number(summary['score_best'])} after {number(summary['rollouts'])} rollouts"
    text = (
        f"The final score is {number(summary['score_final'])} after {number(summary['steps'])} steps and "
        f"{number(summary['tokens'])} tokens; {percent(summary['informative_share'])} of the groups were informative. "
        "One run makes no comparison with uniform: that is what the ablation is for."
    )
    return "unknown", title, text
