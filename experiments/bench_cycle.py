"""What one step costs as the pool grows, and the cycle as one program beside the same code stepped from Python.

    python -m experiments.bench_cycle --config=configs/bench_cycle.py:cpu --workdir=W

Scheduling: pools of made-up tasks whose pass rates hang together within environments and patterns. A mode is
`incremental` (`envsched_incremental`: sums kept up to date, a choice among candidates), `full` (the same belief, its
sums worked out anew and every task scored at every step; what depends on the graph alone is kept), `diffusion` and
`gaussian_field` (`envsched` as it is). A step is `belief_ms` (beliefs of the tasks that are scored), `select_ms` (the
rest of selecting) and `observe_ms`, medians over the steps; steps at which something is refreshed are apart in
`refresh_ms`. `informative_share` is that of the timed steps, to see what looking at fewer tasks costs.

Cycle: steps per second on ToolWorld by one compiled scan over all seeds, by one over a single seed, and with the four
parts of a step called from Python.
"""

import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from matplotlib.figure import Figure
from ml_collections import ConfigDict

from envsched_jax import schedulers, testing
from envsched_jax.schedulers import incremental
from envsched_jax.train import build
from envsched_jax.train.cycle import Stream
from envsched_jax.types import (
    CROSS_KINDS,
    EDGE_KINDS,
    WITHIN_KINDS,
    Batch,
    Edges,
    Globals,
    Graph,
    Nodes,
    Outcome,
    outcome_of,
)
from experiments import common, figures, loop

CONFIG = "configs/bench_cycle.py"
PATTERNS, FEATURES, DOMAIN = 32, 64, 50  # patterns, size of the features, environments of one domain
FEWEST = 3  # timed steps of every mode
REFRESH = {"incremental": 256, "gaussian_field": 4}  # steps between two refreshes

Row = dict[str, Any]


def pool(nodes: int, k: int, tasks_per_env: int, seed: int) -> tuple[Graph, jax.Array]:
    """Returns a graph and the pass rate of every task, f32[N].

    Neighbours are tasks of the same environment; in the cross relation, of the same domain, but one in five anywhere.
    """
    rng = np.random.default_rng(seed)
    env = np.arange(nodes) // tasks_per_env
    envs = int(env[-1]) + 1
    size = np.minimum(tasks_per_env, nodes - env * tasks_per_env)
    domain = tasks_per_env * DOMAIN
    start = np.arange(nodes) // domain * domain
    table = np.empty((2 * k, nodes), np.int32)
    similarity = np.zeros((2 * k, nodes, len(EDGE_KINDS)), np.float32)
    for slot in range(k):
        table[slot] = env * tasks_per_env + rng.integers(0, size)
        near = start + rng.integers(0, np.minimum(domain, nodes - start))
        table[k + slot] = np.where(rng.random(nodes) < 0.2, rng.integers(0, nodes, nodes), near)
        similarity[slot, :, : len(WITHIN_KINDS)] = rng.random((nodes, len(WITHIN_KINDS)), np.float32)
        similarity[k + slot, :, len(WITHIN_KINDS) :] = rng.random((nodes, len(CROSS_KINDS)), np.float32)
    pattern = rng.integers(0, PATTERNS, nodes)
    logit = 2.0 * rng.normal(size=envs)[env] + 1.5 * rng.normal(size=PATTERNS)[pattern] + 1.5 * rng.normal(size=nodes)
    feature = rng.normal(size=(nodes, FEATURES)).astype(np.float32)
    feature /= np.linalg.norm(feature, axis=1, keepdims=True)
    graph = testing.TinyGraph(
        nodes=Nodes(
            mask=jnp.ones(nodes, bool),
            env=jnp.asarray(env, jnp.int32),
            pattern=jnp.asarray(pattern, jnp.int32),
            uid=jnp.asarray(rng.integers(0, 2**32, nodes, dtype=np.uint32)),
            feature=jnp.asarray(feature),
            static=jnp.zeros((nodes, 1), jnp.float32),
            checks=jnp.ones(nodes, jnp.int32),
        ),
        edges=Edges(jnp.asarray(similarity.reshape(-1, len(EDGE_KINDS))), jnp.ones(2 * k * nodes, bool)),
        senders=jnp.asarray(table.reshape(-1)),
        receivers=jnp.tile(jnp.arange(nodes, dtype=jnp.int32), 2 * k),
        globals=Globals(jnp.ones(envs, bool), jnp.ones(PATTERNS, bool)),
    )
    return graph, jnp.asarray(1.0 / (1.0 + np.exp(-logit)), jnp.float32)


