"""The recipes, by name. A scheduler is three pure functions: init, select, observe."""

import functools
from collections.abc import Callable
from typing import Any

from envsched_jax.schedulers.baselines import oracle, stratified, uniform
from envsched_jax.schedulers.envsched import Settings, env_mean, envsched, no_graph, predict, quotas
from envsched_jax.types import Belief, Graph, Scheduler, SchedulerState

__all__ = [
    "RECIPES",
    "Settings",
    "belief_fn",
    "env_mean",
    "envsched",
    "make",
    "no_graph",
    "oracle",
    "predict",
    "quotas",
    "stratified",
    "uniform",
]

RECIPES: dict[str, Callable[..., Scheduler]] = {
    "env_mean": env_mean,
    "envsched": envsched,
    "no_graph": no_graph,
    "oracle": oracle,
    "stratified": stratified,
    "uniform": uniform,
}


def make(name: str, **settings: Any) -> Scheduler:
    """Returns the recipe of this name with these settings; every recipe takes ``batch_size`` and ``group_size``.

    Raises:
      ValueError: for an unknown name, or a setting out of range.
      TypeError: for a setting that the recipe does not have.
    """
    if name not in RECIPES:
        raise ValueError(f"unknown scheduler {name!r}; known are {', '.join(RECIPES)}")
    return RECIPES[name](**settings)


def belief_fn(name: str, **settings: Any) -> Callable[[Graph, SchedulerState], Belief] | None:
    """Returns what the recipe with these settings believes, as a function of graph and state; None if it has no belief.

    Raises what ``make`` raises.
    """
    make(name, **settings)
    if name not in ("env_mean", "envsched", "no_graph"):
        return None
    return functools.partial(predict, Settings(**({} if name == "envsched" else {"belief": name}) | settings))
