"""Tickets per second through a dispatcher. Presets: `cpu` (the default), `smoke`."""

from ml_collections import ConfigDict


def get_config(preset: str = "cpu") -> ConfigDict:
    """Returns the configuration of `experiments.bench_dispatch`.

    Raises:
      ValueError: an unknown preset.
    """
    if preset not in ("cpu", "smoke"):
        raise ValueError(f"unknown preset {preset!r}; there are: cpu, smoke")
    smoke = preset == "smoke"
    config = ConfigDict()
    config.tasks = (400,) if smoke else (10_000, 100_000)
    config.tasks_per_env = 20 if smoke else 100
    config.k = 4 if smoke else 16
    config.recipe = "envsched_incremental"
    config.batch_size = 8 if smoke else 64
    config.group_size = 8
    config.calls = (1, 8) if smoke else (1, 64, 256)  # tickets per call of propose, and outcomes per call of observe
    config.seconds = 0.5 if smoke else 20.0  # of one row, after the programs are compiled
    config.seed = 0
    return config
