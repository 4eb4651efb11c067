"""What the features of the graph say about a task, and the patterns that they form."""

import dataclasses
import math

import numpy as np
import pytest

from envsched_jax import graph
from envsched_jax.graph import features, patterns
from envsched_jax.pool import Record, Verifier


def rec(**changes):
    return dataclasses.replace(Record("a", "e", "text", ("x",)), **changes)


def cosine(x, i=0, j=1):
    return float(x[i].astype(np.float64) @ x[j].astype(np.float64))


def test_roles_are_free_of_names():
    roles = features.roles
    assert roles(rec(gt_actions=("get_user", "set_status", "get_user", "get_user"))) == ["qn", "cn", "qa", "qs"]
    assert roles(rec(gt_actions=("listFlights", "posting_get_login_status", "fly"))) == ["qn", "qn", "cn"]
    assert roles(rec(gt_actions=("fly", "swim"), state_writes=())) == ["qn", "qn"]
    assert roles(rec(gt_actions=("get", "list"), state_writes=("x",))) == ["qn", "cn"]
    assert roles(rec(gt_actions=(), state_writes=("x",))) == [] == roles(rec())
    renamed = [rec(gt_actions=("get_user", "book_flight")), rec(gt_actions=("list_mail", "send_mail"))]
    rows = features.extract(renamed, 16, 0)
    np.testing.assert_array_equal(rows.execution[0], rows.execution[1])
    assert cosine(rows.tools) < 0.4


