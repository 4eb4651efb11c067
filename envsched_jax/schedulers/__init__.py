"""The recipes, by name. A scheduler is three pure functions: init, select, observe."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from envsched_jax.schedulers.baselines import oracle, stratified, uniform
from envsched_jax.schedulers.envsched import Settings, env_mean, envsched, no_graph, predict, quotas
from envsched_jax.types import Belief, Graph, Scheduler, SchedulerState

__all__ = [
    "BELIEVERS",
    "RECIPES",
    "Settings",
    "belief_fn",
    "env_mean",
    "envsched",
    "make",
    "no_graph",
    "oracle",
    "predict",
    "quota_fn",
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


BELIEVERS = ("env_mean", "envsched", "no_graph")  # recipes that predict whether a group will be informative


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
    resolved = _settings(name, settings)
    return None if resolved is None else functools.partial(predict, resolved)


def quota_fn(name: str, **settings: Any) -> Callable[[Graph, SchedulerState], jax.Array] | None:
    """Returns the quotas i32[E] that the recipe sets its next batch, as ``belief_fn`` does; None if it has none."""
    resolved = _settings(name, settings)
    return None if resolved is None or resolved.quota == "none" else functools.partial(quotas, resolved)


def _settings(name: str, settings: dict[str, Any]) -> Settings | None:
    """Resolves the settings of a recipe that believes."""
    make(name, **settings)
    if name not in BELIEVERS:
        return None
    return Settings(**({} if name == "envsched" else {"belief": name}) | settings)
