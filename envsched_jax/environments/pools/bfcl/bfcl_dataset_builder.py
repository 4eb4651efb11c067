"""A TFDS builder of BFCL's pool."""

from collections.abc import Sequence
from typing import Any

from envsched_jax.environments import bfcl
from envsched_jax.pool.jsonl_pool import jsonl_pool_dataset_builder


class Builder(jsonl_pool_dataset_builder.Builder):
    """Writes ``bfcl.pool(categories)`` to ``<data_dir>/bfcl/<name>/1.0.0``; for ``name`` and others see its base."""

    def __init__(self, *, categories: Sequence[str] = bfcl.CATEGORIES, name: str = "default", **kwargs: Any):
        super().__init__(pool=bfcl.pool(categories), name=name, **kwargs)