def test_closer_topologies_are_more_similar():
    paths = [("get_a", "set_b"), ("get_a", "get_b", "set_c"), ("set_a",) * 9]
    rows = features.extract([rec(gt_actions=p, n_turns=len(p) // 2) for p in paths], 16, 0)
    assert 1 >= cosine(rows.execution, 0, 1) > cosine(rows.execution, 1, 2) > 0
    checks = [rec(verifier=Verifier("v", n, True)) for n in (2, 3, 20)]
    rows = features.extract(checks, 16, 0)
    assert cosine(rows.reward, 0, 1) > cosine(rows.reward, 0, 2) > 0
    stepwise = [rec(verifier=Verifier(kind, 2, False)) for kind in ("match_per_turn", "match_at_end")]
    assert cosine(features.extract(stepwise, 16, 0).reward) == pytest.approx(0.75, abs=2e-3)


def test_what_is_missing_lowers_similarity_and_never_stops():
    known = rec(gt_actions=("get", "set"), n_turns=2, verifier=Verifier("v", 1, True), state_writes=("s",))
    less = rec(n_turns=2, verifier=Verifier("v"))
    rows = features.extract([known, less, rec()], 16, 0)
    full, some, none = (float(row @ row) for row in rows.execution)
    assert full == pytest.approx(1, abs=5e-3) and some == pytest.approx(0.15, abs=5e-3) and none == 0
    assert float(rows.reward[0] @ rows.reward[0]) > float(rows.reward[1] @ rows.reward[1]) > 0
    assert not rows.reward[2].any() and not rows.state[1:].any() and not rows.verifier[2].any()
    assert rows.state[0].any()
    np.testing.assert_allclose(np.linalg.norm(rows.node, axis=1), 1, rtol=1e-5)
    # Known to be empty is a property that tasks share, unknown is not.
    empty = features.extract([rec(state_reads=(), gt_actions=())] * 2, 16, 0)
    assert cosine(empty.state) == 1 and 0.2 < cosine(empty.execution) < 1


def test_text_similarity_approaches_exact_tf_idf():
    texts = ["book a flight to Rome", "book a flight to Paris for two", "delete the log file", "the log file", ""]
    rows = features.extract([rec(text=t) for t in texts], 16, 0)
    words = [t.lower().split() for t in texts]
    vocabulary = sorted({w for ws in words for w in ws})
    exact = np.zeros((len(texts), len(vocabulary)))
    for i, ws in enumerate(words):
        for w in set(ws):
            df = sum(w in other for other in words)
            exact[i, vocabulary.index(w)] = (1 + math.log(ws.count(w))) * (1 + math.log((1 + len(texts)) / (1 + df)))
    exact /= np.maximum(np.linalg.norm(exact, axis=1, keepdims=True), 1e-9)
    np.testing.assert_allclose(rows.semantics @ rows.semantics.T, exact @ exact.T, atol=0.2)  # three sigma: 3 / 16
    assert not rows.semantics[4].any()


def test_embeddings_are_used_when_all_records_have_one():
    vectors = [(1.0, 0.0), (3.0, 3.0)]
    both = features.extract([rec(embedding=v) for v in vectors], 16, 0)
    assert cosine(both.semantics) == pytest.approx(0.5**0.5, abs=1e-3)
    one = features.extract([rec(embedding=vectors[0]), rec()], 16, 0)
    assert one.semantics.shape[1] == features.TEXT_DIM and cosine(one.semantics) == pytest.approx(1, abs=5e-3)
    long = features.extract([rec(embedding=tuple(np.eye(3, 1000)[i % 2])) for i in range(3)], 16, 0)
    assert abs(cosine(long.semantics)) < 0.3 and cosine(long.semantics, 0, 2) == pytest.approx(1, abs=5e-3)


def test_wide_sets_share_columns_and_keep_the_unit_interval():
    rng = np.random.default_rng(0)
    rows = features.multi_hot([{f"tool {j}": 1.0 for j in rng.choice(2000, 20)} for _ in range(100)])
    assert rows.shape == (100, 512)
    product = rows @ rows.T
    np.testing.assert_allclose(np.diag(product), 1)
    assert product.min() >= 0 and product[~np.eye(100, dtype=bool)].mean() < 0.15


def test_patterns_find_well_separated_clusters_in_any_order():
    rng = np.random.default_rng(0)
    truth = np.repeat([0, 1, 2, 3], [40, 30, 20, 10])
    rows = (np.eye(4, 6)[truth] * 4 + rng.normal(size=(100, 6)) * 0.1).astype(np.float32)
    uid = rng.integers(0, 2**32, 100, dtype=np.uint32)
    label = patterns.cluster(rows, uid, 4, 0)
    np.testing.assert_array_equal(label, truth)  # numbered by size
    order = rng.permutation(100)
    np.testing.assert_array_equal(patterns.cluster(rows[order], uid[order], 4, 0), truth[order])
    assert patterns.cluster(rows[:1].repeat(5, axis=0), uid[:5], 4, 0).tolist() == [0] * 5


def test_new_tasks_join_the_nearest_pattern_or_found_one():
    old = np.array([[0, 0], [0, 1], [9, 0], [9, 1]], np.float32)
    pattern = np.array([0, 0, 2, 2], np.int32)  # radius 1/2
    new = np.array([[0, 0.4], [8.9, 0.5], [5, 5], [5.2, 5.2], [9, 9]], np.float32)
    assert patterns.join(old, pattern, new, 4).tolist() == [0, 2, 1, 1, 3]
    assert patterns.join(old, pattern, new, 3).tolist() == [0, 2, 1, 1, 1]
    assert patterns.join(old, pattern, new[:0], 3).tolist() == []
    same = [Record(f"t{i}", "e", "", ("get_x",), ("get_x",) * (1 + i % 2)) for i in range(4)]
    g, index = graph.build(same, k=2, num_patterns=3, feature_dim=4)
    extra = [Record("u", "f", "", (), ("get_y",)), Record("v", "f", "", (), ("set_a", "get_b", "set_c"))]
    grown, named = graph.extend(g, index, same, extra)
    label = {t: int(grown.nodes.pattern[named.node_of(t)]) for t in named.task_ids}
    assert label["u"] == label["t0"] == label["t2"] and label["t1"] == label["t3"] and len(set(label.values())) == 3


def test_sketches_agree_with_the_rows_that_they_project():
    rng = np.random.default_rng(0)
    bags = [{f"n{j}": float(1 + j % 3) for j in rng.choice(30, 6)} for _ in range(40)] + [{}]
    rows, sketch = features.multi_hot(bags), features.sketch(bags, 4096, 0)
    np.testing.assert_allclose(sketch @ sketch.T, rows @ rows.T, atol=0.08)  # five sigma: 5 / 64
    assert not sketch[-1].any()
