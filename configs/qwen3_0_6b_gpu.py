"""Qwen3-0.6B on BFCL with one accelerator. Presets: `default` (all parameters learn), `lora` (adapters do)."""

from ml_collections import ConfigDict

from configs import agent


def get_config(preset: str = "default") -> ConfigDict:
    """Returns the configuration.

    Raises:
      ValueError: an unknown preset.
    """
    config = agent.get_config(preset)
    config.environment.categories = ("base", "miss_func", "miss_param")
    config.limits.update({"context": 8192, "answer": 512})
    config.train.update({"steps": 100})
    return config
