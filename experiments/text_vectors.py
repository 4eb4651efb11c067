"""Text vectors of a local sentence-embedding model, for pools whose records carry none.

The model runs through the optional package sentence-transformers (extra `text`), imported only where it is asked for;
without it the graph uses its own TF-IDF.
"""

import dataclasses
import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from envsched_jax.pool import Record

PACKAGE = "sentence_transformers"


class TextModelError(ValueError):
    """The model cannot be used; the message is one line that says what to do."""


def load(path: str | Path) -> Any:
    """Loads the model in the folder `path`; nothing is fetched.

    Raises:
      TextModelError: no such folder, the package is missing, or the folder holds no model that it can read.
    """
    if not Path(path).is_dir():
        raise TextModelError(f"text_model: {path}: no such folder; give the local folder of a sentence-embedding model")
    try:
        package = importlib.import_module(PACKAGE)
    except ImportError as error:
        raise TextModelError(
            f"text_model needs the package sentence-transformers ({error}): pip install 'envsched-jax[text]'"
        ) from error
    try:
        return package.SentenceTransformer(str(path), local_files_only=True)
    except (OSError, ValueError) as error:
        raise TextModelError(f"text_model: {path}: not a sentence-embedding model ({error})") from error


def embed(records: Sequence[Record], model: Any) -> list[Record]:
    """Returns the records with `embedding` set to the model's unit vector of `text`.

    Args:
      records: a pool.
      model: has `encode(list of texts, normalize_embeddings=True) -> f[n, d]`, as `load` returns.

    Raises:
      TextModelError: the model did not give one finite vector per record.
    """
    rows = np.asarray(model.encode([record.text for record in records], normalize_embeddings=True), np.float64)
    if rows.ndim != 2 or len(rows) != len(records) or not np.isfinite(rows).all():
        raise TextModelError(f"text_model: expected {len(records)} finite vectors, got an array of {list(rows.shape)}")
    return [dataclasses.replace(r, embedding=tuple(row.tolist())) for r, row in zip(records, rows, strict=True)]
