"""Conversations as arrays: log-probabilities and gradients are those of every rollout read as a whole."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chats import CONFIG
from flax import nnx
from test_load import logits, model_of
from transcripts_oracle import make_group, plain_log_probs, plain_loss

from envsched_jax.policy import transformer
from envsched_jax.policy.transformer import attend
from envsched_jax.rollout.script import Transcript
from envsched_jax.train import learner, transcripts

MODEL = model_of(CONFIG, 2)
GRAPHDEF, PARAMS = nnx.split(MODEL)
GROUPS = [
    make_group("a", 5, [7, 30, 1], 0),
    make_group("b", 12, [4], 1),
    make_group("c", 1, [20, 20, 9, 3], 2),
    make_group("d", 9, [6, 8], 3),
]
REWARDS = [[1.0, 0.0, 0.0], [1.0], [0.5, 0.1, 0.0, 1.0], [0.3, 0.3]]
GAINS = learner._gains(REWARDS, "group")


def test_rows_worked_by_hand():
    first = [Transcript("a", 0, [1, 2, 3], [4, 5], [True, False], [-0.5, 0.0])]
    first += [Transcript("a", 1, [1, 2, 3], [6], [True], [-0.25])]
    second = [Transcript("b", 0, [9], [7, 8, 9], [True] * 3, [-1.0, -2.0, -3.0])]
    part, last = transcripts.to_parts([second, first, []], [[2.0], [0.5, -0.5], []], part=1)
    assert part.prompt.shape == (1, 128) and part.ids.shape == part.log_prob.shape == (1, 2, 128)
    assert part.prompt[0, :4].tolist() == [1, 2, 3, 0] and part.prompt_length.tolist() == [3]  # shorter rows come first
    assert part.ids[0, :, :3].tolist() == [[4, 5, 0], [6, 0, 0]] and not part.ids[:, :, 3:].any()
    assert part.mask[0, :, :3].tolist() == [[True, False, False], [True, False, False]] and int(part.mask.sum()) == 2
    assert part.log_prob[0, :, :2].tolist() == [[-0.5, 0.0], [-0.25, 0.0]]
    assert part.advantage.tolist() == [[0.5, -0.5]] and last.advantage.tolist() == [[2.0, 0.0]]
    assert last.prompt_length.tolist() == [1] and last.mask[0, 0, :4].tolist() == [True] * 3 + [False]
    (both,) = transcripts.to_parts([second, first], [[2.0], [0.5, -0.5]], part=3)
    assert both.advantage.tolist() == [[0.5, -0.5], [2.0, 0.0], [0.0, 0.0]]
    assert not both.mask[2].any() and both.prompt_length.tolist() == [3, 1, 1]
    assert list(transcripts.to_parts([], [])) == []


def test_members_that_begin_differently_have_rows_of_their_own():
    odd = [make_group("e", 4, [3], 5)[0], make_group("e", 6, [5], 6)[0]]
    parts = list(transcripts.to_parts([GROUPS[0], odd], [GAINS[0], [0.25, -0.75]], part=2))
    assert [part.ids.shape[:2] for part in parts] == [(2, 1)] * 3
    gains = np.concatenate([part.advantage[:, 0] for part in parts])
    np.testing.assert_allclose(sorted(gains), sorted([*GAINS[0], 0.25, -0.75, 0.0]), rtol=1e-6)
    assert sum(int(part.mask.sum()) for part in parts) == sum(one.tokens for one in [*GROUPS[0], *odd])


def unpadded(parts, values):
    """Values of rows [B, G, T] per rollout, keyed by its ids."""
    out = {}
    for rows, value in zip(parts, values, strict=True):
        for b, g in np.ndindex(rows.ids.shape[:2]):
            out[tuple(rows.ids[b, g].tolist())] = np.asarray(value)[b, g]
    return out


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_are_those_of_the_whole_sequence(temperature):
    flat = [one for group in GROUPS for one in group]
    wanted = np.asarray(plain_log_probs(MODEL, flat, temperature))
    parts = list(transcripts.to_parts(GROUPS, GAINS, part=2))
    assert len(parts) == 2
    found = unpadded(parts, [transcripts.score(MODEL, rows, temperature) for rows in parts])
    for one, row in zip(flat, wanted, strict=True):
        values = found[tuple([*one.ids, *[0] * (128 - len(one.ids))])]
        np.testing.assert_allclose(values[: len(one.ids)], row[: len(one.ids)], atol=1e-5)


OPTIONS = {"clip_low": 0.1, "clip_high": 0.3}


@functools.cache
def adder(part, remat=False):
    graphdef = nnx.split(model_with(remat))[0]
    merge = learner.merger("float32", 0, 1.0)
    add = functools.partial(transcripts.add_part, graphdef=graphdef, merge=merge, temperature=0.8, options=OPTIONS)
    return jax.jit(add)


def model_with(remat):
    model = nnx.merge(GRAPHDEF, PARAMS)
    model.config = dataclasses.replace(model.config, remat=remat)
    return model


def summed(part, groups=GROUPS, gains=GAINS, **more):
    total = jnp.float32(sum(one.tokens for group in GROUPS for one in group))
    sums = transcripts.nothing(PARAMS)
    for rows in transcripts.to_parts(groups, gains, part):
        sums = adder(part, **more)(sums, PARAMS, (), rows, total)
    return sums


@pytest.fixture(scope="module")
def oracle():
    def objective(params):
        return plain_loss(nnx.merge(GRAPHDEF, params), GROUPS, REWARDS, 0.8, **OPTIONS)

    return jax.jit(jax.value_and_grad(objective))(PARAMS)


def close(found, wanted, atol=1e-5):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=atol), found, wanted)


def test_parts_add_up_to_the_loss_of_the_whole(oracle):
    value, gradient = oracle
    assert max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(gradient)) > 1e-2
    informative = [0, 2]
    few = [GROUPS[i] for i in informative], [GAINS[i] for i in informative]
    for sums in (summed(3), summed(1), summed(1, *few)):  # the last part of three is filled up
        np.testing.assert_allclose(sums.loss, value, atol=1e-6)
        close(sums.gradient, gradient)
    flat = [one for group in GROUPS for one in group]
    logp = np.asarray(plain_log_probs(MODEL, flat, 0.8))
    gap = np.concatenate([(logp[i, : len(o.ids)] - o.log_prob)[o.mask] for i, o in enumerate(flat)])
    sums = summed(3)
    assert int(sums.ids) == len(gap) and int(sums.clipped) == ((np.exp(gap) < 0.9) | (np.exp(gap) > 1.3)).sum()
    assert 0 < int(sums.clipped) < len(gap)
    np.testing.assert_allclose(sums.gap, np.abs(gap).max(), rtol=1e-5)


def test_layers_computed_again_give_the_same(oracle):
    sums = summed(3, remat=True)
    np.testing.assert_allclose(sums.loss, oracle[0], atol=1e-6)
    close(sums.gradient, oracle[1])


def test_queries_in_blocks_give_the_same(oracle, monkeypatch):
    """128 positions in blocks of 24: the last block is filled up."""
    adder.cache_clear()
    monkeypatch.setattr(transformer, "_QUERIES", 24)
    sums = summed(3)
    adder.cache_clear()
    np.testing.assert_allclose(sums.loss, oracle[0], atol=1e-6)
    close(sums.gradient, oracle[1])


@pytest.mark.parametrize("block", [1, 2, 3])
@pytest.mark.parametrize("shared", [False, True])
def test_attention_in_blocks(block, shared, monkeypatch):
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.normal(size=size), jnp.float32) for size in ((2, 2, 3, 2, 13, 4), *[(2, 2, 3, 13, 4)] * 2)
    )
    mask = jnp.asarray(rng.random((2, 13, 13)) < 0.6)
    prefix = None
    if shared:
        prefix = (
            *(jnp.asarray(rng.normal(size=(2, 2, 7, 4)), jnp.float32) for _ in range(2)),
            jnp.asarray(rng.random((2, 7)) < 0.6),
        )

    def values(q, k, v):
        return jnp.sin(attend(q, k, v, mask, prefix)).sum(), attend(q, k, v, mask, prefix)

    run = jax.value_and_grad(values, argnums=(0, 1, 2), has_aux=True)
    wanted = run(q, k, v)
    monkeypatch.setattr(transformer, "_QUERIES", block)
    close(run(q, k, v), wanted, atol=1e-5)


def test_logits_of_long_rollouts_exist_in_blocks():
    """Several blocks of positions; the later ones see the earlier ones."""
    group = [Transcript("a", 0, [1, 2], (np.arange(300) % 258).tolist(), [True] * 300, [-1.0] * 300)]
    (rows,) = transcripts.to_parts([group], [[1.0]])
    assert rows.ids.shape == (1, 1, 384)
    found = np.asarray(transcripts.score(MODEL, rows, 1.0))[0, 0, :300]
    ids = np.asarray([[1, 2, *group[0].ids]], np.int32)
    scores = jax.nn.log_softmax(logits(MODEL, ids), axis=-1)[0]
    np.testing.assert_allclose(found, scores[np.arange(1, 301), ids[0, 2:]], atol=1e-5)
