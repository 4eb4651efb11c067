"""Compares schedulers over seeds on one suite. `python -m experiments.ablate --workdir=DIR`.

All seeds of an arm run as one vmapped program. An interrupted arm goes on from its checkpoint, a finished one is kept.
On a CPU `--config.jobs=N` runs N arms at a time, each in a process with its share of the cores: faster than one arm on
all of them, since a small policy keeps few cores busy.
"""

import dataclasses
import json
import multiprocessing
import os
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from envsched_jax.train import build
from experiments import common, loop, paired, report
from experiments.headline import BASE, MAIN
from experiments.paired import at_equal_rollouts, spread


def halves(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Splits the evaluation tasks at random but always alike: one half to choose a step, the other to score it."""
    order = np.random.default_rng(17).permutation(n)
    return order[: n // 2], order[n // 2 :]


def best_of(success: np.ndarray) -> np.ndarray:
    """The best score that runs ever reach, without the luck of the best of many noisy evaluations.

    Args:
      success: f64[evaluations, seeds, tasks].

    Returns:
      f64[seeds]: the score on one half of the tasks at the step that is best on the other.
    """
    chooser, scorer = halves(success.shape[2])
    step = success[:, :, chooser].mean(axis=2).argmax(axis=0)
    return success[:, :, scorer].mean(axis=2)[step, np.arange(success.shape[1])]


def rollouts_to(
    level: np.ndarray, success: np.ndarray, rollouts: np.ndarray, budget: float
) -> tuple[np.ndarray, np.ndarray]:
    """Rollouts until the scoring half first reaches a level.

    Args:
      level: the score, f64[seeds]: seeds may begin at other base policies, from which other scores can be reached.
      success: f64[evaluations, seeds, tasks].
      rollouts: f64[evaluations, seeds].
      budget: what counts where the level is never reached within it (a restricted mean).

    Returns:
      f64[seeds] and bool[seeds], whether it was reached.
    """
    _, scorer = halves(success.shape[2])
    there = (success[:, :, scorer].mean(axis=2) >= level) & (rollouts <= budget)
    first = there.argmax(axis=0)
    reached = there.any(axis=0)
    return np.where(reached, rollouts[first, np.arange(len(first))], budget), reached


def summarise(curves: dict[str, loop.Curves], unseen_env: np.ndarray | None = None) -> dict[str, Any]:
    """What summary.json holds of an ablation.

    Args:
      curves: per arm; there must be ``uniform``.
      unseen_env: bool[tasks], whether the environment of an evaluation task is unseen; None: not compared by that.
    """
    base = curves[BASE]
    base_success = np.asarray(base.success, np.float64)
    level = best_of(base_success)
    grid = paired.rollout_grid(base)
    budget = float(grid[-1])
    arms, differences, at_tokens = {}, {}, {}
    for name, arm in curves.items():
        success, rollouts, score = (
            np.asarray(arm.success, np.float64),
            np.asarray(arm.rollouts, np.float64),
            arm.score(),
        )
        mean, low, high = common.interval(score, axis=1)
        spent, reached = rollouts_to(level, success, rollouts, budget)
        informative = np.asarray(arm.informative, np.float64)
        ranked = [x for probe in arm.spearman for x in probe if x is not None]
        arms[name] = {
            "steps": arm.steps,
            "rollouts": rollouts.mean(axis=1),
            "tokens": np.asarray(arm.tokens, np.float64).mean(axis=1),
            "score_mean": mean,
            "score_ci": np.stack([low, high], axis=1),
            "score_average": spread(at_equal_rollouts(arm, grid).mean(axis=0)),
            "informative_share": informative.mean(),
            "informative_curve": informative.mean(axis=1),
            "rollouts_to_uniform_best": {**spread(spent), "reached": int(reached.sum()), "seeds": len(spent)},
            "spearman_variance": float(np.mean(ranked)) if ranked else None,
            "seconds_per_step": arm.seconds / max(arm.timed_steps * score.shape[1], 1),
        }
        if name != BASE:
            share = informative.mean(axis=0) / np.maximum(np.asarray(base.informative).mean(axis=0), 1e-9)
            rollouts_gap, tokens_gap = (paired.minus(arm, base, base, unit) for unit in ("rollouts", "tokens"))
            differences[name] = {
                "score_final_minus_uniform": rollouts_gap["final"],
                "score_mean_minus_uniform": rollouts_gap["mean"],
                "informative_share_over_uniform": spread(share),
                **({} if unseen_env is None else paired.splits(arm, base, unseen_env)),
            }
            at_tokens[name] = {
                "score_final_minus_uniform": tokens_gap["final"],
                "score_mean_minus_uniform": tokens_gap["mean"],
                "tokens": tokens_gap["spent"],
            }
    ours = {
        key: {name: paired.minus(curves[MAIN], arm, base, unit) for name, arm in curves.items() if name != MAIN}
        for key, unit in (("envsched_minus", "rollouts"), ("envsched_minus_tokens", "tokens"))
        if MAIN in curves
    }
    goal = {"uniform_best": level.mean(), "seeds": base.score().shape[1]}
    return {**goal, "arms": arms, "paired": differences, "paired_tokens": at_tokens, **ours}


def _cost(item: tuple[str, dict[str, Any]]) -> tuple[bool, bool, bool, bool, str]:
    """Order of the arms: first those that the question is about; the oracle and the filter roll out much more."""
    name, arm = item
    return name != BASE, name != "envsched", arm["filter"] != "none", arm["scheduler"]["name"] == "oracle", name


class Arms:
    """Runs the arms of one ablation, each only once."""

    def __init__(self, config: ConfigDict, workdir: Path, suite: build.Suite | None):
        self.config, self.workdir = config, workdir
        self.suite = build.build_suite(config) if suite is None else suite
        self.measures = loop.Measures(self.suite, config)
        self.settings = build.plain(config.arms)
        self.names = [name for name, _ in sorted(self.settings.items(), key=_cost)]
        shared = {k: v for k, v in common.plain(config).items() if k not in ("arms", "jobs")}
        self.identity = {"pool": self.suite.fingerprint, "code": loop.code_digest(), "config": shared}

    def kept(self, name: str) -> loop.Curves | None:
        """The result of an arm that the same settings finished before."""
        if not self._path(name).exists():
            return None
        stored = json.loads(self._path(name).read_text())
        return loop.Curves(**stored["curves"]) if stored["identity"] == self._identity(name) else None

    def run(self, name: str, writer: common.MetricWriter) -> loop.Curves:
        """Runs one arm, or goes on with it."""
        started, identity = time.time(), self._identity(name)
        programs = build.build_arm(self.suite, self.config, **self.settings[name])
        checkpoints, beliefs = self.workdir / "checkpoints" / name, self.workdir / f"beliefs_{name}.npz"
        seeds = list(range(self.config.seeds))
        curves = loop.run_arm(name, seeds, programs, self.measures, writer, checkpoints, identity, beliefs)
        common.write_json(self._path(name), {"identity": identity, "curves": dataclasses.asdict(curves)})
        score, share = curves.score()[-1].mean(), np.mean(curves.informative)
        print(
            f"{name}: final score {score:.3f}, informative groups {share:.1%}, {time.time() - started:.0f} s",
            flush=True,
        )
        return curves

    def _path(self, name: str) -> Path:
        return self.workdir / "arms" / f"{name}.json"

    def _identity(self, name: str) -> dict[str, Any]:
        return {**self.identity, "settings": common.plain(self.settings[name])}


_worker: Arms  # of a process that `_run_all` started


def _begin(config: ConfigDict, workdir: Path, places: Any) -> None:
    """Makes a process ready to run arms on the cores that it takes from the queue; it ends with its parent."""
    global _worker
    threading.Thread(target=_end_with_parent, daemon=True).start()
    cores = places.get()
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)  # before JAX counts them
    common.use_compilation_cache()
    _worker = Arms(config, workdir, None)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)  # the parent was killed: nobody waits for this arm, and its checkpoint is on disk


def _run(name: str) -> None:
    with common.MetricWriter(_worker.workdir) as writer:
        _worker.run(name, writer)


def _run_all(config: ConfigDict, workdir: Path, names: list[str]) -> None:
    """Runs arms in several processes; raises what one of them raises, when the others are done and kept."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    jobs = min(config.jobs, len(names))
    if jobs < 2:
        return  # nothing to run side by side: the caller runs what is left
    spawn = multiprocessing.get_context("spawn")
    places = spawn.Queue()
    for job in range(jobs):
        places.put(cores[job::jobs] or [cores[job % len(cores)]])
    with ProcessPoolExecutor(jobs, spawn, _begin, (config, workdir, places)) as pool:
        list(pool.map(_run, names))


def main(config: ConfigDict, workdir: Path, suite: build.Suite | None = None) -> None:
    """Runs every arm of the config and leaves metrics, figures, a page and summary.json in the workdir.

    ``suite`` may bring what `build.build_suite` would make of the config, where several runs share it.
    """
    started = time.time()
    if BASE not in config.arms:
        raise ValueError(f"config.arms: {BASE!r} is missing, and everything is compared with it")
    if config.jobs < 1 or (config.jobs > 1 and jax.default_backend() != "cpu"):
        raise ValueError(f"config.jobs: expected at least 1, and 1 on an accelerator, got {config.jobs}")
    arms = Arms(config, workdir, suite)
    if config.jobs > 1:
        _run_all(config, workdir, [name for name in arms.names if arms.kept(name) is None])
    curves: dict[str, loop.Curves] = {}
    with common.MetricWriter(workdir) as writer:
        for name in arms.names:
            kept = arms.kept(name)
            curves[name] = arms.run(name, writer) if kept is None else kept
            loop.save_schedule(workdir, name, curves[name], arms.suite.index.env_ids)
    common.write_summary(workdir, "ablate", config, summarise(curves, arms.suite.eval_unseen_env), started)
    print(f"report: {report.build(workdir)}")


if __name__ == "__main__":
    common.run_app(main, "configs/ablation.py")
