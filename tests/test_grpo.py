"""Advantages, the GRPO objective and its update: worked values, masks, and learning."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from test_rollout import COUNTER, GRAPHDEF, PARAMS, TASKS, play

from envsched_jax.rollout import rollout, score
from envsched_jax.train import grpo
from envsched_jax.train.advantages import advantages
from envsched_jax.types import Status, is_valid

NAN = float("nan")
REWARD = jnp.array([[1.0, 0.0, 0.0, NAN], [0.1, 0.1, 0.1, 0.1], [NAN, NAN, 1.0, NAN], [2.0, 0.0, 2.0, 0.0]])
VALID = jnp.array([[True, True, True, False], [True] * 4, [False, False, True, False], [True] * 4])


def test_advantages_worked_by_hand():
    third, deviation = 1 / 3, math.sqrt(2) / 3
    expected = np.zeros((4, 4))
    expected[0, :3] = np.array([2 * third, -third, -third]) / (deviation + 0.5)
    expected[3] = np.array([1, -1, 1, -1]) / (1 + 0.5)
    np.testing.assert_allclose(advantages(REWARD, VALID, eps=0.5), expected, atol=1e-6)


def test_undivided_advantages():
    expected = np.zeros((4, 4))
    expected[0, :3] = 2 / 3, -1 / 3, -1 / 3
    expected[3] = 1, -1, 1, -1
    np.testing.assert_allclose(advantages(REWARD, VALID, std="none"), expected, atol=1e-6)


def test_advantages_over_the_deviation_of_the_batch():
    rewards = np.array([1, 0, 0, 0.1, 0.1, 0.1, 0.1, 1, 2, 0, 2, 0])
    result = advantages(REWARD, VALID, std="batch", eps=0.0)
    np.testing.assert_allclose(result[3], np.array([1, -1, 1, -1]) / rewards.std(), rtol=1e-5)
    np.testing.assert_allclose(result[0, :3], np.array([2, -1, -1]) / 3 / rewards.std(), rtol=1e-5)


@pytest.mark.parametrize("std", ["group", "none", "batch"])
def test_equal_rewards_and_invalid_ones_give_exact_zeros(std):
    result = np.asarray(advantages(REWARD, VALID, std=std))
    assert (result[1:3] == 0).all() and result[0, 3] == 0
    gradient = jax.grad(lambda r: (advantages(r, VALID, std=std) ** 2).sum())(jnp.nan_to_num(REWARD))
    assert np.isfinite(gradient).all()
    assert std == "batch" or (np.asarray(gradient)[1:3] == 0).all()  # the batch's deviation reads every reward
    assert (np.asarray(advantages(jnp.full((3, 4), 0.1), jnp.ones((3, 4), bool), std=std)) == 0).all()


def test_unknown_modes_are_named():
    with pytest.raises(ValueError, match="std must be"):
        advantages(REWARD, VALID, std="mean")
    with pytest.raises(ValueError, match="normalise must be"):
        grpo.loss(*[jnp.zeros((1, 1, 1))] * 2, jnp.zeros((1, 1)), jnp.ones((1, 1, 1), bool), normalise="episode")
    with pytest.raises(ValueError, match="kl_weight needs reference_logp"):
        grpo.loss(*[jnp.zeros((1, 1, 1))] * 2, jnp.zeros((1, 1)), jnp.ones((1, 1, 1), bool), kl_weight=0.1)
    with pytest.raises(ValueError, match="unknown optimizer 'lion'; known: adam, sgd"):
        grpo.make_optimizer("lion")


rewards = st.lists(st.sampled_from([0.0, 0.1, 0.25, 0.7, 1.0]), min_size=5, max_size=5)


@settings(max_examples=50, deadline=None)
@given(rewards, st.lists(st.booleans(), min_size=5, max_size=5))
def test_advantages_sum_to_zero_and_do_not_read_the_level(values, valid):
    reward, valid = jnp.array([values]), jnp.array([valid])
    result = ADVANTAGES(reward, valid)
    kept = np.asarray(reward)[np.asarray(valid)]
    assert abs(float(result.sum())) < 1e-4
    assert bool((result != 0).any()) == (len(set(kept.tolist())) > 1)
    np.testing.assert_allclose(result, ADVANTAGES(2 * reward + 3, valid), atol=1e-3)
    np.testing.assert_array_equal(result, ADVANTAGES(jnp.where(valid, reward, jnp.nan), valid))


ADVANTAGES = jax.jit(functools.partial(advantages, eps=1e-6))


def tokens(*ratios):
    """A batch of one rollout per ratio list: log-probs, old log-probs (all -1)."""
    logp = jnp.log(jnp.array([ratios])) - 1.0
    return logp, jnp.full_like(logp, -1.0)


def test_loss_worked_by_hand():
    """Ratios 1.5 and 0.5, clipped to [0.8, 1.2]; advantage 2 and -2."""
    logp, old = tokens([1.5, 0.5, 1.0], [1.5, 0.5, 1.0])
    mask = jnp.array([[[True, True, True], [True, True, False]]])
    gain = jnp.array([[2.0, -2.0]])
    positive, negative = [1.2 * 2, 0.5 * 2, 1.0 * 2], [1.5 * -2, 0.8 * -2]  # min(w A, clip(w) A)
    np.testing.assert_allclose(grpo.loss(logp, old, gain, mask), -(sum(positive) + sum(negative)) / 5, rtol=1e-5)
    by_sequence = grpo.loss(logp, old, gain, mask, normalise="sequence")
    np.testing.assert_allclose(by_sequence, -(sum(positive) / 3 + sum(negative) / 2) / 2, rtol=1e-5)
    wide = grpo.loss(logp, old, gain, mask, clip_low=0.4, clip_high=0.3)
    np.testing.assert_allclose(wide, -(1.3 * 2 + 1 + 2 - 3 - 0.6 * 2) / 5, rtol=1e-5)


def test_gradient_stops_where_the_clip_bites():
    logp, old = tokens([1.5, 0.5], [1.5, 0.5])
    mask = jnp.ones(logp.shape, bool)
    gradient = jax.grad(grpo.loss)(logp, old, jnp.array([[2.0, -2.0]]), mask)
    np.testing.assert_allclose(gradient, [[[0, -2 * 0.5 / 4], [2 * 1.5 / 4, 0]]], atol=1e-6)


def test_on_policy_gradient_is_reinforce_over_all_policy_tokens():
    """At ratio one each token's gradient is -A / tokens: groups without signal count below, and shrink the step."""
    rng = np.random.default_rng(0)
    logp = jnp.asarray(rng.normal(size=(3, 2, 4)), jnp.float32)
    gain, mask = jnp.array([[1.0, -1.0], [0.0, 0.0], [0.0, 0.0]]), jnp.asarray(rng.random((3, 2, 4)) < 0.7)
    gradient = jax.grad(grpo.loss)(logp, logp, gain, mask)
    expected = np.where(mask, -np.asarray(gain)[..., None], 0) / np.asarray(mask).sum()
    np.testing.assert_allclose(gradient, expected, atol=1e-6)
    alone = jax.grad(grpo.loss)(logp[:1], logp[:1], gain[:1], mask[:1])
    share = np.asarray(mask[:1]).sum() / np.asarray(mask).sum()
    np.testing.assert_allclose(gradient[:1], share * alone, atol=1e-6)


