"""Large pools: parts, bounded memory, and neighbours on a shortlist against exact ones."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envsched_jax import graph
from envsched_jax.graph import features, knn, neighbours, patterns, shortlist
from envsched_jax.pool import Record
from envsched_jax.testing import synthetic_pool

K = 8


@pytest.fixture(autouse=True)
def strict_dtypes():
    with jax.numpy_dtype_promotion("strict"):
        yield


@functools.cache
def pool():
    """1,500 tasks, so six tiles."""
    return tuple(synthetic_pool(1500, 15))


def built(records, **options):
    return graph.build(records, k=K, num_patterns=8, feature_dim=16, **options)


def shapes(records):
    rows = features.extract(records, 4, 0)
    env = np.array([int(r.env_id[3:]) for r in records], np.int32)
    uid = np.array([graph.task_uid(r.task_id) for r in records], np.uint32)
    return np.concatenate([rows.execution, rows.reward], axis=1), env, uid


def recall(records, k, probes, queries):
    """The share of neighbours on the shortlist whose score is at least the k-th best of all."""
    shape, env, uid = shapes(records)
    positions, valid = shortlist.search(shape, env, uid, jnp.uint32(0), k=k, probes=probes)
    assert valid.all() and (env[positions] != env).all()
    assert (np.diff(np.sort(positions, axis=0), axis=0) > 0).all()
    some = np.random.default_rng(0).choice(len(env), queries, replace=False)
    score = np.where(env[some][:, None] == env[None, :], -1.0, shape[some] @ shape.T / 2)
    kth = np.partition(score, -k, axis=1)[:, -k]
    return (np.take_along_axis(score, positions[:, some].T, axis=1) >= kth[:, None]).mean()


def by_name(g, index):
    """Senders of every task by name, in order, and its similarities."""
    n = g.nodes.mask.shape[0]
    senders, mask = np.asarray(g.senders).reshape(-1, n), np.asarray(g.edges.mask).reshape(-1, n)
    similarity = np.asarray(g.edges.similarity).reshape(2 * K, n, -1)
    return {
        task_id: ([index.task_ids[s] for s in senders[mask[:, i], i]], similarity[:, i].tolist())
        for i, task_id in enumerate(index.task_ids)
    }


# ---------------------------------------------------------------- shortlists


def test_a_shortlist_of_all_tiles_is_exact():
    assert len(pool()) <= shortlist.PROBES * knn.BLOCK
    exact, approximate = (built(pool(), search=search)[0] for search in ("exact", "approximate"))
    jax.tree.map(np.testing.assert_array_equal, exact, approximate)
    assert np.asarray(exact.edges.mask).reshape(2 * K, -1)[:, : len(pool())].all()


def test_a_short_list_finds_most_neighbours():
    records = synthetic_pool(6000)
    few, more = recall(records, K, 2, 500), recall(records, K, 8, 500)
    assert few > 0.7 and more > 0.93 and more > few
    with pytest.raises(ValueError, match="search='near': expected one of auto, exact, approximate"):
        graph.build(pool(), search="near")


@pytest.mark.slow
def test_recall_at_the_default_on_many_tiles():
    assert recall(synthetic_pool(50_000), 16, shortlist.PROBES, 500) > 0.98  # 0.996 on 1,024 tasks


def test_approximate_graphs_do_not_depend_on_order_capacity_or_numbering(monkeypatch):
    monkeypatch.setattr(shortlist, "PROBES", 2)
    first = by_name(*built(pool(), search="approximate"))
    shuffled = [pool()[i] for i in np.random.default_rng(0).permutation(len(pool()))]
    assert by_name(*built(shuffled, search="approximate", capacity=2000, env_capacity=30)) == first
    _, old = built(shuffled[:1000])
    assert by_name(*built(shuffled, search="approximate", keep=old)) == first
    assert by_name(*built(pool(), search="exact")) != first  # two of six tiles do miss some


def test_every_task_has_as_many_neighbours_as_there_are():
    """Environments of one topology each fill whole tiles, and tiles on the border have few tasks of the other."""
    records = [
        Record(f"t{i}", f"env{env}", "", ("get_a", "set_a"), ("get_a", "set_a") * (1 + env), 1 + env)
        for i, env in enumerate([0] * 700 + [1] * 700 + [2] * 3)
    ]
    shape, env, uid = shapes(records)
    for probes in (1, 2):
        positions, valid = shortlist.search(shape, env, uid, jnp.uint32(0), k=K, probes=probes)
        assert valid.all() and (env[positions] != env).all()
    two = env > 0
    _, valid = shortlist.search(shape[two], env[two] - 1, uid[two], jnp.uint32(0), k=K, probes=1)
    assert valid.sum(axis=0).tolist() == [3] * 700 + [K] * 3
    _, valid = shortlist.search(shape[:700], env[:700], uid[:700], jnp.uint32(0), k=K, probes=1)
    assert not valid.any()


def test_tiles_hold_equal_rows_together_and_all_rows_once():
    rng = np.random.default_rng(0)
    truth = rng.integers(0, 4, 4 * knn.BLOCK)
    rows = np.eye(4, 6, dtype=np.float32)[truth]
    order = shortlist.arrange(rows, rng.permutation(len(rows)).astype(np.uint32))
    np.testing.assert_array_equal(np.sort(order), np.arange(len(rows)))
    assert (np.diff(truth[order]) != 0).sum() <= 6  # three borders, and a tile may cut a group twice


# ---------------------------------------------------------------- bounded memory


def test_scoring_in_parts_changes_nothing(monkeypatch):
    shape, env, uid = shapes(pool())
    shape = np.round(shape * 4) / np.float32(4)  # many ties
    size = -(-len(env) // knn.BLOCK) * knn.BLOCK
    every, start = knn.topology(size, shape, env, uid), jnp.zeros(size // knn.BLOCK, jnp.int32)

    def search():
        return knn.nearest.__wrapped__(knn.cross_score, every, start, jnp.uint32(1), k=K, width=size)

    whole = search()
    monkeypatch.setattr(knn, "WINDOW", 1000)
    jax.tree.map(np.testing.assert_array_equal, whole, search())


def test_features_in_parts_change_nothing(monkeypatch):
    whole, index = built(pool())
    monkeypatch.setattr(neighbours, "PART", 300)
    parts, _ = built(pool())
    for name in ("senders", "edges", "globals"):
        jax.tree.map(np.testing.assert_array_equal, getattr(whole, name), getattr(parts, name))
    np.testing.assert_array_equal(whole.nodes.pattern, parts.nodes.pattern)
    np.testing.assert_allclose(whole.nodes.feature, parts.nodes.feature, atol=1e-6)
    env = np.asarray(whole.nodes.env)[: len(index.task_ids)]
    found = neighbours.parts(env)
    assert len(found) > 2 and [p.start for p in found[1:]] == [p.stop for p in found[:-1]]
    assert found[0].start == 0 and found[-1].stop == len(env)
    assert all(p.stop - p.start >= 300 for p in found[:-1]) and all(env[p.stop - 1] < env[p.stop] for p in found[:-1])


def test_memory_of_the_search_does_not_grow_with_the_pool():
    def temporary(search, n, *args, **static):
        def struct(*shape, dtype=jnp.float32):
            return jax.ShapeDtypeStruct(shape, dtype)

        i32, nothing = struct(n, dtype=jnp.int32), struct(0, n)
        uid = struct(n, dtype=jnp.uint32)
        points = knn.Points(struct(n, dtype=jnp.bool), i32, uid, i32, nothing, nothing, nothing, struct(32, n))
        salt = struct(dtype=jnp.uint32)
        lowered = search.lower(knn.cross_score, points, *[struct(*s, dtype=d) for s, d in args], salt, **static)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    small, large = 2 * knn.WINDOW, 8 * knn.WINDOW
    exact = [temporary(knn.nearest, n, ((2,), jnp.int32), k=K, width=n) for n in (small, large)]
    assert exact[1] < exact[0] + 2**20
    lists = (((2,), jnp.int32), ((2, 4), jnp.int32), ((2, 4), jnp.bool))
    listed = [temporary(knn.among, n, *lists, k=K) for n in (small, large)]
    assert listed[1] < listed[0] + 2**20


# ---------------------------------------------------------------- parts of the build


def test_distinct_rows_are_those_of_numpy():
    rng = np.random.default_rng(0)
    rows = rng.choice(np.array([-2.5, -0.0, 0.0, 1e-3, 7.0], np.float32), (200, 3))
    expected = np.unique(rows.astype(np.float64), axis=0, return_inverse=True, return_counts=True)
    for mine, theirs in zip(patterns._distinct(rows), expected, strict=True):
        np.testing.assert_array_equal(mine, theirs.reshape(mine.shape))


def test_a_survey_of_the_whole_gives_each_record_its_row():
    survey, whole = features.survey(pool()), features.extract(pool(), 8, 0)
    piece = features.extract(pool()[100:160], 8, 0, survey)
    for name in whole._fields:
        np.testing.assert_allclose(getattr(piece, name), getattr(whole, name)[100:160], atol=1e-6)
    assert survey.size == len(pool()) and survey.verifier["kind state"] > 0


def test_synthetic_pools_are_seeded_and_have_the_environments_asked_for():
    assert list(pool()) == synthetic_pool(1500, 15) != synthetic_pool(1500, 15, seed=1)
    assert len({r.task_id for r in pool()}) == 1500 and len({r.env_id for r in pool()}) == 15
    assert any(r.group_id is None for r in pool()) and any(r.group_id for r in pool())
