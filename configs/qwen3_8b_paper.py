"""The setting of the published result: Qwen3-8B, batches of 64 x 8. Presets: `default` (40 steps), `long` (120).

On one host with 8 accelerators of 80 GB: `docs/models.md` has the memory. What the abstract does not say is ours:
learning rate, context, temperature.
"""

from ml_collections import ConfigDict

from configs import agent


def get_config(preset: str = "default") -> ConfigDict:
    """Returns the configuration.

    Raises:
      ValueError: an unknown preset.
    """
    if preset not in ("default", "long"):
        raise ValueError(f"unknown preset {preset!r}; there are: default, long")
    config = agent.get_config()
    config.preset = "qwen3_8b"
    config.mesh.update({"data": 8, "model": 1})
    config.limits.context = 8192
    config.engine.update({"slots": 128, "ahead": 64, "capacity": 8192})
    config.train.update({"steps": 40 if preset == "default" else 120, "batch_size": 64, "group_size": 8, "part": 8})
    config.train.checkpoint_every = 5  # 92 GiB each: parameters and Adam's moments in float32
    config.evaluation.suites = ("bfcl", "taubench", "acebench")
    return config
