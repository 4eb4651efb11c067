"""What an ablation reports, against hand-worked curves; and the programs from the command line."""

import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from experiments import ablate, loop

ROOT = Path(__file__).resolve().parent.parent


def curves(success, rollouts, informative):
    """Success rates [evaluation][seed], the same for all of 40 tasks."""
    return loop.Curves(
        steps=list(range(0, 10 * len(success), 10)),
        success=[[[s] * 40 for s in row] for row in success],
        rollouts=rollouts,
        tokens=rollouts,
        informative=informative,
        env_count=[[1, 2]] * (len(success) - 1),
        spearman=[[0.5, None], [0.1, 0.3]],
        seconds=12.0,
        timed_steps=20,
    )


BASE = curves([[0.1, 0.1], [0.4, 0.2], [0.3, 0.5]], [[0, 0], [100, 100], [200, 200]], [[0.2, 0.1], [0.1, 0.2]])
BETTER = curves([[0.1, 0.1], [0.5, 0.3], [0.6, 0.7]], [[0, 0], [100, 100], [200, 200]], [[0.4, 0.2], [0.4, 0.2]])


def test_the_halves_are_halves():
    first, second = ablate.halves(41)
    assert sorted([*first, *second]) == list(range(41))
    assert len(first) == 20
    assert np.array_equal(first, ablate.halves(41)[0])


def test_best_is_chosen_on_one_half_and_scored_on_the_other():
    chooser, scorer = ablate.halves(8)
    success = np.zeros((3, 1, 8))
    success[1, 0, chooser] = 0.9  # best for the chooser
    success[1, 0, scorer] = 0.3
    success[2, 0, scorer] = 0.8  # best for the scorer, who is not asked
    assert ablate.best_of(success) == [0.3]


def test_summary_by_hand():
    summary = ablate.summarise({"uniform": BASE, "better": BETTER})
    assert summary["uniform_best"] == pytest.approx((0.4 + 0.5) / 2)
    assert summary["seeds"] == 2
    better = summary["arms"]["better"]
    # uniform's best is the seed's own: 0.4 after 100 rollouts and 0.5 after 200
    assert better["rollouts_to_uniform_best"]["mean"] == pytest.approx((100 + 200) / 2)
    assert better["rollouts_to_uniform_best"]["reached"] == 2
    assert summary["arms"]["uniform"]["rollouts_to_uniform_best"] | {"ci": None} == {
        "mean": 150.0,
        "ci": None,
        "reached": 2,
        "seeds": 2,
    }
    assert better["score_mean"] == pytest.approx([0.1, 0.4, 0.65])
    half = 12.7062047 * 0.1  # t(0.975, 1) times the standard error of 0.5 and 0.3
    assert better["score_ci"][1] == pytest.approx([0.4 - half, 0.4 + half])
    assert better["informative_share"] == pytest.approx(0.3)
    assert better["spearman_variance"] == pytest.approx(0.3)
    assert better["seconds_per_step"] == pytest.approx(12 / 40)
    paired = summary["paired"]["better"]
    assert paired["score_final_minus_uniform"]["mean"] == pytest.approx(0.25)
    assert paired["informative_share_over_uniform"]["mean"] == pytest.approx((0.4 / 0.15 + 0.2 / 0.15) / 2)


def test_every_seed_is_measured_against_its_own_base():
    high, low = [[0.5, 0.1], [0.7, 0.2]], [[0.5, 0.1], [0.8, 0.15]]  # a base policy that learns and one that does not
    rollouts, informative = [[0, 0], [100, 100]], [[0.1, 0.1]]
    found = ablate.summarise(
        {"uniform": curves(high, rollouts, informative), "better": curves(low, rollouts, informative)}
    )["arms"]["better"]["rollouts_to_uniform_best"]
    assert (found["mean"], found["reached"]) == (100.0, 1)  # the second seed counts with the budget


def test_rollouts_beyond_the_budget_do_not_count():
    """A filter that spends more than the base arm reaches the level too late."""
    success = np.full((3, 1, 4), 0.0)
    success[2] = 1.0
    spent, reached = ablate.rollouts_to(np.full(1, 0.5), success, np.asarray([[0.0], [100.0], [900.0]]), budget=300.0)
    assert spent.tolist() == [300.0]
    assert reached.tolist() == [False]


def program(name, *flags, code=0, cache=None):
    done = subprocess.run(
        [sys.executable, "-m", f"experiments.{name}", *flags], cwd=ROOT, capture_output=True, text=True, env=cache
    )
    assert done.returncode == code, done.stderr[-2000:]
    return done


@pytest.mark.slow
def test_programs_from_the_command_line(tmp_path):
    cache = os.environ | {"ENVSCHED_CACHE": str(tmp_path / "cache")}
    work = tmp_path / "ablate"
    flags = ["--config=configs/ablation.py:smoke", f"--workdir={work}"]
    program("ablate", *flags, "--config.jobs=2", cache=cache)
    summary = json.loads((work / "summary.json").read_text())
    assert {"uniform", "envsched", "dapo_filter"} <= set(summary["arms"])
    assert {"commit", "device", "config", "wall_s", "uniform_best"} <= set(summary)
    assert (work / "report.html").stat().st_size > 10_000
    rows = (work / "metrics.jsonl").read_text().count("\n")
    again = program("ablate", *flags, cache=cache)
    assert "final score" not in again.stdout  # every arm was kept; how many ran at a time makes no difference
    assert (work / "metrics.jsonl").read_text().count("\n") == rows
    refused = program("ablate", *flags, "--config.world.seed=5", code=2, cache=cache)
    assert refused.stderr.strip().splitlines()[-1].startswith("error: checkpoint of step 8")

    train = tmp_path / "train"
    program("train", "--config=configs/toolworld.py:smoke", f"--workdir={train}", cache=cache)
    summary = json.loads((train / "summary.json").read_text())
    assert set(summary["seconds_per_step"]) == {"select", "rollout", "update", "observe"}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self").exists(), reason="looks for processes in /proc")
def test_processes_that_run_arms_end_with_their_parent(tmp_path):
    flags = ["--config=configs/ablation.py:smoke", "--config.jobs=2", f"--workdir={tmp_path / 'work'}"]
    cache = os.environ | {"ENVSCHED_CACHE": str(tmp_path / "cache")}
    parent = subprocess.Popen([sys.executable, "-m", "experiments.ablate", *flags], cwd=ROOT, env=cache)
    try:
        while not (tmp_path / "work" / "checkpoints").exists():  # an arm has begun
            assert parent.poll() is None
            time.sleep(0.1)
        workers = children(parent.pid, "spawn_main")
    finally:
        parent.kill()
        parent.wait()
    end = time.monotonic() + 30.0
    while (left := [pid for pid in workers if pid in running()]) and time.monotonic() < end:
        time.sleep(0.1)
    assert workers and not left


def running():
    """Command line and parent of every process that is not a zombie, by pid."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, parent = (folder / "stat").read_text().rsplit(")", 1)[1].split()[:2]
            if state != "Z":
                found[int(folder.name)] = (folder / "cmdline").read_text(), int(parent)
    return found


def children(pid, word):
    return [child for child, (line, parent) in running().items() if parent == pid and word in line]


def test_a_wrong_key_is_one_clear_line(tmp_path):
    done = program("train", f"--workdir={tmp_path}", "--config.train.batchsize=3", code=2)
    assert (
        done.stderr.strip()
        .splitlines()[-1]
        .startswith("error: unknown config key 'config.train.batchsize'. Did you mean")
    )
