"""Trains a policy with one scheduler: the whole cycle. `python -m experiments.train --workdir=DIR`."""

import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from envsched_jax.train import build
from experiments import common, loop, report


def main(config: ConfigDict, workdir: Path) -> None:
    """Runs the config and leaves metrics, figures, a page and summary.json in the workdir."""
    started = time.time()
    suite = build.build_suite(config)
    programs = build.build_arm(suite, config, scheduler=build.plain(config.scheduler), filter=config.filter)
    measures = loop.Measures(suite, config)
    identity = {"pool": suite.fingerprint, "code": loop.code_digest(), "config": common.plain(config)}
    name, seeds = config.scheduler.name, [config.seed]
    with common.MetricWriter(workdir) as writer:
        beliefs = workdir / f"beliefs_{name}.npz"
        curves = loop.run_arm(name, seeds, programs, measures, writer, workdir / "checkpoints", identity, beliefs)
    loop.save_schedule(workdir, name, curves, suite.index.env_ids)
    seconds = loop.time_pieces(programs, programs.init(jnp.asarray(seeds)))
    score = curves.score()[:, 0]
    summary = {
        "score_best": score.max(),
        "score_final": score[-1],
        "steps": curves.steps[-1],
        "rollouts": curves.rollouts[-1][0],
        "tokens": curves.tokens[-1][0],
        "informative_share": np.mean(curves.informative),
        "seconds_per_step": seconds,
    }
    common.write_summary(workdir, "train", config, summary, started)
    print(
        f"{name}: best score {score.max():.3f}, final {score[-1]:.3f},"
        f" informative groups {summary['informative_share']:.1%}"
    )
    print(f"report: {report.build(workdir)}")


if __name__ == "__main__":
    common.run_app(main, "configs/toolworld.py")