def test_kl_is_the_k3_estimator():
    logp, reference = jnp.array([[[-1.0, -2.0, NAN]]]), jnp.array([[[-1.5, -1.0, NAN]]])
    mask = jnp.array([[[True, True, False]]])
    value = grpo.loss(logp, logp, jnp.zeros((1, 1)), mask, reference_logp=reference, kl_weight=0.3)
    expected = 0.3 * ((math.exp(-0.5) + 0.5 - 1) + (math.exp(1.0) - 1.0 - 1)) / 2
    np.testing.assert_allclose(value, expected, rtol=1e-5)


@pytest.mark.parametrize("normalise", ["token", "sequence"])
def test_nothing_under_the_mask_leaves_a_trace(normalise):
    logp = jnp.array([[[-1.0, NAN], [NAN, NAN]]])
    mask, gain = jnp.array([[[True, False], [False, False]]]), jnp.array([[0.7, NAN]])
    value, gradient = jax.value_and_grad(functools.partial(grpo.loss, normalise=normalise))(logp, logp, gain, mask)
    np.testing.assert_allclose(value, -0.7, rtol=1e-6)
    np.testing.assert_allclose(gradient, [[[-0.7, 0], [0, 0]]], rtol=1e-6)
    empty = grpo.loss(logp, logp, gain, jnp.zeros_like(mask), normalise=normalise)
    assert float(empty) == 0.0


