"""ToolWorld: many executable tool-use environments as data, served by one jitted step."""

from envsched_jax.environments.toolworld.dynamics import State, apply_call, environment, verify
from envsched_jax.environments.toolworld.generator import (
    HELD_OUT_ENV,
    HELD_OUT_TASK,
    TRAIN,
    Tasks,
    ToolWorld,
    ToolWorldConfig,
    World,
    generate,
)
from envsched_jax.environments.toolworld.habits import habits
from envsched_jax.environments.toolworld.reachability import Auditor

__all__ = [
    "HELD_OUT_ENV",
    "HELD_OUT_TASK",
    "TRAIN",
    "Auditor",
    "State",
    "Tasks",
    "ToolWorld",
    "ToolWorldConfig",
    "World",
    "apply_call",
    "environment",
    "generate",
    "habits",
    "verify",
]
