"""A TFDS builder of tau-bench's pool."""

import os
from collections.abc import Sequence
from typing import Any

from envsched_jax.environments import taubench
from envsched_jax.pool.jsonl_pool import jsonl_pool_dataset_builder


class Builder(jsonl_pool_dataset_builder.Builder):
    """Writes ``taubench.pool(...)`` to ``<data_dir>/taubench/<name>/1.0.0``; for ``name`` and others see its base."""

    def __init__(
        self,
        *,
        checkout: str | os.PathLike[str],
        domains: Sequence[str] = taubench.DOMAINS,
        split: str = "test",
        name: str = "default",
        **kwargs: Any,
    ):
        super().__init__(pool=taubench.pool(checkout, domains, split), name=name, **kwargs)
