"""Schedulers on recorded outcomes of real agents.

    python -m experiments.replay --config=configs/replay.py --config.data_dir=DIR --workdir=W

`DIR` is one data set or a folder of data sets (see `experiments.recorded`). Checkpoints pass from weak to strong,
spread evenly over the steps; at every step an arm picks `B = ceil(T / pool_over_batch)` tasks and gets `G` recorded
trials of each. An arm is better when more of its groups are *live* (their rewards differ) per 1,000 rollouts spent.
Beside that, beliefs are asked to predict outcomes that they have not seen (`experiments.prediction`).

The graph is built from the records of the data set, or from those of `--config.pool`: a file of JSON lines, or `bfcl`
for the benchmark's own tools, state and checks. They must be the same tasks.

Arms with the same seed meet the same luck: the group that a task would return at a step does not depend on who asks.
A finished arm of a data set is kept in `W/results` and not run again while its settings and its data stay the same.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from envsched_jax import schedulers
from envsched_jax.environments import bfcl
from envsched_jax.pool import Record, read_jsonl
from experiments import common, loop, prediction, recorded, replay_report, replay_summary, report, text_vectors
from experiments.recorded import OUTCOMES, TASKS, Recorded
from experiments.replay_arm import Pool, prepare, run_arm

CONFIG = "configs/replay.py"
BFCL = "bfcl"  # the pool that is read from the benchmark's own tools, states and checks
CLAIRVOYANT = "clairvoyant"
REWIRED = "rewired"  # option of an arm: its edges lead to random tasks
KEPT = "kept from an earlier run"


def _recipes(arms: tuple[str, ...], variants: Mapping[str, Mapping[str, Any]]) -> dict[str, tuple[str, dict[str, Any]]]:
    """Recipe and options of every arm and of the clairvoyant one."""
    found = {}
    for arm in (*arms, CLAIRVOYANT):
        options = dict(variants[arm]) if arm in variants else {"recipe": arm}
        found[arm] = (options.pop("recipe"), options)
        if found[arm][0] not in schedulers.RECIPES:
            raise ValueError(f"arm {arm!r}: no recipe {found[arm][0]!r}; there are: {', '.join(schedulers.RECIPES)}")
    return found


def _believers(
    recipes: Mapping[str, tuple[str, Mapping[str, Any]]], **sizes: int
) -> dict[str, tuple[str, Mapping[str, Any]]]:
    """Recipe and options of everything that is asked to predict: recipes by their defaults, arms by their settings.

    An arm with settings of its own that bears the name of its recipe is called `<arm>_replay` here.
    """
    found: dict[str, tuple[str, Mapping[str, Any]]] = {}
    for arm, (recipe, options) in recipes.items():
        if REWIRED in options or schedulers.belief_fn(recipe, **{**sizes, **options}) is None:
            continue  # predictions are asked for on the pool's own graph
        found.setdefault(recipe, (recipe, {}))
        if options and not _only_selects(recipe, options):
            found[f"{arm}_replay" if arm == recipe else arm] = (recipe, options)
    return found


def _only_selects(recipe: str, options: Mapping[str, Any]) -> bool:
    """Whether the belief of these options is that of the recipe's defaults."""
    return recipe == "envsched" and "belief" not in options and "field" not in options


# ------------------------------------------------------------------------------------------------ results kept


def _fingerprint(folder: Path, data: Recorded, basis: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(common.plain([basis, settings]), sort_keys=True).encode())
    for name in (TASKS, OUTCOMES):
        digest.update((folder / name).read_bytes())
    digest.update(repr(data.records).encode())  # they may be another pool's, and have vectors of their own
    return digest.hexdigest()


