"""What a step costs by pool size, and the whole cycle. Presets: `cpu` (the default), `gpu`, `tpu`, `smoke`."""

from ml_collections import ConfigDict

from configs import toolworld


def get_config(preset: str = "cpu") -> ConfigDict:
    """Returns the configuration of `experiments.bench_cycle`.

    Raises:
      ValueError: an unknown preset.
    """
    if preset not in ("cpu", "gpu", "tpu", "smoke"):
        raise ValueError(f"unknown preset {preset!r}; there are: cpu, gpu, tpu, smoke")
    smoke = preset == "smoke"
    config = ConfigDict()
    config.nodes = (400,) if smoke else (10_000, 100_000, 1_000_000)
    # The largest pool of each mode; a look at every task, or a field, is too slow beyond.
    config.largest = ConfigDict({"incremental": 10**9, "full": 10**9, "diffusion": 100_000, "gaussian_field": 100_000})
    config.k = 4 if smoke else 16
    config.tasks_per_env = 20 if smoke else 100
    config.batch_size = 8 if smoke else 256
    config.group_size = 8
    config.candidates = 64 if smoke else 8192
    config.steps = 4 if smoke else 40  # timed, after as many that are not
    config.seconds = 1.0 if smoke else 30.0  # of a mode at one size, after three steps
    config.seed = 0
    # The whole cycle on ToolWorld: a small pool, so that the cycle and not the compiler takes the time.
    config.seeds = 2 if smoke else 8
    config.cycle_steps = 4 if smoke else 20
    config.cycle = toolworld.get_config("smoke" if smoke else "cpu")
    if not smoke:
        config.cycle.world.update({"num_domains": 2, "tasks_per_env": 32, "held_out_envs": 2})
        config.cycle.warm_start.update({"steps": 100, "pools": 1})
        config.cycle.train.update({"batch_size": 32})
    return config
