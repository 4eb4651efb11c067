"""What ages a belief in the loop: selection bias, drift of the policy, or forgetting.

    python -m experiments.drift --config=configs/drift.py:cpu --workdir=W

Each arm trains a policy and looks at the truth now and then: the pass rate of *every* task from fresh rollouts. The
belief is then compared with what the same belief would be in three counterfactuals, made from the recorded truths:

- `no_drift`: the same picks in the same order, rewards as if the present policy had always been there;
- `no_bias`: as many picks drawn uniformly, rewards of the policy at the time;
- `neither`: uniform picks, the present policy.

`no_drift - as_is` is what drift costs, `neither - no_drift` what choosing one's own evidence costs. Forgetting is seen
in the pass rates themselves. Logs of picks and truths stay in `W/<arm>.<seed>.npz`.
"""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from ml_collections import ConfigDict

from envsched_jax import schedulers
from envsched_jax.train import build
from envsched_jax.train.cycle import Stream
from envsched_jax.types import Outcome, SchedulerState, Status, is_valid
from experiments import common, metrics

TRUTH_KEY, REDRAW_KEY = 4242, 777  # fixed, so that every arm meets the same luck


def record(
    suite: build.Suite, config: ConfigDict, scheduler: dict[str, Any], seed: int, reveal: build.Measure
) -> dict[str, np.ndarray]:
    """Trains one policy and returns what happened.

    Returns:
      `node` i32[S, B], `mask` and `explore` bool[S, B], `reward` f32[S, B, G], `valid` bool[S, B, G]; and at every look
      `step` i32[L], `rate` f32[L, n] (pass rate of the n tasks), `mean`, `variance`, `p_informative` f32[L, n] as
      believed (absent for an arm without a belief).
    """
    programs = build.build_arm(suite, config, scheduler=scheduler, filter="none")
    pieces = build.build_pieces(programs)
    state = jax.tree.map(lambda x: x[0], programs.init(jnp.asarray([seed])))
    tasks = len(suite.index.task_ids)
    log: dict[str, list[Any]] = {k: [] for k in ("node", "mask", "explore", "reward", "valid", "step", "rate")}
    log |= {k: [] for k in ("mean", "variance", "p_informative") if programs.believe is not None}
    for step in common.bar(range(config.train.steps + 1), scheduler["name"]):
        if step % config.every == 0:
            one = jax.tree.map(lambda x: x[None], state)
            reward, _ = reveal(jax.random.key(TRUTH_KEY), one.params, suite.task[:tasks])
            log["step"].append(step)
            log["rate"].append(np.asarray(reward[0]).mean(axis=1))
            if programs.believe is not None:
                belief = programs.believe(one)
                for name in ("mean", "variance", "p_informative"):
                    log[name].append(np.asarray(getattr(belief, name))[0, :tasks])
        if step == config.train.steps:
            break
        key = jax.random.fold_in(state.key, state.step)
        batch = pieces["select"](jax.random.fold_in(key, Stream.SELECT), state)
        trajectory = pieces["rollout"](jax.random.fold_in(key, Stream.ROLLOUT), state, batch)
        params, opt_state, _ = pieces["update"](state, trajectory)
        following = pieces["observe"](state, batch, trajectory)
        state = state._replace(params=params, opt_state=opt_state, scheduler=following, step=state.step + 1)
        log["node"].append(np.asarray(batch.node))
        log["mask"].append(np.asarray(batch.mask))
        log["explore"].append(np.asarray(batch.explore))
        log["reward"].append(np.asarray(trajectory.reward))
        log["valid"].append(np.asarray(is_valid(trajectory.status)))
    return {name: np.stack(rows) if name != "step" else np.asarray(rows) for name, rows in log.items()}


def rate_at(log: dict[str, np.ndarray], step: int) -> np.ndarray:
    """The pass rate of every task at a step, f64[n], on the line between the looks before and after."""
    after = int(np.searchsorted(log["step"], step))
    if log["step"][min(after, len(log["step"]) - 1)] == step or after == 0:
        return log["rate"][after].astype(np.float64)
    low, high = log["step"][after - 1], log["step"][after]
    share = (step - low) / (high - low)
    return (1 - share) * log["rate"][after - 1] + share * log["rate"][after]


