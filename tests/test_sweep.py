"""A question asked at several values: what is compared, how a value is chosen, and that the program runs."""

import dataclasses
from unittest import mock

import numpy as np
import pytest

from configs import sweep as sweep_config
from experiments import common, loop, sweep


def curves(success, informative=0.2):
    """Three evaluations of runs whose success per seed and task is `success` [seeds, tasks] at the end, 0 before."""
    success = np.asarray(success, np.float64)
    seeds = len(success)
    steps = [0, 10, 20]
    return loop.Curves(
        steps=steps,
        success=[(success * share).tolist() for share in (0.0, 0.5, 1.0)],
        rollouts=[[100.0 * step] * seeds for step in steps],
        tokens=[[1000.0 * step] * seeds for step in steps],
        informative=[[informative] * seeds] * 2,
    )


def test_compare_is_paired_by_seed_and_knows_the_oracles_room():
    base = np.full((3, 8), 0.4) + 0.1 * np.arange(3)[:, None]
    found = sweep.compare({"uniform": curves(base), "envsched": curves(base + 0.1), "oracle": curves(base + 0.2)})
    assert found["envsched"]["final"]["mean"] == pytest.approx(0.1)
    assert np.allclose(found["envsched"]["final"]["ci"], 0.1)  # seeds differ, differences do not
    assert found["envsched"]["mean"]["mean"] == pytest.approx(0.05)
    assert found["envsched"]["share_of_oracle"] == pytest.approx(0.5)
    assert found["uniform"]["final"]["mean"] == 0.0
    assert found["oracle"]["informative"]["mean"] == pytest.approx(0.2)


def test_a_value_is_chosen_on_other_tasks_than_it_is_scored_on():
    chooser, _ = sweep.ablate.halves(8)
    lucky, plain = np.zeros((3, 8)), np.full((3, 8), 0.5)
    lucky[:, chooser] = 1.0  # best where one chooses, worthless where one scores
    values = {
        "1": {"uniform": curves(plain), "envsched": curves(lucky)},
        "2": {"uniform": curves(plain - 0.1), "envsched": curves(plain + 0.1)},
        "3": {"uniform": curves(plain - 0.2), "envsched": curves(plain)},
    }
    found = sweep.at_best(values)
    assert found["envsched"]["value"] == "1" and found["envsched"]["at_an_end"]
    assert found["envsched"]["score"]["mean"] == 0.0
    assert found["envsched"]["final"]["mean"] == pytest.approx(-0.5)
    assert found["uniform"]["value"] == "1"


def test_every_value_of_every_question_fits_its_base():
    for question in sweep_config.QUESTIONS:
        config = sweep_config.get_config(question)
        assert list(config.order) == list(sweep_config.QUESTIONS[question])
        rollouts = set()
        for label in config.order:
            train = sweep.at_value(config, label).train
            rollouts.add(train.steps * train.batch_size * train.group_size)
            assert train.steps % train.chunk == 0
        assert len(rollouts) == 1 or question == "smoke"  # values are compared at equal rollouts


def test_an_unknown_setting_is_named():
    config = sweep_config.get_config("group_size")
    config.axis["4"].train.groupsize = 3
    with pytest.raises(ValueError, match=r"config\.axis\.4\.train: the base has no groupsize"):
        sweep.at_value(config, "4")


def test_the_program_shares_a_suite_and_leaves_a_table(tmp_path, monkeypatch):
    def ablate(config, workdir, suite):
        assert suite == "suite" and (config.train.group_size == 2) == (workdir.name == "2")
        for name, success in (("uniform", 0.5), ("envsched", 0.6), ("of_another_run", 0.9)):
            arm = dataclasses.asdict(curves(np.full((2, 8), success)))
            common.write_json(workdir / "arms" / f"{name}.json", {"identity": {}, "curves": arm})

    built = mock.Mock(return_value="suite")
    monkeypatch.setattr(sweep.build, "build_suite", built)
    # What an ablation does is tested with it; here it must be called as it wants to be.
    monkeypatch.setattr(sweep.ablate, "main", mock.create_autospec(sweep.ablate.main, side_effect=ablate))
    config = sweep_config.get_config("smoke")
    sweep.main(config, tmp_path)
    built.assert_called_once()  # the size of a group changes nothing in the pool
    summary = common.read_summary(tmp_path)
    assert list(summary["values"]) == ["4", "2"]
    assert set(summary["values"]["2"]) == {"uniform", "envsched"}
    assert summary["values"]["2"]["envsched"]["final"]["mean"] == pytest.approx(0.1)
    assert (tmp_path / "figures" / "gains.png").exists()
    assert "| 2 | `envsched` | 0.600 | +0.100 [0.100, 0.100] |" in (tmp_path / "table.md").read_text()
    page = (tmp_path / "report.html").read_text()
    assert "EnvSched gains on uniform in 2 of 2 values" in page and 'href="2/report.html"' in page
    config.axis["2"].world = {"seed": 5}
    sweep.main(config, tmp_path)
    assert built.call_count == 3  # another pool is another suite
