"""Drives one arm on the host: chunks of the compiled cycle, evaluations, probes, metrics and checkpoints."""

import dataclasses
import hashlib
import math
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from envsched_jax.train import build
from envsched_jax.train.checkpoint import Checkpoints
from envsched_jax.train.cycle import CycleState, StepMetrics
from experiments import common, metrics

EVALUATION_KEY, PROBE_KEY = 99, 12345  # fixed: every arm, seed and step meets the same luck


@dataclasses.dataclass
class Curves:
    """What an arm has produced so far, as plain lists: one entry per evaluation, then per seed."""

    steps: list[int] = dataclasses.field(default_factory=list)
    success: list[list[list[float]]] = dataclasses.field(
        default_factory=list
    )  # [evaluation][seed][task], rounded rates
    rollouts: list[list[float]] = dataclasses.field(default_factory=list)
    tokens: list[list[float]] = dataclasses.field(default_factory=list)
    informative: list[list[float]] = dataclasses.field(default_factory=list)  # mean over the steps since the last one
    env_count: list[list[int]] = dataclasses.field(default_factory=list)  # [evaluation][environment], over all seeds
    spearman: list[list[float | None]] = dataclasses.field(default_factory=list)  # [probe][seed], variance
    seconds: float = 0.0  # in the cycle itself; the first chunk of a process, which compiles, is not timed
    timed_steps: int = 0

    def score(self) -> np.ndarray:
        """Mean success over the evaluation tasks, f64[evaluations, seeds]."""
        return np.asarray(self.success, np.float64).mean(axis=2)


