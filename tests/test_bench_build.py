"""The benchmark of building: what its row says."""

import numpy as np
import pytest

from configs import bench_build as config_file
from envsched_jax import graph, testing
from envsched_jax.graph import shortlist
from experiments import bench_build, common


def test_the_smoke_preset_runs(tmp_path, capsys):
    bench_build.main(config_file.get_config("smoke"), tmp_path)
    (row,) = common.read_summary(tmp_path)["rows"]
    assert row["tasks"] == 600 and row["recall"] == 1.0  # exact
    assert 0 < row["peak_before_gib"] <= row["peak_gib"] and 0 < row["wall_s"] and 0 < row["cpu_s"]
    assert row["steps"] == 3 and row["steps_s"] > 0 and 300 <= row["tasks_seen"] <= 450
    assert "'recall': 1.0" in capsys.readouterr().out


def test_bytes_and_recall_of_a_graph(monkeypatch):
    records = testing.synthetic_pool(1500, 15)
    built, index = graph.build(records, k=4, search="exact")
    nodes = built.nodes.mask.shape[0]
    parts = bench_build.bytes_per_task(built, 1500)
    assert parts["edges.similarity"] == pytest.approx(8 * 7 * 4 * nodes / 1500)
    assert parts["total"] == pytest.approx(sum(v for k, v in parts.items() if k != "total"), abs=0.2)
    config = config_file.get_config("smoke")
    tasks = [records[i] for i in index.record]
    assert bench_build.recall(built, tasks, config) == 1.0
    monkeypatch.setattr(shortlist, "PROBES", 1)
    short, _ = graph.build(records, k=4, search="approximate")
    assert 0.1 < bench_build.recall(short, tasks, config) < 1.0
    none = built._replace(edges=built.edges._replace(mask=np.zeros_like(built.edges.mask)))
    assert bench_build.recall(none, tasks, config) == 0.0
