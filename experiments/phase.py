"""When does scheduling pay? The schedulers of this package on a surrogate of RL, over a grid of regimes.

    python -m experiments.phase --config=configs/phase.py --workdir=W

The surrogate (``experiments.surrogate``) knows every pass rate exactly, so a run takes a fraction of a second and
scores carry no noise of evaluation. The grid: optimiser, batch size, share of degenerate groups at the start, how much
of the difficulty the structure explains, learning rate. Every arm has the same sweep. A finished arm of a batch size is
kept in `W/parts` and not run again while its settings and the code stay the same.
"""

import itertools
import json
import os
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from envsched_jax import schedulers
from envsched_jax.train import build
from experiments import common, loop, phase_figures, phase_score, report, surrogate
from experiments.headline import BASE
from experiments.phase_score import Runs

CLOSE = 0.01  # how near the share of degenerate groups must come to its target


def axes_of(config: ConfigDict) -> dict[str, Any]:
    """The values of every axis but the batch size.

    Raises:
      ValueError: sweeps of different lengths, too few seeds, or a middle that the sweep does not have.
    """
    rates = {name: tuple(how.rates) for name, how in config.optimizers.items()}
    if len({len(sweep) for sweep in rates.values()}) != 1:
        raise ValueError(f"every optimizer needs as many learning rates as the others, got {rates}")
    if not 0 <= config.middle < len(next(iter(rates.values()))):
        raise ValueError(f"middle must be a place in the sweep, got {config.middle}")
    if config.seeds < phase_score.HALVES:
        raise ValueError(f"seeds must be at least {phase_score.HALVES}, got {config.seeds}")
    return {
        "optimizer": tuple(rates),
        "degenerate": tuple(config.degenerate),
        "structure": tuple(config.structure),
        "learning_rate": rates,
    }


def grid(config: ConfigDict) -> tuple[surrogate.Cell, np.ndarray, tuple[int, ...]]:
    """All runs of a part in order: cells f32[n], seeds i32[n], and the shape of the axes and seeds."""
    axes = axes_of(config)
    rows = []
    for optimizer in axes["optimizer"]:
        rates, eps = axes["learning_rate"][optimizer], config.optimizers[optimizer].eps
        for row in itertools.product(axes["degenerate"], axes["structure"], rates, range(config.seeds)):
            rows.append((*row, eps))
    degenerate, structure, rate, seed, eps = np.array(rows).T
    shape = tuple(len(axes[name]) for name in phase_score.AXES[:3])
    cell = surrogate.Cell(*(x.astype(np.float32) for x in (degenerate, structure, rate, eps)))
    return cell, seed.astype(np.int32), (*shape, len(rates), config.seeds)


def run_part(config: ConfigDict, world: surrogate.World, arm: Mapping[str, Any], batch_size: int) -> Runs:
    """Runs one arm at one batch size in every cell, as one compiled program that takes ``config.chunk`` runs at a time.

    Raises:
      ValueError: the spread of the difficulties leaves a share of degenerate groups out of reach.
    """
    settings = dict(arm)
    scheduler = schedulers.make(settings.pop("name"), batch_size=batch_size, group_size=config.group_size, **settings)
    one = partial(
        surrogate.simulate,
        scheduler=scheduler,
        steps=config.steps,
        group_size=config.group_size,
        spread=config.spread,
        sharp=config.sharp,
    )
    program = jax.jit(jax.vmap(one, (0, None, 0)))
    cell, seed, shape = grid(config)
    traces = []
    for first in common.bar(range(0, len(seed), config.chunk), f"{arm['name']} {batch_size}"):
        # The last chunk is filled up with runs of before, so that there is one program.
        rows = np.arange(first, first + config.chunk) % len(seed)
        trace = program(jnp.asarray(seed[rows]), world, jax.tree.map(lambda x, rows=rows: jnp.asarray(x[rows]), cell))
        traces.append(jax.tree.map(np.asarray, trace))
    whole = [np.concatenate(leaves)[: len(seed)] for leaves in zip(*traces, strict=True)]
    runs = Runs(*(leaf.reshape(*shape, *leaf.shape[1:]) for leaf in whole))
    off = np.abs(runs.degenerate.ravel() - cell.degenerate)
    if off.max() > CLOSE:
        target = cell.degenerate[off.argmax()]
        raise ValueError(f"a spread of {config.spread} leaves a degenerate share of {target:.2f} out of reach")
    return runs


