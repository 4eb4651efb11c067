"""Headroom of a log: reading it, the ceiling against known truths, the replay of its choices, and the words."""

import json
import math
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from test_recorded import DATA, needs_data

from envsched_jax.pool import PoolError, Record, write_jsonl
from experiments import common, headroom, headroom_ceiling, headroom_estimate, headroom_log, headroom_words, recorded
from experiments import headroom_replay as replays
from experiments.headroom_log import LogError

ROOT = Path(__file__).resolve().parent.parent


def write(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def roll_out(path, rate, batch, group_size, seed=0, env=None, names=None, stepped=True):
    """Writes the log of uniform selection by shuffled epochs; `rate` f64[S, T] are the true pass rates."""
    rng = np.random.default_rng(seed)
    waiting, rows = [], []
    for step, now in enumerate(rate):
        while len(waiting) < batch:
            waiting += rng.permutation(len(now)).tolist()
        picked, waiting = waiting[:batch], waiting[batch:]
        for task in picked:
            for passed in rng.random(group_size) < now[task]:
                row = {"task": f"t{task:04d}" if names is None else names[task], "reward": float(passed)}
                row |= {"step": 10 * step} if stepped else {}
                rows.append(row | ({} if env is None else {"environment": f"e{env[task]}"}))
    return write(path, rows)


def mixed(rate, group_size):
    return 1 - rate**group_size - (1 - rate) ** group_size


def true_ceiling(rate, batch, group_size):
    return np.mean([np.sort(mixed(now, group_size))[-batch:].mean() for now in rate])


def inside(entry, truth, slack=0.0):
    return entry["ci"][0] - slack <= truth <= entry["ci"][1] + slack


# ------------------------------------------------------------------------------------------------ reading


def test_groups_are_rollouts_of_one_task_at_one_step(tmp_path):
    rows = [("b", 7, 1), ("a", 3, 0), ("b", 7, 0), ("a", 7, 1), ("a", 3, 0), ("a", 3, True)]
    log = headroom_log.read(write(tmp_path / "log", [{"task": t, "step": s, "reward": r} for t, s, r in rows] + [""]))
    assert log.tasks == ("a", "b") and log.env == ("all", "all") and log.steps == 2 and log.stepped and log.binary
    assert log.task.tolist() == [0, 0, 1] and log.step.tolist() == [0, 1, 1] and log.size.tolist() == [3, 1, 2]
    assert log.hits.tolist() == [1, 1, 1] and log.informative.tolist() == [True, False, True]
    assert log.group_size == 3  # of sizes that occur as often, the larger


def test_without_steps_and_with_a_group_size(tmp_path):
    rows = [{"task": "a", "reward": r} for r in (0, 1, 1, 0, 1)] + [{"task": "b", "reward": 0}]
    path = write(tmp_path / "log", rows)
    log = headroom_log.read(path)
    assert not log.stepped and log.size.tolist() == [5, 1] and log.group_size == 5
    assert headroom_log.read(path, 2).size.tolist() == [2, 2, 1, 1]
    with pytest.raises(LogError, match="group_size must be at least 2"):
        headroom_log.read(path, 1)


@pytest.mark.parametrize(
    ("rewards", "ends", "binary"),
    [
        ((0, 1), (0, 1), True),
        ((-1, 1), (-1, 1), True),
        ((0, 0.5), (0, 0.5), True),
        ((0, 0), (0, 1), True),
        ((1, 1), (0, 1), True),
        ((10, 10), (9, 10), True),
        ((-3, -3), (-3, -2), True),
        ((0, 0.2, 0.9), (0, 1), False),
        ((0, 3, 10), (0, 10), False),
    ],
)
def test_rewards_are_put_between_0_and_1(tmp_path, rewards, ends, binary):
    log = headroom_log.read(write(tmp_path / "log", [{"task": "a", "reward": r} for r in rewards]))
    assert (log.low, log.high) == ends and log.binary == binary
    assert np.nanmin(log.reward) >= 0 and np.nanmax(log.reward) <= 1


def test_more_steps_than_replay_takes_are_joined(tmp_path, monkeypatch):
    monkeypatch.setattr(headroom_log, "MOST_STEPS", 4)
    rows = [{"task": "a", "step": step, "reward": 0} for step in range(9)]
    log = headroom_log.read(write(tmp_path / "log", rows))
    assert log.joined == 3 and log.step.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2] and len(log.task) == 9


