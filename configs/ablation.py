"""Schedulers side by side on ToolWorld.

Presets: `cpu` (the main arms, 5 seeds), `peers` (published schedulers, 5 seeds), `headline` (both and 10 seeds, with
short steps), `parts` (EnvSched with one part switched off or exchanged, 5 seeds, with short steps), `demo` (3 arms,
3 seeds of one base policy), `smoke`. Elsewhere every seed has a base policy of its own.
"""

from ml_collections import ConfigDict

from configs import toolworld
from envsched_jax.belief.field import Settings
from envsched_jax.types import CROSS_KINDS, WITHIN_KINDS

PEERS = ("vip_gp", "dump_ucb", "mopps", "learnability", "plr", "mapp", "sec", "potts_graph", "gps_lite", "scaler")
STRENGTHS = Settings().kinds  # of the field's springs at the start


def parts() -> dict[str, dict]:
    """Returns settings of envsched by which one of its parts is switched off or exchanged."""
    within, cross = len(WITHIN_KINDS), len(CROSS_KINDS)
    still = {"walk_pool": 0.0, "walk_env": 0.0, "walk_static": 0.0}
    return {
        "envsched": {},
        "envsched_no_graph": {"field": {"kinds": (0.0,) * (within + cross)}},
        "envsched_within_only": {"field": {"kinds": STRENGTHS[:within] + (0.0,) * cross}},
        "envsched_cross_only": {"field": {"kinds": (0.0,) * within + STRENGTHS[within:]}},
        "envsched_fixed_weights": {"field": {"rate": 0.0}},
        "envsched_no_drift": {"field": still | {"memory": 1.0}},
        "envsched_one_field": {"field": {"blend": (0.0, 1.0, 0.0), "blend_var": 0.0, "blend_walk": 0.0}},
        "envsched_no_coverage": {"coverage": (0.0, 0.0, 0.0)},
        "envsched_no_explore": {"explore_share": 0.0},
        "envsched_no_quotas": {"quota": "none"},
        "envsched_greedy": {"select": "greedy"},
        "envsched_logdet": {"select": "logdet"},
        "envsched_diffusion": {"belief": "diffusion"},
    }


def get_config(preset: str = "cpu") -> ConfigDict:
    """Returns the configuration of `experiments.ablate`: that of `toolworld`, with arms instead of one scheduler.

    Raises:
      ValueError: an unknown preset.
    """
    presets = ("cpu", "peers", "headline", "parts", "demo", "smoke")
    if preset not in presets:
        raise ValueError(f"unknown preset {preset!r}; there are: {', '.join(presets)}")
    config = toolworld.get_config("smoke" if preset == "smoke" else "cpu")
    del config.seed, config.scheduler, config.filter
    config.seeds = {"headline": 10, "demo": 3, "smoke": 2}.get(preset, 5)
    config.jobs = 1  # arms at a time, each in a process of its own; on a CPU
    if preset not in ("demo", "smoke"):
        config.warm_start.policies = config.seeds
    if preset in ("headline", "parts"):
        config.optimizer.learning_rate = 0.001  # further from the end of what can be learned, as published runs are
    names = ["uniform", "envsched", "stratified"]
    if preset in ("cpu", "headline"):
        names += ["no_graph", "env_mean", "oracle"]
    if preset in ("peers", "headline"):
        names += PEERS
    if preset == "parts":
        names = ["uniform"]
    arms: dict[str, dict] = {name: {"scheduler": {"name": name}, "filter": "none"} for name in names}
    if preset == "parts":
        arms |= {arm: {"scheduler": {"name": "envsched", **how}, "filter": "none"} for arm, how in parts().items()}
        arms["envsched_rewired"] = {**arms["envsched"], "rewired": True}
    if preset in ("cpu", "headline", "smoke"):
        arms["dapo_filter"] = {"scheduler": {"name": "uniform"}, "filter": "dapo"}
    config.arms = ConfigDict(arms)
    if preset == "demo":
        config.evaluation.update({"probe_tasks": 128, "probe_rollouts": 16})
    return config
