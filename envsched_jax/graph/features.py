"""What a record says about its task, as rows of numbers whose inner products are similarities.

Everything here is host code in NumPy and depends on the set of records only, not on their order once sorted. Rows have
norm at most 1 and, but for the text, no negative entries, so inner products lie in [0, 1]. They lie on a grid of
2**-10: products and sums of products are then exact in float32 (and in TF32 products) in any order of summation, so
equal tasks tie exactly on every device and in every block.
"""

import hashlib
import re
import zlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np

from envsched_jax.pool.records import Record, Verifier

TEXT_DIM = 256  # of the text sketch behind the edges; Features.node is narrower
_BUCKETS = 1 << 14
_MAX_COLUMNS = 512
_GRID = 2.0**10
_GRAMS = 0.25  # share of the n-grams in the topology
_QUERY = frozenset(
    "browse calculate check compare compute count describe detail details diff display download estimate fetch filter "
    "find get grep head inspect is list load lookup ls open peek preview print pwd query read retrieve scan search "
    "select show sort stat status summarize tail think validate verify view wc cat du calc math".split()
)
# Verbs of change decide only when they come before a word above, as in `set_status`; an unknown verb changes, too.
_CHANGE = frozenset(
    "add append assign book cancel close create delete edit exchange fill make modify move post purchase put register "
    "remove rename reset resolve return send set start stop submit toggle transfer update upload write".split()
)
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


class Features(NamedTuple):
    """One row per record, float32; see the module for what inner products mean."""

    semantics: np.ndarray  # f32[n, TEXT_DIM or the embedding's], may be negative
    tools: np.ndarray  # f32[n, *]
    state: np.ndarray  # f32[n, *], zero where the record names no state
    verifier: np.ndarray  # f32[n, *], zero where the record has no verifier
    execution: np.ndarray  # f32[n, *], squared norm = the share of the topology that is known
    reward: np.ndarray  # f32[n, *], likewise
    node: np.ndarray  # f32[n, D], unit rows of semantics, tools and execution together, not on the grid; one space for
    # all pools with the same seed: names have their own directions, whatever other names there are


class Survey(NamedTuple):
    """What rows rest on beyond their own record: in how many records of the pool each word and name is."""

    size: int  # records
    embedded: bool  # whether all have an embedding
    words: np.ndarray  # f64[_BUCKETS], by hash bucket
    used: Mapping[str, int]
    at_hand: Mapping[str, int]
    state: Mapping[str, int]
    verifier: Mapping[str, int]
    grams: Mapping[str, int]


def survey(records: Sequence[Record]) -> Survey:
    """Counts the words and names of a pool, in memory that grows with their number only."""
    embedded = all(r.embedding is not None for r in records)
    words = np.zeros(_BUCKETS)
    for r in () if embedded else records:
        words[_bag(r.text)[0]] += 1
    names = [_frequencies(bags, Counter(which.tolist())) for bags, which in _bags(records)]
    return Survey(len(records), embedded, words, *names)


def extract(records: Sequence[Record], feature_dim: int, seed: int, of: Survey | None = None) -> Features:
    """Computes all features of a pool, or of some of its records.

    A row takes about 8 KB, and 50 KB while it is made, so large pools are best done in pieces.

    Args:
      records: a checked pool, or some records of one.
      feature_dim: D, the size of ``Features.node``.
      seed: of the random projections.
      of: the survey of the whole pool; by default, that of ``records``.

    Returns:
      The features, row i for record i.
    """
    of = survey(records) if of is None else of
    semantics = _unit(_embeddings(records, seed) if of.embedded else text_sketch(records, seed, of))
    (used, by_used), (at_hand, by_hand), (state, by_state), (verifier, by_verifier), (grams, by_path) = _bags(records)
    in_use, at_rest = _weights(used, of.used, of.size), _weights(at_hand, of.at_hand, of.size)
    paths = _weights(grams)
    tools = _blocks([(0.7, _multi_hot(in_use, of.used)[by_used]), (0.3, _multi_hot(at_rest, of.at_hand)[by_hand])])
    numbers = _numbers(records)
    execution = _blocks([*numbers[:4], (_GRAMS, _multi_hot(paths, of.grams, 128)[by_path]), *numbers[4:]])
    reward = _reward(records)
    # Each part counts by its squared norm: meaning most, then tools and shape.
    meaning = project(semantics, feature_dim, seed + 1)
    calls = 0.7**0.5 * _sketch(in_use, feature_dim, seed + 1)[by_used]
    calls += 0.3**0.5 * _sketch(at_rest, feature_dim, seed + 2)[by_hand]
    path = _GRAMS**0.5 * _sketch(paths, feature_dim, seed + 3)[by_path]
    path += project(_blocks(numbers), feature_dim, seed + 2)
    node = _unit(0.5**0.5 * meaning + 0.5 * calls / _norm(tools) + 0.5 * path / _norm(execution))
    parts = (
        semantics,
        _unit(tools),
        _unit(_multi_hot(_weights(state, of.state, of.size), of.state)[by_state]),
        _unit(_multi_hot(_weights(verifier), of.verifier)[by_verifier]),
        execution,
        reward,
    )
    return Features(*[*map(_on_grid, parts), node.astype(np.float32)])


