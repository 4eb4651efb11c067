"""The report: pages of synthetic runs parse, stand alone, show the numbers and say what the numbers say."""

import html.parser
import re
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from experiments import common, figures, headline, report

STARTED = time.time() - 75
CONFIG = {"seed": 0, "scheduler": {"name": "envsched", "power": 2.0}, "pool": {"path": "<pool>", "tasks": 96}}
SPLITS = {"never": 0.31, "once": 0.42, "more": 0.53, "unseen_env": 0.11, "unseen_group": None}
PICTURES = {  # figures that a full run of this kind has
    "ablate": {"learning_rollouts", "learning_steps", "informative", "rollouts_to_best", "schedule", "calibration"},
    "replay": {"replay"},
    "train": {"score", "informative_share", "reward_mean", "entropy", "loss", "calibration", "schedule"},
}


def arm(speed: float, seeds: int = 5, evaluations: int = 21) -> dict:
    """A learning curve that rises to 0.5 at the given speed, on 8,000 rollouts per evaluation."""
    x = np.arange(evaluations)
    score = 0.1 + 0.4 * (1 - np.exp(-speed * x / 8))
    half = np.where(seeds > 1, 0.01 + 0.0005 * x, np.nan)
    needed = 8000 * 20 / (1 + speed)
    return {
        "steps": x * 10,
        "rollouts": x * 8000,
        "score_mean": score,
        "score_ci": np.stack([score - half, score + half], axis=1),
        "informative_share": 0.2 + 0.1 * speed,
        "informative_curve": 0.2 + 0.1 * speed + 0.02 * np.sin(x[1:]),
        "rollouts_to_uniform_best": {
            "mean": needed,
            "ci": [0.9 * needed, 1.1 * needed] if seeds > 1 else [None, None],
            "reached": seeds,
            "seeds": seeds,
        },
        "spearman_variance": None if speed == 1 else 0.4,
        "seconds_per_step": 0.73,
    }


def ablation(speed: float = 2.0, gain: float = 0.03, half: float = 0.01, seeds: int = 5) -> dict:
    speeds = {"envsched": speed, "uniform": 1.0, "no_graph": 1.5, "env_mean": 1.3, "stratified": 1.05, "oracle": 2.4}
    ci = [gain - half, gain + half] if seeds > 1 else [None, None]
    paired = {name: {"score_final_minus_uniform": {"mean": gain, "ci": ci}} for name in speeds if name != "uniform"}
    arms = {name: arm(s, seeds) for name, s in speeds.items()}
    return {"uniform_best": 0.4123, "seeds": seeds, "arms": arms, "paired": paired}


def recorded_arm(live: float, gain: float, closed: float) -> dict:
    return {
        "live_per_1k": {"mean": live, "ci": [live - 4, live + 4]},
        "gain": {"mean": gain, "ci": [gain - 5, gain + 5]},
        "gap_closed": closed,
        **{name: SPLITS for name in report.RANKINGS},
        "ece": 0.0431,
        "nll": 0.612,
        "envs_touched": 11.5,
    }


def recording(gains: dict[str, float]) -> dict:
    """A replay summary with one data set per given gain of envsched over uniform."""
    return {
        "datasets": {
            name: {
                "arms": {
                    "uniform": recorded_arm(101.5, 0.0, 0.0),
                    "envsched": recorded_arm(101.5 + gain, gain, gain / 60),
                    "no_graph": recorded_arm(101.5 + gain / 2, gain / 2, gain / 120),
                    "oracle": recorded_arm(161.5, 60.0, 1.0),
                }
            }
            for name, gain in gains.items()
        }
    }


def training() -> dict:
    return {
        "score_best": 0.4321,
        "score_final": 0.4211,
        "steps": 200,
        "rollouts": 51200,
        "tokens": 3276800,
        "informative_share": 0.377,
        "seconds_per_step": {"select": 0.01, "rollout": 0.52, "update": 0.2, "observe": 0.004},
    }


def write_run(workdir: Path, kind: str, summary: dict, arms: tuple[str, ...] = ("envsched", "uniform")) -> Path:
    """A finished run with metrics and schedule counts, as the programs write it."""
    random = np.random.default_rng(0)
    with common.MetricWriter(workdir) as writer:
        for name in arms:
            for step in range(0, 200, 5):
                share = 0.2 + 0.2 * step / 200
                row = {"score": 0.1 + step / 500, "score_tasks": 0.1 + step / 450, "score_envs": 0.1 + step / 600}
                row |= {"informative_share": share, "loss": 0.1, "entropy": 2 - step / 200, "reward_mean": share}
                if name != "uniform":
                    row["predicted_informative_share"] = share + 0.05 * random.standard_normal()
                writer.write(step, row, arm=name, seed=0)
    env_ids = np.array([f"env-{i:02d}" for i in range(16)])
    when = np.exp(-0.5 * ((np.arange(20)[:, None] / 20 - np.arange(16)[None] / 16) / 0.2) ** 2)
    for name in arms:
        rate = 40 * when if name == "envsched" else np.full((20, 16), 15.0)
        np.savez(workdir / f"schedule_{name}.npz", counts=random.poisson(rate).astype(np.int32), env_ids=env_ids)
    common.write_summary(workdir, kind, CONFIG, summary, STARTED)
    return workdir


