"""The tables of an ablation: the same numbers in Markdown, CSV and LaTeX, dashes for what a summary lacks."""

import csv

import pytest

from experiments import tables


def spread(mean, half=0.01):
    return {"mean": mean, "ci": [mean - half, mean + half]}


def arm(final, average, reached):
    return {
        "score_mean": [0.1, final],
        "score_ci": [[0.1, 0.1], [final - 0.01, final + 0.01]],
        "score_average": spread(average),
        "informative_share": 0.25,
        "rollouts_to_uniform_best": {**spread(12_000.0, 500), "reached": reached, "seeds": 5},
    }


SUMMARY = {
    "seeds": 5,
    "arms": {"uniform": arm(0.5, 0.3, 4), "envsched": arm(0.6, 0.4, 5), "no_graph": arm(0.45, 0.35, 0)},
    "paired": {
        "envsched": {"score_final_minus_uniform": spread(0.1), "score_mean_minus_uniform": spread(0.09)},
        "no_graph": {"score_final_minus_uniform": spread(-0.05), "score_mean_minus_uniform": spread(0.05)},
    },
    "paired_tokens": {"envsched": {"score_final_minus_uniform": spread(0.08), "tokens": 7.0}},
    "envsched_minus": {"uniform": {"final": spread(0.1)}, "no_graph": {"final": spread(0.15)}},
}


@pytest.fixture
def written(tmp_path):
    return {path.suffix: path.read_text(encoding="utf-8") for path in tables.write(tmp_path, SUMMARY)}


def test_markdown(written):
    lines = written[".md"].splitlines()
    assert lines[0] == "**Arms**, mean and 95 % interval over 5 seeds"
    row = next(line for line in lines if line.startswith("| envsched |"))
    assert row == (
        "| envsched | 0.600 [0.590, 0.610] | +0.100 [0.090, 0.110] | 0.400 [0.390, 0.410] | 25 %"
        " | 12k [11.5k, 12.5k] | 5/5 |"
    )
    assert "| uniform | 0.500 [0.490, 0.510] | – |" in written[".md"]
    widths = {line.count("|") for line in lines[2:6]}
    assert len(widths) == 1  # header, rule and rows have equally many columns


def test_csv_is_unrounded_and_complete(written):
    rows = {row["arm"]: row for row in csv.DictReader(written[".csv"].splitlines())}
    assert list(rows) == ["uniform", "envsched", "no_graph"]
    assert float(rows["no_graph"]["final_minus_uniform_low"]) == pytest.approx(-0.06)
    assert float(rows["envsched"]["final_minus_uniform_at_tokens"]) == 0.08
    assert rows["uniform"]["final_minus_uniform"] == rows["uniform"]["final_minus_uniform_low"] == ""
    assert rows["no_graph"]["reached"] == "0/5"
    assert float(rows["no_graph"]["envsched_minus_final"]) == 0.15
    assert None not in rows["envsched"]  # no row is longer than the header


def test_latex_is_balanced_and_escaped(written):
    text = written[".tex"]
    assert r"no\_graph & 0.450 {\scriptsize [0.440, 0.460]} & $-$0.050 {\scriptsize [$-$0.060, $-$0.040]}" in text
    assert r"25 \% &" in text
    assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == 3
    for part in text.split(r"\begin{tabular}{")[1:]:
        columns = len(part.split("}")[0])
        rows = [line for line in part.splitlines() if line.endswith(r"\\")]
        assert {line.count(" & ") + 1 for line in rows} == {columns}


def test_an_earlier_summary_has_fewer_columns(tmp_path):
    """Summaries written before there were differences at equal tokens, or by one seed."""
    arms = {name: {k: v for k, v in entry.items() if k != "score_average"} for name, entry in SUMMARY["arms"].items()}
    old = {
        "seeds": 1,
        "arms": arms,
        "paired": {"envsched": {"score_final_minus_uniform": {"mean": 0.1, "ci": [None, None]}}},
    }
    found = tables.sections(old)
    assert list(found) == ["Arms"]
    assert found["Arms"].columns == [
        "final score",
        "minus uniform",
        "informative groups",
        "rollouts to uniform's best",
        "reached",
    ]
    assert found["Arms"].rows["envsched"][1] == ("+0.100", "")
    assert "+0.100 |" in tables.markdown(old)
    assert tables.write(tmp_path / "deep", old)[1].exists()
