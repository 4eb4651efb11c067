"""Replay on recorded outcomes. Presets: `default` (the full protocol), `parts` (EnvSched with one part switched off or
exchanged, beside the same bounds; no predictions) and `smoke` (2 seeds, 10 steps).

The data are not shipped: pass `--config.data_dir=DIR`, one data set or a folder of them.
"""

from ml_collections import ConfigDict, config_dict

from configs import ablation
from envsched_jax.schedulers import RECIPES
from envsched_jax.types import EDGE_KINDS

SAME = {"envsched_incremental"}  # on pools of this size it picks what envsched does with belief='diffusion'
FIRST = ("uniform", "stratified", "envsched", "no_graph", "env_mean", "oracle")
OURS = ("envsched_no_graph", "envsched_diffusion")  # envsched with the graph switched off, with another belief


def get_config(preset: str = "default") -> ConfigDict:
    """Returns the configuration of `experiments.replay`.

    Raises:
      ValueError: an unknown preset.
    """
    if preset not in ("default", "parts", "smoke"):
        raise ValueError(f"unknown preset {preset!r}; there are: default, parts, smoke")
    smoke = preset == "smoke"
    config = ConfigDict()
    config.data_dir = config_dict.placeholder(str)
    config.pool = config_dict.placeholder(str)  # records in place of the data set's: `bfcl`, or a file of JSON lines
    config.text_model = config_dict.placeholder(str)  # local folder of a sentence-embedding model; without, TF-IDF
    config.arms = FIRST if smoke else (*FIRST, *OURS, *sorted(set(RECIPES) - set(FIRST) - SAME))
    # Arms that are not a recipe with its default arguments: {arm: {"recipe": name, argument: value, ...}}. The peers
    # keep their defaults, which are their authors'.
    # The two that know something *rank* by it: they are bounds, and have nothing to insure against.
    config.variants = ConfigDict()
    believer = {
        "value": "variance",
        "power": 50.0,  # nearly arg-max: no training, so nothing is forgotten and no belief is made stale by its picks
        "quota": "none",
        "explore_share": 0.0,  # rounded up it would be a quarter of a batch of 4
        "coverage": (0.1, 0.1, 0.1),
        "gamma": 0.97,
        "c": 0.5,
        "kind_weights": (1.0, 1.0, 1.0, 1.0, 32.0, 1.0, 1.0),
    }
    # One setting for all recipes that believe, but for the value: what the field believes of P(informative) is
    # calibrated, so it is used as it is; the others predict variance better. The setting was chosen on these same data
    # sets, for diffusion with as many tries for no_graph as for the graph; the field's own numbers are its defaults.
    # experiments/LOG.md tells what other settings give.
    field = {**believer, "value": "p_informative"}
    settings = {
        "envsched": field,
        "envsched_no_graph": {**field, "field": {"kinds": (0.0,) * len(EDGE_KINDS)}},
        "envsched_diffusion": {**believer, "belief": "diffusion", "nu": 1.0},
        "no_graph": believer,
        "env_mean": believer,
    }
    for arm, how in settings.items():
        recipe = arm if arm in RECIPES else "envsched"
        config.variants[arm] = ConfigDict({"recipe": recipe, **how}, convert_dict=False)
    if preset == "parts":
        # Coverage and quotas are off here, so what can be left out of the closed loop is put in.
        parts = ablation.parts()
        for off in ("", "_diffusion", "_no_coverage", "_no_explore", "_no_quotas"):
            del parts[f"envsched{off}"]
        changed = parts | {
            "envsched_rewired": {"rewired": True},
            "envsched_variance": {"value": "variance"},
            "envsched_power_8": {"power": 8.0},
            "envsched_explore": {"explore_share": 0.25},
            "envsched_cap": {"quota": "cap"},
        }
        config.arms = ("uniform", "oracle", "envsched", "envsched_diffusion", *changed)
        for arm, how in changed.items():
            config.variants[arm] = ConfigDict({"recipe": "envsched", **field, **how}, convert_dict=False)
    for arm in ("oracle", "clairvoyant"):
        config.variants[arm] = ConfigDict({"recipe": "oracle", "select": "argmax"})
    config.seeds = 2 if smoke else 50
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
    # Prediction of outcomes that were not seen: `experiments.prediction`.
    config.predict = ConfigDict()
    config.predict.seeds = 1 if smoke else 3
    config.predict.most = 2 if smoke else 4  # checkpoints asked for
    config.predict.settings = (
        "cold",
        "cold_scenario",
        "cold_env",
        "sparse_05",
        "sparse_15",
        "sparse_40",
        "stale",
        "dense",
    )
    if preset == "parts":
        config.predict.settings = ()
    config.predict.references = True  # simple methods beside the beliefs
    return config
