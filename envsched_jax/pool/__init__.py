"""The pool: all tasks of a run with their metadata."""

from envsched_jax.pool.datasets import read_tfds, write_tfds
from envsched_jax.pool.jsonl import read_jsonl, write_jsonl
from envsched_jax.pool.records import PoolError, Record, Verifier, check_pool, parse_record, to_object

__all__ = [
    "PoolError",
    "Record",
    "Verifier",
    "check_pool",
    "parse_record",
    "read_jsonl",
    "read_tfds",
    "to_object",
    "write_jsonl",
    "write_tfds",
]
