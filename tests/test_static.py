"""Covariates of a record: hand-worked rows, unknown fields, and independence of all other records."""

import dataclasses
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_graph import make_record

from envsched_jax import graph
from envsched_jax.graph import static
from envsched_jax.pool import Record, Verifier

COUNTS, PRODUCTS = slice(0, 6), slice(6, 27)
FLAGS, KINDS = slice(27, 35), slice(35, 39)
PAIRS = [(i, j) for i in range(6) for j in range(i, 6)]
BARE = Record("bare", "env", "", ())
FULL = Record(
    task_id="full",
    env_id="env",
    text="x" * 99,
    tools_available=("get_user", "set_user", "search"),
    gt_actions=("get_user", "get_user", "set_user", "get_user"),
    n_turns=2,
    state_reads=("a", "b"),
    state_writes=("c",),
    verifier=Verifier("turn_checks", 3, True),
)


def row(record):
    (out,) = static.covariates([record])
    return out


def test_a_row_worked_by_hand():
    out = row(FULL)
    assert out.shape == (static.SIZE,) == (39,) and out.dtype == np.float32
    counts = [
        (np.log(100.0) - 6.5) / 1.0,  # 99 characters
        (np.log(5.0) - 1.6) / 0.6,  # 4 actions
        (np.log(3.0) - 1.5) / 0.5,  # 2 of them distinct
        (np.log(4.0) - 2.5) / 0.8,  # 3 tools
        (np.log(3.0) - 1.0) / 0.6,  # 2 turns
        (np.log(4.0) - 1.0) / 0.6,  # 3 checks
    ]
    np.testing.assert_allclose(out[COUNTS], counts, rtol=1e-6)
    np.testing.assert_allclose(out[PRODUCTS], [counts[i] * counts[j] / 2.0 for i, j in PAIRS], rtol=1e-5)
    # reads, writes; of get get set get: three ask, the second repeats, the last comes back; known, partial, by turn
    np.testing.assert_allclose(out[FLAGS], [np.log(3.0), np.log(2.0), 0.75, 0.25, 0.25, 1.0, 1.0, 1.0], rtol=1e-6)
    kinds = np.zeros(4)
    kinds[zlib.crc32(b"turn_checks") % 4] = 1.0
    assert out[KINDS].tolist() == kinds.tolist()


def test_what_is_missing_is_zero():
    """All but the text and the tools, which every record has: none of either is a count of 0."""
    out = row(BARE)
    text, tools = (0.0 - 6.5) / 1.0, (0.0 - 2.5) / 0.8
    expected = np.zeros(39)
    expected[0], expected[3] = -4.0, max(tools, -4.0)  # cut at -4
    assert text < -4.0
    for place, (i, j) in enumerate(PAIRS):
        expected[6 + place] = expected[i] * expected[j] / 2.0
    np.testing.assert_allclose(out, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("name", "places"),
    [
        ("gt_actions", {1, 2, 29, 30, 31, 32}),
        ("n_turns", {4}),
        ("state_reads", {27}),
        ("verifier", {5, 33, 34, 35, 36, 37, 38}),
    ],
)
def test_a_missing_field_empties_its_own_places_only(name, places):
    out, whole = row(dataclasses.replace(FULL, **{name: None})), row(FULL)
    products = {6 + place for place, pair in enumerate(PAIRS) if places & set(pair)}
    for place in range(39):
        if place in places | products:
            assert out[place] == 0.0, place
        else:
            assert out[place] == whole[place], place
    assert any(whole[place] != 0.0 for place in places)


def test_unknown_is_not_empty():
    none, empty = (row(dataclasses.replace(FULL, gt_actions=actions)) for actions in (None, ()))
    assert none[32] == 0.0 and empty[32] == 1.0
    assert none[1] == 0.0 and empty[1] == pytest.approx(-1.6 / 0.6)
    unknown = row(dataclasses.replace(FULL, verifier=Verifier("turn_checks")))
    assert unknown[5] == 0.0 and unknown[33] == 0.0 and unknown[34] == 1.0


@pytest.mark.parametrize(
    ("kind", "stepwise"),
    [("per_step", True), ("TURN_state", True), ("stepwise", True), ("unit_tests", False), ("returned", False)],
)
def test_rewards_that_come_step_by_step_are_flagged(kind, stepwise):
    assert row(dataclasses.replace(FULL, verifier=Verifier(kind)))[34] == float(stepwise)


def test_huge_counts_are_cut():
    out = row(dataclasses.replace(FULL, text="x" * 10**7, n_turns=10**6))
    assert out[0] == 4.0 and out[4] == 4.0 and np.abs(out).max() <= 8.0


def test_no_records_give_no_rows():
    assert static.covariates([]).shape == (0, 39)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(2, 12))
def test_a_row_depends_on_its_own_record_alone(seed, count):
    """Whatever the order and the company."""
    rng = np.random.default_rng(seed)
    records = [make_record(i, i % 3, rng) for i in range(count)]
    rows = static.covariates(records)
    order = rng.permutation(count)
    np.testing.assert_array_equal(static.covariates([records[i] for i in order]), rows[order])
    np.testing.assert_array_equal(static.covariates([*records[:1], FULL, BARE, *records[1:]])[[0, 3]], rows[[0, 1]])
    np.testing.assert_array_equal(rows[-1], row(records[-1]))
    assert np.isfinite(rows).all() and np.abs(rows).max() <= 8.0


def test_names_do_not_matter():
    """Neither task, environment nor other labels tell how hard a task is."""
    renamed = dataclasses.replace(FULL, task_id="a", env_id="b", domain="c", group_id="d", embedding=(1.0, 0.0))
    np.testing.assert_array_equal(row(renamed), row(FULL))


def test_tasks_that_join_have_the_rows_they_would_have_had_from_the_beginning():
    rng = np.random.default_rng(3)
    old, new = [make_record(i, i % 3, rng) for i in range(12)], [make_record(100 + i, i % 5, rng) for i in range(5)]
    options = {"k": 2, "num_patterns": 3, "feature_dim": 8, "capacity": 20}
    g, index = graph.build(old, **options)
    grown, named = graph.extend(g, index, old, new)
    whole, together = graph.build([*old, *new], **options)
    for record in (*old, *new):
        mine = np.asarray(grown.nodes.static)[named.node_of(record.task_id)]
        np.testing.assert_array_equal(mine, np.asarray(whole.nodes.static)[together.node_of(record.task_id)])
        np.testing.assert_array_equal(mine, row(record))
    assert not np.asarray(grown.nodes.static)[17:].any()