def text_sketch(records: Sequence[Record], seed: int, of: Survey) -> np.ndarray:
    """Returns f64[n, TEXT_DIM]: TF-IDF with sublinear counts, hashed and projected at random.

    Word w of text t weighs ``(1 + log count) * (1 + log((1 + n) / (1 + df)))``, df over hash buckets of the surveyed
    pool. The projection of the buckets is by random signs: Achlioptas, "Database-friendly random projections", 2003.
    """
    idf = 1 + np.log((1 + of.size) / (1 + of.words))
    signs = np.random.default_rng(seed).choice(np.array([-1, 1], np.float32), (_BUCKETS, TEXT_DIM))
    out = np.empty((len(records), TEXT_DIM))
    for row, record in zip(out, records, strict=True):
        buckets, count = _bag(record.text)
        row[:] = (idf[buckets] * (1 + np.log(count))).astype(np.float32) @ signs[buckets]
    return out


def multi_hot(
    bags: Sequence[Mapping[str, float]], *, weighted: bool = True, max_columns: int = _MAX_COLUMNS
) -> np.ndarray:
    """Returns unit rows f64[n, C], one column per name: sublinear count times inverse document frequency.

    Pools with more names than columns share columns by hash, which adds a little similarity and takes none. C is a
    multiple of 64, so that the kernels compile for few shapes. An empty bag is a zero row.

    Args:
      bags: per record, name to count.
      weighted: whether rare names weigh more.
      max_columns: a multiple of 64.
    """
    df = Counter(name for bag in bags for name in bag)
    return _multi_hot(_weights(bags, df if weighted else None, len(bags)), df, max_columns)


def sketch(bags: Sequence[Mapping[str, float]], size: int, seed: int, *, weighted: bool = True) -> np.ndarray:
    """Returns a random projection f64[n, size] of the rows of ``multi_hot``, had it a column for every name.

    The signs of a name depend on the name and the seed only, so bags that come later lie in the same space, also if
    they have new names. An empty bag is a zero row.
    """
    df = Counter(name for bag in bags for name in bag) if weighted else None
    return _sketch(_weights(bags, df, len(bags)), size, seed)


def roles(record: Record) -> list[str]:
    """Returns the abstract role of every reference action: two letters, free of names.

    ``q`` asks and ``c`` changes, by the first known verb in the name; a solution that writes no state only asks, and
    one that writes some changes something, at the latest in its last action. Then ``n`` for a tool's first use, ``s``
    for the same tool as just before, ``a`` for a tool used earlier.
    """
    actions = record.gt_actions or ()
    asks = [_asks(action) for action in actions]
    if record.state_writes is not None and actions:
        if not record.state_writes:
            asks = [True] * len(actions)
        elif all(asks):
            asks[-1] = False
    out = []
    for i, (action, ask) in enumerate(zip(actions, asks, strict=True)):
        use = "s" if i and actions[i - 1] == action else "a" if action in actions[:i] else "n"
        out.append(("q" if ask else "c") + use)
    return out


def project(rows: np.ndarray, size: int, seed: int) -> np.ndarray:
    """Returns a random projection f64[n, size] of the rows, by signs; inner products stay in expectation."""
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], (rows.shape[1], size))
    return rows @ signs / np.sqrt(size)