def recipe(mode: str, nodes: int, sizes: Mapping[str, int], candidates: int) -> tuple[str, dict[str, Any]]:
    """Returns name and settings of the recipe that a mode stands for."""
    if mode == "incremental":
        least = max(8, 4 * sizes["batch_size"])
        return "envsched_incremental", {**sizes, "candidates": max(candidates, least), "refresh": REFRESH[mode]}
    if mode == "full":
        return "envsched_incremental", {**sizes, "candidates": max(nodes, 4 * sizes["batch_size"]), "refresh": 1}
    if mode in ("diffusion", "gaussian_field"):
        return "envsched", {**sizes, "belief": mode}
    raise ValueError(f"unknown mode {mode!r}; there are: incremental, full, diffusion, gaussian_field")


def scored(mode: str, nodes: int, candidates: int) -> int:
    """How many tasks a step of the mode scores."""
    return min(nodes, candidates) if mode == "incremental" else nodes


def timed(run: Callable[..., Any], *args: Any) -> tuple[Any, float]:
    """Returns what ``run`` gives, and milliseconds."""
    started = time.perf_counter()
    result = jax.block_until_ready(run(*args))
    return result, 1e3 * (time.perf_counter() - started)


def play(key: jax.Array, rate: jax.Array, batch: Batch, group_size: int) -> Outcome:
    """Returns binary rewards by pass rate."""
    passed = jax.random.bernoulli(key, rate[batch.node][:, None], (batch.node.shape[0], group_size))
    return outcome_of(batch, passed.astype(jnp.float32))