def test_optimizers_step_as_their_formula():
    params, gradient = jnp.array([1.0, 2.0]), jnp.array([3.0, 4.0])  # norm 5: clipped to 0.6, 0.8

    def step(optimizer):
        return np.asarray(optimizer.update(gradient, optimizer.init(params), params)[0])

    np.testing.assert_allclose(step(grpo.make_optimizer("sgd", 0.5)), [-0.3, -0.4], rtol=1e-5)
    np.testing.assert_allclose(step(grpo.make_optimizer("sgd", 0.5, max_norm=None)), [-1.5, -2.0], rtol=1e-5)
    adam = step(grpo.make_optimizer("adam", 0.5, eps=0.1))
    np.testing.assert_allclose(adam, [-0.5 * 0.6 / 0.7, -0.5 * 0.8 / 0.9], rtol=1e-4)


SGD = grpo.make_optimizer("sgd", 0.1, max_norm=None)


@jax.jit
def sgd_step(params, trajectory, advantage):
    state = SGD.init(params)
    return grpo.update(params, state, GRAPHDEF, SGD, COUNTER, trajectory, advantage, temperature=4.0)


@pytest.fixture(scope="module")
def trajectory():
    return play(jax.random.key(0), PARAMS, TASKS)


def leaves(tree):
    return [np.asarray(x) for x in jax.tree.leaves(tree)]


def test_update_follows_the_policy_gradient(trajectory):
    gain = advantages(trajectory.reward, is_valid(trajectory.status))
    assert (np.asarray(gain) != 0).any()
    params, _, metrics = sgd_step(PARAMS, trajectory, gain)

    def objective(params):
        logp = score(nnx.merge(GRAPHDEF, params), COUNTER, trajectory, 4.0)
        return (gain[..., None] * logp).sum() / trajectory.mask.sum()

    gradient = jax.jit(jax.grad(objective))(PARAMS)
    for new, old, g in zip(*map(leaves, (params, PARAMS, gradient)), strict=True):
        np.testing.assert_allclose(new, old + 0.1 * g, atol=1e-5)
    np.testing.assert_allclose(metrics.grad_norm, optax.tree.norm(gradient), rtol=1e-4)
    assert float(metrics.logp_gap) < 1e-5 and float(metrics.clip_fraction) == 0
    assert 0 < float(metrics.entropy) < math.log(3)


def test_update_skips_groups_without_advantage_exactly(trajectory):
    """Groups without signal cost nothing and still count in the mean; 19 groups do not fill their last part."""
    several = jax.tree.map(lambda x: jnp.concatenate([x] * 7)[:19], trajectory)
    gain = jnp.where(
        jnp.arange(19)[:, None] % 3 == 1, jnp.tile(jnp.asarray([1.0, -1.0]), 16)[: trajectory.reward.shape[1]], 0.0
    )
    params, _, metrics = sgd_step(PARAMS, several, gain)

    def objective(params):
        logp = score(nnx.merge(GRAPHDEF, params), COUNTER, several, 4.0)
        return -(gain[..., None] * logp).sum() / several.mask.sum()

    value, gradient = jax.jit(jax.value_and_grad(objective))(PARAMS)
    for new, old, g in zip(*map(leaves, (params, PARAMS, gradient)), strict=True):
        np.testing.assert_allclose(new, old - 0.1 * g, atol=1e-5)
    still, _, nothing = sgd_step(PARAMS, several, jnp.zeros_like(gain))
    assert all(np.array_equal(a, b) for a, b in zip(leaves(still), leaves(PARAMS), strict=True))
    assert float(nothing.loss) == 0
    assert float(value) != 0 and float(metrics.grad_norm) > 0


