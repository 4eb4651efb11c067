"""What ages a belief in the loop: selection bias, drift or forgetting. Presets: `cpu`, `smoke`."""

from ml_collections import ConfigDict

from configs import toolworld


def get_config(preset: str = "cpu") -> ConfigDict:
    """Returns the configuration of `experiments.drift`: that of `toolworld`, with shares of explore picks as arms.

    Raises:
      ValueError: an unknown preset.
    """
    if preset not in ("cpu", "smoke"):
        raise ValueError(f"unknown preset {preset!r}; there are: cpu, smoke")
    config = toolworld.get_config(preset)
    del config.seed, config.scheduler, config.filter
    config.seeds = 1
    config.train.steps = 80 if preset == "cpu" else 8
    config.every = 10 if preset == "cpu" else 4  # steps between two looks at the truth
    config.truth_rollouts = 16 if preset == "cpu" else 4  # of every task of the pool, never charged
    config.explore_shares = (0.0, 0.25, 0.5)  # of envsched; uniform selection is the fourth arm
    config.scheduler = ConfigDict({"belief": "diffusion"}, convert_dict=False)  # settings of envsched in every arm
    return config
