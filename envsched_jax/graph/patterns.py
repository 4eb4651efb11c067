"""Interaction patterns: clusters of abstract execution topology, independent of the environment."""

import numpy as np

_ROUNDS = 20
_ROUNDING = 1e-9  # of squared distances between rows on the features' grid and their means


def cluster(rows: np.ndarray, uid: np.ndarray, num_patterns: int, seed: int) -> np.ndarray:
    """Clusters rows by k-means (Lloyd) from k-means++ starts (Arthur and Vassilvitskii, 2007).

    The random draws depend on ``uid`` and ``seed`` only, so the same set of tasks has the same clusters in any order,
    up to the rounding of sums.

    Args:
      rows: f32[n, C].
      uid: u32[n].
      num_patterns: the most clusters; there are fewer if fewer rows differ.
      seed: of the draws.

    Returns:
      pattern i32[n], numbered by size, largest first, ties by the smallest uid.
    """
    # Tasks with equal topology are one weighted point: they stay together, and there are far fewer points.
    points, member, weight = _distinct(rows)
    smallest = np.full(len(points), np.iinfo(np.uint32).max, np.uint32)
    np.minimum.at(smallest, member, uid)
    centres = _start(points, weight, smallest, min(num_patterns, len(points)), seed)
    label = _nearest(points, centres)
    for _ in range(_ROUNDS):
        share = np.zeros((len(points), len(centres)))
        share[np.arange(len(points)), label] = weight
        mass = share.sum(axis=0)[:, None]
        # In this order of factors: the other way round is 18 times slower where there are many points.
        centres = np.where(mass > 0, (points.T @ share).T / np.maximum(mass, 1.0), centres)
        previous, label = label, _nearest(points, centres)
        if np.array_equal(previous, label):
            break
    size = np.bincount(label, weight, minlength=len(centres))
    first = np.full(len(centres), np.iinfo(np.uint32).max, np.uint32)
    np.minimum.at(first, label, smallest)
    number = np.empty(len(centres), np.int32)
    number[np.lexsort((first, -size))] = np.arange(len(centres))
    return number[label[member]]


def join(rows: np.ndarray, pattern: np.ndarray, new: np.ndarray, num_patterns: int) -> np.ndarray:
    """Finds patterns for new rows; those of the old ones stay.

    A row joins the pattern with the nearest centre. If it is farther from it than every old row is from the centre of
    its own, and a number is unused, it founds a pattern instead, which later rows may join.

    Args:
      rows: f32[n, C], the old rows.
      pattern: i32[n], in ``0 .. num_patterns - 1``.
      new: f32[m, C]; the order decides which row founds a pattern.
      num_patterns: the most patterns.

    Returns:
      pattern i32[m] of the new rows.
    """
    used = np.unique(pattern)
    exact = rows.astype(np.float64)
    centres = np.zeros((num_patterns, rows.shape[1]))
    centres[used] = [exact[pattern == p].mean(axis=0) for p in used]
    radius = ((exact - centres[pattern]) ** 2).sum(axis=1).max() + _ROUNDING
    exists = np.isin(np.arange(num_patterns), used)
    out = np.empty(len(new), np.int32)
    for i, row in enumerate(new.astype(np.float64)):
        distance = np.where(exists, ((centres - row) ** 2).sum(axis=1), np.inf)
        out[i] = np.argmin(distance)
        if distance[out[i]] > radius and not exists.all():
            out[i] = np.argmin(exists)
            centres[out[i]], exists[out[i]] = row, True
    return out


def _distinct(rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns different rows in order, f64[m, C], of each row the number of its equal, i64[n], and their counts i64[m].

    That of ``np.unique(axis=0)``, which compares number by number and takes ten times as long: these bytes sort as the
    numbers do, so a row is compared at once.
    """
    bits = (np.asarray(rows, np.float32) + np.float32(0.0)).view(np.uint32)  # no negative zero
    keys = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31)).astype(">u4")
    whole = np.ascontiguousarray(keys).view(np.dtype((np.void, 4 * rows.shape[1])))[:, 0]
    _, first, member, count = np.unique(whole, return_index=True, return_inverse=True, return_counts=True)
    return rows[first].astype(np.float64), member, count


def _start(points: np.ndarray, weight: np.ndarray, uid: np.ndarray, count: int, seed: int) -> np.ndarray:
    """Draws starts in proportion to weight times squared distance to the starts so far (Gumbel maximum per uid)."""
    distance, chosen = np.ones(len(points)), []
    for draw in range(count):
        with np.errstate(divide="ignore"):
            key = np.log(weight * distance) - np.log(-np.log(_uniform(uid, seed, draw)))
        chosen.append(int(np.lexsort((uid, -key))[0]))
        gap = ((points - points[chosen[-1]]) ** 2).sum(axis=1)
        distance = gap if draw == 0 else np.minimum(distance, gap)
    return points[chosen]


def _uniform(uid: np.ndarray, seed: int, draw: int) -> np.ndarray:
    """Returns numbers in (0, 1), one per uid: SplitMix64 of (seed, draw, uid)."""
    salt = (seed * 0x9E3779B97F4A7C15 + draw * 0xD1B54A32D192ED03) % 2**64
    x = uid.astype(np.uint64) ^ np.uint64(salt)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
    return ((x >> np.uint64(32)).astype(np.float64) + 0.5) / 2**32


def _nearest(points: np.ndarray, centres: np.ndarray) -> np.ndarray:
    return np.argmin((centres**2).sum(axis=1)[None, :] - 2 * points @ centres.T, axis=1)
