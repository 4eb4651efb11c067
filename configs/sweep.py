"""One question each: the main arms against one axis of the setting, everything else as in `ablation`.

Presets: `learning_rate`, `optimizer`, `group_size`, `batch_size`, `pool_size`, `degenerate`, `structure`, `reward`,
`policy`, `suite`, `third_suite`, `smoke`.
"""

from typing import Any

from ml_collections import ConfigDict

from configs import ablation

ARMS = ("uniform", "envsched", "no_graph", "learnability", "oracle")

# Generator settings of three suites. Choices are tuned on the first two; the third is for the final table only.
SUITES: dict[str, dict[str, Any]] = {
    "first": {},
    "second": {"seed": 1, "habit_seed": 1, "structure": 0.6, "doc_noise": (0.0, 0.0, 0.25, 0.5)},
    "third": {"seed": 2, "habit_seed": 2, "structure": 0.8, "doc_noise": (0.0, 0.25), "variants": 4},
}

# By question: what each value changes in the base. Where a step grows or shrinks, the number of rollouts stays.
QUESTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "learning_rate": {
        label: {"optimizer": {"learning_rate": float(label)}} for label in ("5e-4", "1e-3", "2e-3", "4e-3", "8e-3")
    },
    # Adam whose epsilon is above its gradients shrinks with the informative share; with a tiny one it is scale-free.
    "optimizer": {
        "eps_1e-1": {},
        "eps_1e-2": {"optimizer": {"eps": 1e-2, "learning_rate": 0.0005}},
        "eps_1e-8": {"optimizer": {"eps": 1e-8, "learning_rate": 0.0001}},
    },
    "group_size": {
        "4": {"train": {"group_size": 4, "batch_size": 128}},
        "8": {},
        "16": {"train": {"group_size": 16, "batch_size": 32}},
    },
    "batch_size": {
        "16": {"train": {"batch_size": 16, "steps": 480, "chunk": 40}, "evaluation": {"probe_every": 240}},
        "64": {},
        "256": {"train": {"batch_size": 256, "steps": 30, "chunk": 3}, "evaluation": {"probe_every": 15}},
    },
    "pool_size": {f"{38 * n}": {"world": {"tasks_per_env": n}} for n in (16, 64, 256)},
    "degenerate": {f"shift_{n}": {"world": {"habit_shift": float(n)}} for n in (-1, 0, 1, 2)},
    "structure": {"none": {"world": {"structure": 0.0}}, "half": {"world": {"structure": 0.5}}, "full": {}},
    "reward": {
        "binary": {},
        "partial": {"world": {"reward_mix": (0.0, 1.0, 0.0)}},
        "mixed": {"world": {"reward_mix": (0.4, 0.4, 0.2)}},
    },
    "policy": {size: {"policy": {"preset": size}} for size in ("tiny", "small", "medium")},
    "suite": {name: {"world": SUITES[name]} for name in ("first", "second")},
    "third_suite": {"third": {"world": SUITES["third"]}},
    "smoke": {"4": {}, "2": {"train": {"group_size": 2}}},
}


def get_config(preset: str = "suite") -> ConfigDict:
    """Returns the configuration of `experiments.sweep`.

    ``base`` is the configuration of `experiments.ablate`, ``axis`` what each value changes in it, in the order
    of ``order``, and ``tune`` says whether an arm may choose its value, as it may its learning rate, or the value is
    given from outside.

    Raises:
      ValueError: an unknown preset.
    """
    if preset not in QUESTIONS:
        raise ValueError(f"unknown preset {preset!r}; there are: {', '.join(QUESTIONS)}")
    config = ConfigDict()
    config.question = preset
    config.tune = preset == "learning_rate"
    config.base = ablation.get_config("smoke" if preset == "smoke" else "cpu")
    names = ARMS[:2] if preset == "smoke" else ARMS
    config.base.arms = ConfigDict({name: {"scheduler": {"name": name}, "filter": "none"} for name in names})
    config.axis = ConfigDict(QUESTIONS[preset])
    config.order = tuple(QUESTIONS[preset])
    return config
