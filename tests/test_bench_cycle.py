"""The benchmark of a step: its pools, and the whole program on a small one."""

import numpy as np
import pytest

from configs import bench_cycle as config_file
from experiments import bench_cycle, common


def test_pools_hang_together_and_number_by_environment():
    graph, rate = bench_cycle.pool(2000, 3, 10, seed=0)
    table, env = np.asarray(graph.senders).reshape(6, 2000), np.asarray(graph.nodes.env)
    assert (env[table[:3]] == env[None, :]).all() and env.max() == 199
    assert 0.8 < (env[table[3:]] // 50 == env[None, :] // 50).mean() < 0.9
    rate = np.asarray(rate)
    between = np.var([rate[env == e].mean() for e in range(200)])
    assert between > 2 * rate.var() / 10 and 0.0 < rate.min() and rate.max() < 1.0


def test_modes_are_known():
    sizes = {"batch_size": 4, "group_size": 2}
    assert bench_cycle.recipe("full", 100, sizes, 8)[1]["candidates"] == 100
    assert bench_cycle.recipe("incremental", 100, sizes, 8)[1]["candidates"] == 16
    assert bench_cycle.scored("incremental", 100, 64) == 64 and bench_cycle.scored("diffusion", 100, 64) == 100
    with pytest.raises(ValueError, match="unknown mode 'slow'"):
        bench_cycle.recipe("slow", 100, sizes, 8)


@pytest.mark.slow
def test_the_program_measures_and_draws(tmp_path):
    bench_cycle.main(config_file.get_config("smoke"), tmp_path)
    summary = common.read_summary(tmp_path)
    assert [row["mode"] for row in summary["rows"]] == ["diffusion", "full", "gaussian_field", "incremental"]
    for row in summary["rows"]:
        for name in ("belief_ms", "observe_ms", "rollout_tokens_per_s", "update_ms"):
            assert row[name] > 0.0
        assert row["select_ms"] >= 0.0 and 0.0 <= row["informative_share"] <= 1.0
    assert set(summary["cycle"]) >= {"scan_all_seeds", "scan_one_seed", "python_one_seed"}
    assert (tmp_path / "figures" / "step.png").stat().st_size > 5000
