"""A Gaussian field of log-odds over the graph: what is believed of every task, and how surely.

The log-odds of task i are a sum of four parts, from coarse to fine,

    f_i = x_i . beta + u_env(i) + g_i + e_i,

each with its own prior and pace. ``beta`` (an intercept, static covariates, text features) and the environments' ``u``
walk at random, since training moves whole families at once. ``g`` is smooth along the graph (see ``springs``) and
``e`` is the task's own; both are slow. So the order of difficulty is remembered for long, the frontier briefly.

A group with k passes in n enters by its Gaussian bound (Jaakkola and Jordan 2000), and each part is updated given the
coarser ones: a shift that all tasks share is not counted twice. What a task keeps of an outcome is relative to the
coarse parts of that moment; when they move on, so does the task.

There are two such fields, of passing and of being mixed (a group whose rewards differ); the second sees what the
first cannot, pass rates that are 0 or 1 around a mean of 1/2. A logistic regression combines them by how well each has
foretold the batches so far, which also keeps P(informative) calibrated on the picks.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from envsched_jax.belief import history, logistic, springs
from envsched_jax.types import EDGE_KINDS, Belief, Graph, Outcome

TOLERANCE = 1e-2  # of a solve, relative; the next one starts where it ends


class Settings(NamedTuple):
    """Priors and paces; variances are of log-odds, walks per step."""

    intercept: float = 2.0  # prior variance of the pool's level
    static: float = 0.3  # prior variance that all static covariates explain together
    feature: float = 0.3  # prior variance that the text features explain
    env: float = 0.3  # prior variance of an environment's level
    graph: float = 20.0  # s_g^2, variance of g where a task has no neighbours
    own: float = 0.5  # variance of e at the start
    kinds: tuple[float, ...] = (2.0, 0.3, 0.3, 0.1, 60.0, 0.2, 0.1)  # w_s at the start; 0 switches a kind off
    walk_pool: float = 0.01
    walk_env: float = 0.005
    walk_static: float = 0.0005
    memory: float = 0.98  # what is kept of a task's own evidence per step
    rate: float = 0.1  # of learning the weights; 0 keeps them
    probes: int = 8  # of the field, for variances; at most 32
    iterations: int = 40  # of conjugate gradients per solve, the most
    refresh: int = 4  # steps between two refreshes of variances and weights, which cost most
    blend: tuple[float, float, float] = (0.0, 0.5, 0.5)  # intercept and slopes of the two fields at the start
    blend_var: float = 0.1
    blend_walk: float = 0.002


def check(settings: Settings) -> None:
    """Raises ValueError for priors and paces that cannot work."""
    variances, walks = ("intercept", "static", "feature", "env", "blend_var"), ("pool", "env", "static")
    for name in (*variances, *(f"walk_{of}" for of in walks), "blend_walk", "rate"):
        _require(settings, name, getattr(settings, name) >= 0.0, "at least 0")
    for name in ("graph", "own"):
        _require(settings, name, getattr(settings, name) > 0.0, "above 0")
    for name in ("iterations", "refresh"):
        _require(settings, name, getattr(settings, name) >= 1, "at least 1")
    _require(settings, "memory", 0.0 <= settings.memory <= 1.0, "in [0, 1]")
    _require(settings, "probes", 1 <= settings.probes <= 32, "from 1 to 32")
    right = len(settings.kinds) == len(EDGE_KINDS) and all(w >= 0.0 for w in settings.kinds)
    _require(settings, "kinds", right, f"{len(EDGE_KINDS)} numbers, at least 0")
    _require(settings, "blend", len(settings.blend) == 3, "3 numbers")


def _require(settings: Settings, name: str, right: bool, expected: str) -> None:
    if not right:
        raise ValueError(f"field.{name} must be {expected}, got {getattr(settings, name)}")


class Memory(NamedTuple):
    """What one field remembers: M coefficients, R probes."""

    beta: jax.Array  # f32[M]
    cov: jax.Array  # f32[M, M]
    coarse_var: jax.Array  # f32[N], x_i . cov x_i as of the last refresh
    env: jax.Array  # f32[E]
    env_var: jax.Array  # f32[E]
    precision: jax.Array  # f32[N], own evidence about g
    shift: jax.Array  # f32[N], precision times what that says g is
    field: jax.Array  # f32[N], g
    field_var: jax.Array  # f32[N]
    probe: jax.Array  # f32[N, R], draws of the field around its mean
    own_precision: jax.Array  # f32[N], own evidence about e
    own_shift: jax.Array  # f32[N]
    log_weight: jax.Array  # f32[S], of the kinds
    log_scale: jax.Array  # f32[2], log s_g^2 and log s_e^2
    moment: jax.Array  # f32[S + 2], second moments of their gradients


class State(NamedTuple):
    """Both fields and what combines them."""

    clock: jax.Array  # i32[], steps so far
    centre: jax.Array  # f32[*], mean of the static covariates in the pool at the start
    scale: jax.Array  # f32[*], their spread
    passing: Memory
    mixed: Memory
    blend: jax.Array  # f32[3]
    blend_cov: jax.Array  # f32[3, 3]


class LogOdds(NamedTuple):
    """Log-odds of some tasks, f32[B] each: the parts and how uncertain each is."""

    coarse: jax.Array
    coarse_var: jax.Array
    env: jax.Array
    env_var: jax.Array
    field: jax.Array
    field_var: jax.Array
    own: jax.Array
    own_var: jax.Array

    @property
    def mean(self) -> jax.Array:
        """The sum of the parts."""
        return self.coarse + self.env + self.field + self.own

    @property
    def var(self) -> jax.Array:
        """The sum of their variances."""
        return self.coarse_var + self.env_var + self.field_var + self.own_var


def init(settings: Settings, graph: Graph) -> State:
    """Returns the fields before the first outcome."""
    num_nodes, num_envs = graph.nodes.mask.shape[0], graph.globals.env_mask.shape[0]
    static, feature = graph.nodes.static.shape[1], graph.nodes.feature.shape[1]
    prior = [settings.intercept] + [settings.static / max(static, 1)] * static + [settings.feature] * feature
    precision, shift, nothing, own_precision, own_shift = (jnp.zeros(num_nodes, jnp.float32) for _ in range(5))
    memory = Memory(
        beta=jnp.zeros(len(prior), jnp.float32),
        cov=jnp.diag(jnp.asarray(prior, jnp.float32)),
        coarse_var=jnp.zeros(num_nodes, jnp.float32),
        env=jnp.zeros(num_envs, jnp.float32),
        env_var=jnp.full(num_envs, settings.env, jnp.float32),
        precision=precision,
        shift=shift,
        field=nothing,
        field_var=nothing,
        probe=jnp.zeros((num_nodes, settings.probes), jnp.float32),
        own_precision=own_precision,
        own_shift=own_shift,
        log_weight=jnp.log(jnp.maximum(jnp.asarray(settings.kinds, jnp.float32), 1e-6)),
        log_scale=jnp.log(jnp.asarray([settings.graph, settings.own], jnp.float32)),
        moment=jnp.zeros(len(EDGE_KINDS) + 2, jnp.float32),
    )
    real = graph.nodes.mask.astype(jnp.float32)[:, None]
    total = jnp.maximum(real.sum(), 1.0)
    centre = (real * graph.nodes.static).sum(axis=0) / total
    spread = jnp.sqrt((real * jnp.square(graph.nodes.static - centre[None, :])).sum(axis=0) / total)
    scale = jnp.where(spread > 0.05, spread, 1.0)
    memory = _settle(settings, graph, memory, _rows(graph, centre, scale))
    return State(
        clock=jnp.zeros((), jnp.int32),
        centre=centre,
        scale=scale,
        passing=memory,
        mixed=jax.tree.map(jnp.copy, memory),  # a buffer of its own, so that a state can be donated
        blend=jnp.asarray(settings.blend, jnp.float32),
        blend_cov=settings.blend_var * jnp.eye(3, dtype=jnp.float32),
    )


def _rows(graph: Graph, centre: jax.Array, scale: jax.Array) -> jax.Array:
    """Returns the covariates x_i, f32[N, M]."""
    one = jnp.ones((graph.nodes.mask.shape[0], 1), jnp.float32)
    static = (graph.nodes.static - centre[None, :]) / scale[None, :]
    return jnp.concatenate([one, static, graph.nodes.feature], axis=1)


def log_odds(
    memory: Memory, x: jax.Array, env: jax.Array, node: jax.Array | slice, coarse_var: jax.Array | None = None
) -> LogOdds:
    """Returns what one field says of these tasks: x f32[B, M], env i32[B], node i32[B], or a slice for all tasks.

    ``coarse_var``, f32[B], is the variance of the covariates' part; worked out where it is not given.
    """
    own_var = 1.0 / (jnp.exp(-memory.log_scale[1]) + memory.own_precision[node])
    return LogOdds(
        coarse=logistic.dot(x, memory.beta[:, None])[:, 0],
        coarse_var=_quadratic(x, memory.cov) if coarse_var is None else coarse_var,
        env=memory.env[env],
        env_var=memory.env_var[env],
        field=memory.field[node],
        field_var=memory.field_var[node],
        own=own_var * memory.own_shift[node],
        own_var=own_var,
    )


def update(settings: Settings, graph: Graph, state: State, outcome: Outcome, trials: jax.Array | None = None) -> State:
    """Returns the fields one step later. Failed and absent rollouts say nothing.

    Args:
      settings: priors and paces.
      graph: the dual-relation graph.
      state: before the outcome.
      outcome: rewards in [0, 1].
      trials: f32[N], how many all-or-nothing rollouts one of this task is worth, see ``partial``; 1 by default.
    """
    seen = history.group_statistics(outcome)
    real = history.present(outcome)
    node = jnp.where(real, outcome.node, 0)
    worth = jnp.where(real, 1.0, 0.0) if trials is None else jnp.where(real, trials[node], 0.0)
    count = jnp.stack([worth * seen["n"], jnp.where(real, seen["groups"], 0.0)])
    passed = jnp.stack([worth * seen["s1"], jnp.where(real, seen["informative"], 0.0)])
    everything = _rows(graph, state.centre, state.scale)
    x, env = everything[node], graph.nodes.env[node]

    fields = _both(state)
    before = jax.vmap(lambda m: log_odds(m, x, env, node))(fields)
    mixed_share = logistic.expectations(before.mean[0], before.var[0], outcome.reward.shape[1])[2]
    walked = state.blend_cov + settings.blend_walk * jnp.eye(3, dtype=jnp.float32)
    blend, cov = logistic.regress(state.blend, walked, _signals(before, mixed_share), count[1], passed[1])
    due = state.clock % settings.refresh == 0
    fields = jax.vmap(lambda m, n, k: _update(settings, graph, m, everything, node, n, k, due))(fields, count, passed)
    passing, mixed = (jax.tree.map(lambda leaf, i=i: leaf[i], fields) for i in range(2))
    return State(state.clock + 1, state.centre, state.scale, passing, mixed, blend, cov)


def _both(state: State) -> Memory:
    """Returns the two fields as one with a leading axis."""
    return jax.tree.map(lambda a, b: jnp.stack([a, b]), state.passing, state.mixed)


def _update(
    settings: Settings,
    graph: Graph,
    memory: Memory,
    everything: jax.Array,
    node: jax.Array,
    n: jax.Array,
    k: jax.Array,
    due: jax.Array,
) -> Memory:
    x, env = everything[node], graph.nodes.env[node]
    walk = [settings.walk_pool] + [settings.walk_static] * (memory.beta.shape[0] - 1)
    memory = memory._replace(
        cov=memory.cov + jnp.diag(jnp.asarray(walk, jnp.float32)),
        env_var=memory.env_var + settings.walk_env,
        precision=settings.memory * memory.precision,
        shift=settings.memory * memory.shift,
        own_precision=settings.memory * memory.own_precision,
        own_shift=settings.memory * memory.own_shift,
    )
    now = log_odds(memory, x, env, node)
    w, y = logistic.gaussian_bound(n, k, now.mean, now.var)

    weight = w / (1.0 + w * (now.env_var + now.field_var + now.own_var))
    gain = x.T * weight[None, :]
    cov = jnp.linalg.solve(
        jnp.eye(x.shape[1], dtype=jnp.float32) + logistic.dot(memory.cov, logistic.dot(gain, x)), memory.cov
    )
    cov = 0.5 * (cov + cov.T)
    memory = memory._replace(
        beta=memory.beta + logistic.dot(cov, logistic.dot(gain, (y - now.mean)[:, None]))[:, 0], cov=cov
    )

    now = log_odds(memory, x, env, node)
    weight = w / (1.0 + w * (now.coarse_var + now.field_var + now.own_var))
    num_envs = memory.env.shape[0]
    env_var = 1.0 / (1.0 / memory.env_var + jax.ops.segment_sum(weight, env, num_envs))
    step = env_var * jax.ops.segment_sum(weight * (y - now.mean), env, num_envs)
    memory = memory._replace(env=memory.env + step, env_var=env_var)

    now = log_odds(memory, x, env, node)
    weight = w / (1.0 + w * (now.coarse_var + now.env_var + now.own_var))
    added = jnp.zeros_like(memory.precision).at[node].add(weight)
    shift = memory.shift.at[node].add(weight * (y - now.coarse - now.env - now.own))
    memory = memory._replace(precision=memory.precision + added, shift=shift)
    memory = jax.lax.cond(
        due,
        lambda m: _settle(settings, graph, m, everything),
        lambda m: _settle_mean(settings, graph, m, added),
        memory,
    )

    now = log_odds(memory, x, env, node)
    weight = w / (1.0 + w * (now.coarse_var + now.env_var + now.field_var))
    memory = memory._replace(
        own_precision=memory.own_precision.at[node].add(weight),
        own_shift=memory.own_shift.at[node].add(weight * (y - now.coarse - now.env - now.field)),
    )
    if settings.rate == 0.0:
        return memory
    now = log_odds(memory, x, env, node)
    return jax.lax.cond(due, lambda m: _learn(settings, graph, m, now, node, n, k, w, y), lambda m: m, memory)


def _settle(settings: Settings, graph: Graph, memory: Memory, x: jax.Array) -> Memory:
    """Solves for the field and its variances, starting from the last solution, and refreshes those of ``x . beta``."""
    prior = _springs(settings, graph, memory)
    noise = springs.noise(prior, graph.nodes.uid, memory.precision, settings.probes)
    # A row without springs, as all padding is, needs no probe; left out, it also has no say in the path of the solver.
    noise = jnp.where((prior.degree > 0.0)[:, None], noise, 0.0)
    target = jnp.concatenate([memory.shift[:, None], noise], axis=1)
    start = jnp.concatenate([memory.field[:, None], memory.probe], axis=1)
    solved = springs.solve(prior, memory.precision, target, start, iterations=settings.iterations, tolerance=TOLERANCE)
    var = springs.variances(prior, memory.precision, solved[:, 1:])
    coarse_var = _quadratic(x, memory.cov)
    return memory._replace(field=solved[:, 0], probe=solved[:, 1:], field_var=var, coarse_var=coarse_var)


def _settle_mean(settings: Settings, graph: Graph, memory: Memory, added: jax.Array) -> Memory:
    """Solves for the field alone; its variances shrink only where evidence was ``added``, f32[N]."""
    solved = springs.solve(
        _springs(settings, graph, memory),
        memory.precision,
        memory.shift[:, None],
        memory.field[:, None],
        iterations=settings.iterations,
        tolerance=TOLERANCE,
    )
    return memory._replace(field=solved[:, 0], field_var=memory.field_var / (1.0 + memory.field_var * added))


def _springs(settings: Settings, graph: Graph, memory: Memory) -> springs.Springs:
    used = jnp.asarray([float(w > 0.0) for w in settings.kinds], jnp.float32)
    return springs.springs(graph, used * jnp.exp(memory.log_weight), jnp.exp(memory.log_scale[0]))


def _learn(
    settings: Settings,
    graph: Graph,
    memory: Memory,
    after: LogOdds,
    node: jax.Array,
    n: jax.Array,
    k: jax.Array,
    w: jax.Array,
    y: jax.Array,
) -> Memory:
    """Moves weights and scales along the gradient of how likely each group is given all the others (leave one out).

    With ``g = (Q + Lambda)^-1 b`` the gradient is ``- lambda . dQ g``, where ``(Q + Lambda) lambda`` is the gradient of
    the likelihood by g (the adjoint): one solve serves all weights. The own scale has its gradient by the variance.
    """
    keep = jnp.maximum(1.0 - w * after.var, 0.02)  # what is left of the precision without the group itself
    slope, bend = logistic.slopes(n, k, (after.mean - after.var * w * y) / keep, after.var / keep)
    prior = _springs(settings, graph, memory)
    source = jnp.zeros_like(memory.field).at[node].add(slope / keep)[:, None]
    adjoint = springs.solve(
        prior, memory.precision, source, jnp.zeros_like(source), iterations=settings.iterations, tolerance=0.03
    )[:, 0]
    weight = jnp.exp(memory.log_weight)
    by_kind, by_graph = springs.slopes(graph, prior, weight, memory.field, adjoint)
    by_own = (bend * jnp.square(after.own_var / keep)).sum() * jnp.exp(-memory.log_scale[1])
    gradient = jnp.concatenate([by_kind, jnp.stack([by_graph, by_own])])
    moment = 0.9 * memory.moment + 0.1 * jnp.square(gradient)
    step = settings.rate * gradient / (jnp.sqrt(moment) + 1e-3)
    return memory._replace(
        log_weight=jnp.clip(memory.log_weight + step[:-2], -7.0, 5.5),
        log_scale=jnp.clip(memory.log_scale + step[-2:], -4.0, 3.5),
        moment=moment,
    )


def _signals(both: LogOdds, mixed: jax.Array) -> jax.Array:
    """Returns what the blend sees, f32[B, 3]: 1 and the log-odds of being mixed as either field has them.

    ``mixed``, f32[B], is P(informative) by the field of passing.
    """
    direct = both.mean[1] * jax.lax.rsqrt(1.0 + (np.pi / 8.0) * both.var[1])
    return jnp.stack([jnp.ones_like(direct), logistic.logit(mixed), direct], axis=1)


def believe(graph: Graph, state: State, group_size: int, trials: jax.Array | None = None) -> Belief:
    """Returns the belief, f32[N] per field.

    The variance is ``E p(1-p)`` over the passing field, as much larger or smaller as P(informative) is after the blend,
    and smaller for rewards that are a share of checks. ``evidence`` is in rollouts that would leave the uncertainty.

    Args:
      graph: the dual-relation graph.
      state: the fields.
      group_size: G.
      trials: f32[N], as for ``update``.
    """
    x = _rows(graph, state.centre, state.scale)
    both = jax.vmap(lambda m: log_odds(m, x, graph.nodes.env, slice(None), m.coarse_var))(_both(state))
    passing, variance, mixed = logistic.expectations(both.mean[0], both.var[0], group_size)
    signals = _signals(both, mixed)
    informative = jax.nn.sigmoid(logistic.dot(signals, state.blend[:, None])[:, 0])
    variance = jnp.minimum(variance * informative / jnp.maximum(mixed, 1e-3), passing * (1.0 - passing))
    if trials is not None:
        variance = variance / trials
    evidence = 1.0 / jnp.maximum(both.var[0] * passing * (1.0 - passing), 1e-6)
    return Belief(passing, variance, informative, evidence)


def _quadratic(x: jax.Array, cov: jax.Array) -> jax.Array:
    """Returns ``x_i . cov x_i``, f32[B], at least 0."""
    return jnp.maximum((x * logistic.dot(x, cov)).sum(axis=1), 0.0)
