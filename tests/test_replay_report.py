"""What is shown of a replay: its table, its figures and its page, from a summary as the program writes it."""

import json

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from matplotlib import rc_context

from experiments import common, figures, replay_report, replay_summary, report

STEPS = 30


def result(rate, seed, believes):
    """An arm's result over two seeds, as `replay_arm.run_arm` returns it."""
    rng = np.random.default_rng(seed)
    live = np.cumsum(rng.random((2, STEPS)) < rate, axis=1)
    window = {"predicted": [0.5, 0.4, 0.3], "realised": [0.45, 0.4, 0.5], "error": [0.01, 0.01, 0.01]}
    unknown = window | {"predicted": [float("nan")] * 3}
    said = np.array([[4.0, 0, 6], [0.2, 0, 4.8], [1.0, 0, 4.0]])  # tasks, sum of predictions, sum of truths
    sums = np.zeros((2, 3, 10))
    sums[:, :, [0, 5, 8]] = said
    score = {"ece": 0.1, "auc_mixed_never": 0.6} if believes else {}
    return {
        "live_per_1k": (1000 * live[:, -1] / (4 * STEPS)).tolist(),
        "rows": [(seed, 10, score) for seed in range(2)],
        "envs_touched": [2, 3],
        "gini_visits": [0.1, 0.2],
        "rollouts": [4 * STEPS] * 2,
        "live": live.tolist(),
        "degenerate": [window if believes else unknown] * 2,
        "reliability": sums.tolist() if believes else None,
    }


RATES = {"uniform": 0.3, "envsched": 0.7, "no_graph": 0.5, "mopps": 0.4, "oracle": 0.9, "clairvoyant": 1.0}


def summary_of(names=("one", "two")):
    """A summary of these data sets, through the file as any reader gets it."""
    results = {
        name: {arm: result(rate, i, arm in ("envsched", "no_graph")) for i, (arm, rate) in enumerate(RATES.items())}
        for name in names
    }
    datasets = {}
    for name, found in results.items():
        arms = replay_summary.summarise(found)
        clairvoyant = arms.pop("clairvoyant")
        predicted = {"cold": {"envsched": {"auc_mixed": {"mean": 0.71, "ci": [0.7, 0.72]}}}}
        datasets[name] = {"arms": arms, "clairvoyant": clairvoyant, "prediction": predicted}
    return {
        "datasets": datasets,
        "gap_closed": replay_report.mean_gap(datasets),
        "comparison": replay_summary.compare(results),
    }


def test_calibration_of_an_arm_by_hand():
    arm = replay_summary.summarise({"envsched": result(0.5, 0, True)})["envsched"]
    assert arm["reliability"]["mean"] == {
        "tasks": [4, 6],
        "predicted": pytest.approx([0.05, 0.8]),
        "realised": pytest.approx([0.25, 2 / 3]),
    }
    assert arm["degenerate"]["realised"] == pytest.approx([0.45, 0.4, 0.5])
    assert arm["degenerate_within"] == pytest.approx(2 / 3)  # 0.05 and 0 off, and 0.2
    silent = replay_summary.summarise({"uniform": result(0.5, 0, False)})["uniform"]
    assert silent["reliability"] is None and np.isnan(silent["degenerate_within"])


def test_mean_gap_leaves_out_sets_without_one():
    def data(**gaps):
        return {"arms": {arm: {"gap_closed": gap} for arm, gap in gaps.items()}}

    nan = float("nan")
    got = replay_report.mean_gap({"a": data(x=0.2, y=nan), "b": data(x=0.4, y=nan), "c": data(x=nan, y=nan)})
    assert got["x"] == pytest.approx(0.3) and np.isnan(got["y"])


def test_the_table_has_a_row_per_data_set():
    lines = replay_report.table(summary_of()).splitlines()
    assert [line.split()[0] for line in lines[2:]] == ["one", "two", "mean"]
    assert lines[1].split() == [*(arm for arm in RATES if arm != "clairvoyant"), "clairvoyant"]
    assert "+1.000" in lines[-1] and "(+1.00)" in lines[2]


@pytest.mark.parametrize("names", [("one",), ("one", "two", "three", "four")])
def test_all_figures_and_the_page_are_drawn(tmp_path, names):
    common.write_summary(tmp_path, "replay", {"seeds": 2}, summary_of(names), 0.0)
    summary = common.read_summary(tmp_path)
    drawn = replay_report.draw(tmp_path, summary)
    page = report.build(tmp_path).read_text(encoding="utf-8")
    pictures = {path.name for path in (tmp_path / "figures").glob("*.png")}
    assert {path.name for path in drawn} == {"gap_closed.png", "live_groups.png"}
    assert pictures == {
        "gap_closed.png",
        "live_groups.png",
        "replay.png",
        "reliability_mean.png",
        "reliability_p_informative.png",
        "degenerate.png",
    }
    for name in pictures:
        assert (tmp_path / "figures" / name).read_bytes().startswith(b"\x89PNG")
    assert "over mopps (best peer)" in page and "over no_graph (best ablation)" in page
    assert "Prediction of outcomes not seen" in page and "0.710" in page
    assert page.count("<svg") == 4  # bars, two reliability diagrams, degenerate shares


def test_figures_of_calibration_without_any_belief(tmp_path):
    """Arms without a belief leave empty panels, not an error; the page leaves them out."""
    silent = replay_summary.summarise({"uniform": result(0.3, 0, False), "oracle": result(0.9, 1, False)})
    datasets = json.loads(json.dumps(common.plain({"one": {"arms": silent}})))
    for path in (
        figures.reliability(datasets, "mean", tmp_path / "reliability.png"),
        figures.degenerate(datasets, tmp_path / "degenerate.png", 10, 0.05),
    ):
        assert path.stat().st_size > 1000 and path.with_suffix(".svg").exists()
    assert report._trust(datasets, tmp_path) == []


@pytest.mark.parametrize("panels", [1, 5])
def test_every_arm_has_a_colour_of_its_own_and_a_place_in_the_legend(panels):
    """As many arms as there are recipes, with the longest names that are not cut."""
    from matplotlib.figure import Figure

    names = ["uniform", "envsched", *(f"wide_wide_name_no_{i:02d}" for i in range(16))]
    palette = figures.colours(names)
    assert len(set(palette.values())) == len(names)
    with rc_context(figures.STYLE):
        figure = Figure(figsize=(max(figures.WIDTH, 3.0 * panels), 2.8), layout="constrained")
        axes = list(figure.subplots(1, panels, squeeze=False)[0])
        for name in names:
            axes[-1].plot([0, 1], [0, 1], color=palette[name], label=name)
        figures.legend(figure, axes)
        figure.draw_without_rendering()
    box = figure.legends[0].get_window_extent()
    assert len(figure.legends[0].get_texts()) == len(names)
    assert box.x0 >= 0 and box.x1 <= figure.bbox.width and box.y1 <= figure.bbox.height
    assert axes[0].get_window_extent().height > 1.5 * figure.dpi  # the panels are not squeezed
