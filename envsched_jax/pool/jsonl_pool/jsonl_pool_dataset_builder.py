"""A TFDS builder for any pool: JSON lines, ToolWorld's generator, or any other list of records.

Files are array_record, which TFDS writes and reads without TensorFlow.
"""

import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow_datasets as tfds

from envsched_jax.pool.jsonl import read_jsonl
from envsched_jax.pool.records import Record, check_pool, to_object

_TEXTS = ("task_id", "env_id", "text", "domain", "group_id")
_LISTS = ("tools_available", "gt_actions", "state_reads", "state_writes")


class Builder(tfds.core.GeneratorBasedBuilder):
    """Writes one pool as the split ``pool`` of ``<data_dir>/jsonl_pool/<name>/1.0.0``, in the pool's order.

    Unknown fields of a record are listed in ``missing`` and hold an empty value; its extra fields are JSON text.

    Args:
      pool: a list of records or the path of a JSON-lines pool.
      name: tells pools in one ``data_dir`` apart.
      **kwargs: of ``tfds.core.DatasetBuilder``, such as ``data_dir``.
    """

    VERSION = tfds.core.Version("1.0.0")

    def __init__(self, *, pool: Sequence[Record] | str | os.PathLike[str], name: str = "default", **kwargs: Any):
        self.records = read_jsonl(pool) if isinstance(pool, str | os.PathLike) else list(pool)
        check_pool(self.records, f"pool {name!r}")
        config = tfds.core.BuilderConfig(name=name, version=self.VERSION)
        super().__init__(config=config, **({"file_format": "array_record"} | kwargs))

    def _info(self) -> tfds.core.DatasetInfo:
        features: dict[str, Any] = {name: tfds.features.Text() for name in _TEXTS}
        features |= {name: tfds.features.Sequence(tfds.features.Text()) for name in _LISTS}
        features |= {
            "n_turns": np.int64,
            "verifier": {"kind": tfds.features.Text(), "n_checks": np.int64, "partial": np.bool_},
            # As bytes: the default encoding rounds to float32.
            "embedding": tfds.features.Tensor(shape=(None,), dtype=np.float64, encoding=tfds.features.Encoding.BYTES),
            "extra": tfds.features.Text(doc="JSON object"),
            "missing": tfds.features.Sequence(tfds.features.Text()),
        }
        # The order of a pool means something to its owner: keep it.
        return tfds.core.DatasetInfo(
            builder=self, features=tfds.features.FeaturesDict(features), disable_shuffling=True
        )

    def _split_generators(self, dl_manager: tfds.download.DownloadManager) -> dict[str, Any]:
        del dl_manager
        return {"pool": self._generate_examples()}

    def _generate_examples(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for i, record in enumerate(self.records):
            yield i, example(record)


def example(record: Record) -> dict[str, Any]:
    """Returns the record in the features of ``Builder``."""
    obj = to_object(Record(**{**vars(record), "extra": {}}))
    verifier = obj.pop("verifier", {})
    filled = {name: obj.get(name, "") for name in _TEXTS} | {name: obj.get(name, []) for name in _LISTS}
    names = (*_TEXTS, *_LISTS, "n_turns", "embedding")
    missing = [name for name in names if name not in obj]
    missing += [f"verifier.{name}" for name in ("kind", "n_checks", "partial") if name not in verifier]
    return filled | {
        "n_turns": obj.get("n_turns", 0),
        "verifier": {"kind": "", "n_checks": 0, "partial": False} | verifier,
        "embedding": np.array(obj.get("embedding", []), np.float64),
        "extra": json.dumps(dict(record.extra), allow_nan=False),
        "missing": missing,
    }