def _kept(path: Path, fingerprint: str) -> dict[str, Any] | None:
    """The finished result in `path`, None if there is none or it is of other settings, data or a broken file."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return result if result["fingerprint"] == fingerprint else None


def _run_or_keep(path: Path, mark: str, run: Callable[[], Mapping[str, Any]]) -> tuple[Mapping[str, Any], str]:
    """A result from its file if it is finished there, else by `run`; and what to say about the time."""
    started = time.time()
    result = _kept(path, mark)
    if result is not None:
        return result, KEPT
    result = dict(run())
    common.write_json(path, result | {"fingerprint": mark})
    return result, f"{time.time() - started:.1f} s"


# ------------------------------------------------------------------------------------------------ program


def _records(pool: str) -> list[Record]:
    """The records of a pool by name (`bfcl`) or of a file."""
    if pool == BFCL:
        return bfcl.pool(("base", "miss_func", "miss_param"))  # the categories that outcomes were recorded of
    if not Path(pool).is_file():
        raise recorded.RecordedError(f"config.pool: {pool}: no such file; expected one of JSON lines, or '{BFCL}'")
    return read_jsonl(pool)


def _load(data_dir: str | None, text_model: str | None, pool: str | None = None) -> list[tuple[Path, Recorded]]:
    """All data sets, with the records of `pool` and the text vectors of `text_model` where they are given."""
    if not data_dir:
        raise recorded.RecordedError("no data: pass --config.data_dir=DIR, a data set or a folder of data sets")
    found = [(folder, recorded.load(folder)) for folder in recorded.find_sets(data_dir)]
    if pool is not None:
        if len(found) > 1:
            raise recorded.RecordedError(f"config.pool: {pool}: expected one data set, got {len(found)} in {data_dir}")
        ((folder, data),) = found
        found = [(folder, recorded.with_pool(data, _records(pool), pool))]
    if text_model is None:
        return found
    model = text_vectors.load(text_model)
    return [(folder, replace(data, records=text_vectors.embed(data.records, model))) for folder, data in found]


def _arms(
    workdir: Path,
    name: str,
    pool: Pool,
    recipes: Mapping[str, tuple[str, Mapping[str, Any]]],
    protocol: Mapping[str, Any],
    mark: Callable[[Mapping[str, Any]], str],
) -> dict[str, Mapping[str, Any]]:
    """The results of every arm on one data set."""
    results = {}
    for arm in common.bar(list(recipes), name):
        recipe, options = recipes[arm]
        oracle = "recorded" if arm == CLAIRVOYANT else "held_back" if recipe == "oracle" else None
        how = {"options": {k: v for k, v in options.items() if k != REWIRED}, REWIRED: options.get(REWIRED, False)}
        full = dict(protocol) | {"recipe": recipe, "oracle": oracle, **how}
        path = workdir / "results" / f"{name}.{arm}.json"
        result, took = _run_or_keep(path, mark(full), partial(run_arm, pool, **full))
        if took != KEPT:
            _write_metrics(workdir, name, arm, result)
        results[arm] = result
        live = np.mean(result["live_per_1k"])
        print(f"{name} {arm}: {live:.1f} live groups per 1,000 rollouts ({took})", flush=True)
    return results


def _write_metrics(workdir: Path, name: str, arm: str, result: Mapping[str, Any]) -> None:
    with common.MetricWriter(workdir, events=False) as writer:  # a folder of events per seed would be thousands
        for seed, step, row in result["rows"]:
            writer.write(step, row, dataset=name, arm=arm, seed=seed)


def replay(
    workdir: Path,
    *,
    data_dir: str | None,
    pool: str | None,
    text_model: str | None,
    arms: tuple[str, ...],
    variants: Mapping[str, Mapping[str, Any]],
    seeds: int,
    steps: int,
    pool_over_batch: int,
    group_size: int,
    cohort: int,
    evaluations: int,
    graph: Mapping[str, Any],
    predict: Mapping[str, Any],
) -> dict[str, Any]:
    """Replays every arm on every data set and returns the summary; see `configs/replay.py` for the arguments."""
    loaded = _load(data_dir, text_model, pool)
    if seeds < 1 or steps < 2 or group_size < 2 or pool_over_batch < 1:
        raise ValueError("seeds and pool_over_batch must be at least 1, steps and group_size at least 2")
    recipes = _recipes(arms, variants)
    code = loop.code_digest()
    results, datasets = {}, {}
    for folder, data in loaded:
        ready = prepare(data, group_size=group_size, cohort=cohort, graph=graph)
        batch_size = math.ceil(len(data.records) / pool_over_batch)
        sizes = {"batch_size": batch_size, "group_size": group_size}
        basis = {"cohort": cohort, "graph": graph, "code": code}
        mark = partial(_fingerprint, folder, data, basis)
        protocol = {"seeds": seeds, "steps": steps, "evaluations": evaluations, **sizes}
        results[data.name] = _arms(workdir, data.name, ready, recipes, protocol, mark)
        believers = _believers(recipes, **sizes)
        path = workdir / "results" / f"{data.name}.prediction.json"
        ask = partial(_predict, data, ready, group_size, believers, sizes, predict)
        predicted, took = _run_or_keep(path, mark({"believers": believers, **sizes, **predict}), ask)
        print(f"{data.name} prediction of outcomes not seen ({took})", flush=True)
        figures = replay_summary.summarise(results[data.name])
        datasets[data.name] = {
            "tasks": len(data.records),
            "environments": len(np.unique(ready.env)),
            "checkpoints": [[data.models[m] for m in models] for models in ready.members],
            "batch_size": batch_size,
            "arms": {arm: figures[arm] for arm in arms},
            CLAIRVOYANT: figures[CLAIRVOYANT],
            "prediction": predicted["settings"],
        }
    return {
        "datasets": datasets,
        "gap_closed": replay_report.mean_gap(datasets),
        "comparison": replay_summary.compare(results),
    }


def _predict(
    data: Recorded,
    pool: Pool,
    group_size: int,
    believers: Mapping[str, tuple[str, Mapping[str, Any]]],
    sizes: Mapping[str, int],
    predict: Mapping[str, Any],
) -> dict[str, Any]:
    methods = {
        name: believer
        for name, (recipe, options) in believers.items()
        if (believer := prediction.of_recipe(recipe, **{**sizes, **options})) is not None
    }
    asked = prediction.problem_of(data, pool, group_size)
    return {"settings": prediction.evaluate(asked, methods, **predict)}


def main(config: ConfigDict, workdir: Path) -> None:
    """Runs the program: results, `metrics.jsonl`, `summary.json` and figures go to `workdir`."""
    started = time.time()
    summary = replay(workdir, **common.plain(config) | {"arms": tuple(config.arms)})
    common.write_summary(workdir, "replay", config, summary, started)
    replay_report.draw(workdir, summary)
    print(replay_report.table(summary), flush=True)
    print(f"report: {report.build(workdir)}")


if __name__ == "__main__":
    common.run_app(main, CONFIG)
