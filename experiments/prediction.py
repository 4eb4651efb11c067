"""How well beliefs predict recorded outcomes that they have not seen, beside simple reference methods.

One question (`Case`) shows some recorded trials and asks for mean, within-task variance and P(informative) of other
tasks, or of the same tasks at a later checkpoint. The settings:

* `cold`: half of the tasks observed at one checkpoint, predict the others there; `cold_scenario` and `cold_env` hold
  out whole scenarios (`group_id`) and whole environments;
* `sparse_05`, `sparse_15`, `sparse_40`: one rollout of that share of all past (checkpoint, task) cells, predict every
  task at the present checkpoint; `stale`: one rollout of every task at the checkpoint before; `dense`: all the past.

Beliefs learn of the shown trials as in a run: `Scheduler.observe` on one `Outcome` per checkpoint, in order of time,
with a row per task and a slot per trial. Trials that are not shown are ABSENT and their rewards are zeros.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from envsched_jax import schedulers
from envsched_jax.schedulers import common as recipes
from envsched_jax.types import Belief, Graph, History, Outcome, Scheduler, SchedulerState, Status
from experiments import common, metrics, recorded, reference
from experiments.recorded import Recorded, Tables
from experiments.reference import Estimate, Observed
from experiments.replay_arm import Pool, prepare

COLD = ("cold", "cold_scenario", "cold_env")
SPARSE = {"sparse_05": 0.05, "sparse_15": 0.15, "sparse_40": 0.40}
SETTINGS = (*COLD, *SPARSE, "stale", "dense")
RANKED = ("spearman_mean", "spearman_variance", "auc_mixed", "top_quarter", "auc_informative")
METRICS = (*RANKED, "ece", "brier", "nll", "ece_mean")
SMALLEST = 8  # tasks to predict; a rank correlation of fewer says nothing

Believe = Callable[[Graph, SchedulerState], Belief]


class Case(NamedTuple):
    """One question: C checkpoints, T tasks in node order, K trials."""

    present: int  # the checkpoint whose outcomes are asked for
    shown: np.ndarray  # bool[C, T, K], trials that may be seen
    target: np.ndarray  # bool[T], tasks that are asked for


class Believer(NamedTuple):
    """A method under test: `scheduler.observe` takes in what is shown, `believe` predicts."""

    scheduler: Scheduler
    believe: Believe


class Problem(NamedTuple):
    """A data set made ready."""

    name: str
    pool: Pool
    group_size: int
    view: reference.View


# ------------------------------------------------------------------------------------------------ questions


def _halve(rng: np.random.Generator, block: np.ndarray) -> np.ndarray:
    """About half of the tasks in whole blocks, at least one block in and one out: bool[T]."""
    names, size = np.unique(block, return_counts=True)
    order = rng.permutation(len(names))
    inside = np.cumsum(size[order]) <= len(block) / 2
    inside[0], inside[-1] = True, False
    return np.isin(block, names[order[inside]])


def _choose(values: Sequence[int], most: int) -> list[int]:
    at = np.linspace(0, len(values) - 1, min(most, len(values))).round().astype(int)
    return [values[i] for i in at]


def _one_each(rng: np.random.Generator, cells: np.ndarray, there: np.ndarray) -> np.ndarray:
    """One random trial of every chosen cell that has any: bool[C, T, K]."""
    score = np.where(there, rng.random(there.shape), -1)
    return there & (score == score.max(axis=-1, keepdims=True)) & cells[..., None]


def cold_cases(pool: Pool, setting: str, seed: int, most: int) -> list[Case]:
    """Half of the tasks at one checkpoint; none where there are no two blocks to tell apart."""
    block = {"cold": np.arange(len(pool.env)), "cold_env": pool.env, "cold_scenario": pool.scenario}[setting]
    if len(np.unique(block)) < 2 or (block < 0).any():
        return []
    there = ~np.isnan(pool.pooled)
    cases = []
    for present in _choose(range(len(there)), most):
        rng = np.random.default_rng([seed, present, SETTINGS.index(setting)])
        inside = _halve(rng, block)
        shown = np.zeros_like(there)
        shown[present] = there[present] & inside[:, None]
        cases.append(Case(present, shown, ~inside))
    return cases


def past_cases(pool: Pool, setting: str, seed: int, most: int) -> list[Case]:
    """Every task at a checkpoint, from some of what came before; none where there is one checkpoint."""
    there = ~np.isnan(pool.pooled)
    cases = []
    for present in _choose(range(1, len(there)), most):
        rng = np.random.default_rng([seed, present, SETTINGS.index(setting)])
        time = np.arange(len(there))[:, None]
        past = np.broadcast_to(time < present, there.shape[:2])
        if setting == "dense":
            shown = there & past[..., None]
        elif setting == "stale":
            shown = _one_each(rng, past & (time == present - 1), there)
        else:
            shown = _one_each(rng, past & (rng.random(past.shape) < SPARSE[setting]), there)
        cases.append(Case(present, shown, np.ones(there.shape[1], bool)))
    return cases


def cases(pool: Pool, setting: str, seed: int, most: int) -> list[Case]:
    """The questions of one setting and seed, at no more than `most` checkpoints spread over the curve."""
    if setting not in SETTINGS:
        raise ValueError(f"unknown setting {setting!r}; there are: {', '.join(SETTINGS)}")
    return (cold_cases if setting in COLD else past_cases)(pool, setting, seed, most)


# ------------------------------------------------------------------------------------------------ answers


def observed(pooled: np.ndarray, shown: np.ndarray, group_size: int) -> Observed:
    """What a reference method gets to see: the shown trials of each task, f64[T] per field.

    A cell (checkpoint, task) is a group; rewards of different groups are never pooled into one variance.
    """
    reward = np.where(shown, pooled, np.nan)
    count, mean, variance = metrics.moments(reward)  # [C, T]
    dof = np.maximum(count - 1, 0)
    share = np.array([metrics.p_informative(row, group_size) for row in reward])
    newest = len(count) - 1 - np.argmax((count > 0)[::-1], axis=0)
    groups = ~np.isnan(share)

    def over(weight: np.ndarray, value: np.ndarray) -> np.ndarray:
        total = weight.sum(axis=0)
        average = (weight * np.nan_to_num(value)).sum(axis=0) / np.maximum(total, 1e-9)
        return np.where(total > 0, average, np.nan)

    return Observed(
        rollouts=count.sum(axis=0),
        mean=over(count, mean),
        dof=dof.sum(axis=0),
        variance=over(dof, variance),
        groups=groups.sum(axis=0).astype(np.float64),
        share=over(groups.astype(np.float64), share),
        last=np.take_along_axis(mean, newest[None], axis=0)[0],
    )


def program(believer: Believer) -> Callable[[Graph, Tables, jax.Array, int, int], Belief]:
    """Returns the compiled function `(graph, table, shown, start, stop) -> Belief`.

    It observes checkpoints `start` to `stop - 1`, one outcome each, from the empty state; `shown` is bool[C, N, K].
    """

    def run(graph: Graph, table: Tables, shown: jax.Array, start: int, stop: int) -> Belief:
        nodes = jnp.arange(shown.shape[1], dtype=jnp.int32)

        def step(time: jax.Array, state: SchedulerState) -> SchedulerState:
            seen = shown[time] & table.there[time]
            outcome = Outcome(
                node=nodes,
                explore=jnp.zeros_like(nodes, dtype=bool),
                reward=jnp.where(seen, table.reward[time], 0.0),
                status=jnp.where(seen, int(Status.OK), int(Status.ABSENT)).astype(jnp.int8),
                tokens=seen.astype(jnp.float32),
                seconds=seen.astype(jnp.float32),
                age=jnp.zeros_like(nodes),
            )
            return believer.scheduler.observe(graph, state, outcome)

        state = jax.lax.fori_loop(start, stop, step, believer.scheduler.init(graph))
        return believer.believe(graph, state)

    return jax.jit(run)


def answer(run: Callable[..., Belief], pool: Pool, case: Case, setting: str) -> Estimate:
    """What a compiled believer predicts for the tasks of one case."""
    _, size, trials = pool.table.there.shape
    pad = ((0, 0), (0, size - case.shown.shape[1]), (0, trials - case.shown.shape[2]))
    start, stop = (case.present, case.present + 1) if setting in COLD else (0, case.present)
    belief = run(pool.graph, pool.table, np.pad(case.shown, pad), start, stop)
    mean, variance, share = (np.asarray(x, np.float64)[: case.shown.shape[1]] for x in belief[:3])
    return Estimate(mean, variance, share)


def score(guess: Estimate, reward: np.ndarray, target: np.ndarray, group_size: int) -> dict[str, float]:
    """Compares predictions with the trials of the present checkpoint.

    Args:
      guess: f64[T] per field.
      reward: f64[T, K], NaN where there is no trial; tasks with fewer than two trials are left out.
      target: bool[T].
      group_size: G; the truth of P(informative) is the exact share of informative groups of G of the trials.
    """
    count, mean, variance = metrics.moments(reward)
    at = target & (count >= 2)
    if at.sum() < SMALLEST:
        return dict.fromkeys(METRICS, metrics.NOTHING)
    values = {
        "spearman_mean": metrics.spearman(guess.mean[at], mean[at]),
        "spearman_variance": metrics.spearman(guess.variance[at], variance[at]),
        "auc_mixed": metrics.auc(guess.variance[at], variance[at] > 0),
        "top_quarter": metrics.top_quarter(guess.variance[at], variance[at]),
        "ece_mean": metrics.calibration_error(guess.mean[at], mean[at]),
    }
    share = metrics.p_informative(reward, group_size)
    full = target & ~np.isnan(share)
    if guess.share is None or not full.any():
        return dict.fromkeys(METRICS, metrics.NOTHING) | values
    values["auc_informative"] = metrics.auc(guess.share[at], variance[at] > 0)
    said, truth = guess.share[full], share[full]
    values["ece"] = metrics.calibration_error(said, truth)
    values["brier"] = float(((said - truth) ** 2 + truth * (1 - truth)).mean())
    values["nll"] = metrics.log_loss(said, truth)
    return values


# ------------------------------------------------------------------------------------------------ the benchmark


def problem_of(data: Recorded, pool: Pool, group_size: int) -> Problem:
    """Makes a loaded data set and its pool a problem."""
    view = reference.view([data.records[i] for i in pool.record], pool.env)
    return Problem(data.name, pool, group_size, view)


def problem(
    folder: str | Path, *, group_size: int = 4, cohort: int = 5, graph: Mapping[str, Any] | None = None
) -> Problem:
    """Makes one data set ready; `graph` holds the arguments of `envsched_jax.graph.build`."""
    data = recorded.load(folder)
    return problem_of(data, prepare(data, group_size=group_size, cohort=cohort, graph=graph or {}), group_size)


def problems(data_dir: str | Path, **settings: Any) -> list[Problem]:
    """Makes every data set of a folder ready, see `problem`."""
    return [problem(folder, **settings) for folder in recorded.find_sets(data_dir)]


def of_recipe(name: str, **settings: Any) -> Believer | None:
    """The belief of a recipe of the library with these settings; None if the recipe has none."""
    believe = schedulers.belief_fn(name, **settings)
    return None if believe is None else Believer(schedulers.make(name, **settings), believe)


def of_history(believe: Callable[[Graph, History], Belief], gamma: float = 0.9) -> Believer:
    """A belief that needs the history alone; records fade by `gamma` with every checkpoint."""

    def unused(*_: object) -> Any:
        raise ValueError("this scheduler only observes")

    def observe(graph: Graph, state: SchedulerState, outcome: Outcome) -> SchedulerState:
        return recipes.observe(graph, state, outcome, gamma=gamma)

    return Believer(Scheduler(recipes.init, unused, observe), lambda graph, state: believe(graph, state.history))


def evaluate(
    task: Problem,
    believers: Mapping[str, Believer],
    *,
    seeds: int = 2,
    most: int = 8,
    settings: Sequence[str] = SETTINGS,
    references: bool = True,
) -> dict[str, dict[str, dict[str, Any]]]:
    """Scores beliefs, and the reference methods beside them, on one data set.

    Args:
      task: the data set.
      believers: by name.
      seeds: repetitions; each draws anew what is shown.
      most: checkpoints asked for per setting and seed.
      settings: of `SETTINGS`; those that a data set does not allow are left out of the result.
      references: whether to run the reference methods.

    Returns:
      `{setting: {method: {metric: {"mean", "ci"}}}}`: per seed the mean over checkpoints, then mean and 95 % interval
      over seeds.
    """
    programs = {name: program(believer) for name, believer in believers.items()}
    predictors = reference.predictors(task.view) if references else {}
    results = {}
    for setting in settings:
        rows: dict[str, list[list[dict[str, float]]]] = {}
        for seed in range(seeds):
            asked = cases(task.pool, setting, seed, most)
            answers = [_answers(task, case, setting, programs, predictors) for case in asked]
            for name in answers[0] if answers else ():
                rows.setdefault(name, []).append([scores[name] for scores in answers])
        if rows:
            results[setting] = {name: _over_seeds(scores) for name, scores in rows.items()}
    return results


def _answers(
    task: Problem,
    case: Case,
    setting: str,
    programs: Mapping[str, Callable[..., Belief]],
    predictors: Mapping[str, reference.Predictor],
) -> dict[str, dict[str, float]]:
    """The scores of every method on one case."""
    guesses = {name: answer(run, task.pool, case, setting) for name, run in programs.items()}
    seen = observed(task.pool.pooled, case.shown, task.group_size) if predictors else None
    for name, predict in predictors.items():
        if seen is not None and (setting not in COLD or name not in reference.OWN):
            guesses[name] = predict(seen)
    reward = task.pool.pooled[case.present]
    return {name: score(guess, reward, case.target, task.group_size) for name, guess in guesses.items()}


def _over_seeds(rows: list[list[dict[str, float]]]) -> dict[str, dict[str, Any]]:
    found = {}
    for metric in METRICS:
        values = np.array([[row[metric] for row in seed] for seed in rows])
        kept = [row[~np.isnan(row)] for row in values]
        mean, low, high = common.interval([row.mean() if len(row) else metrics.NOTHING for row in kept])
        found[metric] = {"mean": float(mean), "ci": [float(low), float(high)]}
    return found


def table(results: Mapping[str, Mapping[str, Mapping[str, Any]]], shown: Sequence[str] = RANKED) -> str:
    """Results of one data set as text: a row per setting and method."""
    lines = [f"{'setting':<14}{'method':<20}" + "".join(f"{name:>19}" for name in shown)]
    for setting, methods in results.items():
        for method, values in methods.items():
            cells = "".join(f"{values[name]['mean']:>19.3f}" for name in shown)
            lines.append(f"{setting:<14}{method:<20}{cells}")
    return "\n".join(lines)