def measure(
    mode: str,
    graph: Graph,
    rate: jax.Array,
    *,
    batch_size: int,
    group_size: int,
    candidates: int,
    steps: int,
    seconds: float,
) -> Row:
    """Runs a scheduler for some steps and returns its row."""
    nodes = graph.nodes.mask.shape[0]
    name, settings = recipe(mode, nodes, {"batch_size": batch_size, "group_size": group_size}, candidates)
    scheduler = schedulers.make(name, **settings)
    state, init_ms = timed(jax.jit(scheduler.init), graph)
    if mode == "incremental":
        graph = incremental.lean(graph)
    select, observe = jax.jit(scheduler.select), jax.jit(scheduler.observe, donate_argnums=1)
    outcome_of_batch = jax.jit(partial(play, rate=rate, group_size=group_size))
    believe = _believe(name, settings, scored(mode, nodes, candidates), nodes)
    times: dict[str, list[float]] = {"belief": [], "select": [], "observe": [], "refresh": []}
    informative, spent = [], 0.0
    for step in range(2 * steps):
        key = jax.random.fold_in(jax.random.key(0), step)
        _, belief_ms = timed(believe, graph, state)
        batch, select_ms = timed(select, key, graph, state)
        outcome = jax.block_until_ready(outcome_of_batch(jax.random.fold_in(key, 1), batch=batch))
        state, observe_ms = timed(observe, graph, state, outcome)
        refreshed = mode in REFRESH and (step + (mode == "incremental")) % REFRESH[mode] == 0
        if step < 2:
            continue  # these compile
        reward = np.asarray(outcome.reward)
        informative.append(float((reward.max(axis=1) > reward.min(axis=1)).mean()))
        spent += belief_ms + select_ms + observe_ms
        for part, ms in (
            ("belief", belief_ms),
            ("select", select_ms),
            ("refresh" if refreshed else "observe", observe_ms),
        ):
            times[part].append(ms)
        if spent > 1e3 * seconds and len(times["observe"]) >= FEWEST:
            break
    belief_ms = float(np.median(times["belief"]))
    return {
        "nodes": nodes,
        "mode": mode,
        "belief_ms": belief_ms,
        "select_ms": max(float(np.median(times["select"])) - belief_ms, 0.0),
        "observe_ms": float(np.median(times["observe"])),
        "refresh_ms": float(np.median(times["refresh"])) if times["refresh"] else None,
        "init_ms": init_ms,
        "steps": len(times["observe"]),
        "scored": scored(mode, nodes, candidates),
        "informative_share": float(np.mean(informative[len(informative) // 2 :])),
        "graph_bytes_per_task": size_of(graph) / nodes,
        "state_bytes_per_task": size_of(state) / nodes,
    }


def _believe(name: str, settings: Mapping[str, Any], count: int, nodes: int) -> Callable[..., Any]:
    """Returns the compiled belief about as many tasks as a step scores."""
    if name == "envsched_incremental" and count < nodes:
        node = jnp.sort(jax.random.randint(jax.random.key(1), (count,), 0, nodes, jnp.int32))
        return jax.jit(lambda graph, state: incremental.believe(graph, state, node, **settings))
    believe = schedulers.belief_fn(name, **settings)
    assert believe is not None  # these recipes all believe something
    return jax.jit(believe)


def size_of(tree: Any) -> int:
    """Bytes of all arrays of a pytree; a key counts as its data."""
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


# ------------------------------------------------------------------------------------------------ the whole cycle


def cycle(config: ConfigDict, seeds: int, steps: int) -> dict[str, float]:
    """Returns steps of a seed per second: one program over all seeds, one over a single seed, and from Python."""
    config = config.copy_and_resolve_references()
    config.train.chunk = steps
    suite = build.build_suite(config)
    programs = build.build_arm(suite, config, scheduler=build.plain(config.scheduler), filter=config.filter)
    speed = {}
    for name, count in (("scan_all_seeds", seeds), ("scan_one_seed", 1)):
        state = programs.init(jnp.arange(count))
        (state, _), _ = timed(programs.run, state)  # compiles
        _, ms = timed(programs.run, state)
        speed[name] = 1e3 * steps * count / ms
    state = jax.tree.map(lambda x: x[0], programs.init(jnp.arange(1)))
    pieces = build.build_pieces(programs)
    root, scheduler, params, opt_state = state.key, state.scheduler, state.params, state.opt_state
    started = time.perf_counter()
    for step in range(2 * steps):
        if step == steps:
            started = time.perf_counter()
        now = state._replace(scheduler=scheduler, params=params, opt_state=opt_state)
        key = jax.random.fold_in(root, step)
        batch = pieces["select"](jax.random.fold_in(key, Stream.SELECT), now)
        trajectory = pieces["rollout"](jax.random.fold_in(key, Stream.ROLLOUT), now, batch)
        params, opt_state, _ = pieces["update"](now, trajectory)
        scheduler = jax.block_until_ready(pieces["observe"](now, batch, trajectory))
    jax.block_until_ready(params)
    speed["python_one_seed"] = steps / (time.perf_counter() - started)
    parts = loop.time_pieces(programs, programs.init(jnp.arange(1)))
    trajectory = pieces["rollout"](root, state, pieces["select"](root, state))
    tokens = float(jnp.where(jnp.isfinite(trajectory.tokens), trajectory.tokens, 0.0).sum())
    return speed | {"rollout_tokens_per_s": tokens / parts["rollout"], "update_ms": 1e3 * parts["update"]}


# ------------------------------------------------------------------------------------------------ program


def bench(workdir: Path, config: ConfigDict) -> dict[str, Any]:
    """Measures everything and returns the summary; see `configs/bench_cycle.py` for the config."""
    speed = cycle(config.cycle, config.seeds, config.cycle_steps)
    print(", ".join(f"{name} {value:.1f}" for name, value in speed.items()), flush=True)
    rows = []
    with common.MetricWriter(workdir, events=False) as writer:
        for nodes in config.nodes:
            graph, rate = pool(nodes, config.k, config.tasks_per_env, config.seed)
            for mode, largest in config.largest.items():
                if nodes > largest:
                    continue
                row = measure(
                    mode,
                    graph,
                    rate,
                    batch_size=config.batch_size,
                    group_size=config.group_size,
                    candidates=config.candidates,
                    steps=config.steps,
                    seconds=config.seconds,
                )
                print(line(row), flush=True)
                writer.write(nodes, {k: v for k, v in row.items() if k not in ("mode", "refresh_ms")}, mode=mode)
                rows.append(row | {name: speed[name] for name in ("rollout_tokens_per_s", "update_ms")})
    return {"rows": rows, "cycle": speed}


def line(row: Row) -> str:
    """One row as text."""
    refresh = "" if row["refresh_ms"] is None else f" (refresh {row['refresh_ms']:.1f})"
    step = row["belief_ms"] + row["select_ms"] + row["observe_ms"]
    return (
        f"{row['nodes']:>9,} {row['mode']:15} belief {row['belief_ms']:8.2f} select {row['select_ms']:8.2f} "
        f"observe {row['observe_ms']:8.2f}{refresh} = {step:8.2f} ms; informative {row['informative_share']:.1%}; "
        f"bytes per task {row['graph_bytes_per_task']:.0f} + {row['state_bytes_per_task']:.0f}"
    )


def draw(workdir: Path, rows: list[Row]) -> None:
    """Writes `figures/step.png`, milliseconds of a step by pool size."""
    modes = list(dict.fromkeys(row["mode"] for row in rows))
    palette = dict(zip(modes, (figures.ACCENT, *figures.OTHERS), strict=False))
    with matplotlib.rc_context(figures.STYLE):
        figure = Figure(figsize=(figures.WIDTH, 3.2), layout="constrained")
        axes = figure.subplots()
        for mode in modes:
            mine = [row for row in rows if row["mode"] == mode]
            step = [row["belief_ms"] + row["select_ms"] + row["observe_ms"] for row in mine]
            axes.plot([row["nodes"] for row in mine], step, marker="o", color=palette[mode], label=mode)
        axes.set(xscale="log", yscale="log", xlabel="tasks", ylabel="ms per step")
        axes.legend()
        figures.save(figure, workdir / "figures" / "step.png")


def main(config: ConfigDict, workdir: Path) -> None:
    """Runs the program: `metrics.jsonl`, `summary.json` and a figure go to `workdir`."""
    started = time.time()
    summary = bench(workdir, config)
    common.write_summary(workdir, "bench_cycle", config, summary, started)
    draw(workdir, summary["rows"])
    print(f"figures: {workdir / 'figures'}")


if __name__ == "__main__":
    common.run_app(main, CONFIG)
