"""The recipes, by name. A scheduler is three pure functions: init, select, observe."""

import functools
from collections.abc import Callable
from typing import Any

import jax

from envsched_jax.schedulers import incremental, posterior, predictors
from envsched_jax.schedulers.bandits import dump_ucb, scaler, sec
from envsched_jax.schedulers.baselines import oracle, stratified, uniform
from envsched_jax.schedulers.envsched import Settings, env_mean, envsched, no_graph, predict, quotas
from envsched_jax.schedulers.growth import grow, transfer
from envsched_jax.schedulers.incremental import envsched_incremental
from envsched_jax.schedulers.posterior import mapp, mopps
from envsched_jax.schedulers.predictors import gps_lite, potts_graph, vip_gp
from envsched_jax.schedulers.replayed import learnability, plr
from envsched_jax.types import Belief, Graph, Scheduler, SchedulerState

__all__ = [
    "BELIEFS",
    "FAMILY",
    "RECIPES",
    "Settings",
    "belief_fn",
    "dump_ucb",
    "env_mean",
    "envsched",
    "envsched_incremental",
    "gps_lite",
    "grow",
    "learnability",
    "make",
    "mapp",
    "mopps",
    "no_graph",
    "oracle",
    "plr",
    "potts_graph",
    "predict",
    "quota_fn",
    "quotas",
    "scaler",
    "sec",
    "stratified",
    "transfer",
    "uniform",
    "vip_gp",
]

RECIPES: dict[str, Callable[..., Scheduler]] = {
    "dump_ucb": dump_ucb,
    "env_mean": env_mean,
    "envsched": envsched,
    "envsched_incremental": envsched_incremental,
    "gps_lite": gps_lite,
    "learnability": learnability,
    "mapp": mapp,
    "mopps": mopps,
    "no_graph": no_graph,
    "oracle": oracle,
    "plr": plr,
    "potts_graph": potts_graph,
    "scaler": scaler,
    "sec": sec,
    "stratified": stratified,
    "uniform": uniform,
    "vip_gp": vip_gp,
}

FAMILY = ("env_mean", "envsched", "no_graph")  # the recipes that take ``Settings``


def _predict(graph: Graph, state: SchedulerState, **settings: Any) -> Belief:
    return predict(Settings(**settings), graph, state)


# What the recipes that predict anything believe of every task: (graph, state, **settings of the recipe) to Belief.
BELIEFS: dict[str, Callable[..., Belief]] = {
    "env_mean": functools.partial(_predict, belief="env_mean"),
    "envsched": _predict,
    "envsched_incremental": incremental.believe,
    "gps_lite": predictors.believe_gps,
    "mapp": posterior.believe,
    "mopps": posterior.believe,
    "no_graph": functools.partial(_predict, belief="no_graph"),
    "potts_graph": predictors.believe_potts,
    "vip_gp": predictors.believe_gp,
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
    return functools.partial(BELIEFS[name], **settings) if name in BELIEFS else None


def quota_fn(name: str, **settings: Any) -> Callable[[Graph, SchedulerState], jax.Array] | None:
    """Returns the quotas i32[E] that the recipe sets its next batch, as ``belief_fn`` does; None if it has none."""
    make(name, **settings)
    if name not in FAMILY:
        return None
    resolved = Settings(**({} if name == "envsched" else {"belief": name}) | settings)
    return None if resolved.quota == "none" else functools.partial(quotas, resolved)
