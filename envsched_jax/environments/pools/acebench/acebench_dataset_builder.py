"""A TFDS builder of ACEBench-Agent's pool."""

import os
from collections.abc import Sequence
from typing import Any

from envsched_jax.environments import acebench
from envsched_jax.pool.jsonl_pool import jsonl_pool_dataset_builder


class Builder(jsonl_pool_dataset_builder.Builder):
    """Writes ``acebench.pool(...)`` to ``<data_dir>/acebench/<name>/1.0.0``; for ``name`` and others see its base."""

    def __init__(
        self,
        *,
        checkout: str | os.PathLike[str],
        kinds: Sequence[str] = acebench.KINDS,
        language: str = "en",
        name: str = "default",
        **kwargs: Any,
    ):
        super().__init__(pool=acebench.pool(checkout, kinds, language), name=name, **kwargs)