GOOD = {"task": "a", "reward": 1, "step": 0}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], r"log: the log is empty"),
        (["", "  "], r"log: the log is empty"),
        ([GOOD, "{"], r"log:2: expected one JSON object, got broken JSON"),
        ([GOOD, "[1]"], r"log:2: expected a JSON object, got \[1\]"),
        ([{"reward": 1}], r"log:1: field 'task': expected a non-empty string, got nothing"),
        ([{"task": 3, "reward": 1}], r"log:1: field 'task': expected a non-empty string, got 3"),
        ([{"task": "a"}], r"log:1: field 'reward': expected a finite number, got nothing: leave out rollouts that"),
        ([{"task": "a", "reward": math.nan}], r"log:1: field 'reward': expected a finite number, got NaN: leave out"),
        ([{"task": "a", "reward": math.inf}], r"log:1: field 'reward': expected a finite number, got Infinity"),
        ([{"task": "a", "reward": "1"}], r"log:1: field 'reward': expected a finite number, got \"1\"$"),
        ([GOOD, {"task": "a", "reward": 1}], r"log:2: field 'step': line 1 has one, none here"),
        ([{"task": "a", "reward": 1}, GOOD], r"log:2: field 'step': line 1 has none, one here"),
        ([GOOD | {"step": 0.5}], r"log:1: field 'step': expected an integer, got 0.5"),
        ([GOOD | {"step": math.nan}], r"log:1: field 'step': expected an integer, got NaN"),
        ([GOOD | {"step": True}], r"log:1: field 'step': expected an integer, got true"),
        ([GOOD | {"environment": 1}], r"log:1: field 'environment': expected a non-empty string, got 1"),
        (
            [GOOD | {"environment": "x"}, GOOD | {"environment": "y"}],
            r"log:2: field 'environment': task 'a' is of 'y' here and of 'x' in line 1",
        ),
    ],
)
def test_what_is_wrong_is_told_by_line_and_field(tmp_path, rows, message):
    with pytest.raises(LogError, match=message):
        headroom_log.read(write(tmp_path / "log", rows))


def test_a_broken_encoding_and_a_missing_file(tmp_path):
    (tmp_path / "log").write_bytes(b"\xff\n")
    with pytest.raises(LogError, match="log:1: expected one JSON object"):
        headroom_log.read(tmp_path / "log")
    with pytest.raises(LogError, match="nosuch: no such file"):
        headroom_log.read(tmp_path / "nosuch")


# ------------------------------------------------------------------------------------------------ shares as they were


def test_shares_by_hand(tmp_path):
    rows = [("a", "x", 0, 0), ("a", "x", 0, 1), ("b", "x", 0, 0), ("b", "x", 0, 0), ("c", "y", 0, 1), ("c", "y", 0, 1)]
    rows += [("c", "y", 1, 1)]  # a group of one
    path = write(tmp_path / "log", [{"task": t, "environment": e, "step": s, "reward": r} for t, e, s, r in rows])
    was = headroom_estimate.as_it_was(headroom_log.read(path))
    assert was["informative"]["mean"] == was["never_passes"] == was["always_passes"] == pytest.approx(1 / 3)
    assert was["equal_between"] == 0 and was["informative"]["groups"] == 3
    assert was["environments"]["x"]["mean"] == 0.5 and was["environments"]["x"]["tasks"] == 2
    assert was["environments"]["y"]["mean"] == 0 and was["environments"]["y"]["always_passes"] == 1


