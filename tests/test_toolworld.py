"""ToolWorld against a step function in plain Python loops, its own solutions, and hand-worked rewards."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envsched_jax.environments import toolworld as tw
from envsched_jax.environments.toolworld import topologies
from envsched_jax.environments.toolworld import vocabulary as vocab
from envsched_jax.train import imitation

CONFIG = tw.ToolWorldConfig(
    num_domains=3,
    tasks_per_env=20,
    eval_per_env=4,
    held_out_envs=4,
    eval_per_held_out_env=8,
    reward_mix=(0.4, 0.3, 0.3),
)
SUITE = tw.generate(CONFIG)
ENVIRONMENT = tw.environment(SUITE.world, SUITE.tasks)
play = jax.jit(jax.vmap(lambda task, script: imitation.demonstrate(ENVIRONMENT, task, script)))
call = jax.jit(
    lambda env, slots, tool, argument: tw.apply_call(jax.tree.map(jnp.asarray, SUITE.world), env, slots, tool, argument)
)


def oracle_call(world, env, slots, tool, argument):
    """One tool call, in loops."""
    for r in range(vocab.RULES):
        if not world.rule_mask[env, tool, r]:
            continue
        fires = all(n < 0 or slots[z] == n for z, n in enumerate(world.need[env, tool, r]))
        asked = world.argument_is[env, tool, r]
        if asked >= 0 and slots[asked] != argument:
            fires = False
        if fires:
            after = [p if p >= 0 else s for p, s in zip(world.put[env, tool, r], slots, strict=True)]
            code, read = world.code[env, tool, r], world.read[env, tool, r]
            ok = code == vocab.Code.OK
            told = vocab.FIRST["value"] + slots[read] if ok and read >= 0 else 0
            return after, [vocab.FIRST["code"] + code, world.gives[env, tool] if ok else 0, told]
    after = list(slots)
    if world.mistake[env, tool]:
        after[vocab.MISTAKE] = 1
    return after, [vocab.FIRST["code"] + vocab.Code.ERROR, 0, 0]


def test_every_script_solves_its_task():
    demos = play(jnp.arange(len(SUITE.records)), jnp.asarray(SUITE.script))
    assert bool(demos.success.all())
    assert np.asarray(demos.reward).min() == 1.0
    assert {name for name in topologies.TOPOLOGIES} == {r.env_id.split("/")[1] for r in SUITE.records}


def test_doing_nothing_solves_no_task():
    """Neither submitting at once nor never calling anything is rewarded, whatever the kind of reward."""
    submit = SUITE.world.card[:, :, 1] == vocab.FIRST["op"] + vocab.Op.SUBMIT
    script = np.zeros_like(SUITE.script)
    script[:, 0, 0] = vocab.FIRST["tool"] + submit.argmax(1)[SUITE.tasks.env]
    script[:, 0, 1] = vocab.NO_ARGUMENT
    for calls in (script, np.zeros_like(script)):
        demos = play(jnp.arange(len(SUITE.records)), jnp.asarray(calls))
        assert not bool(demos.success.any())
        assert np.asarray(demos.reward).max() <= 0.0


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_calls_equal_the_oracle(data):
    env = data.draw(st.integers(0, SUITE.world.tool_mask.shape[0] - 1))
    tool = data.draw(st.sampled_from(np.flatnonzero(SUITE.world.tool_mask[env]).tolist()))
    slots = data.draw(st.lists(st.integers(0, vocab.VALUES - 1), min_size=vocab.SLOTS, max_size=vocab.SLOTS))
    argument = data.draw(st.integers(-1, vocab.VALUES - 1))
    after, answer = call(env, jnp.asarray(slots, jnp.int32), tool, argument)
    expected_after, expected_answer = oracle_call(SUITE.world, env, slots, tool, argument)
    assert np.asarray(after).tolist() == expected_after
    assert np.asarray(answer).tolist() == expected_answer


def test_walks_equal_the_oracle():
    """Rules fire rarely from random states; walks from real initial states meet every rule that a policy meets."""
    rng = np.random.default_rng(0)
    fired = set()
    for task in rng.choice(len(SUITE.records), 60):
        env, slots = int(SUITE.tasks.env[task]), SUITE.tasks.init[task].tolist()
        for _ in range(8):
            tool = int(rng.choice(np.flatnonzero(SUITE.world.tool_mask[env])))
            argument = int(rng.integers(vocab.VALUES)) if SUITE.world.takes_argument[env, tool] else -1
            expected, answer = oracle_call(SUITE.world, env, slots, tool, argument)
            after, told = call(env, jnp.asarray(slots, jnp.int32), tool, argument)
            assert np.asarray(after).tolist() == expected
            assert np.asarray(told).tolist() == answer
            slots = expected
            fired.add(answer[0] - vocab.FIRST["code"])
    assert fired == {vocab.Code.OK, vocab.Code.ERROR, vocab.Code.BROKEN}


@pytest.mark.parametrize(
    ("kind", "slots", "ended", "reward"),
    [
        (0, {0: 1, 1: 1}, True, 1.0),
        (0, {0: 1, 1: 1}, False, 0.0),  # nobody submitted
        (0, {0: 1}, True, 0.0),
        (0, {0: 1, 1: 1, vocab.MISTAKE: 1}, True, 0.0),
        (1, {0: 1}, True, 0.25),  # one of the two checks that were open, half of its share
        (1, {0: 1, vocab.MISTAKE: 1}, True, 0.0),
        (1, {}, True, 0.0),  # slot 2 held from the start and earns nothing
        (2, {0: 1}, True, 0.0),
        (2, {0: 1, 1: 1, vocab.MISTAKE: 1}, True, -0.5),
        (2, {0: 1, 1: 1}, True, 1.0),
    ],
)
def test_rewards_by_hand(kind, slots, ended, reward):
    goal = np.full((1, vocab.SLOTS), -1, np.int32)
    goal[0, :3] = 1
    init = np.zeros((1, vocab.SLOTS), np.int32)
    init[0, 2] = 1
    tasks = tw.Tasks(
        *(jnp.asarray(x) for x in (np.zeros(1, np.int32), init, goal, np.ones(1), np.asarray([kind]), np.zeros(1)))
    )
    state = init[0].copy()
    state[list(slots)] = list(slots.values())
    got, success = tw.verify(tasks, tw.State(jnp.int32(0), jnp.asarray(state), jnp.int32(1), jnp.bool_(ended)))
    assert float(got) == reward
    assert bool(success) == (reward == 1.0)


def test_splits_share_nothing():
    groups = {
        s: {SUITE.records[i].group_id for i in SUITE.where(s)} for s in (tw.TRAIN, tw.HELD_OUT_TASK, tw.HELD_OUT_ENV)
    }
    envs = {s: {SUITE.records[i].env_id for i in SUITE.where(s)} for s in groups}
    assert not groups[tw.TRAIN] & groups[tw.HELD_OUT_TASK]
    content = {s: set() for s in groups}
    for s, seen in content.items():
        for i in SUITE.where(s):  # the prompt without its header, and the solution
            seen.add((int(SUITE.tasks.env[i]), SUITE.tasks.tail[i, :-1].tobytes(), SUITE.script[i].tobytes()))
    assert not content[tw.TRAIN] & content[tw.HELD_OUT_TASK]
    assert not envs[tw.TRAIN] & envs[tw.HELD_OUT_ENV]
    assert envs[tw.HELD_OUT_TASK] <= envs[tw.TRAIN]
    assert len(envs[tw.HELD_OUT_ENV]) == CONFIG.held_out_envs
    assert min(len(groups[s]) for s in groups) > 10


def test_same_config_same_suite_other_seed_other_suite():
    again = tw.generate(CONFIG)
    assert again.records == SUITE.records
    assert all(np.array_equal(a, b) for a, b in zip(again.tasks, SUITE.tasks, strict=True))
    other = tw.generate(dataclasses.replace(CONFIG, seed=1))
    assert other.records != SUITE.records


def test_a_prompt_tells_what_a_policy_needs_and_nothing_hidden():
    """Tasks that differ only in hidden slots have the same prompt."""
    ids, mask = jax.vmap(ENVIRONMENT.prompt)(jnp.arange(len(SUITE.records)))
    assert ids.shape[1:] == (vocab.PROMPT_LENGTH, vocab.NUM_FIELDS)
    assert int(ids.max()) < vocab.VOCAB_SIZE
    assert bool((mask == (ids[..., 0] > 0)).all())
    seen = {}
    pairs = 0
    for i, prompt in enumerate(np.asarray(ids)):
        first = seen.setdefault(prompt.tobytes(), i)
        hidden = slice(vocab.SYMBOLS, vocab.SYMBOLS + vocab.HIDDEN)
        if not np.array_equal(SUITE.tasks.init[first, hidden], SUITE.tasks.init[i, hidden]):
            pairs += 1
            assert SUITE.tasks.env[first] == SUITE.tasks.env[i]
    assert pairs > 0


@pytest.mark.parametrize("structure", [0.0, 1.0])
def test_structure_decides_what_difficulty_depends_on(structure):
    habit = tw.habits(dataclasses.replace(CONFIG, num_domains=8, structure=structure))
    over_style, over_place = habit.std(axis=2).max(), habit.reshape(-1, vocab.STYLES).std(axis=0).max()
    assert habit.std() > 0.3
    assert (over_style < 1e-12) == (structure == 1.0)
    assert (over_place < 1e-12) == (structure == 0.0)


@pytest.mark.parametrize("bad", [{"structure": 1.5}])
def test_structure_out_of_range(bad):
    with pytest.raises(ValueError, match=r"structure=1.5: expected a number from 0 to 1"):
        tw.habits(dataclasses.replace(CONFIG, **bad))


def test_too_many_held_out_environments():
    with pytest.raises(ValueError, match=r"held_out_envs=40: only \d+ of 18 environments can be held out"):
        tw.generate(dataclasses.replace(CONFIG, held_out_envs=40))


def test_near_duplicates_share_goal_and_length():
    by_group = {}
    for i, record in enumerate(SUITE.records):
        by_group.setdefault(record.group_id, []).append(i)
    pairs = [group for group in by_group.values() if len(group) > 1]
    assert len(pairs) > 30
    for group in pairs:
        assert len({SUITE.records[i].n_turns for i in group}) == 1
        assert len({int(SUITE.tasks.tail[i, 0, 0]) for i in group}) == 1
