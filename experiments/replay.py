"""Schedulers on recorded outcomes of real agents.

    python -m experiments.replay --config=configs/replay.py --config.data_dir=DIR --workdir=W

`DIR` is one data set or a folder of data sets (see `experiments.recorded`). Checkpoints pass from weak to strong,
spread evenly over the steps; at every step an arm picks `B = ceil(T / pool_over_batch)` tasks and gets `G` recorded
trials of each. An arm is better when more of its groups are *live* (their rewards differ) per 1,000 rollouts spent.

Arms with the same seed meet the same luck: the group that a task would return at a step does not depend on who asks.
A finished arm of a data set is kept in `W/results` and not run again while its settings and its data stay the same.
"""

import hashlib
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from envsched_jax import schedulers
from experiments import common, loop, metrics, recorded, replay_report, report
from experiments.recorded import OUTCOMES, TASKS
from experiments.replay_arm import RANKED, SPLITS, WHOLE, Pool, prepare, run_arm

CONFIG = "configs/replay.py"
CLAIRVOYANT = "clairvoyant"


def _spread(values: Any) -> dict[str, Any]:
    mean, low, high = common.interval(values)
    return {"mean": float(mean), "ci": [float(low), float(high)]}


def _mean(rows: list[tuple[int, int, dict[str, float]]], name: str) -> float:
    values = [row[name] for _, _, row in rows if name in row and row[name] is not None and math.isfinite(row[name])]
    return float(np.mean(values)) if values else metrics.NOTHING


def summarise(results: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The figures of every arm of one data set; what is not defined is NaN (null in the file).

    `gap_closed` is (arm - uniform) / (oracle - uniform) of the mean live groups per 1,000 rollouts; its interval takes
    the oracle's mean gain as given. `gain` is the difference from uniform, paired by seed.
    """
    per_1k = {arm: np.asarray(result["live_per_1k"]) for arm, result in results.items()}
    base = per_1k.get("uniform")
    room = per_1k["oracle"].mean() - base.mean() if base is not None and "oracle" in per_1k else metrics.NOTHING
    room = room if room > 0 else metrics.NOTHING
    arms = {}
    for arm, result in results.items():
        gain = _spread(per_1k[arm] - (metrics.NOTHING if base is None else base))
        arms[arm] = {
            "live_per_1k": _spread(per_1k[arm]),
            "gain": gain,
            "gap_closed": float(gain["mean"] / room),
            "gap_closed_ci": (np.array(gain["ci"]) / room).tolist(),
            **{name: {split: _mean(result["rows"], f"{name}_{split}") for split in SPLITS} for name in RANKED},
            **{name: _mean(result["rows"], name) for name in WHOLE},
            "envs_touched": float(np.mean(result["envs_touched"])),
            "gini_visits": float(np.mean(result["gini_visits"])),
            "rollouts": float(np.mean(result["rollouts"])),
            "live_curve": np.mean(result["live"], axis=0).tolist(),
        }
    return arms


# ------------------------------------------------------------------------------------------------ program


def _fingerprint(folder: Path, settings: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(common.plain(settings), sort_keys=True).encode())
    for name in (TASKS, OUTCOMES):
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()


def _kept(path: Path, fingerprint: str) -> dict[str, Any] | None:
    """The finished result in `path`, None if there is none or it is of other settings, data or a broken file."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return result if result["fingerprint"] == fingerprint else None


def _run_or_keep(
    workdir: Path, name: str, arm: str, mark: str, pool: Pool, settings: Mapping[str, Any]
) -> Mapping[str, Any]:
    """The result of one arm on one data set: from the workdir if it is finished there, else by running it."""
    path = workdir / "results" / f"{name}.{arm}.json"
    started = time.time()
    result = _kept(path, mark)
    took = "kept from an earlier run"
    if result is None:
        result = run_arm(pool, **settings)
        with common.MetricWriter(workdir) as writer:
            for seed, step, row in result["rows"]:
                writer.write(step, row, dataset=name, arm=arm, seed=seed)
        common.write_json(path, result | {"fingerprint": mark})
        took = f"{time.time() - started:.1f} s"
    live = np.mean(result["live_per_1k"])
    print(f"{name} {arm}: {live:.1f} live groups per 1,000 rollouts ({took})", flush=True)
    return result


def replay(
    workdir: Path,
    *,
    data_dir: str | None,
    arms: tuple[str, ...],
    variants: Mapping[str, Mapping[str, Any]],
    seeds: int,
    steps: int,
    pool_over_batch: int,
    group_size: int,
    cohort: int,
    evaluations: int,
    graph: Mapping[str, Any],
) -> dict[str, Any]:
    """Replays every arm on every data set and returns the summary; see `configs/replay.py` for the arguments."""
    if not data_dir:
        raise recorded.RecordedError("no data: pass --config.data_dir=DIR, a data set or a folder of data sets")
    if seeds < 1 or steps < 2 or group_size < 2 or pool_over_batch < 1:
        raise ValueError("seeds and pool_over_batch must be at least 1, steps and group_size at least 2")
    recipes = {}
    for arm in (*arms, CLAIRVOYANT):
        options = dict(variants[arm]) if arm in variants else {"recipe": arm}
        recipes[arm] = (options.pop("recipe"), options)
        if recipes[arm][0] not in schedulers.RECIPES:
            raise ValueError(f"arm {arm!r}: no recipe {recipes[arm][0]!r}; there are: {', '.join(schedulers.RECIPES)}")
    datasets = {}
    for folder in recorded.find_sets(data_dir):
        data = recorded.load(folder)
        pool = prepare(data, group_size=group_size, cohort=cohort, graph=graph)
        settings = {
            "seeds": seeds,
            "steps": steps,
            "evaluations": evaluations,
            "batch_size": math.ceil(len(data.records) / pool_over_batch),
            "group_size": group_size,
        }
        results = {}
        for arm in common.bar(list(recipes), data.name):
            recipe, options = recipes[arm]
            oracle = "recorded" if arm == CLAIRVOYANT else "held_back" if recipe == "oracle" else None
            full = settings | {"recipe": recipe, "options": options, "oracle": oracle}
            mark = _fingerprint(folder, full | {"cohort": cohort, "graph": graph, "code": loop.code_digest()})
            results[arm] = _run_or_keep(workdir, data.name, arm, mark, pool, full)
        figures = summarise(results)
        datasets[data.name] = {
            "tasks": len(data.records),
            "environments": len(np.unique(pool.env)),
            "checkpoints": [[data.models[m] for m in models] for models in pool.members],
            "batch_size": settings["batch_size"],
            "arms": {arm: figures[arm] for arm in arms},
            CLAIRVOYANT: figures[CLAIRVOYANT],
        }
    return {"datasets": datasets, "gap_closed": replay_report.mean_gap(datasets)}


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
