"""Schedulers side by side on ToolWorld. Presets: `cpu` (all arms, 5 seeds), `demo` (3 arms, 3 seeds), `smoke`."""

from ml_collections import ConfigDict

from configs import toolworld


def get_config(preset: str = "cpu") -> ConfigDict:
    """Returns the configuration of `experiments.ablate`: that of `toolworld`, with arms instead of one scheduler.

    Raises:
      ValueError: an unknown preset.
    """
    if preset not in ("cpu", "demo", "smoke"):
        raise ValueError(f"unknown preset {preset!r}; there are: cpu, demo, smoke")
    config = toolworld.get_config("smoke" if preset == "smoke" else "cpu")
    del config.seed, config.scheduler, config.filter
    config.seeds = {"cpu": 5, "demo": 3, "smoke": 2}[preset]
    names = ["uniform", "stratified", "envsched"]
    if preset == "cpu":
        names += ["no_graph", "env_mean", "oracle"]
    arms: dict[str, dict] = {name: {"scheduler": {"name": name}, "filter": "none"} for name in names}
    if preset != "demo":
        arms["dapo_filter"] = {"scheduler": {"name": "uniform"}, "filter": "dapo"}
    config.arms = ConfigDict(arms)
    if preset == "demo":
        config.evaluation.update({"probe_tasks": 128, "probe_rollouts": 16})
    return config
