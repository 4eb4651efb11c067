"""The policy: one transformer for teacher-forced scoring and cached decoding, and its named sizes."""

from envsched_jax.policy.presets import PRESETS, preset
from envsched_jax.policy.transformer import Cache, Prefix, Transformer, TransformerConfig

__all__ = ["PRESETS", "Cache", "Prefix", "Transformer", "TransformerConfig", "preset"]
