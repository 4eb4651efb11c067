"""Pools as TFDS data sets, without TensorFlow. TFDS itself is imported on the first call only."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from envsched_jax.pool.records import PoolError, Record, check_pool, parse_record


def write_tfds(
    pool: Sequence[Record] | str | os.PathLike[str], data_dir: str | os.PathLike[str], name: str = "default"
) -> Any:
    """Writes a pool as a TFDS data set in array_record files.

    Args:
      pool: records, or the path of a JSON-lines pool.
      data_dir: the data set is written to ``<data_dir>/jsonl_pool/<name>/1.0.0``; if it is there, nothing is.
      name: tells pools in one ``data_dir`` apart.

    Returns:
      The prepared builder; ``builder.as_data_source("pool")`` gives random access to the examples.

    Raises:
      PoolError: the pool is broken, or another pool of this name is already there.
    """
    from envsched_jax.pool.jsonl_pool import jsonl_pool_dataset_builder

    builder = jsonl_pool_dataset_builder.Builder(pool=pool, name=name, data_dir=os.fspath(data_dir))
    there = builder.is_prepared()
    builder.download_and_prepare()
    if there and read_tfds(builder) != builder.records:
        raise PoolError(f"{builder.data_dir}: holds another pool already: expected a new name or data_dir")
    return builder


def read_tfds(source: Any) -> list[Record]:
    """Reads a pool that ``write_tfds`` wrote.

    Args:
      source: the builder, or a folder with one such data set in it, at any depth.

    Returns:
      The records in the pool's order.

    Raises:
      PoolError: no data set or several of them in the folder, or it is not of a pool.
    """
    where = os.fspath(source) if isinstance(source, str | os.PathLike) else os.fspath(source.data_dir)
    builder = _find(where) if isinstance(source, str | os.PathLike) else source
    if "pool" not in builder.info.splits or "missing" not in builder.info.features:
        raise PoolError(f"{where}: expected a data set with the split 'pool' that write_tfds made")
    data = builder.as_data_source("pool")
    examples = data.__getitems__(range(len(data)))
    records = [parse_record(_object(e), f"{where}: example {i}") for i, e in enumerate(examples)]
    check_pool(records, where)
    return records


def _find(folder: str) -> Any:
    import tensorflow_datasets as tfds

    found = sorted(p.parent for p in Path(folder).rglob("dataset_info.json"))
    if len(found) != 1:
        names = ", ".join(str(p.relative_to(folder)) for p in found) or "none"
        raise PoolError(f"{folder}: expected a folder with one TFDS data set, found {names}")
    return tfds.builder_from_directory(found[0])


def _object(example: Mapping[str, Any]) -> dict[str, Any]:
    plain = {name: _plain(value) for name, value in example.items()}
    missing, extra = set(plain.pop("missing")), json.loads(plain.pop("extra"))
    verifier = {n: v for n, v in plain.pop("verifier").items() if f"verifier.{n}" not in missing}
    obj = {n: v for n, v in plain.items() if n not in missing}
    if verifier:
        # Extra fields of the verifier are already under "verifier.<name>" in `extra`.
        obj["verifier"] = verifier
    return obj | extra


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.decode("utf-8")
    if isinstance(value, Mapping):
        return {n: _plain(v) for n, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return _plain(value.tolist()) if hasattr(value, "tolist") else value
