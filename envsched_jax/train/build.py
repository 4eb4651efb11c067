"""From a config to compiled programs: the module that reads a ``ConfigDict`` and calls ``jax.jit``."""

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from envsched_jax import graph as graphs
from envsched_jax import schedulers
from envsched_jax.environments import audit, toolworld
from envsched_jax.environments.base import Environment
from envsched_jax.environments.toolworld import vocabulary
from envsched_jax.policy import Transformer, preset
from envsched_jax.rollout.engine import evaluate
from envsched_jax.train import cycle, grpo, warmstart
from envsched_jax.types import Belief, Graph, Key

Measure = Callable[[Key, nnx.State, jax.Array], tuple[jax.Array, jax.Array]]


@dataclasses.dataclass(frozen=True)
class Suite:
    """What all arms of an experiment share: the pool, its graph, the base policies and the evaluation tasks."""

    world: toolworld.ToolWorld
    environment: Environment
    graph: Graph
    index: graphs.Index
    task: jax.Array  # i32[N], the environment's task behind each node
    graphdef: nnx.GraphDef
    bases: nnx.State  # with a leading axis of base policies; seed r of an arm starts from r modulo their number
    eval_task: jax.Array  # i32[n], held-out tasks of training environments, then those of held-out environments
    eval_unseen_env: np.ndarray  # bool[n]
    probe: np.ndarray  # i64[m], nodes whose truth is measured now and then
    fingerprint: str  # of the pool: every record, in node order


@dataclasses.dataclass(frozen=True)
class Programs:
    """The compiled programs of one arm. A leading axis ``R`` runs over seeds."""

    setup: cycle.Setup
    init: Callable[[jax.Array], cycle.CycleState]  # seeds i32[R]
    run: Callable[[cycle.CycleState], tuple[cycle.CycleState, cycle.StepMetrics]]  # one chunk; metrics [R, steps, ...]
    reveal: Callable[[cycle.CycleState], cycle.CycleState] | None  # for an arm that reads the truth
    believe: Callable[[cycle.CycleState], Belief] | None  # f32[R, N] per field; None for an arm without a belief
    chunk: int  # steps of one call of run


def plain(section: ConfigDict) -> dict[str, Any]:
    """One section of a config as keyword arguments."""
    return section.copy_and_resolve_references().to_dict()


def fingerprint(world: toolworld.ToolWorld, train: np.ndarray, index: graphs.Index) -> str:
    """Identifies a pool by the content of its records in node order; ``train`` are their places in the world."""
    digest = hashlib.blake2b(digest_size=12)
    for position in index.record:
        digest.update(repr(world.records[train[position]]).encode())
    return digest.hexdigest()


def audited(world: toolworld.ToolWorld, train: np.ndarray, mode: str) -> np.ndarray:
    """Reads the verifiers of these tasks before any rollout and returns the tasks to train on, i64[n].

    ``mode`` is 'off', 'report' (prints what is broken) or 'exclude' (and leaves it out).
    """
    if mode not in ("off", "report", "exclude"):
        raise ValueError(f"audit must be 'off', 'report' or 'exclude', not {mode!r}")
    if mode == "off":
        return train
    report = audit.audit([world.records[i] for i in train], toolworld.Auditor(world))
    print(report.text(), flush=True)
    broken = set(report.task_ids) if mode == "exclude" else set()
    return np.array([i for i in train if world.records[i].task_id not in broken], train.dtype)