@pytest.mark.slow
def test_update_reports_how_far_the_policy_has_moved(trajectory):
    moved = jax.tree.map(lambda x: 1.5 * x, PARAMS)
    metrics = sgd_step(moved, trajectory, jnp.full_like(trajectory.reward, 1e-6))[2]
    now = score(nnx.merge(GRAPHDEF, moved), COUNTER, trajectory, 4.0)
    gap = np.asarray(now - trajectory.logp)[np.asarray(trajectory.mask)]
    np.testing.assert_allclose(metrics.logp_gap, np.abs(gap).max(), rtol=1e-4)
    np.testing.assert_allclose(metrics.clip_fraction, ((np.exp(gap) < 0.8) | (np.exp(gap) > 1.2)).mean(), atol=1e-6)


def test_no_signal_no_step(trajectory):
    params, _, metrics = sgd_step(PARAMS, trajectory, jnp.zeros_like(trajectory.reward))
    for new, old in zip(leaves(params), leaves(PARAMS), strict=True):
        np.testing.assert_array_equal(new, old)
    assert float(metrics.grad_norm) == 0


def test_failed_and_absent_rollouts_change_nothing(trajectory):
    bad = jnp.zeros_like(trajectory.success).at[3:5].set(True)
    bad_status = trajectory.status.at[3].set(Status.ENV_ERROR).at[4].set(Status.ABSENT)

    def step(fill):
        spoilt = trajectory._replace(
            status=bad_status,
            reward=jnp.where(bad, fill, trajectory.reward),
            logp=jnp.where(bad[..., None], fill, trajectory.logp),
        )
        return sgd_step(PARAMS, spoilt, advantages(spoilt.reward, is_valid(spoilt.status)))

    one, two = step(0.5), step(NAN)
    for a, b in zip(leaves(one), leaves(two), strict=True):
        np.testing.assert_array_equal(a, b)
    used = np.asarray(trajectory.mask)[~np.asarray(bad)].sum()
    gain = advantages(trajectory.reward, ~bad)
    np.testing.assert_allclose(one[2].loss, -(gain * trajectory.tokens).sum() / used, atol=1e-5)


@pytest.mark.slow
def test_grpo_learns_the_counter():
    """Mean reward over all tasks rises from 0.4 to above 0.9; a goal or two may stay at a near miss (reward 0.75)."""
    optimizer = grpo.make_optimizer("adam", 0.01, eps=1e-5)

    @jax.jit
    def train(key, params):
        def step(carry, number):
            params, state = carry
            model = nnx.merge(GRAPHDEF, params)
            played = rollout(jax.random.fold_in(key, number), model, COUNTER, TASKS, group_size=16, temperature=4.0)
            gain = advantages(played.reward, is_valid(played.status))
            params, state, metrics = grpo.update(
                params, state, GRAPHDEF, optimizer, COUNTER, played, gain, temperature=4.0
            )
            return (params, state), (played.reward.mean(), metrics.logp_gap)

        return jax.lax.scan(step, (params, optimizer.init(params)), jnp.arange(200))[1]

    reward, gap = train(jax.random.key(0), PARAMS)
    assert float(reward[0]) < 0.5
    assert float(reward[-10:].mean()) > 0.9
    assert float(gap.max()) < 1e-4  # rollout and update agree on the policy, at every step
