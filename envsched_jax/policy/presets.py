"""Named sizes of the transformer. The small ones are for ToolWorld, the ``qwen3`` ones fit the published weights."""

import dataclasses
from typing import Any

from envsched_jax.policy.transformer import TransformerConfig


def _qwen3(num_layers: int, embed_dim: int, num_heads: int, mlp_dim: int, tied: bool = True) -> TransformerConfig:
    return TransformerConfig(
        151936, num_layers, embed_dim, num_heads, 8, 128, mlp_dim, rope_theta=1e6, tied=tied, blank_id=None
    )


PRESETS: dict[str, TransformerConfig] = {
    "tiny": TransformerConfig(512, num_layers=2, embed_dim=64, num_heads=4, num_kv_heads=2, head_dim=16, mlp_dim=160),
    "small": TransformerConfig(512, num_layers=4, embed_dim=128, num_heads=8, num_kv_heads=4, head_dim=16, mlp_dim=352),
    "medium": TransformerConfig(
        512, num_layers=8, embed_dim=384, num_heads=6, num_kv_heads=2, head_dim=64, mlp_dim=1024
    ),
    "qwen3_0_6b": _qwen3(28, 1024, 16, 3072),
    "qwen3_1_7b": _qwen3(28, 2048, 16, 6144),
    "qwen3_4b": _qwen3(36, 2560, 32, 9728),
    "qwen3_8b": _qwen3(36, 4096, 32, 12288, tied=False),
}


def preset(name: str, **overrides: Any) -> TransformerConfig:
    """Returns the named configuration with ``overrides`` put in, for example ``preset('tiny', vocab_size=300)``.

    Raises:
      ValueError: for an unknown name; the message lists the known ones.
    """
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}; known: {', '.join(sorted(PRESETS))}")
    return dataclasses.replace(PRESETS[name], **overrides)