def code_digest() -> str:
    """Identifies the code that results depend on: every module of the package and of the experiments."""
    digest = hashlib.blake2b(digest_size=8)
    for folder in ("envsched_jax", "experiments"):
        for path in sorted((common.SOURCE_ROOT / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


class Measures:
    """Compiled measurements that all arms of a suite share."""

    def __init__(self, suite: build.Suite, config: ConfigDict):
        self.suite, self.config = suite, config
        self.evaluate = build.build_measure(suite, config, group_size=config.evaluation.rollouts)
        self.probe = build.build_measure(suite, config, group_size=config.evaluation.probe_rollouts)

    def success(self, state: CycleState) -> np.ndarray:
        """Success rate of every evaluation task under the current policies, f64[seeds, n]."""
        _, success = self.evaluate(jax.random.key(EVALUATION_KEY), state.params, self.suite.eval_task)
        return np.asarray(success, np.float64).mean(axis=2)

    def beliefs(self, programs: build.Programs, state: CycleState) -> list[dict[str, float]]:
        """How well each seed's belief ranks the probe tasks, against fresh rollouts."""
        if programs.believe is None:
            return []
        nodes = self.suite.probe
        reward, _ = self.probe(jax.random.key(PROBE_KEY), state.params, self.suite.task[nodes])
        belief = jax.device_get(programs.believe(state))
        visits = np.asarray(state.scheduler.history.visits)[:, nodes]
        rows = []
        for seed, truth in enumerate(np.asarray(reward, np.float64)):
            mean, variance = truth.mean(axis=1), truth.var(axis=1, ddof=1)
            predicted, never = belief.variance[seed, nodes], visits[seed] == 0
            rows.append(
                {
                    "spearman_variance": metrics.spearman(predicted, variance),
                    "spearman_variance_never": metrics.spearman(predicted[never], variance[never]),
                    "spearman_mean": metrics.spearman(belief.mean[seed, nodes], mean),
                    "top_quarter": metrics.top_quarter(predicted, variance),
                    "never_share": float(never.mean()),
                }
            )
        return rows


def run_arm(
    name: str,
    seeds: list[int],
    programs: build.Programs,
    measures: Measures,
    writer: common.MetricWriter,
    folder: Path,
    identity: dict[str, Any],
    beliefs: Path | None = None,
) -> Curves:
    """Runs one arm to the end, or goes on from its checkpoint.

    Args:
      name: the arm, a label of the metrics.
      seeds: one run each, in one vmapped program.
      programs: of this arm.
      measures: of the suite.
      writer: gets one row per seed and evaluation.
      folder: for the checkpoints of this arm.
      identity: what a checkpoint must agree with.
      beliefs: the npz file that `save_beliefs` writes at the end; None: it is not written.

    Returns:
      The curves.

    Raises:
      FloatingPointError: if a loss is not finite; the last checkpoint stays.
    """
    train, evaluation = measures.config.train, measures.config.evaluation
    if train.steps % train.chunk or evaluation.probe_every % train.chunk:
        raise ValueError(
            f"train.steps={train.steps} and evaluation.probe_every={evaluation.probe_every} must be multiples of"
            f" train.chunk={train.chunk}"
        )
    budget, compiled = train.steps * train.batch_size * train.group_size, False
    state, curves = programs.init(jnp.asarray(seeds)), Curves()
    with Checkpoints(folder, {**identity, "arm": name, "seeds": seeds}) as checkpoints:
        restored = checkpoints.restore(state)
        if restored is not None:
            state, curves = restored[0], Curves(**restored[1])
        if not curves.steps:
            _evaluate(name, seeds, programs, measures, writer, state, curves, None)
        done = int(state.step[0])
        for step in common.bar(range(done + programs.chunk, train.steps + 1, programs.chunk), name):
            if float(state.rollouts.min()) >= budget:
                break  # a filter spends several batches per step; arms are compared at equal rollouts
            if programs.reveal is not None:
                state = jax.block_until_ready(programs.reveal(state))
            started = time.perf_counter()
            state, chunk = programs.run(state)
            chunk = jax.device_get(chunk)
            if compiled:
                curves.seconds += time.perf_counter() - started
                curves.timed_steps += programs.chunk
            compiled = True
            if not np.isfinite(chunk.loss).all():
                raise FloatingPointError(f"arm {name}: the loss is not finite within {programs.chunk} steps of {step}")
            _evaluate(name, seeds, programs, measures, writer, state, curves, chunk)
            checkpoints.save(step, state, dataclasses.asdict(curves))
    if beliefs is not None:
        save_beliefs(beliefs, programs, state, measures.suite)
    return curves


def _evaluate(
    name: str,
    seeds: list[int],
    programs: build.Programs,
    measures: Measures,
    writer: common.MetricWriter,
    state: CycleState,
    curves: Curves,
    chunk: StepMetrics | None,
) -> None:
    """Appends one evaluation to the curves and one row per seed to the metrics."""
    step, unseen = int(state.step[0]), measures.suite.eval_unseen_env
    success = measures.success(state)
    due = step > 0 and (step % measures.config.evaluation.probe_every == 0)
    beliefs = measures.beliefs(programs, state) if due else []
    share = None if chunk is None else informative_share(chunk)
    for i, seed in enumerate(seeds):
        row: dict[str, float] = {
            "score": success[i].mean(),
            "score_tasks": success[i, ~unseen].mean(),
            "score_envs": success[i, unseen].mean(),
            "rollouts": float(state.rollouts[i]),
            "tokens": float(state.tokens[i]),
        }
        if chunk is not None and share is not None:
            row |= {
                k: float(v[i].mean())
                for k, v in chunk._asdict().items()
                if k not in ("env_count", "rollouts", "tokens")
            }
            row |= {"informative_share": float(share[i]), "degenerate_share": 1 - float(share[i])}
            row["envs_touched"] = float((chunk.env_count[i].sum(axis=0) > 0).sum())
        row |= beliefs[i] if beliefs else {}
        writer.write(step, row, arm=name, seed=seed)
    curves.steps.append(step)
    curves.success.append(np.round(success, 4).tolist())
    curves.rollouts.append(np.asarray(state.rollouts, np.float64).tolist())
    curves.tokens.append(np.asarray(state.tokens, np.float64).tolist())
    if chunk is not None and share is not None:
        curves.informative.append(share.tolist())
        curves.env_count.append(chunk.env_count.sum(axis=(0, 1)).tolist())
    if beliefs:
        curves.spearman.append(
            [None if math.isnan(row["spearman_variance"]) else row["spearman_variance"] for row in beliefs]
        )


def informative_share(chunk: StepMetrics) -> np.ndarray:
    """Share of informative groups among all groups rolled out in a chunk, f64[seeds]; metrics [seeds, steps, ...]."""
    groups = np.asarray(chunk.env_count, np.float64).sum(axis=2)
    return (np.asarray(chunk.informative_share, np.float64) * groups).sum(axis=1) / groups.sum(axis=1)


def save_schedule(workdir: Path, name: str, curves: Curves, env_ids: tuple[str, ...]) -> None:
    """Writes how many groups of each environment were rolled out between evaluations."""
    counts = np.asarray(curves.env_count, np.int64)[:, : len(env_ids)]
    np.savez(workdir / f"schedule_{name}.npz", counts=counts, env_ids=np.asarray(env_ids))


def save_beliefs(path: Path, programs: build.Programs, state: CycleState, suite: build.Suite) -> None:
    """Writes what the first seed believes of every task, and the graph that it believes it on, as an npz file.

    Arrays over n tasks: `mean` and `variance` (of the reward, predicted), `p_informative` (f32), `visits`, `env`,
    `pattern` (i32); names `env_ids`; over m edges, each of `sender` (who lends) and `receiver` (i32) and `weight`
    (f32, similarity summed over its kinds). An arm without a belief leaves no file.
    """
    if programs.believe is None:
        return
    n = len(suite.index.task_ids)
    belief, graph = jax.device_get((programs.believe(state), programs.setup.graph))
    edge = np.flatnonzero(graph.edges.mask)
    np.savez_compressed(
        path,
        mean=belief.mean[0, :n],
        variance=belief.variance[0, :n],
        p_informative=belief.p_informative[0, :n],
        visits=np.asarray(state.scheduler.history.visits)[0, :n],
        env=graph.nodes.env[:n],
        pattern=graph.nodes.pattern[:n],
        env_ids=np.asarray(suite.index.env_ids),
        sender=graph.senders[edge],
        receiver=graph.receivers[edge],
        weight=graph.edges.similarity[edge].sum(axis=1),
    )


def time_pieces(programs: build.Programs, state: CycleState, repeats: int = 10) -> dict[str, float]:
    """Median seconds of select, rollout, update and observe for one seed, each compiled and warmed up apart."""
    pieces = build.build_pieces(programs)
    one = jax.tree.map(lambda x: x[0], state)
    key = jax.random.key(0)
    batch = pieces["select"](key, one)
    trajectory = pieces["rollout"](key, one, batch)
    arguments = {
        "select": (key, one),
        "rollout": (key, one, batch),
        "update": (one, trajectory),
        "observe": (one, batch, trajectory),
    }
    medians = {}
    for name, piece in pieces.items():
        jax.block_until_ready(piece(*arguments[name]))
        times = []
        for _ in range(repeats):
            started = time.perf_counter()
            jax.block_until_ready(piece(*arguments[name]))
            times.append(time.perf_counter() - started)
        medians[name] = float(np.median(times))
    return medians
