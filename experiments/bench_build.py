"""What building a graph costs by pool size: time, memory, bytes per task, recall of the search, and steps on it.

    python -m experiments.bench_build --config=configs/bench_build.py:million --workdir=W

Pools are those of `testing.synthetic_pool`. Recall is the share of a task's cross neighbours whose score is at least
that of its k-th best among all tasks, so that neighbours that tie count alike. Steps are of `envsched_incremental`.
"""

import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from ml_collections import ConfigDict

from envsched_jax import graph, schedulers, testing
from envsched_jax.graph import features, neighbours
from envsched_jax.pool import Record
from envsched_jax.schedulers import incremental
from envsched_jax.types import Graph
from experiments import common


def measure(tasks: int, config: ConfigDict) -> dict[str, Any]:
    """Builds one graph and returns its row: seconds by the clock and of all cores, peak GiB, bytes per task, recall."""
    records = testing.synthetic_pool(tasks, max(1, tasks // config.tasks_per_env), config.seed)
    before, wall, cpu = peak_gib(), time.perf_counter(), time.process_time()
    built, index = graph.build(records, k=config.k, seed=config.seed, search=config.search)
    jax.block_until_ready(built)
    row = {
        "tasks": tasks,
        "search": config.search,
        "wall_s": time.perf_counter() - wall,
        "cpu_s": time.process_time() - cpu,
        "peak_gib": peak_gib(),
        "peak_before_gib": before,  # of the records alone, at the first size
        "bytes_per_task": bytes_per_task(built, tasks),
    }
    if config.steps:
        row |= schedule(built, tasks, config)
    if config.recall_tasks:
        row["recall"] = recall(built, [records[i] for i in index.record], config)
    return row


def schedule(built: Graph, tasks: int, config: ConfigDict) -> dict[str, float]:
    """Schedules some steps on the graph, with made-up outcomes, and returns what they took, compiling included."""
    wall = time.perf_counter()
    scheduler = schedulers.make(
        "envsched_incremental", batch_size=min(config.batch_size, tasks // 4), group_size=config.group_size
    )
    state = jax.jit(scheduler.init)(built)
    lean = incremental.lean(built)
    select, observe = jax.jit(scheduler.select), jax.jit(scheduler.observe, donate_argnums=1)
    play = jax.jit(testing.simulate, static_argnums=3)
    for step in range(config.steps):
        key = jax.random.fold_in(jax.random.key(config.seed), step)
        batch = select(key, lean, state)
        state = observe(lean, state, play(jax.random.fold_in(key, 1), lean, batch, config.group_size))
    seen = int((jax.block_until_ready(state).history.visits > 0).sum())
    return {"steps": config.steps, "steps_s": time.perf_counter() - wall, "tasks_seen": seen, "peak_gib": peak_gib()}


def peak_gib() -> float:
    """The most memory that this process has had so far; Linux counts KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def bytes_per_task(built: Graph, tasks: int) -> dict[str, float]:
    """Bytes of every array of the graph, its padding too, for each task; those below one are left out."""
    leaves = {jax.tree_util.keystr(path).lstrip("."): x.nbytes / tasks for path, x in jax.tree.leaves_with_path(built)}
    return {name: size for name, size in leaves.items() if size >= 1.0} | {"total": sum(leaves.values())}


def recall(built: Graph, tasks: Sequence[Record], config: ConfigDict) -> float:
    """The share of cross neighbours that score as well as the exact ones, over a sample of tasks.

    Args:
      built: the graph.
      tasks: in node order, as `build` numbers them without `keep`.
      config: has `k`, `seed` and `recall_tasks`.
    """
    env = np.asarray(built.nodes.env)[: len(tasks)]
    some = np.random.default_rng(config.seed).choice(len(tasks), min(config.recall_tasks, len(tasks)), replace=False)
    survey, best = features.survey(tasks), np.zeros((len(some), 0), np.float32)
    queries = _topology([tasks[i] for i in some], survey)
    for part in neighbours.parts(env):
        score = queries @ _topology(tasks[part], survey).T / 2
        score[env[some][:, None] == env[part][None, :]] = -1.0
        best = np.sort(np.concatenate([best, score], axis=1), axis=1)[:, -config.k :]
    nodes = built.nodes.mask.shape[0]
    senders, exists = (
        np.asarray(x).reshape(2 * config.k, nodes)[config.k :, some].T for x in (built.senders, built.edges.mask)
    )
    rows = _topology([tasks[i] for i in np.where(exists, senders, 0).reshape(-1)], survey)
    found = np.einsum("qd,qkd->qk", queries, rows.reshape(*senders.shape, -1)) / 2
    # Products of features are exact, so equal scores are equal. Tasks with fewer candidates than k want no more.
    wanted = np.minimum((best >= 0).sum(axis=1), config.k)
    return float(((found >= best[:, :1]) & exists).sum() / wanted.sum())


def _topology(tasks: Sequence[Record], survey: features.Survey) -> np.ndarray:
    rows = features.extract(tasks, 1, 0, survey)
    return np.concatenate([rows.execution, rows.reward], axis=1)


def main(config: ConfigDict, workdir: Path) -> None:
    """Measures every size, smallest first, and prints a row each."""
    started, rows = time.time(), []
    for tasks in sorted(config.tasks):
        rows.append(measure(tasks, config))
        shown = {k: round(v, 4) if isinstance(v, float) else v for k, v in rows[-1].items() if k != "bytes_per_task"}
        print(shown, {k: round(v) for k, v in rows[-1]["bytes_per_task"].items()}, flush=True)
    common.write_summary(workdir, "bench_build", config, {"rows": rows}, started)


if __name__ == "__main__":
    common.run_app(main, "configs/bench_build.py")
