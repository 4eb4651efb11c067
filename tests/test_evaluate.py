"""Evaluations and what else is read from an agent's config: worked values, what is left out, and what is refused."""

import json
import math

import numpy as np
import pytest
from flax import nnx
from ml_collections import ConfigDict

from configs import agent as agent_config
from configs import qwen3_8b_paper
from envsched_jax.environments import bfcl
from envsched_jax.policy import preset
from envsched_jax.policy.load import ModelError
from envsched_jax.policy.transformer import Transformer
from envsched_jax.pool.records import PoolError
from envsched_jax.rollout.script import Transcript
from envsched_jax.train import build_agent
from experiments import common, evaluate, memory

T_QUANTILE = 12.706204736  # of Student's t with one degree of freedom, 97.5 %


def made(*results):
    """Rollouts with these (progress, success)."""
    return [Transcript("a", 0, progress=p, success=s, error="" if s is not None else "late") for p, s in results]


def test_a_score_worked_by_hand():
    rollouts = made((1.0, True), (None, None), (0.25, False), (1.0, True), (None, None), (None, None))
    for one, status in zip(rollouts, ["ok", "env_error", "truncated", "ok", "env_timeout", "infra_error"], strict=True):
        one.status = status
    result = evaluate.score(rollouts, ["a", "b", "c"], 2)
    half = T_QUANTILE * math.sqrt(0.125) / math.sqrt(2)  # of 1 and 0.5; the third task has no result
    np.testing.assert_allclose(result.pop("ci"), [0.75 - half, 0.75 + half], rtol=1e-6)
    rest = result.pop("rollouts")
    assert result == {
        "tasks": 2,
        "repeats": 2,
        "success": 0.75,
        "success_by_repeat": [0.5, 1.0],
        "solved_in_every_repeat": 0.5,
        "solved_in_any_repeat": 1.0,
        "progress": 0.75,
    }
    assert rest["rollouts"] == 6 and rest["failed_share"] == 0.5 and rest["truncated_share"] == 1 / 6


def test_every_and_any():
    rollouts = made(*[(0.0, s) for s in (True, True, True, False, False, False)])
    result = evaluate.score(rollouts, ["a", "b", "c"], 2)
    assert (result["success"], result["solved_in_every_repeat"]) == (0.5, pytest.approx(1 / 3))
    assert result["solved_in_any_repeat"] == pytest.approx(2 / 3)
    assert result["success_by_repeat"] == pytest.approx([2 / 3, 1 / 3])


def test_one_task_has_no_interval():
    result = common.plain(evaluate.score(made((0.5, False), (1.0, True)), ["a"], 2))
    assert result["ci"] is None and evaluate.told(result) == "50.0%, 1 tasks x 2"
    other = {"success": 0.0, "ci": [0.0, 0.0]}
    average = evaluate.average([result, other])
    assert average == {"success": 0.25, "ci": None} and evaluate.told(average) == "25.0%"
    assert "NaN" not in json.dumps([result, average])


def test_without_a_result_there_is_no_score():
    with pytest.raises(ValueError, match="no rollout of 2 has a result: late"):
        evaluate.score(made((None, None), (None, None)), ["a", "b"], 1)
    with pytest.raises(ValueError, match="no rollout of 0 has a result: there are no tasks"):
        evaluate.score([], [], 1)


def test_an_average_worked_by_hand():
    suites = [{"success": 0.5, "ci": [0.2, 0.8]}, {"success": 0.1, "ci": [-0.3, 0.5]}]
    found = evaluate.average(suites)
    assert found["success"] == pytest.approx(0.3)
    np.testing.assert_allclose(found["ci"], [0.3 - 0.25, 0.3 + 0.25])  # half widths 0.3 and 0.4
    assert evaluate.told(found) == "30.0% [5.0%, 55.0%]"
    same = evaluate.average(suites[:1])
    assert same["success"] == 0.5 and same["ci"] == pytest.approx([0.2, 0.8])


def test_tasks_are_chosen_once():
    tasks = [f"t{i}" for i in range(20)]
    some = evaluate.chosen(tasks, 5, seed=1)
    assert some == evaluate.chosen(tasks, 5, seed=1) != evaluate.chosen(tasks, 5, seed=2)
    assert len(set(some)) == 5 and some == [task for task in tasks if task in some]
    for most in (0, 20, 30):
        assert evaluate.chosen(tasks, most, seed=1) == tasks