class Counterfactual:
    """Feeds made-up outcomes to a belief: programs compiled once per recipe."""

    def __init__(self, suite: build.Suite, name: str, settings: dict[str, Any]):
        scheduler = schedulers.make(name, **settings)
        believe = schedulers.belief_fn(name, **settings)
        if believe is None:
            raise ValueError(f"recipe {name!r} has no belief")
        self.graph, self.tasks, self.group_size = suite.graph, len(suite.index.task_ids), settings["group_size"]
        self._init = scheduler.init
        self._observe: Callable[..., SchedulerState] = jax.jit(scheduler.observe)
        self._believe = jax.jit(believe)

    def variance(self, nodes: np.ndarray, rates: list[np.ndarray], rng: np.random.Generator) -> np.ndarray:
        """Believed variance f64[n] after groups of `nodes` i32[s, B] whose pass rates at step s are `rates[s]`."""
        state = self._init(self.graph)
        for picks, rate in zip(nodes, rates, strict=True):
            passed = rng.random((len(picks), self.group_size)) < rate[picks][:, None]
            outcome = Outcome(
                node=jnp.asarray(picks, jnp.int32),
                explore=jnp.zeros(len(picks), bool),
                reward=jnp.asarray(passed, jnp.float32),
                status=jnp.full(passed.shape, int(Status.OK), jnp.int8),
                tokens=jnp.zeros(passed.shape, jnp.float32),
                seconds=jnp.zeros(passed.shape, jnp.float32),
                age=jnp.zeros(len(picks), jnp.int32),
            )
            state = self._observe(self.graph, state, outcome)
        return np.asarray(self._believe(self.graph, state).variance, np.float64)[: self.tasks]


def analyse(log: dict[str, np.ndarray], counterfactual: Counterfactual) -> list[dict[str, float]]:
    """One row per look: rank correlation of believed with true variance, as it is and in the counterfactuals."""
    rows, rng = [], np.random.default_rng(REDRAW_KEY)
    for look, step in enumerate(log["step"]):
        rate = log["rate"][look].astype(np.float64)
        truth = rate * (1 - rate)
        row = {"step": float(step), "mean_rate": float(rate.mean()), "mean_variance": float(truth.mean())}
        if step:
            picks = log["node"][:step]
            uniform = np.stack([rng.choice(len(rate), picks.shape[1], replace=False) for _ in range(step)])
            past = [rate_at(log, s) for s in range(step)]
            cases = {
                "as_is": (picks, past),
                "no_drift": (picks, [rate] * step),
                "no_bias": (uniform, past),
                "neither": (uniform, [rate] * step),
            }
            for name, (nodes, rates) in cases.items():
                row[f"spearman_{name}"] = metrics.spearman(counterfactual.variance(nodes, rates, rng), truth)
            before = log["rate"][look - 1].astype(np.float64)
            touched = np.isin(np.arange(len(rate)), log["node"][int(log["step"][look - 1]) : step])
            row |= {
                "change_picked": float((rate - before)[touched].mean()),
                "change_others": float((rate - before)[~touched].mean()),
                "forgotten": float((rate - before < -0.3).mean()),
                "rank_kept_rate": metrics.spearman(before, rate),
                "rank_kept_variance": metrics.spearman(before * (1 - before), truth),
            }
        if "variance" in log:
            row["spearman"] = metrics.spearman(log["variance"][look].astype(np.float64), truth)
        rows.append(row)
    return rows


def _save(path: Path, log: Mapping[str, np.ndarray]) -> None:
    arrays: dict[str, Any] = dict(log)
    np.savez(path, **arrays)


def main(config: ConfigDict, workdir: Path) -> None:
    """Runs the arms; what is in the workdir already is not run again."""
    started = time.time()
    suite = build.build_suite(config)
    reveal = build.build_measure(suite, config, group_size=config.truth_rollouts)
    base = build.plain(config.scheduler)
    arms = {"uniform": {"name": "uniform"}}
    arms |= {f"explore_{s:g}": {"name": "envsched", **base, "explore_share": s} for s in config.explore_shares}
    sizes = {"batch_size": config.train.batch_size, "group_size": config.train.group_size}
    counterfactual = Counterfactual(suite, "envsched", base | sizes)
    summary: dict[str, Any] = {"arms": {}}
    with common.MetricWriter(workdir) as writer:
        for arm, scheduler in arms.items():
            for seed in range(config.seeds):
                path = workdir / f"{arm}.{seed}.npz"
                if not path.exists():
                    _save(path, record(suite, config, scheduler, seed, reveal))
                log = dict(np.load(path))
                rows = analyse(log, counterfactual)
                for row in rows:
                    writer.write(int(row["step"]), {k: v for k, v in row.items() if k != "step"}, arm=arm, seed=seed)
                passed = np.where(log["valid"], log["reward"], np.nan)
                live = np.nanmax(passed, axis=2) > np.nanmin(passed, axis=2)
                means = {k: float(np.nanmean([r.get(k, np.nan) for r in rows[1:]])) for k in rows[-1] if k != "step"}
                summary["arms"][f"{arm}.{seed}"] = means | {"informative_share": float(live.mean())}
                print(arm, seed, {k: round(v, 3) for k, v in summary["arms"][f"{arm}.{seed}"].items()}, flush=True)
    common.write_summary(workdir, "drift", config, summary, started)


if __name__ == "__main__":
    common.run_app(main, "configs/drift.py")
