"""Numbers of a record that may tell how hard its task is, before any rollout: the covariates of the belief's prior.

Every number comes from one record alone, by a fixed transformation to a spread of about one. So a task that joins
later gets the same row as it would have had from the beginning.
"""

import zlib
from collections.abc import Sequence
from functools import lru_cache
from itertools import combinations_with_replacement

import numpy as np

from envsched_jax.graph import features
from envsched_jax.pool.records import Record

KIND_BUCKETS = 4  # of the verifier's kind, by hash
COUNTS = ("text", "steps", "distinct", "available", "turns", "checks")  # centre and scale of log(1 + x) in _LOG
_LOG = {
    "text": (6.5, 1.0),
    "steps": (1.6, 0.6),
    "distinct": (1.5, 0.5),
    "available": (2.5, 0.8),
    "turns": (1.0, 0.6),
    "checks": (1.0, 0.6),
}
SIZE = len(COUNTS) + len(COUNTS) * (len(COUNTS) + 1) // 2 + 8 + KIND_BUCKETS


def covariates(records: Sequence[Record]) -> np.ndarray:
    """Returns f32[n, SIZE]: logarithms of counts, their pairwise products, shares and flags; 0 stands for unknown.

    Counts are of characters of the text, reference actions, distinct ones, tools at hand, turns and checks. Then come
    attributes read and written, the share of asking actions, repetition, whether the solution is known, whether the
    reward is partial, whether it comes step by step, and the verifier's kind.
    """
    out = np.empty((len(records), SIZE), np.float32)
    for row, record in zip(out, records, strict=True):
        row[:] = _row(record)
    return out


def _row(record: Record) -> list[float]:
    actions, verifier = record.gt_actions, record.verifier
    path = [] if actions is None else features.roles(record)
    known = {
        "text": len(record.text),
        "steps": None if actions is None else len(actions),
        "distinct": None if actions is None else len(set(actions)),
        "available": len(record.tools_available),
        "turns": record.n_turns,
        "checks": None if verifier is None else verifier.n_checks,
    }
    counts = [_scaled(name, known[name]) for name in COUNTS]
    products = [a * b / 2.0 for a, b in combinations_with_replacement(counts, 2)]
    kinds = [0.0] * KIND_BUCKETS
    if verifier is not None:
        kinds[zlib.crc32(verifier.kind.encode()) % KIND_BUCKETS] = 1.0
    flags = [
        _log1p(len(record.state_reads or ())),
        _log1p(len(record.state_writes or ())),
        _share(path, "q", 0),
        _share(path, "s", 1),
        _share(path, "a", 1),
        float(actions is not None),
        float(verifier is not None and bool(verifier.partial)),
        float(verifier is not None and bool({"turn", "step", "stepwise"} & set(verifier.kind.lower().split("_")))),
    ]
    return [*counts, *products, *flags, *kinds]


@lru_cache(maxsize=1 << 16)  # counts are small and come again and again
def _scaled(name: str, value: int | None) -> float:
    if value is None:
        return 0.0
    centre, scale = _LOG[name]
    return float(np.clip((np.log1p(value) - centre) / scale, -4.0, 4.0))


@lru_cache(maxsize=1 << 12)
def _log1p(count: int) -> float:
    return float(np.log1p(count))


def _share(path: Sequence[str], letter: str, place: int) -> float:
    return sum(role[place] == letter for role in path) / len(path) if path else 0.0
