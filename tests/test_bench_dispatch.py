"""The benchmark of the dispatcher: what its rows say."""

from configs import bench_dispatch as config_file
from experiments import bench_dispatch, common


def test_the_smoke_preset_runs(tmp_path):
    config = config_file.get_config("smoke")
    config.calls, config.seconds = (8,), 0.2
    bench_dispatch.main(config, tmp_path)
    rows = common.read_summary(tmp_path)["rows"]
    assert [(row["tasks"], row["call"], row["durable"]) for row in rows] == [(400, 8, False), (400, 8, True)]
    for row in rows:
        assert row["tickets_per_s"] > 0 and 0 < row["propose_ms"] <= row["propose_ms_worst"]
