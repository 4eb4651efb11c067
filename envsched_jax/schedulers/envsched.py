"""The recipe of this library: a belief from own records, environments and the graph; value; quotas; a draw."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from envsched_jax.belief import cost, diffusion, environment, field, partial
from envsched_jax.belief.environment import Moments
from envsched_jax.belief.field import Settings as FieldSettings
from envsched_jax.schedulers import common
from envsched_jax.select import greedy, logdet, quota, sample, value
from envsched_jax.types import EDGE_KINDS, Batch, Belief, Graph, Key, Outcome, Scheduler, SchedulerState

EXPLORE, EXPLOIT = 0, 1  # streams of random numbers within one call of select
DEFAULT_FIELD = FieldSettings()
CHECKS_DOF, CHECKS_CORRELATION = 10.0, 0.3  # strength and place of the prior of how checks hang together
PRIOR_VARIANCE, SHARED = 4.0, 0.1  # of log-odds, and what tasks of one environment have in common, for 'logdet'
TIE = 1e-4  # size of the random part that breaks ties in the greedy selection


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that can be set about ``envsched``.

    The defaults of ``power``, ``coverage`` and ``gamma`` were chosen in the closed loop on one ToolWorld suite with one
    seed (``experiments/LOG.md``): a policy in training moves, so records fade over about 10 steps.

    Attributes:
      batch_size: B, tasks per step.
      group_size: G, rollouts per task.
      belief: 'gaussian_field' (log-odds with drift, over the graph), 'diffusion' (own record, environment and graph by
        averages), 'no_graph' (own record and environment alone) or 'env_mean' (environment means alone).
      field: priors and paces of the Gaussian field, a ``belief.field.Settings`` or a mapping of some of its fields.
      informative: how P(informative) is believed: 'beta' for binary rewards, 'share' for any others.
      value: 'p_informative' (for advantages divided by the group's deviation), 'environment' (divided by that of the
        environment) or 'variance' (not divided, or all alike).
      cost: 'none', 'tokens' or 'seconds': what a value is divided by, as predicted.
      cost_power: 1 is value per cost, 1/2 the allocation of least variance for what is spent.
      select: 'sample', 'greedy' (value minus similarity) or 'logdet' (value plus information).
      power: of the value in the draw, for 'sample'; 0 is uniform.
      eta: weight of the similarity penalty, for 'greedy'.
      shortlist: tasks looked at by 'greedy' and 'logdet'.
      information: value of one nat of information, for 'logdet'.
      budget: the most that a batch may cost as predicted (``cost`` times G, summed), for 'logdet'; None is no limit.
      explore_share: share of the batch, rounded up, drawn evenly over environments and patterns whatever is believed.
      coverage: weights of the novelty of environment, pattern and task, beside a value between 0 and 1.
      quota: 'none', 'uniform', 'proportional', 'weights' or 'cap'.
      quota_weights: for 'weights', one per environment in order of index.
      quota_cap: for 'cap', the most tasks of one environment in a batch; None is a tenth of the batch or twice an even
        share, whichever is more, so that few environments can still fill it.
      gamma: discount of records per step; 0.9 is a memory of about 10 steps.
      nu: the most rollouts that the neighbours count for; None is one group.
      c: rollouts that the environment's mean counts for.
      prior: mean, variance and share of informative groups before any record, c rollouts strong; a pass rate that is
        Beta(1/2, 1/2) in groups of 8.
      restart: share of a record that stays at its task in each round of diffusion; at 1/2 neighbours and neighbours
        of neighbours weigh the same.
      mix: share of the within relation.
      rounds: of diffusion, at most 2.
      kind_weights: how much each of ``types.EDGE_KINDS`` counts; near-duplicates tell most about each other.
    """

    batch_size: int
    group_size: int
    belief: str = "gaussian_field"
    field: FieldSettings | Mapping[str, Any] = DEFAULT_FIELD
    informative: str = "beta"
    value: str = "p_informative"
    cost: str = "none"
    cost_power: float = 0.5
    select: str = "sample"
    power: float = 8.0
    eta: float = 0.1
    shortlist: int = 8192
    information: float = 0.5
    budget: float | None = None
    explore_share: float = 0.25
    coverage: tuple[float, float, float] = (0.03, 0.03, 0.03)
    quota: str = "cap"
    quota_weights: tuple[float, ...] | None = None
    quota_cap: int | None = None
    gamma: float = 0.9
    nu: float | None = None
    c: float = 2.0
    prior: tuple[float, float, float] = (0.5, 0.125, 0.6)
    restart: float = 0.5
    mix: float = 0.7
    rounds: int = 2
    kind_weights: tuple[float, ...] = (1.0, 1.0, 1.0, 1.0, 4.0, 1.0, 1.0)

    def __post_init__(self) -> None:
        """Raises ValueError for what cannot work, before anything is traced."""
        common.check_sizes(self.batch_size, self.group_size)
        if isinstance(self.field, Mapping):
            object.__setattr__(self, "field", FieldSettings(**self.field))
        if not isinstance(self.field, FieldSettings):
            raise ValueError(f"field must be a belief.field.Settings or a mapping of its fields, got {self.field!r}")
        field.check(self.field)
        choices = {
            "belief": ("gaussian_field", "diffusion", "no_graph", "env_mean"),
            "informative": ("beta", "share"),
            "value": ("p_informative", "environment", "variance"),
            "cost": ("none", "tokens", "seconds"),
            "select": ("sample", "greedy", "logdet"),
            "quota": quota.MODES,
        }
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} must be one of {', '.join(known)}, got {getattr(self, name)!r}")
        for name in ("explore_share", "gamma", "restart", "mix", "cost_power"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise ValueError(f"{name} must lie in [0, 1], got {getattr(self, name)}")
        for name in ("power", "eta", "information", "c", "nu"):
            if getattr(self, name) is not None and not getattr(self, name) >= 0.0:
                raise ValueError(f"{name} must be at least 0, got {getattr(self, name)}")
        for name in ("coverage", "kind_weights", "quota_weights"):
            if not all(number >= 0.0 for number in getattr(self, name) or ()):
                raise ValueError(f"{name} must be at least 0 each, got {getattr(self, name)}")
        if len(self.coverage) != 3:
            raise ValueError(f"coverage needs 3 numbers: of environment, pattern and task, got {self.coverage}")
        if len(self.prior) != 3 or not all(0.0 <= number <= 1.0 for number in self.prior):
            raise ValueError(f"prior needs a mean, a variance and a share, each in [0, 1], got {self.prior}")
        if self.rounds not in (0, 1, 2):
            raise ValueError(f"rounds must be 0, 1 or 2, got {self.rounds}")
        if (self.quota == "weights") != (self.quota_weights is not None):
            raise ValueError("quota_weights belong to quota='weights', which needs them")
        if self.quota_weights is not None and not sum(self.quota_weights) > 0.0:
            raise ValueError(f"quota_weights must not all be 0, got {self.quota_weights}")
        if self.quota_cap is not None and (self.quota != "cap" or self.quota_cap < 1):
            raise ValueError(f"quota_cap belongs to quota='cap' and is at least 1, got {self.quota_cap}")
        if len(self.kind_weights) != len(EDGE_KINDS):
            raise ValueError(f"kind_weights needs {len(EDGE_KINDS)} numbers, one for each of {', '.join(EDGE_KINDS)}")
        if self.budget is not None and (self.select != "logdet" or self.cost == "none"):
            raise ValueError("budget belongs to select='logdet' with a cost of tokens or seconds")
        if self.budget is not None and not self.budget > 0.0:
            raise ValueError(f"budget must be above 0, got {self.budget}")
        if self.shortlist < 2 * self.batch_size:
            raise ValueError(f"shortlist must be at least twice the batch, got {self.shortlist}")


def predict(settings: Settings, graph: Graph, state: SchedulerState) -> Belief:
    """Returns what the recipe believes of every task, f32[N] per field."""
    if settings.belief == "gaussian_field":
        return field.believe(graph, state.memory, settings.group_size, _trials(graph, state))
    shared = blending(settings)
    if settings.belief != "diffusion":
        return environment.believe(graph, state.history, own=settings.belief == "no_graph", **shared)
    return diffusion.believe(
        graph,
        state.history,
        nu=most_lent(settings),
        kind_weights=jnp.asarray(settings.kind_weights, jnp.float32),
        restart=settings.restart,
        mix=settings.mix,
        rounds=settings.rounds,
        **shared,
    )


def blending(settings: Settings) -> dict[str, Any]:
    """Returns the arguments that all beliefs by averages take."""
    return {
        "c": settings.c,
        "prior": Moments(*(jnp.float32(x) for x in settings.prior)),
        "group_size": settings.group_size,
        "informative": settings.informative,
    }


def most_lent(settings: Settings) -> float:
    """Returns the most rollouts that the neighbours count for."""
    return settings.group_size if settings.nu is None else settings.nu


def _trials(graph: Graph, state: SchedulerState) -> jax.Array:
    """Returns how many all-or-nothing rollouts a rollout of each task is worth, f32[N]; above 1 with partial credit."""
    rho = partial.correlation(graph, state.history, c=CHECKS_DOF, prior=CHECKS_CORRELATION)
    return partial.effective_trials(graph.nodes.checks, rho[graph.nodes.env])


def quotas(settings: Settings, graph: Graph, state: SchedulerState) -> jax.Array:
    """Returns the quota of every environment for the next batch, i32[E]; beside ``select.quota.deviation``."""
    return allocate(settings, graph, state, quota.count_tasks(graph))


def allocate(settings: Settings, graph: Graph, state: SchedulerState, tasks: jax.Array) -> jax.Array:
    """Returns the quotas, i32[E], from the eligible tasks of every environment, i32[E]."""
    environments = jnp.maximum((tasks > 0).sum(), 1)
    fair = (2 * settings.batch_size + environments - 1) // environments
    default_cap = jnp.maximum(math.ceil(settings.batch_size / 10), fair)
    return quota.allocate(
        graph,
        state.quota_carry,
        batch_size=settings.batch_size,
        mode=settings.quota,
        weights=settings.quota_weights,
        cap=default_cap if settings.quota_cap is None else settings.quota_cap,
        tasks=tasks,
    )


def costs(settings: Settings, graph: Graph, state: SchedulerState) -> jax.Array:
    """Returns what one rollout of every task is predicted to cost, f32[N], in tokens or seconds; 1 if nobody asks."""
    if settings.cost == "none":
        return jnp.ones_like(state.truth)
    predicted = cost.predict(
        graph,
        state.history,
        nu=most_lent(settings),
        c=settings.c,
        kind_weights=jnp.asarray(settings.kind_weights, jnp.float32),
        restart=settings.restart,
        mix=settings.mix,
        rounds=settings.rounds,
    )
    return predicted.tokens if settings.cost == "tokens" else predicted.seconds


def _worth(settings: Settings, graph: Graph, belief: Belief, counts: jax.Array, price: jax.Array) -> jax.Array:
    """Returns the value of every task, per cost if so set, f32[N]."""
    if settings.value == "environment":
        worth = value.score(graph, belief, std="environment") + value.coverage_bonus(graph, counts, settings.coverage)
    else:
        worth = value.combine(graph, belief, counts, target=settings.value, coverage=settings.coverage)
    if settings.cost == "none":
        return worth
    return value.per_cost(worth, price, graph.nodes.mask, alpha=settings.cost_power)


def pick(settings: Settings, key: Key, graph: Graph, state: SchedulerState) -> Batch:
    """Returns the next batch: explore picks first, then the others."""
    nodes = graph.nodes
    belief = predict(settings, graph, state)
    counts = value.visit_counts(state.history, state.step, settings.group_size, settings.gamma)
    price = costs(settings, graph, state)
    worth = _worth(settings, graph, belief, counts, price)
    slots = quotas(settings, graph, state)
    explorers = math.ceil(settings.explore_share * settings.batch_size - 1e-6)

    score = sample.stratified_log_weight(graph) + sample.gumbel(jax.random.fold_in(key, EXPLORE), nodes.uid)
    node, mask = sample.draw(score, nodes.mask, nodes.env, slots, explorers, even=True)
    spent, budget = None, None
    if settings.budget is not None:  # explore picks are paid from it too; those that would exceed it are dropped
        spent = settings.group_size * price
        mask = mask & (jnp.cumsum(jnp.where(mask, spent[node], 0.0)) <= settings.budget)
        node = jnp.where(mask, node, 0)
        budget = settings.budget - jnp.where(mask, spent[node], 0.0).sum()
    eligible = nodes.mask & ~jnp.zeros_like(nodes.mask).at[node].max(mask)
    slots = slots.at[nodes.env[node]].add(-mask.astype(jnp.int32))

    key, rest = jax.random.fold_in(key, EXPLOIT), settings.batch_size - explorers
    if settings.select == "sample":
        limit = None if settings.quota == "none" else slots
        score = sample.keys(key, nodes.uid, worth, settings.power)
        others, others_mask = sample.draw(score, eligible, nodes.env, limit, rest)
    elif settings.select == "logdet":
        score = worth + TIE * sample.uniform(key, nodes.uid)
        uncertain = jnp.maximum(belief.mean * (1.0 - belief.mean), 1e-2)
        others, others_mask = logdet.pick(
            score,
            jax.lax.rsqrt(1.0 / PRIOR_VARIANCE + belief.evidence * uncertain),
            nodes.feature,
            eligible,
            nodes.env,
            slots,
            node,
            mask,
            count=rest,
            weight=settings.information,
            noise=1.0 / (settings.group_size * uncertain),
            shared=SHARED,
            shortlist=settings.shortlist,
            cost=spent,
            budget=budget,
        )
    else:
        score = worth + TIE * sample.uniform(key, nodes.uid)
        closest = greedy.similarity_to(nodes.feature, node, mask)
        others, others_mask = greedy.pick(
            score,
            nodes.feature,
            eligible,
            nodes.env,
            slots,
            closest,
            count=rest,
            eta=settings.eta,
            shortlist=settings.shortlist,
        )
    explore = jnp.arange(settings.batch_size) < explorers
    return common.to_batch(
        jnp.concatenate([node, others]), jnp.concatenate([mask, others_mask]), explore, worth, belief
    )


def envsched(**settings: Any) -> Scheduler:
    """Returns the scheduler with these ``Settings``; an unknown keyword is a TypeError."""
    return from_settings(Settings(**settings))


def no_graph(**settings: Any) -> Scheduler:
    """Returns ``envsched`` that believes own records and environment means only."""
    return from_settings(Settings(belief="no_graph", **settings))


def env_mean(**settings: Any) -> Scheduler:
    """Returns ``envsched`` that believes environment means only."""
    return from_settings(Settings(belief="env_mean", **settings))


def from_settings(settings: Settings) -> Scheduler:
    """Returns the scheduler with these settings."""
    prior = settings.field
    assert isinstance(prior, FieldSettings)  # __post_init__ has seen to that

    def init(graph: Graph) -> SchedulerState:
        return common.init(graph, field.init(prior, graph) if settings.belief == "gaussian_field" else ())

    def select(key: Key, graph: Graph, state: SchedulerState) -> Batch:
        return pick(settings, key, graph, state)

    def observe(graph: Graph, state: SchedulerState, outcome: Outcome) -> SchedulerState:
        mode, weights = settings.quota, settings.quota_weights
        following = common.observe(graph, state, outcome, gamma=settings.gamma, mode=mode, weights=weights)
        if settings.belief != "gaussian_field":
            return following
        memory = field.update(prior, graph, state.memory, outcome, _trials(graph, state))
        return following._replace(memory=memory)

    return Scheduler(init, select, observe)
