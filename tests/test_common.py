"""What programs share: metrics survive a kill, summaries are whole, intervals are Student's, errors are one line."""

import json
import os
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict
from scipy import stats

from experiments import common


def lines(workdir):
    return [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]


def test_rows_come_back(tmp_path):
    with common.MetricWriter(tmp_path) as writer:
        writer.write(
            0, {"score": 0.25, "tokens": np.int64(7), "nan": float("nan"), "inf": np.float32("inf")}, arm="a", seed=1
        )
        writer.write(
            3, {"score": jnp.float32(0.5), "half": jnp.bfloat16(2.0), "one": np.ones((1, 1)), "ok": np.bool_(True)}
        )
    rows = [
        {"step": 0, "arm": "a", "seed": 1, "score": 0.25, "tokens": 7, "nan": None, "inf": None},
        {"step": 3, "score": 0.5, "half": 2.0, "one": 1.0, "ok": 1},
    ]
    assert lines(tmp_path) == rows
    assert common.read_metrics(tmp_path) == rows
    folders = {path.parent.name for path in (tmp_path / "tensorboard").glob("**/events.out.tfevents.*")}
    assert folders == {"arm-a_seed-1", "tensorboard"}


def test_every_row_is_on_disk_before_the_next(tmp_path):
    with common.MetricWriter(tmp_path) as writer:
        writer.write(0, {"score": 1.0})
        assert lines(tmp_path) == [{"step": 0, "score": 1.0}]
    writer.close()  # a second close changes nothing


@pytest.mark.parametrize(
    ("rest", "kept"),
    [
        ('{"step": 2, "sco', []),
        ('{"step": 2, "score": 0.5}', [{"step": 2, "score": 0.5}]),
        ("", []),
    ],
)
def test_resume_repairs_the_last_line(tmp_path, rest, kept):
    whole = [{"step": 0, "score": 0.0}, {"step": 1, "score": 0.1}]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in whole) + rest)
    assert common.read_metrics(tmp_path) == whole + kept  # also while the run is still writing
    with common.MetricWriter(tmp_path) as writer:
        writer.write(5, {"score": 0.9})
    assert lines(tmp_path) == [*whole, *kept, {"step": 5, "score": 0.9}]


def test_a_repeated_step_replaces_the_row(tmp_path):
    with common.MetricWriter(tmp_path) as writer:
        for seed in (0, 1):
            writer.write(0, {"score": float(seed)}, arm="a", seed=seed)
        writer.write(1, {"score": 5.0}, arm="a", seed=0)
        writer.write(0, {"score": 9.0}, arm="a", seed=0)
    assert [(r["step"], r["seed"], r["score"]) for r in common.read_metrics(tmp_path)] == [
        (0, 0, 9.0),
        (0, 1, 1.0),
        (1, 0, 5.0),
    ]


def test_damage_in_the_middle_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"st\n{"step": 2}\n')
    with pytest.raises(common.RunError, match=r"metrics\.jsonl:2: not a JSON line"):
        common.read_metrics(tmp_path)


@pytest.mark.parametrize("scalars", [{"x": [1.0, 2.0]}, {"x": "three"}, {"x": None}, {"step": 1.0}, {"arm": 1.0}])
def test_what_is_not_a_metric(tmp_path, scalars):
    with common.MetricWriter(tmp_path) as writer, pytest.raises(ValueError, match=next(iter(scalars))):
        writer.write(0, scalars, arm="a")
    assert lines(tmp_path) == []


def test_summary_round_trip(tmp_path):
    config = ConfigDict({"a": 2, "nest": {"t": (1, 2)}})
    config.b = config.get_ref("a") * 3
    config.a = 5
    path = common.write_summary(
        tmp_path, "train", config, {"curve": np.arange(3.0), "bad": jnp.nan, "n": np.int32(4)}, 0.0
    )
    assert [p.name for p in tmp_path.iterdir()] == ["summary.json"] == [path.name]
    summary = common.read_summary(tmp_path)
    assert summary["kind"] == "train"
    assert summary["config"] == {"a": 5, "b": 15, "nest": {"t": [1, 2]}}
    assert (summary["curve"], summary["bad"], summary["n"]) == ([0.0, 1.0, 2.0], None, 4)
    assert summary["device"]["count"] >= 1 and summary["device"]["kind"]
    assert summary["versions"]["jax"] and summary["wall_s"] > 1e9
    assert summary["commit"] == common.commit()


def test_summary_keeps_its_own_names(tmp_path):
    with pytest.raises(ValueError, match="commit"):
        common.write_summary(tmp_path, "train", {}, {"commit": "mine"}, 0.0)
    assert list(tmp_path.iterdir()) == []


def test_failed_write_leaves_the_old_summary(tmp_path, monkeypatch):
    common.write_json(tmp_path / "summary.json", {"kind": "old"})
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        common.write_json(tmp_path / "summary.json", {"kind": "new"})
    assert common.read_summary(tmp_path) == {"kind": "old"}


def git(folder, *arguments):
    identity = ["-c", "user.name=n", "-c", "user.email=e", "-c", "commit.gpgsign=false"]
    run = subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True)
    return run.stdout.strip()