FULL = {
    "ablate": ablation,
    "replay": lambda: recording({"bfcl": 22.0, "taubench": 1.0}),
    "train": training,
}


class Page(html.parser.HTMLParser):
    """Checks that elements nest and collects what the tests ask about."""

    VOID = frozenset({"meta", "br", "image"})

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.count: dict[str, int] = {}
        self.ids: list[str] = []
        self.text = ""
        self.h1 = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.count[tag] = self.count.get(tag, 0) + 1
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.count[tag] = self.count.get(tag, 0) + 1
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" not in self.open:
            self.text += data
        if "h1" in self.open:
            self.h1 += data


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    """The folders of one finished and reported run of every kind."""
    found = {}
    for kind, summary in FULL.items():
        arms = ("envsched",) if kind == "train" else ("envsched", "uniform")
        found[kind] = write_run(tmp_path_factory.mktemp(kind), kind, summary(), arms)
        assert report.build(found[kind]) == found[kind] / "report.html"
    return found


@pytest.fixture(params=list(FULL))
def built(request, runs) -> tuple[str, Path, str]:
    workdir = runs[request.param]
    return request.param, workdir, (workdir / "report.html").read_text(encoding="utf-8")


def test_page_stands_alone(built):
    kind, workdir, text = built
    page = Page(text)
    assert not re.search(r"https?:|//[a-z]|@import|url\((?!#|data:)", text)
    assert not {"script", "link", "iframe", "img"} & page.count.keys()
    assert not re.search(r'(?:src|href)="(?!#|data:)', text)
    assert "prefers-color-scheme" in text
    assert len(page.ids) == len(set(page.ids))
    assert {f"#{i}" for i in page.ids} >= set(re.findall(r'href="(#[^"]+)"', text))
    assert {path.stem for path in (workdir / "figures").glob("*.png")} == PICTURES[kind]
    assert page.count["figure"] == page.count["svg"] == text.count('role="img"') == len(PICTURES[kind])


def test_page_ends_with_where_it_came_from(built):
    _, workdir, text = built
    page = Page(text)
    summary = common.read_summary(workdir)
    for fact in (summary["commit"], summary["device"]["kind"], f"jax {summary['versions']['jax']}", "scheduler.power"):
        assert fact in page.text
    assert "'<pool>'" in page.text  # escaped in the page
    assert page.text.index("Configuration") > page.text.index(page.h1)


def test_ablation_shows_its_numbers(tmp_path):
    summary = ablation()
    text = report.build(write_run(tmp_path, "ablate", summary)).read_text(encoding="utf-8")
    page = Page(text)
    assert "EnvSched beats uniform: the same score with 33 % fewer rollouts" in page.h1
    for number in (
        "0.412",
        "53,333",
        "80,000",
        "53.3k",
        "[48k, 58.7k]",
        "40 % of its groups were informative, 30 % of uniform's",
        "5 of 5 seeds",
        "+0.030",
        "[0.020, 0.040]",
        "0.73",
    ):
        assert number in page.text, number
    assert page.text.count("5/5") >= len(summary["arms"])
    assert all(name in page.text for name in summary["arms"])


def test_report_without_optional_files(tmp_path):
    common.write_summary(tmp_path, "ablate", CONFIG, ablation(), STARTED)
    page = Page(report.build(tmp_path).read_text(encoding="utf-8"))
    assert page.count["figure"] == len(PICTURES["ablate"] - {"schedule", "calibration"})


def test_replay_and_training_show_their_numbers(runs):
    pages = {kind: Page((workdir / "report.html").read_text(encoding="utf-8")).text for kind, workdir in runs.items()}
    for number in ("124 live groups per 1,000 rollouts, uniform 102, 37 % of the gap", "[120, 128]", "0.612", "0.110"):
        assert number in pages["replay"], number
    for number in (
        "0.432",
        "51,200 rollouts",
        "0.421",
        "3,276,800 tokens",
        "38 %",
        "0.520",
        "no comparison with uniform",
    ):
        assert number in pages["train"], number


@pytest.mark.parametrize(
    ("speed", "gain", "half", "seeds", "verdict", "words"),
    [
        (2.0, 0.03, 0.01, 5, "better", "33 % fewer rollouts"),
        (1.0, 0.03, 0.01, 5, "better", "a higher final score"),
        (1.0, 0.03, 0.04, 5, "not-better", "does not beat uniform in this run: no difference outside the intervals"),
        (1.0, -0.03, 0.01, 5, "not-better", "does not beat uniform in this run: it is worse"),
        (0.2, 0.03, 0.01, 5, "not-better", "does not beat uniform in this run: one gain and one loss"),
        (2.0, 0.03, 0.01, 1, "unknown", "cannot tell"),
    ],
)
def test_ablation_verdict(speed, gain, half, seeds, verdict, words):
    found, title, text = headline.ablate(ablation(speed, gain, half, seeds))
    assert found == verdict
    assert words in title
    assert "0.412" in text


