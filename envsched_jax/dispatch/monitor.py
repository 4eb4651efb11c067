"""What a person should see of a run: numbers to plot, and sentences where something is wrong."""

import math
from collections.abc import Sequence
from typing import Any

from envsched_jax.dispatch.ledger import Ledger

HOPELESS = 8  # groups in a row without any reward, where rewards were expected, until that is an alarm
HOPED = 0.2  # mean reward above the lowest that was expected of them
UNSEEN = 20  # batches without a task of an environment
EMPTY = 64  # groups in a row that taught nothing
FAILING = 0.5  # share of an environment's groups that bring nothing
APART = 0.1  # between the predicted and the realised share of informative groups, beyond two standard errors


def metrics(ledger: Ledger, shares: dict[str, float], tasks: int) -> dict[str, Any]:
    """Returns numbers, and under ``environments`` a dictionary of numbers each.

    Args:
      ledger: the books.
      shares: what the recipe means every environment to get, where it has such an aim.
      tasks: in the pool.

    Returns:
      ``counts``; ``informative_share`` over the run; of the latest groups ``predicted_informative``,
      ``realised_informative`` (of those with a prediction) and ``lately_informative``; ``tasks_seen``, a share of the
      pool; ``envs_seen``; ``waiting_tasks``. By environment: ``proposed``, ``observed``, ``open``, ``failed``,
      ``invalid_rollouts``, ``share`` of the groups that brought anything, ``configured_share`` (None if there is none),
      ``informative_share``, ``reward``, ``tokens`` and ``seconds`` per rollout, ``lag`` in versions per group,
      ``last_batch``, ``discards`` by reason.
    """
    counts = {**ledger.counts, "open": len(ledger.open)}
    predicted, realised, lately = _lately(ledger)
    groups = sum(tally.groups for tally in ledger.tallies.values())
    out: dict[str, int] = {}
    for ticket in ledger.open.values():
        out[ticket.env_id] = out.get(ticket.env_id, 0) + 1
    envs = {}
    brought = sum(tally.observed - tally.failed for tally in ledger.tallies.values())
    for env_id, tally in ledger.tallies.items():
        rollouts = tally.rollouts + tally.invalid
        envs[env_id] = {
            "proposed": tally.proposed,
            "observed": tally.observed,
            "open": out.get(env_id, 0),
            "failed": tally.failed,
            "invalid_rollouts": tally.invalid,
            "share": _ratio(tally.observed - tally.failed, brought),
            "configured_share": shares.get(env_id),
            "informative_share": _ratio(tally.informative, tally.groups),
            "reward": _ratio(tally.reward, tally.rollouts),
            "tokens": _ratio(tally.tokens, rollouts),
            "seconds": _ratio(tally.seconds, rollouts),
            "lag": _ratio(tally.lag, tally.observed),
            "last_batch": tally.last,
            "discards": dict(tally.discards),
        }
    return {
        "counts": counts,
        "informative_share": _ratio(sum(tally.informative for tally in ledger.tallies.values()), groups),
        "predicted_informative": predicted,
        "realised_informative": realised,
        "lately_informative": lately,
        "tasks_seen": len(ledger.seen) / tasks,
        "envs_seen": len(ledger.tallies),
        "waiting_tasks": len(ledger.failing),
        "environments": envs,
    }


def alarms(ledger: Ledger, envs: Sequence[str], batches: int) -> list[str]:
    """Returns one sentence for everything that a person should look at now.

    Args:
      ledger: the books.
      envs: environments that have eligible tasks.
      batches: how many were chosen.
    """
    found = []
    for env_id in envs:
        tally = ledger.tallies.get(env_id)
        unseen = batches - (0 if tally is None else max(0, tally.last))
        if unseen >= UNSEEN:
            found.append(f"environment {env_id!r} had no task in the latest {unseen} batches")
        if tally is None:
            continue
        if tally.zeros >= HOPELESS and tally.hoped / tally.zeros >= HOPED:
            found.append(
                f"environment {env_id!r}: {tally.zeros} groups in a row without any reward, where "
                f"{tally.hoped / tally.zeros:.2f} above the lowest was expected: is its verifier broken?"
            )
        if tally.observed >= HOPELESS and tally.failed >= FAILING * tally.observed:
            found.append(f"environment {env_id!r}: {tally.failed} of {tally.observed} groups had no valid rollout")
    predicted, realised, _ = _lately(ledger)
    count = len(ledger.recent)
    if predicted is not None and realised is not None and count >= EMPTY:
        margin = APART + 2.0 * math.sqrt(max(predicted * (1.0 - predicted), 0.01) / count)
        if abs(predicted - realised) > margin:
            found.append(
                f"{predicted:.0%} of the latest groups were predicted to be informative and {realised:.0%} were"
            )
    if count >= EMPTY and not any(informative for _, informative in list(ledger.recent)[-EMPTY:]):
        found.append(f"none of the latest {EMPTY} groups was informative: the pool may be too easy, or too hard")
    return found


def _lately(ledger: Ledger) -> tuple[float | None, float | None, float | None]:
    known = [(p, informative) for p, informative in ledger.recent if p is not None]
    return (
        _ratio(sum(p for p, _ in known), len(known)),
        _ratio(sum(informative for _, informative in known), len(known)),
        _ratio(sum(informative for _, informative in ledger.recent), len(ledger.recent)),
    )


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None