def test_commit(tmp_path, monkeypatch):
    tree = (tmp_path / "tree").resolve()
    (tree / "inner").mkdir(parents=True)
    monkeypatch.setattr(common, "SOURCE_ROOT", tree)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.resolve()))
    assert common.commit() == "unknown"
    git(tree, "init")
    assert common.commit() == "unknown"
    (tree / "file").write_text("one")
    git(tree, "add", "file")
    git(tree, "commit", "-m", "m")
    head = git(tree, "rev-parse", "HEAD")
    assert common.commit() == head
    (tree / "file").write_text("two")
    assert common.commit() == head + "-dirty"
    monkeypatch.setattr(common, "SOURCE_ROOT", tree / "inner")
    assert common.commit() == "unknown"


@pytest.mark.parametrize("dof", [1, 2, 3, 4, 5, 9, 10, 31, 64, 1001])
def test_t_quantile(dof):
    np.testing.assert_allclose(common.t_quantile(dof), stats.t.ppf(0.975, dof), rtol=1e-9)


@pytest.mark.parametrize(("shape", "axis"), [((5,), 0), ((2, 7), 0), ((4, 3, 6), 1), ((3, 8), -1)])
def test_interval(shape, axis):
    values = np.random.default_rng(0).normal(3.0, 2.0, shape)
    mean, low, high = common.interval(values, axis)
    error = stats.sem(values, axis=axis)
    want = stats.t.interval(0.95, shape[axis] - 1, values.mean(axis=axis), error)
    np.testing.assert_allclose(mean, values.mean(axis=axis), rtol=1e-12)
    np.testing.assert_allclose((low, high), want, rtol=1e-9)


def test_interval_of_one_seed_and_of_nan():
    mean, low, high = common.interval([[1.0, 2.0]])
    np.testing.assert_array_equal(mean, [1.0, 2.0])
    assert np.isnan([low, high]).all()
    mean, low, high = common.interval([[1.0, np.nan], [3.0, 2.0]])
    assert mean[0] == 2.0 and np.isnan([mean[1], low[1], high[1]]).all() and low[0] < 2.0 < high[0]


def test_bar_is_silent_off_a_terminal(capsys):
    items = [1, 2]
    assert common.bar(items, "desc", 2) is items
    assert capsys.readouterr() == ("", "")


PROGRAM = """
from experiments import common
def main(config, workdir):
    if config.fail == "value":
        raise ValueError("two\\nlines")
    if config.fail == "missing":
        config.section.nothing
    if config.fail == "argument":
        (lambda size: size)(**config.section, extra=1)
    if config.fail == "bug":
        [][1]
    import jax
    print(config.section.size, workdir, jax.config.jax_compilation_cache_dir)
if __name__ == "__main__":
    common.run_app(main, {default!r})
"""
CONFIG = """
from ml_collections import ConfigDict
def get_config(preset="cpu"):
    if preset not in ("cpu", "gpu"):
        raise ValueError(f"unknown preset {preset!r}")
    return ConfigDict({"section": {"size": 3}, "fail": "", "rate": 0.5})
"""


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    folder = tmp_path_factory.mktemp("program")
    (folder / "config.py").write_text(CONFIG)
    (folder / "program.py").write_text(PROGRAM.replace("{default!r}", repr(str(folder / "config.py"))))

    def run(*arguments, **environment):
        path = f"{common.SOURCE_ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
        command = [sys.executable, "program.py", *arguments]
        env = os.environ | {"PYTHONPATH": path} | environment
        return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)

    return run


def test_program_runs_with_overrides_and_cache(program, tmp_path):
    run = program(
        f"--workdir={tmp_path / 'new'}", "--config.section.size=4", JAX_COMPILATION_CACHE_DIR=str(tmp_path / "c")
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert run.stdout.split() == ["4", str(tmp_path / "new"), str(tmp_path / "c")]
    assert (tmp_path / "new").is_dir()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--config.section.siz=1"],
            """unknown config key 'config.section.siz'. Did you mean "size" instead of "siz"?""",
        ),
        (["--config=config.py:gpu", "--config.nosuchkey=1"], "unknown config key 'config.nosuchkey'."),
        (["--config.section.size=x"], "flag --config.section.size=x: invalid literal for int() with base 10: 'x'"),
        (["--config=config.py:tpu"], "Error whilst parsing config file: ValueError: unknown preset 'tpu'"),
        (["--config=nothing.py"], "No such file or directory: 'nothing.py'"),
        (["--config.fail=value"], "two lines"),
        (["--config.fail=missing"], "unknown config key 'nothing'."),
        (["--config.fail=argument"], "got an unexpected keyword argument 'extra'"),
        (["--workdir=config.py"], "File exists: 'config.py'"),
    ],
)
def test_one_line_errors(program, tmp_path, arguments, message):
    run = program(f"--workdir={tmp_path}", *arguments)
    assert run.returncode == 2, run.stderr
    assert run.stderr.startswith("error: ") and run.stderr.count("\n") == 1
    assert message in run.stderr


def test_workdir_is_required(program):
    run = program()
    assert run.returncode == 2
    assert run.stderr.count("\n") == 1 and "--workdir must have a value" in run.stderr


def test_a_bug_keeps_its_traceback(program, tmp_path):
    run = program(f"--workdir={tmp_path}", "--config.fail=bug")
    assert run.returncode == 1
    assert "IndexError" in run.stderr


def test_import_is_light():
    heavy = {"matplotlib", "tensorboardX", "tqdm", "jax"}
    code = f"import sys, experiments.common; print(sorted({heavy} & set(sys.modules)))"
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=common.SOURCE_ROOT, capture_output=True, text=True, check=True
    )
    assert run.stdout == "[]\n"
