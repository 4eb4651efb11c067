"""Replay on recorded outcomes. Presets: `default` (the full protocol) and `smoke` (2 seeds, 10 steps).

The data are not shipped: pass `--config.data_dir=DIR`, one data set or a folder of them.
"""

from ml_collections import ConfigDict, config_dict


def get_config(preset: str = "default") -> ConfigDict:
    """Returns the configuration of `experiments.replay`.

    Raises:
      ValueError: an unknown preset.
    """
    if preset not in ("default", "smoke"):
        raise ValueError(f"unknown preset {preset!r}; there are: default, smoke")
    smoke = preset == "smoke"
    config = ConfigDict()
    config.data_dir = config_dict.placeholder(str)
    config.arms = ("uniform", "stratified", "envsched", "no_graph", "env_mean", "oracle")
    # Arms that are not a recipe with its default arguments: {arm: {"recipe": name, argument: value, ...}}.
    # The two that know something *rank* by it: they are bounds, and have nothing to insure against.
    config.variants = ConfigDict()
    for arm in ("oracle", "clairvoyant"):
        config.variants[arm] = ConfigDict({"recipe": "oracle", "select": "argmax"})
    config.seeds = 2 if smoke else 20
    config.steps = 10 if smoke else 80
    config.pool_over_batch = 40  # B = ceil(T / pool_over_batch)
    config.group_size = 4  # G
    config.cohort = 5  # models that make a checkpoint where each has at most one trial of a task
    config.evaluations = 3 if smoke else 10  # times that beliefs are scored
    config.graph = ConfigDict()
    config.graph.k = 16
    config.graph.num_patterns = 32
    config.graph.feature_dim = 64
    config.graph.seed = 0
    return config
