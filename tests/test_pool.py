"""The pool: records, JSON lines and TFDS data sets."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from envsched_jax import pool
from envsched_jax.pool import PoolError, Record, Verifier

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"
SETS = {"bfcl_multiturn": 600, "bfcl_v1_2024": 1700, "mcpmark": 127, "swebench_verified": 500, "taubench": 165}

_names = st.lists(st.text(max_size=8), max_size=4).map(tuple)
_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
_counts = st.integers(0, 2**31 - 1)
_records = st.builds(
    Record,
    task_id=st.text(min_size=1, max_size=8),
    env_id=st.text(min_size=1, max_size=8),
    text=st.text(max_size=30),
    tools_available=_names,
    gt_actions=st.none() | _names,
    n_turns=st.none() | _counts,
    state_reads=st.none() | _names,
    state_writes=st.none() | _names,
    verifier=st.none() | st.builds(Verifier, st.text(max_size=5), st.none() | _counts, st.none() | st.booleans()),
    domain=st.none() | st.text(max_size=5),
    group_id=st.none() | st.text(max_size=5),
    embedding=st.none() | st.tuples(*[st.floats(allow_nan=False, allow_infinity=False)] * 3),
    extra=st.dictionaries(st.sampled_from(["difficulty", "tags", "verifier.loc", "é"]), _json, max_size=3),
)
_pools = st.lists(_records, min_size=1, max_size=4, unique_by=lambda r: r.task_id)


def full(task_id="a", **changes):
    fields = {
        "env_id": "e",
        "text": "naïve ✓",
        "tools_available": ("get", "set"),
        "gt_actions": ("get", "set"),
        "n_turns": 2,
        "state_reads": (),
        "state_writes": ("x",),
        "verifier": Verifier("state", 3, False),
        "domain": "d",
        "group_id": "g",
        "embedding": (0.1, -2.0),
        "extra": {"verifier.loc": 7, "tags": ["u", None, {"v": 1.5}]},
    }
    return Record(task_id, **(fields | changes))


def line(**changes):
    fields = {"task_id": "a", "env_id": "e", "text": "t", "tools_available": []} | changes
    return json.dumps(fields).encode()


def test_only_the_needed_fields_and_null_is_missing():
    obj = {"task_id": "a", "env_id": "e", "text": "", "tools_available": [], "n_turns": None, "verifier": None}
    assert pool.parse_record(obj, "here") == Record("a", "e", "", ())


def test_unknown_fields_are_kept_at_both_levels():
    obj = json.loads(line(verifier={"kind": "k", "n_checks": None, "loc": 3}, why=None))
    record = pool.parse_record(obj, "here")
    assert record.verifier == Verifier("k", None, None)
    assert dict(record.extra) == {"why": None, "verifier.loc": 3}
    assert pool.to_object(record) == {**obj, "verifier": {"kind": "k", "loc": 3}}


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(_pools)
def test_writing_and_reading_gives_the_same_pool(tmp_path, records):
    path = tmp_path / "pool.jsonl"
    pool.write_jsonl(path, records)
    assert pool.read_jsonl(path) == records


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "{path}: the pool is empty: expected at least one record"),
        (b"\n \n", "{path}: the pool is empty: expected at least one record"),
        (line() + b"\n{'a'", "{path}:2: expected one JSON object, got broken JSON: Expecting property name"),
        (b"[" * 100_000, "{path}:1: expected one JSON object, got broken JSON: "),
        (line(x=float("nan")), "{path}:1: expected one JSON object, got broken JSON: NaN is not a JSON number"),
        (line() + b"\n\xff\n", "{path}:2: expected UTF-8, got byte 0xff at byte 1 of the line"),
        (b"3", "{path}:1: expected a JSON object, got 3"),
        (line(task_id=None), "{path}:1: field 'task_id' is missing: expected a non-empty string"),
        (b'{"task_id": "a"}', "{path}:1: field 'env_id' is missing: expected a non-empty string"),
        (line(env_id=""), "{path}:1: field 'env_id': expected a non-empty string, got \"\""),
        (line(text=5), "{path}:1: field 'text': expected a string, got 5"),
        (line(text="\ud800"), "{path}:1: field 'text': expected valid Unicode, got a lone surrogate in"),
        (line(tools_available="get"), "{path}:1: field 'tools_available': expected a list of strings, got \"get\""),
        (line(gt_actions=["a", 3]), "{path}:1: field 'gt_actions', item 1: expected a string, got 3"),
        (line(n_turns="3"), "{path}:1: field 'n_turns': expected an integer from 0 to 2147483647, got \"3\""),
        (line(n_turns=True), "{path}:1: field 'n_turns': expected an integer from 0 to 2147483647, got true"),
        (line(n_turns=-1), "{path}:1: field 'n_turns': expected an integer from 0 to 2147483647, got -1"),
        (line(n_turns=2.0), "{path}:1: field 'n_turns': expected an integer from 0 to 2147483647, got 2.0"),
        (line(verifier="k"), "{path}:1: field 'verifier': expected an object with 'kind', and perhaps"),
        (line(verifier={}), "{path}:1: field 'verifier': 'kind' is missing: expected a string"),
        (line(verifier={"kind": "k", "partial": 1}), "{path}:1: field 'verifier', 'partial': expected true or false"),
        (line(embedding=[]), "{path}:1: field 'embedding': expected a non-empty list of numbers, got a list"),
        (line(embedding=[1, None]), "{path}:1: field 'embedding', item 1: expected a finite number, got null"),
        (line(embedding=[10**400]), "{path}:1: field 'embedding', item 0: expected a finite number, got 1000"),
        (
            line() + b"\n\n" + line(task_id="b") + b"\n" + line(),
            "{path}: lines 1 and 4: field 'task_id': both are 'a': expected a different one for every task",
        ),
        (
            line(embedding=[1, 2]) + b"\n" + line(task_id="b", embedding=[1]),
            "{path}: lines 1 and 2: field 'embedding': 2 and 1 numbers: expected one length for the whole pool",
        ),
    ],
)
def test_one_clear_error_names_file_line_field_and_what_was_expected(tmp_path, content, message):
    path = tmp_path / "tasks.jsonl"
    path.write_bytes(content)
    with pytest.raises(PoolError) as error:
        pool.read_jsonl(path)
    assert str(error.value).startswith(message.replace("{path}", str(path)))


def test_writing_refuses_what_could_not_be_read_and_leaves_the_file(tmp_path):
    path = tmp_path / "pool.jsonl"
    pool.write_jsonl(path, [full()])
    before = path.read_bytes()
    for records, message in [
        ([], "the pool is empty"),
        ([full(), full()], "records 1 and 2: field 'task_id': both are 'a'"),
        ([full(extra={"x": float("nan")})], "record 'a': expected values that JSON can hold"),
        ([full(extra={"x": {1, 2}})], "record 'a': expected values that JSON can hold"),
        ([full(extra={"text": "x"})], "record 'a': extra field 'text': expected a name that no field has"),
    ]:
        with pytest.raises(PoolError, match=message):
            pool.write_jsonl(path, records)
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", SETS)
def test_recorded_data_sets_are_read(name):
    path = DATA / name / "tasks.jsonl"
    if not path.is_file():
        pytest.skip("the recorded data sets are not next to this checkout")
    records = pool.read_jsonl(path)
    assert len(records) == SETS[name]
    assert all(r.text and r.verifier for r in records)
    raw = [json.loads(text) for text in path.read_bytes().splitlines()]
    kept = [{k: v for k, v in obj.items() if v is not None} for obj in raw]
    again = [{k: v for k, v in pool.to_object(r).items() if v is not None} for r in records]
    assert again == kept


def test_importing_the_pool_does_not_import_tfds():
    code = "import sys, envsched_jax.pool; sys.exit('tensorflow_datasets' in sys.modules)"
    root = Path(__file__).resolve().parents[1]
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, timeout=60)


def test_tfds_round_trip_keeps_order_and_tells_unknown_from_empty(tmp_path):
    unknown = Record("n", "e", "", ())
    empty = full("m", gt_actions=(), state_reads=(), state_writes=(), n_turns=0, domain="", embedding=None, extra={})
    partly = full("k", verifier=Verifier("", None, None), group_id=None, extra={"verifier.loc": {"a": [1]}})
    records = [unknown, empty, full("z"), partly, full("b", verifier=None, embedding=None, extra={"é": None})]
    builder = pool.write_tfds(records, tmp_path, name="small")
    assert pool.read_tfds(builder) == records
    assert pool.read_tfds(tmp_path) == records
    assert pool.read_tfds(str(builder.data_dir)) == records
    assert [e["task_id"] for e in builder.as_data_source("pool")] == [b"n", b"m", b"z", b"k", b"b"]
    assert "tensorflow" not in sys.modules

    pool.write_tfds(records, tmp_path, name="small")  # again: nothing to do
    with pytest.raises(PoolError, match="holds another pool already: expected a new name or data_dir"):
        pool.write_tfds(records[:2], tmp_path, name="small")

    path = tmp_path / "other.jsonl"
    pool.write_jsonl(path, records[:2])
    assert pool.read_tfds(pool.write_tfds(path, tmp_path, name="other")) == records[:2]
    with pytest.raises(PoolError, match=r"expected a folder with one TFDS data set, found jsonl_pool/other/1\.0\.0, "):
        pool.read_tfds(tmp_path)


def test_tfds_errors(tmp_path):
    with pytest.raises(PoolError, match="expected a folder with one TFDS data set, found none"):
        pool.read_tfds(tmp_path)
    with pytest.raises(PoolError, match="pool 'default': the pool is empty"):
        pool.write_tfds([], tmp_path)
