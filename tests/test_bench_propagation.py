"""The benchmark of propagation: its graphs, its clock, and the whole program on small graphs."""

import json

import numpy as np
import pytest

from configs import bench_propagation as config_file
from envsched_jax.belief import native
from experiments import bench_propagation, bench_variants, common

SETTING = {"nodes": 11_000, "k": 3, "relations": 2, "channels": 2, "restart": 0.1, "rounds": 2, "seed": 0}


def test_graphs_have_the_neighbours_they_promise():
    table = bench_variants.problem(order="environment", **SETTING).table
    node = np.arange(11_000)
    assert (table[:3] // 100 == node // 100).all()
    in_domain = (table[3:] // 5000 == node // 5000).mean()
    assert abs(in_domain - (0.8 + 0.2 * 5000 / 11_000)) < 0.02


def test_orders_are_the_same_graph_by_other_names():
    ordered, shuffled = (bench_variants.problem(order=o, **SETTING) for o in ("environment", "random"))
    results = [np.sort(bench_variants.exact(p), axis=0) for p in (ordered, shuffled)]
    np.testing.assert_allclose(*results, rtol=1e-12)
    assert (ordered.table != shuffled.table).mean() > 0.9
    np.testing.assert_allclose(shuffled.weight.sum(axis=0), 1.0, rtol=1e-5)


def test_wrong_names_are_told():
    with pytest.raises(ValueError, match="unknown order 'zigzag'"):
        bench_variants.problem(order="zigzag", **SETTING)
    with pytest.raises(ValueError, match="unknown variant 'magic'; there are: diffuse, "):
        bench_variants.why_not("magic")


def test_turns_alternate_and_stop_when_time_is_up():
    calls = []
    runners = {"a": lambda: calls.append("a"), "b": lambda: calls.append("b")}
    turns = bench_propagation.take_turns(runners, repeats=5, seconds=0.0)
    assert calls == ["a", "b"] * 3 and [len(t) for t in turns.values()] == [3, 3]
    assert len(bench_propagation.take_turns(runners, repeats=5, seconds=60.0)["a"]) == 5


def test_compulsory_bytes_by_hand():
    p = bench_variants.problem(order="environment", **SETTING)
    assert bench_propagation.compulsory_bytes(p) == 11_000 * (6 * 8 + 3 * 2 * 4)


def test_the_program_measures_draws_and_keeps(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(native, "_library", native._library)  # loaded here, put back for the tests that follow
    config = config_file.get_config("smoke")
    bench_propagation.main(config, tmp_path)
    summary = common.read_summary(tmp_path)
    told = capsys.readouterr().out
    names = {row["variant"] for row in summary["rows"]}
    assert names | set(summary["left_out"]) == set(config.variants)
    assert {"diffuse", "jraph", "segment_sum", "bcoo", "bcsr", "scipy_csr"} <= names
    assert all(f"left out: {name} ({reason})" in told for name, reason in summary["left_out"].items())
    assert len(summary["rows"]) == len(names) * 2 and summary["copy_gb_per_s"] > 0
    for row in summary["rows"]:
        assert row["max_rel_error"] < 1e-5
        assert row["gb_per_s"] == pytest.approx(row["nodes"] * (8 * 8 + 3 * 8 * 4) / row["ms_per_round"] / 1e6)
        assert row["fraction_of_copy"] == pytest.approx(row["gb_per_s"] / row["copy_gb_per_s"])
        assert row["cpu_ms_per_round"] >= 0 and row["ms_per_round_min"] <= row["ms_per_round"]
    assert len(common.read_metrics(tmp_path)) == len(summary["rows"])
    assert all((tmp_path / "figures" / f"{name}.png").stat().st_size > 5000 for name in ("throughput", "roofline"))

    monkeypatch.setattr(bench_propagation, "measure", lambda *a, **k: pytest.fail("a finished graph is kept"))
    bench_propagation.main(config, tmp_path)
    assert common.read_summary(tmp_path)["rows"] == summary["rows"]
    assert json.loads((tmp_path / "results" / "500.random.json").read_text())["rows"] == summary["rows"][: len(names)]
