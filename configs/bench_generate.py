"""Tokens per second of generation beside transformers. Presets: `cpu` (the default), `smoke` (a random small model)."""

from ml_collections import ConfigDict, config_dict


def get_config(preset: str = "cpu") -> ConfigDict:
    """Returns the configuration of `experiments.bench_generate`.

    Raises:
      ValueError: an unknown preset.
    """
    if preset not in ("cpu", "smoke"):
        raise ValueError(f"unknown preset {preset!r}; there are: cpu, smoke")
    smoke = preset == "smoke"
    config = ConfigDict()
    # Folder of safetensors or GGUF file; without, `preset` with random weights.
    config.model = config_dict.placeholder(str)
    config.preset = "tiny"
    config.dtype = "float32"
    config.batch_sizes = (2,) if smoke else (8, 32)
    config.prompt = 16 if smoke else 128
    config.tokens = 8 if smoke else 64
    config.rounds = 1 if smoke else 3  # medians; all variants take turns in each
    config.seed = 0
    return config