def test_ablation_that_never_reaches_says_so():
    summary = ablation(1.0, -0.03)
    summary["arms"]["envsched"]["rollouts_to_uniform_best"]["reached"] = 0
    _, _, text = headline.ablate(summary)
    assert "EnvSched never reached the best score of uniform (0.412) in 5 seeds." in text
    assert "0.030 lower" in text


def test_ablation_that_learns_nothing():
    summary = ablation(1.0, 0.0)
    for name in ("envsched", "uniform"):
        summary["arms"][name]["rollouts_to_uniform_best"].update(mean=0.0, ci=[0.0, 0.0])
    verdict, _, text = headline.ablate(summary)
    assert verdict == "not-better"
    assert "after 0 rollouts in 5 of 5 seeds, uniform after 0 in 5 of 5. Its final" in text


def test_ablation_without_a_comparison():
    summary = ablation()
    del summary["arms"]["envsched"]
    verdict, title, text = headline.ablate(summary)
    assert (verdict, title) == ("unknown", "This run does not compare envsched with uniform")
    assert "no_graph" in text


@pytest.mark.parametrize(
    ("gains", "verdict", "title"),
    [
        ({"a": 20.0, "b": 1.0}, "mixed", "on 1 of 2 recorded data sets (a); on the rest it does not beat uniform"),
        ({"a": 20.0}, "better", "EnvSched finds more live groups than uniform on 1 of 1 recorded data set"),
        ({"a": 2.0, "b": -20.0}, "not-better", "EnvSched does not beat uniform on any of 2 recorded data sets"),
    ],
)
def test_replay_verdict(gains, verdict, title):
    found, said, text = headline.replay(recording(gains))
    assert found == verdict
    assert said.endswith(title)
    assert all(f"{name}: " in text for name in gains)


def test_replay_without_paired_gain_compares_the_intervals():
    summary = recording({"a": 20.0, "b": 7.0})
    for data in summary["datasets"].values():
        for entry in data["arms"].values():
            del entry["gain"]
    assert "1 of 2" in headline.replay(summary)[1]


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (lambda w: w.rmdir(), "no such run directory"),
        (lambda w: None, "holds no run: summary.json is missing"),
        (lambda w: (w / "metrics.jsonl").write_text('{"step": 0}\n'), "is unfinished: summary.json is missing"),
        (lambda w: (w / "summary.json").write_text('{"kind": "abl'), "not valid JSON"),
        (lambda w: (w / "summary.json").write_text('{"kind": "bench_cycle"}'), "kind 'bench_cycle' has no report"),
        (lambda w: (w / "summary.json").write_text('{"kind": "ablate", "seeds": 1}'), "the key 'arms' is missing"),
    ],
)
def test_one_clear_error(tmp_path, prepare, message):
    workdir = tmp_path / "run"
    workdir.mkdir()
    prepare(workdir)
    with pytest.raises(common.RunError, match=re.escape(message)):
        report.build(workdir)
    assert not (workdir / "report.html").exists()


def test_broken_schedule_is_named(tmp_path):
    write_run(tmp_path, "ablate", ablation())
    (tmp_path / "schedule_uniform.npz").write_bytes(b"PK\x03\x04 cut")
    with pytest.raises(common.RunError, match=r"schedule_uniform\.npz: not readable"):
        report.build(tmp_path)


def test_command_line(tmp_path):
    command = [sys.executable, "-m", "experiments.report", f"--workdir={tmp_path / 'nothing'}"]
    run = subprocess.run(command, cwd=common.SOURCE_ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 2
    assert run.stderr == f"error: {tmp_path / 'nothing'}: no such run directory\n"


def test_figures_leave_nothing_behind(tmp_path):
    import matplotlib

    before = dict(matplotlib.rcParams)
    path = figures.learning_curves(ablation()["arms"], tmp_path / "deep" / "curve.png", "rollouts", 0.4)
    assert path == tmp_path / "deep" / "curve.png"
    assert path.read_bytes().startswith(b"\x89PNG")
    assert dict(matplotlib.rcParams) == before


def test_figures_are_reproducible(tmp_path):
    for name in ("a", "b"):
        figures.rollouts_to_best(ablation()["arms"], tmp_path / name / "bars.png")
    assert (tmp_path / "a" / "bars.svg").read_bytes() == (tmp_path / "b" / "bars.svg").read_bytes()


def test_colours_do_not_depend_on_order():
    assert figures.colours(["no_graph", "uniform", "envsched"]) | {"x": ""} == figures.colours(
        ["envsched", "uniform", "no_graph"]
    ) | {"x": ""}


@pytest.mark.parametrize(
    ("value", "text"), [(950, "950"), (12_345, "12.3k"), (1.5e6, "1.5M"), (0, "0"), (-2000, "-2k")]
)
def test_short(value, text):
    assert figures.short(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "–"), (float("nan"), "–"), (0.41234, "0.412"), (12345.6, "12,346"), (0, "0"), (73.21, "73.2")],
)
def test_number(value, text):
    assert headline.number(value) == text