def _save(path: Path, identity: dict[str, Any], runs: Runs) -> None:
    """Writes a part atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial_path = path.with_name(f".{path.name}.{os.getpid()}.npz")
    np.savez_compressed(partial_path, identity=json.dumps(identity, sort_keys=True), **runs._asdict())
    os.replace(partial_path, path)


def _kept(path: Path, identity: dict[str, Any]) -> Runs | None:
    """The part that the same settings and code finished before."""
    if not path.exists():
        return None
    with np.load(path) as stored:
        if str(stored["identity"]) != json.dumps(identity, sort_keys=True):
            return None
        return Runs(**{name: stored[name] for name in Runs._fields})


def _rows(writer: common.MetricWriter, config: ConfigDict, arm: str, batch_size: int, runs: Runs, base: Runs) -> None:
    """Writes a row per cell: means over seeds, gains over uniform paired by seed."""
    axes = axes_of(config)
    measured = phase_score.gains(runs, base)
    curve = phase_score.score(runs.rate)
    for place in np.ndindex(*curve.shape[:4]):
        optimizer = axes["optimizer"][place[0]]
        settings = {
            "degenerate": axes["degenerate"][place[1]],
            "structure": axes["structure"][place[2]],
            "learning_rate": axes["learning_rate"][optimizer][place[3]],
        }
        cell = " ".join(f"{name}={value:g}" for name, value in settings.items())
        values = {f"{name}_over_uniform" if name in ("final", "average") else name: v for name, v in measured.items()}
        scalars = {name: value[place].mean() for name, value in values.items()}
        scalars |= settings | {
            "score_start": curve[place][:, 0].mean(),
            "score_final": curve[place][:, -1].mean(),
            "informative_realised": runs.informative[place].mean(),
            "dropped": runs.drop[place].mean(),
            "batch_size": batch_size,
        }
        labels = {"arm": arm, "optimizer": optimizer, "cell": f"B={batch_size} {cell}"}
        writer.write(config.steps, scalars, **labels)


def main(config: ConfigDict, workdir: Path) -> None:
    """Runs every arm at every batch size and leaves metrics, figures and summary.json in the workdir."""
    started = time.time()
    axes, arms = axes_of(config), build.plain(config.arms)
    if BASE not in arms:
        raise ValueError(f"config.arms: {BASE!r} is missing, and everything is compared with it")
    world = surrogate.build_world(**build.plain(config.world))
    # What else is run, and what is shown of it, may change beside a kept part.
    free = ("arms", "batch_sizes", "middle")
    shared = {name: value for name, value in common.plain(config).items() if name not in free}
    code = loop.code_digest()
    runs: dict[int, dict[str, Runs]] = {}
    with common.MetricWriter(workdir, events=False) as writer:
        # Uniform first: every row is a comparison with it. The batch size of the middle comes before the others.
        middle = (len(config.batch_sizes) - 1) / 2
        order = sorted(range(len(config.batch_sizes)), key=lambda i: abs(i - middle))
        for batch_size in (config.batch_sizes[i] for i in order):
            runs[batch_size] = {}
            for name in sorted(arms, key=lambda name: (name != BASE, name)):
                part_started = time.time()
                path = workdir / "parts" / f"{name}.{batch_size}.npz"
                arm = common.plain(arms[name])
                identity = {"code": code, "config": shared, "arm": arm, "batch_size": batch_size}
                kept = _kept(path, identity)
                if kept is None:
                    kept = run_part(config, world, arms[name], batch_size)
                    _rows(writer, config, name, batch_size, kept, runs[batch_size].get(BASE, kept))
                    _save(path, identity, kept)
                    seconds = time.time() - part_started
                    count = kept.drop.size
                    print(
                        f"{name}, batch {batch_size}: final score {phase_score.score(kept.rate)[..., -1].mean():.3f},"
                        f" {count} runs, {seconds:.0f} s ({1000 * seconds / count / config.steps:.2f} ms per step)",
                        flush=True,
                    )
                runs[batch_size][name] = kept
    runs = {batch_size: runs[batch_size] for batch_size in config.batch_sizes}
    summary = summarise(config, runs)
    common.write_summary(workdir, "phase", config, summary, started)
    drawn = phase_figures.draw(summary, workdir / "figures", axes, list(config.batch_sizes), config.middle)
    print(f"figures: {', '.join(map(str, drawn))}\nreport: {report.build(workdir)}")


def summarise(config: ConfigDict, runs: Mapping[int, Mapping[str, Runs]]) -> dict[str, Any]:
    """What summary.json holds: `axes`, `seeds`, `tasks`, `cells`, `marginal`, `sweep_edges`, `transfer`, `dropped`."""
    axes = axes_of(config)
    world = config.world
    tasks = world.environments * world.topologies * world.depths * world.copies
    batch_size = config.batch_sizes[len(config.batch_sizes) // 2]
    place = (0, len(axes["degenerate"]) // 2, len(axes["structure"]) // 2)
    epoch = min(config.steps, -(-tasks // batch_size))
    base = runs[batch_size][BASE]
    return {
        "axes": axes | {"batch_size": tuple(config.batch_sizes)},
        "seeds": config.seeds,
        "tasks": tasks,
        "cells": phase_score.cells(runs, axes),
        "marginal": phase_score.marginals(runs, axes),
        "sweep_edges": phase_score.edges(runs),
        # At the middle of the grid, by learning rate of the first optimiser.
        "transfer": [
            {"optimizer": axes["optimizer"][0], "learning_rate": rate, **phase_score.transfer(base, (*place, i), epoch)}
            for i, rate in enumerate(axes["learning_rate"][axes["optimizer"][0]])
        ],
        "dropped": {
            name: float(np.mean([arms[name].drop.mean() for arms in runs.values()])) for name in runs[batch_size]
        },
    }


if __name__ == "__main__":
    common.run_app(main, "configs/phase.py")