def test_interval_counts_tasks_not_their_repeats():
    alone = headroom_estimate.interval(np.arange(400) % 4 == 0, np.arange(400))
    assert alone["ci"] == pytest.approx([0.210, 0.295], abs=0.002)  # Wilson's
    alike = headroom_estimate.interval(np.arange(400) % 4 == 0, np.arange(400) % 40)  # a task's groups are all equal
    assert alike["ci"] == pytest.approx([0.142, 0.402], abs=0.01)  # that of 40 tasks
    none = headroom_estimate.interval(np.zeros(400, bool), np.arange(400) % 40)
    assert none["mean"] == 0 and none["ci"][0] == 0 and none["ci"][1] == pytest.approx(0.088, abs=0.002)
    assert math.isnan(headroom_estimate.interval(np.zeros(0, bool), np.zeros(0, int))["mean"])


# ------------------------------------------------------------------------------------------------ ceiling


def test_the_best_share_by_hand():
    tasks = np.array([[2, 1, 0, 1], [0, 4, 0, 0]])
    value = np.array([0.1, 0.5, 0.9, 1.0])
    assert headroom_ceiling.best(tasks, value, 0.25) == pytest.approx([1.0, 0.5])
    assert headroom_ceiling.best(tasks, value, 0.5) == pytest.approx([0.75, 0.5])
    assert headroom_ceiling.best(tasks, value, 0.125) == pytest.approx([1.0, 0.5])
    assert headroom_ceiling.best(tasks, value, 1.0) == pytest.approx([(0.2 + 0.5 + 1.0) / 4, 0.5])