def build_suite(config: ConfigDict) -> Suite:
    """Builds pool, graph and base policies from the sections world, graph, policy, warm_start and evaluation.

    Raises:
      TypeError: for a key that the section does not have.
      ValueError: for a value out of range.
    """
    world_config = toolworld.ToolWorldConfig(**plain(config.world))
    world = toolworld.generate(world_config)
    environment = toolworld.environment(world.world, world.tasks)
    train = audited(world, world.where(toolworld.TRAIN), config.audit)
    graph, index = graphs.build([world.records[i] for i in train], **plain(config.graph))
    task = np.zeros(index.capacity, np.int32)
    task[: len(index.record)] = train[index.record]
    model_config = preset(config.policy.preset, vocab_size=vocabulary.VOCAB_SIZE)
    bases = warmstart.base_policies(model_config, world_config, warmstart.WarmStartConfig(**plain(config.warm_start)))
    graphdef, _ = nnx.split(Transformer(model_config, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng([world_config.seed, 11])
    tasks, envs = (
        rng.permutation(world.where(split))[: config.evaluation.tasks_per_split]
        for split in (toolworld.HELD_OUT_TASK, toolworld.HELD_OUT_ENV)
    )
    return Suite(
        world=world,
        environment=environment,
        graph=graph,
        index=index,
        task=jnp.asarray(task),
        graphdef=graphdef,
        bases=bases,
        eval_task=jnp.asarray(np.concatenate([tasks, envs])),
        eval_unseen_env=np.arange(len(tasks) + len(envs)) >= len(tasks),
        probe=np.sort(rng.permutation(len(index.record))[: config.evaluation.probe_tasks]),
        fingerprint=fingerprint(world, train, index),
    )


def build_arm(
    suite: Suite, config: ConfigDict, *, scheduler: dict[str, Any], filter: str, rewired: bool = False
) -> Programs:
    """Compiles one arm.

    Args:
      suite: shared by all arms.
      config: with the sections ``train`` and ``optimizer``.
      scheduler: ``name`` and the settings of that recipe.
      filter: 'none', or 'dapo': a step draws up to ``train.max_draws`` batches and keeps informative groups.
      rewired: whether the edges lead to random tasks, the null model of "the graph helps".

    Raises:
      ValueError: for an unknown recipe, filter or optimiser.
      TypeError: for a setting that the recipe does not have.
    """
    if filter not in ("none", "dapo"):
        raise ValueError(f"filter must be 'none' or 'dapo', not {filter!r}")
    train, settings = config.train, dict(scheduler)
    name = settings.pop("name")
    if filter == "dapo" and name not in ("uniform", "stratified"):
        raise ValueError(f"filter='dapo' draws several batches per step, by which {name!r} would age its records")
    if suite.world.config.reward_mix[0] < 1 and name in schedulers.FAMILY:
        settings.setdefault("informative", "share")  # the beta formula is for rewards that take two values
    settings |= {"batch_size": train.batch_size, "group_size": train.group_size}
    # The graph is an argument, not a constant of the program: constants are compiled in, once per arm.
    graph, task = graphs.rewire(jax.random.key(0), suite.graph) if rewired else suite.graph, suite.task
    setup = cycle.Setup(
        graph=graph,
        task=task,
        environment=suite.environment,
        graphdef=suite.graphdef,
        optimizer=grpo.make_optimizer(**plain(config.optimizer)),
        scheduler=schedulers.make(name, **settings),
        batch_size=train.batch_size,
        group_size=train.group_size,
        temperature=train.temperature,
        std=train.advantage_std,
        clip_low=train.clip_low,
        clip_high=train.clip_high,
        quotas=schedulers.quota_fn(name, **settings),
        max_draws=train.max_draws if filter == "dapo" else 1,
    )
    # A filter spends several batches per step, so its curve is looked at after fewer steps.
    chunk = max(1, train.chunk // 5) if filter == "dapo" else train.chunk

    def start(graph: Graph, bases: nnx.State, seed: jax.Array) -> cycle.CycleState:
        base = jax.tree.map(lambda x: x[seed % x.shape[0]], bases)
        return cycle.init(jax.random.key(seed), setup._replace(graph=graph), base)

    init = jax.jit(jax.vmap(start, (None, None, 0)))
    run = jax.jit(
        jax.vmap(lambda g, t, s: cycle.run(setup._replace(graph=g, task=t), s, steps=chunk), (None, None, 0)),
        donate_argnums=2,
    )
    reveal = jax.jit(
        jax.vmap(
            lambda g, t, s: cycle.reveal(setup._replace(graph=g, task=t), s, group_size=train.truth_rollouts),
            (None, None, 0),
        )
    )
    belief = schedulers.belief_fn(name, **settings)
    believe = None if belief is None else jax.jit(jax.vmap(lambda g, s: belief(g, s.scheduler), (None, 0)))
    return Programs(
        setup=setup,
        chunk=chunk,
        init=lambda seeds: init(graph, suite.bases, seeds),
        run=lambda state: run(graph, task, state),
        reveal=(lambda state: reveal(graph, task, state)) if name == "oracle" else None,
        believe=None if believe is None else lambda state: believe(graph, state),
    )


def build_measure(suite: Suite, config: ConfigDict, *, group_size: int) -> Measure:
    """Compiles fresh, uncharged rollouts: (key, params [R, ...], task i32[n]) -> (reward, success), both [R, n, G].

    All seeds share the key, so that curves differ by policy and not by luck of the evaluation.
    """

    def measure(key: Key, params: nnx.State, task: jax.Array) -> tuple[jax.Array, jax.Array]:
        model = nnx.merge(suite.graphdef, params)
        return evaluate(
            key, model, suite.environment, task, group_size=group_size, temperature=config.train.temperature
        )

    return jax.jit(jax.vmap(measure, (None, 0, None)))


def build_pieces(programs: Programs) -> dict[str, Callable]:
    """Compiles the four parts of a step apart, for one seed, to time them: select, rollout, update, observe."""
    setup = programs.setup
    return {
        "select": jax.jit(lambda key, state: cycle.select(setup, key, state.scheduler)),
        "rollout": jax.jit(lambda key, state, batch: cycle.play(setup, key, state.params, batch)),
        "update": jax.jit(lambda state, trajectory: cycle.learn(setup, state.params, state.opt_state, trajectory)),
        "observe": jax.jit(lambda state, batch, trajectory: cycle.observe(setup, state.scheduler, batch, trajectory)),
    }
