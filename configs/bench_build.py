"""What building a graph costs by pool size. Presets: `cpu` (the default), `million`, `smoke`."""

from ml_collections import ConfigDict


def get_config(preset: str = "cpu") -> ConfigDict:
    """Returns the configuration of `experiments.bench_build`.

    Raises:
      ValueError: an unknown preset.
    """
    if preset not in ("cpu", "million", "smoke"):
        raise ValueError(f"unknown preset {preset!r}; there are: cpu, million, smoke")
    config = ConfigDict()
    # Ascending, since peak memory is that of the process so far.
    config.tasks = {"cpu": (20_000, 50_000, 100_000, 200_000), "million": (1_000_000,), "smoke": (600,)}[preset]
    config.tasks_per_env = 100
    config.search = "auto"
    config.k = 4 if preset == "smoke" else 16
    config.recall_tasks = 64 if preset == "smoke" else 512  # whose exact neighbours are found, too; 0: none
    config.steps = 3 if preset == "smoke" else 100  # scheduled on the graph; 0: none
    config.batch_size = 256
    config.group_size = 8
    config.seed = 0
    return config
