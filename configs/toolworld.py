"""The whole cycle on ToolWorld. Presets: `cpu` (the default), `smoke` (seconds), `gpu` (a larger policy)."""

from ml_collections import ConfigDict


def get_config(preset: str = "cpu") -> ConfigDict:
    """Returns the configuration of `experiments.train`.

    Raises:
      ValueError: an unknown preset.
    """
    if preset not in ("cpu", "smoke", "gpu"):
        raise ValueError(f"unknown preset {preset!r}; there are: cpu, smoke, gpu")
    config = ConfigDict()
    config.seed = 0
    config.filter = "none"  # or dapo
    config.scheduler = ConfigDict({"name": "envsched"}, convert_dict=False)

    config.world = ConfigDict()
    config.world.seed = 0
    config.world.num_domains = 8
    config.world.tasks_per_env = 64
    config.world.eval_per_env = 8
    config.world.held_out_envs = 10
    config.world.eval_per_held_out_env = 24
    config.world.reward_mix = (1.0, 0.0, 0.0)
    config.world.variants = 2
    config.world.doc_noise = (0.0,)
    config.world.structure = 1.0
    config.world.habit_seed = 0
    config.world.habit_scale = 1.8
    config.world.habit_shift = 0.0

    config.audit = "off"  # 'report': read every verifier before any rollout; 'exclude': and leave out what is broken

    config.graph = ConfigDict()
    config.graph.k = 16
    config.graph.num_patterns = 32
    config.graph.feature_dim = 64

    config.policy = ConfigDict()
    config.policy.preset = "tiny"

    config.warm_start = ConfigDict()
    config.warm_start.steps = 2000
    config.warm_start.pools = 4
    config.warm_start.policies = 1  # base policies; seeds of an ablation take turns with them

    # The regime of the published setting: a batch is about a fortieth of the pool, and the update shrinks with the
    # share of informative groups, because Adam's epsilon is larger than its gradients.
    config.train = ConfigDict()
    config.train.steps = 120
    config.train.batch_size = 64
    config.train.group_size = 8
    config.train.temperature = 0.3
    config.train.advantage_std = "group"
    config.train.clip_low = 0.2
    config.train.clip_high = 0.2
    config.train.max_draws = 8
    config.train.truth_rollouts = 16
    config.train.chunk = 10

    config.optimizer = ConfigDict()
    config.optimizer.name = "adam"
    config.optimizer.learning_rate = 0.002
    config.optimizer.eps = 0.1
    config.optimizer.b1 = 0.9
    config.optimizer.b2 = 0.99
    config.optimizer.max_norm = 10.0

    config.evaluation = ConfigDict()
    config.evaluation.tasks_per_split = 192
    config.evaluation.rollouts = 4
    config.evaluation.probe_every = 60
    config.evaluation.probe_tasks = 256
    config.evaluation.probe_rollouts = 64
    if preset == "gpu":
        config.policy.preset = "small"
    if preset == "smoke":
        _shrink(config)
    return config


def _shrink(config: ConfigDict) -> None:
    """Everything small: shows that the cycle runs, not that it learns."""
    config.world.update(
        {"num_domains": 2, "tasks_per_env": 8, "eval_per_env": 2, "held_out_envs": 2, "eval_per_held_out_env": 4}
    )
    config.graph.update({"k": 4, "num_patterns": 8, "feature_dim": 16})
    config.warm_start.update({"steps": 20, "pools": 1})
    config.train.update({"steps": 8, "batch_size": 8, "group_size": 4, "max_draws": 2, "chunk": 4})
    config.evaluation.update(
        {"tasks_per_split": 8, "rollouts": 2, "probe_every": 4, "probe_tasks": 16, "probe_rollouts": 4}
    )