def _signs(name: str, size: int, seed: int) -> np.ndarray:
    bits = np.frombuffer(hashlib.shake_128(f"{seed} {name}".encode()).digest(-(-size // 8)), np.uint8)
    return 2.0 * np.unpackbits(bits)[:size] - 1.0


def _weights(
    bags: Sequence[Mapping[str, float]], df: Mapping[str, int] | None = None, size: int = 0
) -> list[dict[str, float]]:
    """Returns sublinear counts times, if there are document frequencies of ``size`` bags, their inverse; by name."""
    found = set(chain.from_iterable(bags))
    rarity = {name: 1 + np.log((1 + size) / (1 + df[name])) if df else 1.0 for name in found}
    return [{name: _log1p(count) * rarity[name] for name, count in sorted(bag.items())} for bag in bags]


@lru_cache(maxsize=1 << 12)
def _log1p(count: float) -> float:
    return np.log1p(count)


def _multi_hot(
    weights: Sequence[Mapping[str, float]], names: Mapping[str, int], max_columns: int = _MAX_COLUMNS
) -> np.ndarray:
    few = len(names) <= max_columns
    column = {name: i if few else zlib.crc32(name.encode()) % max_columns for i, name in enumerate(sorted(names))}
    out = np.zeros((len(weights), -(-max(1, min(len(names), max_columns)) // 64) * 64))
    for row, bag in zip(out, weights, strict=True):
        for name, weight in bag.items():
            row[column[name]] += weight
    return _unit(out)


def _sketch(weights: Sequence[Mapping[str, float]], size: int, seed: int) -> np.ndarray:
    names = sorted({name for bag in weights for name in bag})
    place = {name: i for i, name in enumerate(names)}
    signs = np.array([_signs(name, size, seed) for name in names]).reshape(len(names), size)
    out = np.zeros((len(weights), size))
    for row, bag in zip(out, weights, strict=True):
        if bag:
            row[:] = _unit(np.array([[*bag.values()]]))[0] @ signs[[place[name] for name in bag]]
    return out / np.sqrt(size)


@lru_cache(maxsize=1 << 16)  # names come again and again
def _asks(name: str) -> bool:
    return next((w in _QUERY for w in _words(name) if w in _QUERY or w in _CHANGE), False)


@lru_cache(maxsize=1 << 12)  # of kinds of verifier
def _words(name: str) -> list[str]:
    return [w.lower() for w in _WORD.findall(name)]


def _bag(text: str) -> tuple[np.ndarray, np.ndarray]:
    words = Counter(zlib.crc32(w.encode()) % _BUCKETS for w in re.findall(r"\w+", text.lower()))
    buckets = sorted(words)  # a fixed order of summation
    return np.array(buckets, np.int64), np.array([words[b] for b in buckets], np.float64)


def _counts(names: Sequence[str] | None) -> Counter[str]:
    # An empty set is something that two tasks can share; an unknown one is not.
    return Counter() if names is None else Counter(names) or Counter({"": 1})


def _bags(records: Sequence[Record]) -> list[tuple[list[Mapping[str, float]], np.ndarray]]:
    """Returns the bags of used and available tools, state, verifier and n-grams: different ones, and whose is which."""

    def apart(values: Iterable[Any], bag: Callable[[Any], Mapping[str, float]]) -> Any:
        place: dict[Hashable, int] = {}
        which = [place.setdefault(value, len(place)) for value in values]
        return [bag(value) for value in place], np.array(which, np.int64)

    return [
        apart((r.gt_actions for r in records), _counts),
        apart((r.tools_available for r in records), _counts),
        apart(((r.state_reads, r.state_writes) for r in records), _state),
        apart((r.verifier for r in records), _verifier),
        apart((None if r.gt_actions is None else tuple(roles(r)) for r in records), _ngrams),
    ]


def _frequencies(bags: Sequence[Mapping[str, float]], times: Mapping[int, int]) -> Counter[str]:
    """Counts the records with each name; bag i is that of ``times[i]`` records."""
    df: Counter[str] = Counter()
    for i, bag in enumerate(bags):
        for name in bag:
            df[name] += times[i]
    return df


def _state(known: tuple[Sequence[str] | None, Sequence[str] | None]) -> dict[str, float]:
    reads, writes = known
    bag = {f"read {n}": 0.5 for n in reads or ()} | {f"write {n}": 1.0 for n in writes or ()}
    return bag or ({} if reads is None and writes is None else {"": 1.0})


def _verifier(v: Verifier | None) -> dict[str, float]:
    if v is None:
        return {}
    bag = {f"kind {v.kind}": 2.0}
    if v.n_checks is not None:
        bag[f"checks {v.n_checks.bit_length()}"] = 1.0
    if v.partial is not None:
        bag[f"partial {v.partial}"] = 1.0
    return bag


def _ngrams(path: Sequence[str] | None) -> Mapping[str, float]:
    if path is None:
        return {}
    padded = ["^", *path, "$"]
    grams: Counter[str] = Counter(path)
    for n in (2, 3):
        grams.update(" ".join(padded[i : i + n]) for i in range(len(padded) - n + 1))
    return grams


def _numbers(records: Sequence[Record]) -> list[tuple[float, np.ndarray]]:
    """Abstract execution topology without the n-grams, blocks of fixed width: what is unknown leaves a block zero."""
    numbers = np.array([_shape(r) for r in records], np.float64)  # NaN: unknown
    turns, steps, per_turn, asking, depth, repetition, fan_in = numbers.T
    return [
        (0.15, _soft_log(turns)),
        (0.20, _soft_log(steps)),
        (0.05, _soft_log(per_turn)),
        (0.15, _soft(asking * 4, 5)),
        (0.08, _soft_log(depth)),
        (0.06, _soft(repetition * 4, 5)),
        (0.06, _soft_log(fan_in)),
    ]


def _shape(record: Record) -> tuple[float, ...]:
    turns = np.nan if record.n_turns is None else float(record.n_turns)
    if record.gt_actions is None:
        return (turns, *[np.nan] * 6)
    path = roles(record)
    kinds = [r[0] for r in path]
    steps = len(path)
    asking = kinds.count("q") / steps if steps else np.nan
    # Depth: how often a change follows an answer; fan-in: the most answers in a row that flow into one change.
    depth = sum(a == "q" and b == "c" for a, b in pairwise(kinds))
    fan_in = max((len(run) for run in re.findall(r"(q+)c", "".join(kinds))), default=0)
    repetition = sum(r[1] != "n" for r in path) / steps if steps else np.nan
    return (turns, steps, steps / max(turns, 1.0), asking, depth, repetition, fan_in)


def _reward(records: Sequence[Record]) -> np.ndarray:
    """Reward topology, f64[n, *]: number of checks, all or nothing, at the end or step by step."""
    checks, partial, stepwise = np.full((3, len(records)), np.nan)
    for i, v in enumerate(r.verifier for r in records):
        if v is None:
            continue
        stepwise[i] = bool({"turn", "step", "stepwise"} & set(_words(v.kind)))
        checks[i] = np.nan if v.n_checks is None else v.n_checks
        partial[i] = np.nan if v.partial is None else v.partial
    return _blocks([(0.5, _soft_log(checks)), (0.25, _soft(partial, 2)), (0.25, _soft(stepwise, 2))])


def _soft_log(x: np.ndarray) -> np.ndarray:
    """Soft bins of a count, two per doubling: 1 + 2 log2 in steps, so that 2 and 3 are near and 2 and 20 are not."""
    return _soft(2 * np.log2(1 + x), 16)


def _soft(x: np.ndarray, bins: int) -> np.ndarray:
    """Returns unit rows f64[n, bins], the weight shared between the two nearest of bins 0..bins-1; NaN gives zeros."""
    distance = np.abs(np.clip(x, 0, bins - 1)[:, None] - np.arange(bins)[None, :])
    return _unit(np.nan_to_num(np.maximum(0.0, 1.0 - distance)))


def _blocks(parts: Sequence[tuple[float, np.ndarray]]) -> np.ndarray:
    """Joins unit (or zero) rows so that the inner product is the weighted sum of theirs."""
    return np.concatenate([np.sqrt(weight) * rows for weight, rows in parts], axis=1)


def _unit(rows: np.ndarray) -> np.ndarray:
    return rows / _norm(rows)


def _norm(rows: np.ndarray) -> np.ndarray:
    """Returns the length of every row, f64[n, 1], and 1 for a zero row."""
    norm = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.where(norm > 0, norm, 1.0)


def _on_grid(rows: np.ndarray) -> np.ndarray:
    return (np.round(rows * _GRID) / _GRID).astype(np.float32)


def _embeddings(records: Sequence[Record], seed: int) -> np.ndarray:
    rows = _unit(np.array([r.embedding for r in records], np.float64))
    return rows if rows.shape[1] <= TEXT_DIM else project(rows, TEXT_DIM, seed)
