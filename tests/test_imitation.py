"""The warm start: what the lapsing expert draws, renaming of tools, and a cache that is used."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from envsched_jax.environments import toolworld as tw
from envsched_jax.environments.toolworld import vocabulary as vocab
from envsched_jax.policy import preset
from envsched_jax.train import imitation, warmstart

WORLD = tw.ToolWorldConfig(num_domains=2, tasks_per_env=6, eval_per_env=2, held_out_envs=2, eval_per_held_out_env=2)
SUITE = tw.generate(WORLD)
ENVIRONMENT = tw.environment(SUITE.world, SUITE.tasks)
DEMOS = jax.jit(jax.vmap(lambda task, script: imitation.demonstrate(ENVIRONMENT, task, script)))(
    jnp.arange(len(SUITE.records)), jnp.asarray(SUITE.script)
)
NAMES = (vocab.FIRST["tool"], vocab.TOOLS)


def targets(lapse):
    n = len(SUITE.records)
    submits = SUITE.world.card[:, :, 1] == vocab.FIRST["op"] + vocab.Op.SUBMIT
    submit = jnp.asarray(vocab.FIRST["tool"] + submits.argmax(1)[SUITE.tasks.env])
    return imitation.lapsed_targets(DEMOS, jnp.full(n, lapse), submit, 2), np.asarray(submit)


def test_the_expert_lapses_as_told():
    wanted, submit = targets(0.2)
    np.testing.assert_allclose(wanted.sum(-1), 1, atol=1e-5)
    assert not np.asarray(jnp.where(DEMOS.legal | ~DEMOS.mask[..., None], 0.0, wanted)).any()
    for i in range(0, len(submit), 7):
        legal = np.asarray(DEMOS.legal[i, 4])  # the tool token of turn 2
        e = 1 - 0.8**1.5
        expected = e * 0.5 * legal / legal.sum()
        expected[submit[i]] += e * 0.5
        expected[int(DEMOS.target[i, 4])] += 1 - e
        np.testing.assert_allclose(wanted[i, 4], expected, atol=1e-6)
    np.testing.assert_allclose(targets(0.0)[0], jax.nn.one_hot(DEMOS.target, vocab.NUM_OUTPUTS), atol=1e-6)


def test_renaming_is_a_bijection_that_all_parts_share():
    wanted, _ = targets(0.3)
    renamed, moved = imitation.rename(jax.random.key(0), DEMOS, wanted, NAMES)
    changed = 0
    for i in range(0, len(SUITE.records), 5):
        cards, new = np.asarray(DEMOS.prompt[i]), np.asarray(renamed.prompt[i])
        name = dict(zip(cards[: vocab.TOOLS, 0].tolist(), new[: vocab.TOOLS, 0].tolist(), strict=True))
        name.pop(0, None)
        changed += sum(a != b for a, b in name.items())
        assert len(set(name.values())) == len(name)
        np.testing.assert_array_equal(cards[:, 1:], new[:, 1:])
        live = np.asarray(DEMOS.mask[i])
        for t in np.flatnonzero(live):
            old_id, new_id = int(DEMOS.target[i, t]), int(renamed.target[i, t])
            assert new_id == name.get(old_id, old_id)
            assert bool(renamed.legal[i, t, new_id])
            np.testing.assert_allclose(moved[i, t, new_id], wanted[i, t, old_id], atol=1e-6)
    assert changed > 50


def test_base_policy_is_made_once(tmp_path, monkeypatch):
    monkeypatch.setenv("ENVSCHED_CACHE", str(tmp_path))
    config = warmstart.WarmStartConfig(steps=3, pools=1, batch_size=4, tasks_per_env=2)
    model = preset("tiny", vocab_size=vocab.VOCAB_SIZE)
    first = warmstart.base_policy(model, WORLD, config)
    assert len(list(tmp_path.rglob("*.npz"))) == 1
    monkeypatch.setattr(warmstart, "demonstrations", None)  # a second making would fail
    again = warmstart.base_policy(model, WORLD, config)
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True))
    monkeypatch.undo()
    monkeypatch.setenv("ENVSCHED_CACHE", str(tmp_path))
    second = warmstart.base_policy(model, WORLD, dataclasses.replace(config, seed=1))
    assert len(list(tmp_path.rglob("*.npz"))) == 2
    monkeypatch.setattr(warmstart, "demonstrations", None)
    both = warmstart.base_policies(model, WORLD, dataclasses.replace(config, policies=2))
    for stacked, a, b in zip(*map(jax.tree.leaves, (both, first, second)), strict=True):
        np.testing.assert_array_equal(stacked, np.stack([a, b]))


def test_there_is_at_least_one_base_policy():
    with pytest.raises(ValueError, match="policies: expected at least 1, got 0"):
        warmstart.WarmStartConfig(policies=0)
