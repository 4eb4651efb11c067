"""Finds tasks whose verifier cannot tell good from bad, before a single rollout is spent on them.

Two faults can be read off an executable environment: the verifier is content with the untouched initial state, so that
doing nothing passes; or no sequence of calls within the turn budget satisfies it, so that nothing passes. Neither task
teaches what it is meant to. The audit is sound: it reports what is proven, and what it cannot decide it lists apart.
"""

import enum
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from envsched_jax.pool import Record

_SHOWN = 20  # findings listed one by one in the text


class Auditable(Protocol):
    """What an executable environment can say of a task without a policy. ``None`` means that it does not know."""

    def noop_passes(self, task: str) -> bool | None:
        """Tells whether the verifier is satisfied by the untouched initial state of this ``task_id``."""
        ...

    def satisfiable(self, task: str) -> bool | None:
        """Tells whether some sequence of calls within the turn budget satisfies the verifier.

        ``False`` only if it is proven that there is none: a search that found nothing is ``None``.
        """
        ...

    def explain(self, task: str) -> str:
        """Returns in a few words why the task is as it is; an empty string where there is nothing to add."""
        ...


class Fault(enum.Enum):
    """What is wrong with a task; the value is how a report says it."""

    NOOP_PASSES = "doing nothing passes"
    UNSATISFIABLE = "nothing can pass"


@dataclass(frozen=True)
class Finding:
    """One broken task."""

    task_id: str
    env_id: str
    fault: Fault
    detail: str  # from ``Auditable.explain``, may be empty


@dataclass(frozen=True)
class Report:
    """What an audit found.

    Attributes:
      findings: in the order of the records, one per broken task.
      unknown: ids of tasks that are not known to be broken nor known to be sound.
      num_tasks: how many were looked at.
    """

    findings: tuple[Finding, ...]
    unknown: tuple[str, ...]
    num_tasks: int

    @property
    def task_ids(self) -> tuple[str, ...]:
        """Ids of the broken tasks, as ``graph.retire`` takes them."""
        return tuple(finding.task_id for finding in self.findings)

    def text(self) -> str:
        """Returns the report to read: one line of counts, then a line for each of the first findings."""
        counts = Counter(finding.fault for finding in self.findings)
        parts = [f"{fault.value}: {counts[fault]}" for fault in Fault]
        lines = [f"audit of {self.num_tasks} tasks: {', '.join(parts)}, not known: {len(self.unknown)}"]
        for finding in self.findings[:_SHOWN]:
            detail = f" ({finding.detail})" if finding.detail else ""
            lines.append(f"  {finding.task_id}: {finding.fault.value}{detail}")
        if len(self.findings) > _SHOWN:
            lines.append(f"  and {len(self.findings) - _SHOWN} more")
        return "\n".join(lines)


def audit(records: Sequence[Record], environment: Auditable) -> Report:
    """Asks an environment about every task of a pool; nothing is rolled out.

    The idea of checking verifiers before generation is that of BRACE, which found 104 of 1,127 tasks broken.

    Args:
      records: the pool, or the part of it that this environment executes.
      environment: answers by ``task_id``.

    Raises:
      What the environment raises for a task that it does not have.
    """
    findings, unknown = [], []
    for record in records:
        noop = environment.noop_passes(record.task_id)
        can = True if noop else environment.satisfiable(record.task_id)
        if noop or can is False:
            fault = Fault.NOOP_PASSES if noop else Fault.UNSATISFIABLE
            findings.append(Finding(record.task_id, record.env_id, fault, environment.explain(record.task_id)))
        elif noop is None or can is None:
            unknown.append(record.task_id)
    return Report(tuple(findings), tuple(unknown), len(records))


def exclude(records: Iterable[Record], report: Report) -> list[Record]:
    """Returns the records without the broken tasks, in their order.

    Leaving them out before ``graph.build`` is better than ``graph.retire`` afterwards: a retired task stays a neighbour
    of others. Retire what is found in a run that has begun.
    """
    broken = set(report.task_ids)
    return [record for record in records if record.task_id not in broken]