def test_rewards_worked_by_hand():
    one = Transcript("a", 0, progress=0.5, success=False, attempts=4, refused=1)
    quiet = Transcript("a", 0, progress=0.5, success=True)
    failed = Transcript("a", 0, attempts=4, refused=0, status="env_error")
    for kind, extra, wanted in (
        ("progress", 0.0, [0.5, 0.5, None]),
        ("success", 0.0, [0.0, 1.0, None]),
        ("progress", 0.2, [0.65, 0.5, None]),
    ):
        rewards = [build_agent.reward(t, {"kind": kind, "format": extra}) for t in (one, quiet, failed)]
        assert rewards == [pytest.approx(value) if value is not None else None for value in wanted]
    with pytest.raises(ValueError, match=r"config\.reward\.kind: expected one of progress, success, got 'style'"):
        build_agent.reward(one, {"kind": "style", "format": 0.0})


def test_what_cannot_be_built_is_named():
    config = agent_config.get_config()
    with pytest.raises(ModelError, match=r"config\.model: expected a folder"):
        build_agent.load_model(config)
    with pytest.raises(ModelError, match=r"config\.model: expected a folder"):
        build_agent.build_chat(config.chat, config.model)
    with pytest.raises(ModelError, match=r"config\.chat: brief and example are not for the style hermes"):
        build_agent.build_chat(ConfigDict({"style": "hermes", "brief": True, "example": False}), "nowhere")
    with pytest.raises(ModelError, match=r"config\.chat\.style: expected one of hermes, list, python, got 'xml'"):
        build_agent.build_chat(ConfigDict({"style": "xml"}), "nowhere")
    with pytest.raises(PoolError, match="environment: expected bfcl, taubench or acebench, got 'chess'"):
        build_agent.build_world(ConfigDict({"name": "chess"}))
    for name in ("taubench", "acebench"):
        with pytest.raises(PoolError, match=f"checkout of {name}: expected the folder of a clone"):
            build_agent.build_world(config.suites[name])
    for name in ("slots", "chunk", "piece"):
        other = agent_config.get_config()
        other.engine[name] = 0
        with pytest.raises(ValueError, match=f"{name}: expected at least 1, got 0"):
            build_agent.build_agent(other, None, temperature=0.0)
    config.preset = "huge"
    with pytest.raises(ValueError, match="unknown preset 'huge'"):
        build_agent.model_config(config)


@pytest.mark.parametrize(("dtype", "rank"), [("float32", 0), pytest.param("bfloat16", 2, marks=pytest.mark.slow)])
def test_memory_without_weights(dtype, rank, tmp_path, capsys):
    config = qwen3_8b_paper.get_config()
    config.preset, config.dtype = "tiny", dtype
    config.mesh.update({"data": 1, "model": 1})
    config.limits.context = 512  # 448 after the prompt: rounded up
    config.engine.update({"slots": 4, "chunk": 4})
    config.train.update({"part": 1, "group_size": 2, "lora_rank": rank})
    memory.main(config, tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    params = nnx.state(Transformer(preset("tiny"), rngs=nnx.Rngs(0)))
    count = sum(leaf.size for leaf in nnx.to_flat_state(params).leaves)
    assert summary["parameters"] == count
    c = preset("tiny")
    inner = (c.num_heads + 2 * c.num_kv_heads) * c.head_dim + 3 * c.mlp_dim + c.num_heads * c.head_dim
    thin = rank * c.num_layers * (7 * c.embed_dim + inner)
    learns = thin if rank else count
    fixed = 2 * count if rank else 0  # in bfloat16
    assert summary["kept_bytes_per_device"] == 12 * learns + fixed + 4  # float32, twice more for Adam, and its count
    assert set(summary["programs"]) == {"pass", "step", "decode"}
    for line in summary["programs"].values():
        assert line["arguments"] > 0 and line["temporaries"] >= 0
    assert summary["programs"]["step"]["shared"] > 0  # memory is taken over
    assert f"{count:,} parameters" in capsys.readouterr().out


@pytest.mark.skipif(not bfcl.available(), reason="bfcl-eval is not installed: `make bfcl` does it")
def test_scenarios_are_held_out_whole():
    sections = {share: agent_config.environment("bfcl", share) for share in build_agent.SHARES}
    worlds = {share: build_agent.build_world(section).records for share, section in sections.items()}
    ids = {share: {record.task_id for record in records} for share, records in worlds.items()}
    assert ids["train"] | ids["held_out"] == ids["all"] and not ids["train"] & ids["held_out"]
    assert 0.12 < len(ids["held_out"]) / len(ids["all"]) < 0.28
    scenarios = [{record.group_id for record in worlds[share]} for share in ("train", "held_out")]
    assert not scenarios[0] & scenarios[1]
    sections["all"].share = "some"
    with pytest.raises(PoolError, match="share of bfcl: expected one of all, train, held_out, got 'some'"):
        build_agent.build_world(sections["all"])
