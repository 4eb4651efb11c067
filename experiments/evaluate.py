"""How well a model does on benchmarks of agents, with repeats. `python -m experiments.evaluate --workdir=DIR`.

Every suite is a section of `config.suites`; a finished one is kept while config, code and weights stay the same: a run
that was killed goes on with the next.
"""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from envsched_jax.rollout.script import Transcript, summarise
from envsched_jax.train import build_agent
from experiments import common, loop


def main(config: ConfigDict, workdir: Path) -> None:
    """Evaluates `config.model` and leaves one file per suite and summary.json in the workdir."""
    started, evaluation = time.time(), config.evaluation
    unknown = [name for name in evaluation.suites if name not in config.suites]
    if unknown or not evaluation.suites:
        raise ValueError(f"config.evaluation.suites: expected some of {', '.join(config.suites)}, got {unknown or ()}")
    worlds = {name: build_agent.build_world(config.suites[name]) for name in evaluation.suites}
    chat = build_agent.build_chat(config.chat, config.model)
    model = build_agent.load_model(config)
    agent = build_agent.build_agent(config, chat, temperature=evaluation.temperature)
    basis = {**common.plain(config), "code": loop.code_digest(), "weights": weights(config.model)}
    suites = {}
    for number, (name, world) in enumerate(worlds.items()):
        tasks = chosen([record.task_id for record in world.records], evaluation.most, config.seed)
        identity = {**basis, "tasks": tasks}
        path = workdir / f"{name}.json"
        kept = json.loads(path.read_text()) if path.exists() else None
        note = " (kept from an earlier run)"
        if kept is None or kept["identity"] != identity:
            note = ""
            key = jax.random.fold_in(jax.random.key(config.seed), 100 + number)
            jobs = [(task, repeat) for task in tasks for repeat in range(evaluation.repeats)]
            made = agent.play(model, key, jobs, world.start)
            kept = common.plain({"identity": identity, "result": score(made, tasks, evaluation.repeats)})
            common.write_json(path, kept)
        suites[name] = kept["result"]
        print(f"{name}: {told(suites[name])}{note}", flush=True)
    macro = average(list(suites.values()))
    print(f"macro average: {told(macro)}")
    common.write_summary(workdir, "evaluate", config, {"suites": suites, "macro": macro}, started)


def weights(path: str) -> dict[str, list[int]]:
    """Returns size and time of change, in nanoseconds, of the files of a model: it may be trained on under its name."""
    files = [Path(path)] if Path(path).is_file() else sorted(Path(path).glob("*"))
    return {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files}


def chosen(tasks: Sequence[str], most: int, seed: int) -> list[str]:
    """Returns the tasks, or so many of them at random, always the same."""
    if not 0 < most < len(tasks):
        return list(tasks)
    return [tasks[i] for i in np.sort(np.random.default_rng(seed).choice(len(tasks), most, replace=False))]


def score(made: Sequence[Transcript], tasks: Sequence[str], repeats: int) -> dict[str, Any]:
    """Returns the success rate with its interval over tasks, of rollouts ordered by task, then repeat.

    A single task has no interval: ``ci`` is None.
    A rollout whose environment failed has no result and is left out; a task without any result, too.
    """
    success = np.asarray([np.nan if one.success is None else one.success for one in made], np.float64)
    progress = np.asarray([np.nan if one.progress is None else one.progress for one in made], np.float64)
    table = success.reshape(len(tasks), repeats)
    there = ~np.isnan(table)
    rows = np.asarray([row[known].mean() for row, known in zip(table, there, strict=True) if known.any()])
    if not rows.size:
        why = next((one.error for one in made if one.error), "there are no tasks")
        raise ValueError(f"no rollout of {len(made)} has a result: {why}")
    columns = [column[known].mean() for column, known in zip(table.T, there.T, strict=True) if known.any()]
    mean, low, high = common.interval(rows)
    return {
        "tasks": len(rows),
        "repeats": repeats,
        "success": float(mean),
        "ci": [float(low), float(high)] if len(rows) > 1 else None,
        "success_by_repeat": [float(value) for value in columns],
        "solved_in_every_repeat": float(np.mean(rows == 1.0)),
        "solved_in_any_repeat": float(np.mean(rows > 0.0)),
        "progress": float(np.nanmean(progress)),
        "rollouts": summarise(made),
    }


def average(results: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the mean over suites; its interval takes their tasks as independent, and is None if one has none."""
    mean = float(np.mean([result["success"] for result in results]))
    if any(result["ci"] is None for result in results):
        return {"success": mean, "ci": None}
    half = [(result["ci"][1] - result["ci"][0]) / 2 for result in results]
    spread = float(np.sqrt(np.sum(np.square(half))) / len(results))
    return {"success": mean, "ci": [mean - spread, mean + spread]}


def told(result: Mapping[str, Any]) -> str:
    """Returns a result in words."""
    interval = "" if result["ci"] is None else " [{:.1%}, {:.1%}]".format(*result["ci"])
    size = f", {result['tasks']} tasks x {result['repeats']}" if "tasks" in result else ""
    return f"{result['success']:.1%}{interval}{size}"


if __name__ == "__main__":
    common.run_app(main, "configs/agent.py")
