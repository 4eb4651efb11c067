"""`experiments.agent`: whole steps on BFCL, resumed where it was killed; with the weights of SmolLM2 where they are."""

import json

import chats
import jax
import numpy as np
import pytest
from flax import nnx
from ml_collections import ConfigDict

from configs import smollm2_bfcl_cpu
from envsched_jax.environments import bfcl
from envsched_jax.policy.load import load, save
from envsched_jax.policy.tokenizer import load_tokenizer
from envsched_jax.policy.transformer import Transformer, TransformerConfig
from envsched_jax.rollout.agent import Agent
from envsched_jax.train import build_agent
from experiments import agent, evaluate

needs_package = pytest.mark.skipif(not bfcl.available(), reason="bfcl-eval is not installed: `make bfcl` does it")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """Returns a folder with a random model of bytes and its tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    encoder = chats.tokenizer().encoder
    encoder.save(str(folder / "tokenizer.json"))
    fields = {"eos_token": "<|im_end|>", "chat_template": chats.CHATML}
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    dimensions = TransformerConfig(encoder.get_vocab_size(), 1, 16, 2, 1, 8, 16, qk_norm=False, blank_id=None)
    save(Transformer(dimensions, rngs=nnx.Rngs(0)), folder)
    return folder


def config_of(model, steps=3) -> ConfigDict:
    config = smollm2_bfcl_cpu.get_config("smoke")
    config.model = str(model)
    config.limits.update({"context": 4096, "answer": 6, "answers": 2})
    config.train.update({"steps": steps, "lora_rank": 0})
    return config


def weights_in(folder):
    return [np.asarray(x) for x in jax.tree.leaves(nnx.state(load(folder, "float32")))]


@pytest.mark.slow
@needs_package
def test_a_run_that_breaks_off_goes_on_as_if_it_had_not(tiny, tmp_path, monkeypatch):
    def made_up(transcript, section):  # a random model does nothing that earns a reward, so its ids decide
        return float(sum(transcript.ids) % 3 == 0)

    monkeypatch.setattr(build_agent, "reward", made_up)
    agent.main(config_of(tiny), tmp_path / "whole")

    class PowerCut(Exception):
        pass

    played, calls = Agent.play, []

    def breaks(self, *args):
        calls.append(1)
        if len(calls) == 3:
            raise PowerCut
        return played(self, *args)

    monkeypatch.setattr(Agent, "play", breaks)
    with pytest.raises(PowerCut):
        agent.main(config_of(tiny), tmp_path / "broken")
    agent.main(config_of(tiny), tmp_path / "broken")
    first, second = (tmp_path / name / agent.TRANSCRIPTS for name in ("whole", "broken"))
    assert first.read_text() == second.read_text()
    for mine, theirs in zip(weights_in(tmp_path / "whole/model"), weights_in(tmp_path / "broken/model"), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    moved = zip(weights_in(tmp_path / "whole/model"), weights_in(tiny), strict=True)
    assert any((mine != before).any() for mine, before in moved)
    summary = json.loads((tmp_path / "broken/summary.json").read_text())
    assert summary["steps"] == 3 and summary["rollouts"] == 12 and 0 < summary["informative_share"] <= 1
    with pytest.raises(ValueError, match="learning_rate"):
        other = config_of(tiny)
        other.optimizer.learning_rate = 0.5
        agent.main(other, tmp_path / "broken")
    (tmp_path / "broken/model/model.safetensors").unlink()
    agent.main(config_of(tiny), tmp_path / "broken")  # killed after its last step, before the weights were written
    for mine, theirs in zip(weights_in(tmp_path / "whole/model"), weights_in(tmp_path / "broken/model"), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert load_tokenizer(tmp_path / "broken/model").encode("press") == load_tokenizer(tiny).encode("press")


def test_transcripts_of_steps_that_come_again_are_taken_out(tmp_path):
    path = tmp_path / agent.TRANSCRIPTS
    agent._forget_after(path, 1)
    assert not path.exists()
    rows = [json.dumps({"step": step, "text": "a\u2028é"}, ensure_ascii=False) for step in (1, 1, 2, 2)]
    path.write_text("\n".join([*rows, '{"step": 2, "te']), encoding="utf-8")
    for done in (2, 1):
        agent._forget_after(path, done)
        assert path.read_text(encoding="utf-8").split("\n") == [*rows[: 2 * done], ""]


@pytest.mark.parametrize(
    ("section", "name", "value", "why"),
    [
        ("reward", "kind", "style", r"config\.reward\.kind: expected one of progress, success"),
        ("train", "save_every", 0, r"config\.train\.save_every: expected at least 1, got 0"),
    ],
)
def test_what_a_run_cannot_do_is_said_before_it_starts(section, name, value, why, tmp_path):
    config = config_of("nowhere")
    config[section][name] = value
    with pytest.raises(ValueError, match=why):
        agent.main(config, tmp_path)


@needs_package
def test_an_evaluation_goes_on_with_the_next_suite(tiny, tmp_path, capsys):
    config = config_of(tiny)
    config.suites.again = config.suites.bfcl.copy_and_resolve_references()
    config.evaluation.update({"suites": ("bfcl",), "repeats": 2})
    evaluate.main(config, tmp_path)
    written = (tmp_path / "bfcl.json").stat().st_mtime_ns
    evaluate.main(config, tmp_path)
    assert (tmp_path / "bfcl.json").stat().st_mtime_ns == written
    summary = json.loads((tmp_path / "summary.json").read_text())
    result = summary["suites"]["bfcl"]
    assert result["tasks"] == 2 and result["repeats"] == 2 and result["success"] == 0.0
    assert result["rollouts"]["rollouts"] == 4 and "macro average: 0.0%" in capsys.readouterr().out
    (tmp_path / "bfcl.json").write_text((tmp_path / "bfcl.json").read_text().replace("model.safetensors", "other"))
    evaluate.main(config, tmp_path)  # of other weights under the same name
    assert (tmp_path / "bfcl.json").stat().st_mtime_ns > written
    config.evaluation.suites = ("none",)
    with pytest.raises(ValueError, match="suites"):
        evaluate.main(config, tmp_path)


@pytest.mark.slow
@needs_package
@pytest.mark.skipif(
    smollm2_bfcl_cpu.weights() is None, reason="the weights of SmolLM2 are not here: `make smollm2` brings them"
)
def test_a_step_with_real_weights(tmp_path):
    config = smollm2_bfcl_cpu.get_config("smoke")
    config.limits.update({"answer": 48})
    config.reward.format = 0.2
    agent.main(config, tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    rows = [json.loads(line) for line in (tmp_path / agent.TRANSCRIPTS).read_text().splitlines()]
    assert summary["rollouts"] == len(rows) == 4 and summary["tokens"] == sum(row["tokens"] for row in rows) > 0
    assert {row["status"] for row in rows} <= {"ok", "truncated"} and not any(row["error"] for row in rows)
    (row,) = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert row["logp_gap"] < 1e-3  # what was sampled is what is scored
    assert load(tmp_path / "model", "float32").config.num_layers == 30
