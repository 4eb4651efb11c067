"""The rollout engine on a small counter world, against a replay in plain Python."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from envsched_jax.environments.base import Environment
from envsched_jax.policy import Transformer, TransformerConfig
from envsched_jax.rollout import Trajectory, evaluate, log_probs, rollout, score
from envsched_jax.types import Status

# A counter from 0 to 4. Tokens: 1 up, 2 down, 3 submit; 4 by one, 5 by two; 6 + s shows the counter s.
F, P, M, C, V, N = 2, 3, 4, 2, 11, 10
CONFIG = TransformerConfig(V, num_layers=1, embed_dim=16, num_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=16)


def _prompt(task):
    goal = 6 + task % 5
    return jnp.array([[6, 0], [0, 0], [1, 0]]).at[1, 0].set(goal), jnp.array([True, True, False]).at[2].set(task >= 5)


def _legal(state, call, j):
    tokens = jnp.arange(V)
    if j == 0:
        return (tokens >= 1) & (tokens <= 3)
    return (tokens == 4) | ((tokens == 5) & (call[0] != 3))


def _step(state, call):
    goal, counter, _ = state
    moved = jnp.clip(counter + (call[1] - 3) * jnp.array([0, 1, -1, 0])[call[0]], 0, 4)
    submitted = call[0] == 3
    return (goal, moved, submitted), jnp.array([0, 0]).at[0].set(6 + moved).at[1].set(call[1]), submitted


def _verify(state):
    goal, counter, submitted = state
    success = submitted & (goal == counter)
    return jnp.where(submitted, 1.0 - jnp.abs(goal - counter) / 4, 0.0), success


COUNTER = Environment(
    num_fields=F,
    prompt_length=P,
    max_turns=M,
    call_length=C,
    vocab_size=V,
    start=jnp.array([6, 0]),
    prompt=_prompt,
    reset=lambda task: (task % 5, jnp.int32(0), jnp.bool_(False)),
    legal=_legal,
    feed=lambda call, j: jnp.array([0, 0]).at[0].set(call[j]),
    step=_step,
    verify=_verify,
)
GRAPHDEF, PARAMS = nnx.split(Transformer(CONFIG, rngs=nnx.Rngs(0)))
TASKS = jnp.arange(N, dtype=jnp.int32)


@functools.partial(jax.jit, static_argnames=("group_size", "greedy"))
def play(key, params, task, uid=None, temperature=4.0, group_size=8, greedy=False):
    model = nnx.merge(GRAPHDEF, params)
    return rollout(key, model, COUNTER, task, uid, group_size=group_size, temperature=temperature, greedy=greedy)


@jax.jit
def rescore(params, trajectory, temperature):
    model = nnx.merge(GRAPHDEF, params)
    return score(model, COUNTER, trajectory, temperature), log_probs(model, COUNTER, trajectory, temperature)


@pytest.fixture(scope="module")
def played() -> Trajectory:
    return jax.tree.map(np.asarray, play(jax.random.key(0), PARAMS, TASKS))


def replay(task, targets):
    """The episode that the targets make, in plain Python."""
    goal, counter, done, read = task % 5, 0, False, [6, 0]
    inputs, mask, legal, turns = [], [], [], 0
    for turn in range(M):
        tool, amount = targets[2 * turn], targets[2 * turn + 1]
        inputs += [read, [tool, 0]]
        mask += [not done] * 2
        legal += [{1, 2, 3}, {4} if tool == 3 else {4, 5}]
        if not done:
            turns += 1
            counter = min(4, max(0, counter + {1: 1, 2: -1, 3: 0}[tool] * (amount - 3)))
            done, read = tool == 3, [6 + counter, amount]
    success = done and counter == goal
    return inputs, mask, legal, turns, done, success, done * (1 - abs(goal - counter) / 4)


def test_every_episode_equals_its_replay(played):
    assert 0 < played.success.mean() < 1 and set(played.status.ravel()) == {Status.OK, Status.TRUNCATED}
    for b in range(N):
        for g in range(8):
            inputs, mask, legal, turns, done, success, reward = replay(b, played.target[b, g].tolist())
            np.testing.assert_array_equal(played.inputs[b, g], inputs)
            np.testing.assert_array_equal(played.mask[b, g], mask)
            assert [set(np.flatnonzero(row)) for row in played.legal[b, g]] == legal
            assert played.turns[b, g] == turns and played.tokens[b, g] == 2 * turns
            assert played.status[b, g] == (Status.OK if done else Status.TRUNCATED)
            assert played.success[b, g] == success and played.reward[b, g] == reward


def test_types_and_shapes(played):
    shapes = {
        "task": ((N,), "int32"),
        "inputs": ((N, 8, M * C, F), "int32"),
        "target": ((N, 8, M * C), "int32"),
        "legal": ((N, 8, M * C, V), "bool"),
        "logp": ((N, 8, M * C), "float32"),
        "mask": ((N, 8, M * C), "bool"),
        "reward": ((N, 8), "float32"),
        "success": ((N, 8), "bool"),
        "turns": ((N, 8), "int32"),
        "tokens": ((N, 8), "float32"),
        "status": ((N, 8), "int8"),
    }
    assert {name: (x.shape, str(x.dtype)) for name, x in played._asdict().items()} == shapes


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_recorded_log_probs_equal_teacher_forced_ones(temperature):
    trajectory = play(jax.random.key(1), PARAMS, TASKS, temperature=temperature)
    scored, everything = rescore(PARAMS, trajectory, temperature)
    np.testing.assert_allclose(scored, trajectory.logp, atol=1e-5)
    assert (np.asarray(scored)[~np.asarray(trajectory.mask)] == 0).all()
    mass = np.exp(np.asarray(everything, np.float64))
    np.testing.assert_allclose(mass.sum(-1), 1, atol=1e-5)
    assert (mass[~np.asarray(trajectory.legal)] == 0).all()


def test_temperature_divides_the_logits(played):
    _, cold = rescore(PARAMS, played, 0.5)
    _, plain = rescore(PARAMS, played, 1.0)
    legal = played.legal
    weight = np.where(legal, np.exp(2 * np.where(legal, plain, 0.0)), 0)
    np.testing.assert_allclose(np.exp(cold), weight / weight.sum(-1, keepdims=True), atol=1e-5)


def test_frequencies_are_the_stated_probabilities():
    """20,000 draws of the first call, each cell within 4.5 standard errors; illegal tokens never."""
    trajectory = play(jax.random.key(2), PARAMS, TASKS[3:4], temperature=0.7, group_size=20000)
    _, everything = rescore(PARAMS, jax.tree.map(lambda x: x[:, :1] if x.ndim > 1 else x, trajectory), 0.7)
    first = np.exp(np.asarray(everything[0, 0, 0], np.float64))
    target, logp = np.asarray(trajectory.target[0]), np.asarray(trajectory.logp[0], np.float64)
    share = np.bincount(target[:, 0], minlength=V) / 20000
    assert (np.abs(share - first) <= 4.5 * np.sqrt(first * (1 - first) / 20000)).all()
    for tool in (1, 2):  # the second token, given the first
        drawn = target[:, 0] == tool
        p = np.exp(logp[drawn & (target[:, 1] == 5), 1][0])
        assert abs((target[drawn, 1] == 5).mean() - p) <= 4.5 * np.sqrt(p * (1 - p) / drawn.sum())
    assert (target[target[:, 0] == 3, 1] == 4).all()


def test_greedy_takes_the_most_probable():
    trajectory = play(jax.random.key(3), PARAMS, TASKS, greedy=True, group_size=2)
    _, everything = rescore(PARAMS, trajectory, 1.0)
    np.testing.assert_array_equal(trajectory.target, np.argmax(everything, -1))
    np.testing.assert_array_equal(trajectory.target[:, 0], trajectory.target[:, 1])


def test_draws_belong_to_the_task_and_not_to_its_place(played):
    order = np.array([7, 2, 9, 0, 0, 1, 3, 3, 3, 8])
    again = play(jax.random.key(0), PARAMS, TASKS[order])
    for name in ("target", "mask", "reward", "status"):
        np.testing.assert_array_equal(getattr(again, name), getattr(played, name)[order], err_msg=name)
    np.testing.assert_allclose(again.logp, played.logp[order], atol=1e-6)


def test_key_uid_and_member_each_give_other_draws(played):
    other_key = play(jax.random.key(5), PARAMS, TASKS).target
    other_uid = play(jax.random.key(0), PARAMS, TASKS, TASKS + 100).target
    for target in (np.asarray(other_key), np.asarray(other_uid), played.target[:, ::-1]):
        assert (target[:, :, 0] == played.target[:, :, 0]).mean() < 0.9
    stated = play(jax.random.key(0), PARAMS, TASKS[::-1], TASKS[::-1]).target[::-1]
    np.testing.assert_array_equal(stated, played.target)


def test_seeds_are_a_vmap(played):
    _, other = nnx.split(Transformer(CONFIG, rngs=nnx.Rngs(1)))
    params = jax.tree.map(lambda *x: jnp.stack(x), PARAMS, other)
    keys = jnp.stack([jax.random.key(0), jax.random.key(9)])
    both = jax.vmap(play, (0, 0, None))(keys, params, TASKS)
    np.testing.assert_array_equal(both.target[0], played.target)
    alone = play(jax.random.key(9), other, TASKS)
    np.testing.assert_array_equal(both.target[1], alone.target)
    np.testing.assert_allclose(both.logp[1], alone.logp, atol=1e-5)


def test_evaluation_does_not_depend_on_the_chunk(played):
    @jax.jit
    def run(key, params):
        model = nnx.merge(GRAPHDEF, params)
        return evaluate(key, model, COUNTER, TASKS, group_size=8, temperature=4.0, chunk=4)  # the last one is padded

    reward, success = run(jax.random.key(0), PARAMS)
    np.testing.assert_array_equal(reward, played.reward)
    np.testing.assert_array_equal(success, played.success)