SPREADS = {
    "even": lambda rng, n: rng.random(n),
    "two-humped": lambda rng, n: rng.beta(0.3, 0.3, n),
    "mostly hopeless": lambda rng, n: np.where(rng.random(n) < 0.7, 0.0, rng.beta(1, 2, n)),
    "environments and tasks": lambda rng, n: (
        1 / (1 + np.exp(-rng.normal(0, 3, n // 10).repeat(10) - rng.normal(0, 1, n)))
    ),
    "hard": lambda rng, n: rng.beta(1, 12, n),
    "all one half": lambda rng, n: np.full(n, 0.5),
    "all one tenth": lambda rng, n: np.full(n, 0.1),
    "nothing passes": lambda rng, n: np.zeros(n),
    "all or nothing": lambda rng, n: (rng.random(n) < 0.4).astype(float),
}


@pytest.mark.parametrize("name", SPREADS)
@pytest.mark.parametrize(("size", "repeats"), [(300, 1), pytest.param(300, 4, marks=pytest.mark.slow)])
def test_the_ceiling_is_that_of_the_known_pass_rates(name, size, repeats):
    """Over 4 pools and two selectivities the truth is nearly always in the interval of 95 %, and the bias is small."""
    hits, off = 0, []
    for seed in range(4):
        rng = np.random.default_rng([seed, size, repeats])
        rate = SPREADS[name](rng, size)
        trials = np.full(size, 8 * repeats)
        drawn = headroom_ceiling.spread(headroom_ceiling.counts(trials, rng.binomial(trials, rate)), rng, draws=80)
        for share in (0.1, 0.3):
            truth = np.sort(mixed(rate, 8))[-round(share * size) :].mean()
            draws = headroom_ceiling.best(drawn.tasks, headroom_ceiling.mixed(8), share)
            low, high = np.quantile(draws, (0.025, 0.975))
            hits += low - 2e-3 <= truth <= high + 2e-3
            off.append(draws.mean() - truth)
    assert hits >= 6, (hits, off)
    assert abs(np.mean(off)) < 0.05


def test_the_best_groups_seen_are_no_ceiling():
    rng = np.random.default_rng(0)
    hits = rng.binomial(8, 0.1, 400)
    groups_seen = np.sort((hits > 0) & (hits < 8))[-40:].mean()
    drawn = headroom_ceiling.spread(headroom_ceiling.counts(np.full(400, 8), hits), rng)
    draws = headroom_ceiling.best(drawn.tasks, headroom_ceiling.mixed(8), 0.1)
    truth = mixed(0.1, 8)
    assert groups_seen == 1.0 and truth == pytest.approx(0.57, abs=0.01)
    assert np.quantile(draws, 0.025) < truth + 0.05 and draws.mean() < truth + 0.12  # 400 groups tell .1 to .005


def test_tasks_without_a_rollout_are_like_the_others():
    rng = np.random.default_rng(0)
    rate = rng.beta(0.5, 3, 1200)
    hits = rng.binomial(8, rate)
    part = headroom_ceiling.spread(headroom_ceiling.counts(np.full(400, 8), hits[:400], unseen=800), rng)
    assert part.tasks.sum(axis=1).tolist() == [1200] * headroom_ceiling.DRAWS
    low, high = np.quantile(headroom_ceiling.best(part.tasks, headroom_ceiling.mixed(8), 0.05), (0.025, 0.975))
    assert low <= np.sort(mixed(rate, 8))[-60:].mean() <= high


def test_stretches_are_passes_over_the_tasks(tmp_path):
    rate = np.full((60, 120), 0.5)
    log = headroom_log.read(roll_out(tmp_path / "log", rate, 12, 2))
    stretches = headroom_estimate._stretches(log)
    assert [int(s.sum()) for s in stretches] == [108] * 6  # 9 of 10 steps of a pass; what is left over is too short
    assert (np.sum(stretches, axis=0) <= 1).all()
    for stretch in stretches:
        steps = np.unique(log.step[stretch])
        assert np.isin(log.step, steps).sum() == stretch.sum()
    short = headroom_log.read(roll_out(tmp_path / "log", rate[:3], 12, 2))
    assert [s.all() for s in headroom_estimate._stretches(short)] == [True]


def test_rewards_that_are_not_all_or_nothing_need_repeats(tmp_path):
    rng = np.random.default_rng(0)
    chance = rng.beta(0.4, 1.0, 150)

    def rows(repeats):
        for step in range(repeats):
            for task, informative in enumerate(rng.random(150) < chance):
                for reward in rng.random(4) if informative else np.full(4, 0.3):
                    yield {"task": str(task), "step": step, "reward": float(reward)}

    log = headroom_log.read(write(tmp_path / "log", rows(12)))
    (found,) = headroom_estimate.ceiling(log, [0.1], 150, rng)
    assert not log.binary and inside(found, np.sort(chance)[-15:].mean())
    assert headroom_estimate.ceiling(headroom_log.read(write(tmp_path / "log", rows(1))), [0.1], 150, rng) is None


# ------------------------------------------------------------------------------------------------ replay


def test_candidates_lie_ahead_and_count_once(tmp_path):
    rows = [(step, task) for step in range(8) for task in ("ab" if step % 2 else "bc")]
    log = headroom_log.read(
        write(tmp_path / "log", [{"task": t, "step": s, "reward": r} for s, t in rows for r in (0, 1)])
    )
    plan = replays.plan(log, np.array([5, 3, 4]), 8, 3, 2)
    assert plan.decision.tolist() == [-1, 0, 1, 2, 3, 4, -1, -1]  # nothing is known at first, too little ahead at last
    assert plan.node.tolist() == [[3, 4], [5, 3]] * 4
    for step, row in zip(range(1, 6), plan.ahead, strict=True):
        assert set(np.flatnonzero(row >= 0)) == {3, 4, 5}
        for node, task in ((5, 0), (3, 1), (4, 2)):
            later = np.flatnonzero((log.task == task) & (log.step >= step))
            assert row[node] == later[0]
    assert replays.plan(log, np.array([5, 3, 4]), 8, 8, 2) is None  # nothing is left before or after
    assert replays.plan(log, np.array([5, 3, 4]), 8, None, 2) is None  # two of three tasks: no choice


def test_a_group_of_one_is_seen_but_not_picked(tmp_path):
    rows = [(s, t, r) for s in range(9) for t in "abcdef" for r in ((0,) if t == "a" else (0, 1))]
    log = headroom_log.read(write(tmp_path / "log", [{"task": t, "step": s, "reward": r} for s, t, r in rows]))
    plan = replays.plan(log, np.arange(6), 8, 2, 2)
    assert (plan.ahead[:, 0] == -1).all() and (plan.ahead[:, 1:6] >= 0).all()
    assert plan.status[0].sum() == 11


def test_weights_by_hand():
    picked = np.array([[0, 3, -1], [3, 4, 5]])
    assert replays.weights(picked, 6).tolist() == [1, 0, 0, 2, 1, 1]
    ahead = np.array([[0, -1, 3, 1], [3, 4, 5, -1]])
    plan = replays.Plan(*[np.zeros(0)] * 4, ahead, 3, 2)
    assert replays.uniform_weights(plan, picked, 6) == pytest.approx([2 / 3, 2 / 3, 0, 2 / 3 + 1, 1, 1])


def test_a_log_without_steps_is_taken_in_random_order(tmp_path):
    log = headroom_log.read(roll_out(tmp_path / "log", np.full((1, 100), 0.5), 100, 4, stepped=False))
    timed = replays.shuffled(log, np.random.default_rng(0))
    assert timed.steps == replays.PSEUDO_STEPS and (np.diff(timed.step) >= 0).all()
    assert sorted(timed.task) == sorted(log.task) and timed.task.tolist() != log.task.tolist()
    at = {task: row for task, row in zip(log.task, log.reward, strict=True)}
    assert all((at[task] == row).all() for task, row in zip(timed.task, timed.reward, strict=True))


def test_the_pool_gives_texts_tools_and_environments(tmp_path):
    log = headroom_log.read(roll_out(tmp_path / "log", np.full((1, 3), 0.5), 3, 4))
    pool = [Record(f"t{i:04d}", f"env{i % 2}", "text", ("tool",)) for i in range(4)]
    assert headroom_estimate.with_pool(log, pool).env == ("env0", "env1", "env0")
    assert replays.records(log, pool) == pool
    with pytest.raises(PoolError, match=r"field 'task_id': 1 tasks of the log have no record: t0002"):
        headroom_estimate.with_pool(log, pool[:2])


# ------------------------------------------------------------------------------------------------ words


def figures(share=0.2, best=0.8, gain=0.2, groups=1000, batch=10, **changed):
    def entry(mean, half=0.02):
        return {"mean": mean, "ci": [mean - half, mean + half]}

    arm = {"informative": entry(share + gain), "gain": entry(gain), "rollouts_needed": entry(share / (share + gain))}
    replay = {"uniform": {"informative": entry(share)}, "envsched": arm, "graph_gain": entry(0.05)}
    return {
        "as_it_was": {"informative": entry(share) | {"groups": groups}},
        "ceiling": entry(best),
        "replay": replay,
        "batch": batch,
        "pool": 200,
        "graph_from": "the pool",
    } | changed


@pytest.mark.parametrize(
    ("found", "verdict", "says"),
    [
        (figures(groups=99), "unknown", "99 groups"),
        (figures(share=0.75), "not_needed", r"75.0 % \[73.0, 77.0\]"),
        (figures(batch=101), "no_choice", "101 of 200 tasks"),
        (figures(ceiling=None), "unknown", "not all or nothing"),
        (figures(share=0.01, best=0.02), "barren", "Change the tasks"),
        (figures(share=0.4, best=0.44), "little_room", "less than 1.2 times"),
        (figures(replay=None), "untested", "at least 6 steps"),
        (figures(), "pays", r"0.50 \[0.48, 0.52\] of the rollouts"),
        (figures(gain=0.03), "small_gain", "short trial"),
        (figures(gain=0.01), "not_shown", "no gain"),
    ],
)
def test_verdicts(found, verdict, says):
    got, reasons = headroom_words.advise(found)
    assert got == verdict and re.search(says, " ".join(reasons))


def test_whether_the_graph_pays_is_told_apart():
    found = figures()
    assert "The graph adds +5.0 points [+3.0, +7.0]" in " ".join(headroom_words.advise(found)[1])
    found["replay"]["graph_gain"] = {"mean": 0.0, "ci": [-0.02, 0.02]}
    assert "nothing that this log could show" in " ".join(headroom_words.advise(found)[1])
    assert "--pool" not in " ".join(headroom_words.advise(found)[1])
    assert "--pool" in " ".join(headroom_words.advise(found | {"graph_from": "ids and environments"})[1])


# ------------------------------------------------------------------------------------------------ the program


def run(tmp_path, *options):
    headroom.main([*options, f"--workdir={tmp_path / 'run'}"])
    assert (tmp_path / "run" / headroom.REPORT).read_text().startswith("# Would scheduling pay? log")
    return common.read_summary(tmp_path / "run")


@pytest.mark.parametrize(
    ("rows", "told"),
    [
        ([{"task": "a", "reward": r} for r in (0, 1)], "1 groups"),
        ([{"task": str(t), "step": s, "reward": 1} for t in range(50) for s in range(9)], "0 groups"),  # of one each
        ([{"task": str(t), "reward": 0.5} for t in range(5) for _ in range(3)], "5 groups"),
    ],
)
def test_logs_that_say_nothing(tmp_path, capsys, rows, told):
    summary = run(tmp_path, f"--rollouts={write(tmp_path / 'log', rows)}")
    assert summary["verdict"] == "unknown" and told in summary["reasons"][0]
    assert "unknown: Roll out more first" in capsys.readouterr().out


def test_when_all_groups_are_degenerate(tmp_path, capsys):
    rate = np.tile((np.arange(120) % 3 == 0).astype(float), (30, 1))
    summary = run(tmp_path, f"--rollouts={roll_out(tmp_path / 'log', rate, 12, 4)}")
    assert summary["verdict"] == "barren" and summary["replay"] is None
    assert summary["as_it_was"]["never_passes"] == pytest.approx(2 / 3)
    assert summary["as_it_was"]["always_passes"] == pytest.approx(1 / 3)
    assert inside(summary["ceiling"], 0.0) and summary["ceiling"]["ci"][1] < 0.05
    assert "66.7 % / 33.3 %" in capsys.readouterr().out


def test_errors_are_one_line(tmp_path, monkeypatch):
    log = write(tmp_path / "log", [{"task": "a", "reward": None}])
    done = subprocess.run(
        [sys.executable, "-m", "experiments.headroom", f"--rollouts={log}"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"error: {log}:1: field 'reward'")
    with pytest.raises(ValueError, match="--window must be at least 2"):
        headroom.main([f"--rollouts={log}", "--window=1"])
    with pytest.raises(LogError, match="nosuch: no such file"):
        write(log, [GOOD])
        headroom.main([f"--rollouts={log}", f"--pool={tmp_path / 'nosuch'}"])


@pytest.mark.slow
def test_the_truth_lies_within_the_intervals(tmp_path, monkeypatch):
    """A pool as ToolWorld's: environments and tasks differ, everything becomes easier; all pass rates are known."""
    rng = np.random.default_rng(3)
    env = np.arange(240) % 12
    hard = rng.normal(-2.5, 2.5, 12)[env] + rng.normal(0, 1.5, 240)
    rate = 1 / (1 + np.exp(-(hard[None, :] + np.linspace(-0.5, 1.0, 60)[:, None])))
    kept = {}
    follow = replays.follow

    def keep(arm, graph, what, group_size, seed):
        kept[arm] = (follow(arm, graph, what, group_size, seed), what)
        return kept[arm][0]

    monkeypatch.setattr(replays, "follow", keep)
    path = roll_out(tmp_path / "log", rate, 12, 8, env=env)
    summary = run(tmp_path, f"--rollouts={path}")
    log = headroom_log.read(path)
    assert summary["groups"] == 720 and summary["environments"] == 12 and summary["batch"] == 12
    assert inside(summary["as_it_was"]["informative"], mixed(rate, 8).mean())
    assert inside(summary["ceiling"], true_ceiling(rate, 12, 8))
    assert inside(summary["replay"]["ceiling"], true_ceiling(rate, 30, 8), slack=0.01)  # of twelve environments
    truth = mixed(rate, 8)[log.step, log.task]  # of every logged group
    for arm, (picks, _) in kept.items():
        chosen = picks.among[picks.among >= 0]
        assert inside(summary["replay"][arm]["informative"], truth[chosen].mean(), slack=0.01)
    assert summary["verdict"] == "pays" and summary["replay"]["envsched"]["gain"]["ci"][0] > 0.1
    assert 0 < summary["replay"]["free"]["supported"] < 1
    assert summary["replay"]["envsched"]["rollouts_needed"]["ci"][1] < 0.9


@pytest.mark.slow
def test_without_structure_the_graph_adds_nothing(tmp_path):
    rng = np.random.default_rng(5)
    names = [f"{number:08x}" for number in rng.integers(0, 2**32, 200)]
    rate = np.tile(1 / (1 + np.exp(-rng.normal(-1.5, 2.5, 200))), (60, 1))
    summary = run(tmp_path, f"--rollouts={roll_out(tmp_path / 'log', rate, 10, 8, names=names)}")
    gain = summary["replay"]["graph_gain"]
    assert inside(gain, 0.0, slack=0.01) and abs(gain["mean"]) < 0.04
    assert summary["verdict"] == "pays"  # own records tell which tasks are mixed
    # Where all tasks are alike there is nothing to know.
    alike = roll_out(tmp_path / "log", np.full((60, 200), 0.1), 10, 8, names=names)
    summary = run(tmp_path, f"--rollouts={alike}")
    assert inside(summary["replay"]["envsched"]["gain"], 0.0) and summary["verdict"] in ("not_shown", "little_room")


@pytest.mark.slow
@needs_data
def test_recorded_outcomes_as_a_log(tmp_path):
    data = recorded.load(DATA / "bfcl_multiturn")
    strong = data.reward[1]
    rows = [
        {"task": record.task_id, "environment": record.env_id, "reward": float(reward)}
        for record, trials in zip(data.records, strong, strict=True)
        for reward in trials
        if not np.isnan(reward)
    ]
    write_jsonl(tmp_path / "pool", data.records)
    summary = run(tmp_path, f"--rollouts={write(tmp_path / 'log', rows)}", f"--pool={tmp_path / 'pool'}")
    assert summary["groups"] == 600 and summary["steps"] is None and summary["environments"] == 20
    assert summary["as_it_was"]["informative"]["mean"] == pytest.approx(0.5, abs=0.01)  # as the data set's page says
    assert summary["ceiling_of_all"]["mean"] == pytest.approx(0.5, abs=0.02)
    assert summary["replay"]["graph_gain"]["ci"][0] > 0  # variants of a scenario know of each other


@pytest.mark.slow
def test_the_block_of_the_page_runs(tmp_path):
    (block,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "headroom.md").read_text(), re.S)
    script = tmp_path / "block.py"
    script.write_text(block)
    done = subprocess.run([sys.executable, "-W", "error", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "EnvSched's belief" in done.stdout
