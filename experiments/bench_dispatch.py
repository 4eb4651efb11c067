"""Tickets per second through a dispatcher: proposed, observed, and on disk when the call returns.

    python -m experiments.bench_dispatch --config=configs/bench_dispatch.py:cpu --workdir=W

One ticket is one group: proposed once, observed once. `durable` waits for the disk in every call, `memory` keeps no
folder at all.
"""

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from ml_collections import ConfigDict

import envsched_jax as es
from envsched_jax.dispatch import Dispatcher, feedback
from experiments import bench_cycle, common


def pool(tasks: int, config: ConfigDict) -> tuple[list[es.Record], tuple[es.Graph, es.Index]]:
    """Returns made-up tasks and the graph of `bench_cycle` as theirs, which takes no search for neighbours."""
    graph, _ = bench_cycle.pool(tasks, config.k, config.tasks_per_env, config.seed)
    records = [
        es.Record(f"task{i:07d}", f"env{i // config.tasks_per_env:05d}", "", (), extra={"row": i}) for i in range(tasks)
    ]
    envs = tuple(dict.fromkeys(record.env_id for record in records))
    names = tuple(record.task_id for record in records)
    return records, (graph, es.Index(names, envs, np.arange(tasks), tasks, graph.globals.env_mask.shape[0]))


def measure(records: Any, graph: Any, call: int, folder: Path | None, config: ConfigDict) -> dict[str, Any]:
    """Returns one row: tickets per second, and milliseconds of a call of either kind."""
    sizes = {"batch_size": config.batch_size, "group_size": config.group_size}
    recipe = es.make_scheduler(config.recipe, **sizes)
    rng = np.random.default_rng(config.seed)
    took: dict[str, list[float]] = {"propose": [], "observe": []}
    with Dispatcher(records, recipe, group_size=config.group_size, graph=graph, folder=folder) as dispatcher:
        done, began, version = 0, 0.0, 0
        while not began or time.perf_counter() - began < config.seconds:
            start = time.perf_counter()
            tickets = dispatcher.propose(call)
            middle = time.perf_counter()
            rewards = (rng.random((call, config.group_size)) < rng.random((call, 1))).astype(float).tolist()
            outcomes = [feedback(t.ticket_id, r, tokens=100.0) for t, r in zip(tickets, rewards, strict=True)]
            ready = time.perf_counter()
            dispatcher.observe_many(outcomes)
            end = time.perf_counter()
            version += 1
            if began:
                took["propose"].append(middle - start)
                took["observe"].append(end - ready)
                done += call
            elif version * call >= 4 * max(call, config.batch_size):  # everything is compiled
                began = time.perf_counter()
        seconds = time.perf_counter() - began
    return {
        "tasks": len(records),
        "call": call,
        "durable": folder is not None,
        "tickets_per_s": done / seconds,
        **{f"{kind}_ms": 1e3 * float(np.mean(times)) for kind, times in took.items()},
        **{f"{kind}_ms_worst": 1e3 * float(np.max(times)) for kind, times in took.items()},
    }


def main(config: ConfigDict, workdir: Path) -> None:
    """Runs the program: `metrics.jsonl` and `summary.json` go to `workdir`."""
    started, rows = time.time(), []
    with common.MetricWriter(workdir, events=False) as writer:
        for tasks in config.tasks:
            records, graph = pool(tasks, config)
            for call in config.calls:
                for durable in (False, True):
                    with tempfile.TemporaryDirectory(dir=workdir) as folder:
                        row = measure(records, graph, call, Path(folder) if durable else None, config)
                    rows.append(row)
                    writer.write(len(rows), row)
                    print(
                        f"{tasks:>9,} tasks, calls of {call:>3}, {'durable' if durable else 'memory ':7} "
                        f"{row['tickets_per_s']:8.0f} tickets/s; propose {row['propose_ms']:7.2f} ms (worst "
                        f"{row['propose_ms_worst']:.0f}), observe {row['observe_ms']:6.2f} ms",
                        flush=True,
                    )
    common.write_summary(workdir, "bench_dispatch", config, {"rows": rows}, started)


if __name__ == "__main__":
    common.run_app(main, "configs/bench_dispatch.py")
