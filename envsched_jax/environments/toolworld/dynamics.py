"""ToolWorld on the device: one step function and one verifier for every environment."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from envsched_jax.environments.base import Environment
from envsched_jax.environments.toolworld import vocabulary as vocab
from envsched_jax.environments.toolworld.generator import Tasks, World


class State(NamedTuple):
    """Where one episode stands."""

    task: jax.Array  # i32[]
    slots: jax.Array  # i32[Z]
    turn: jax.Array  # i32[], calls made
    ended: jax.Array  # bool[], by a terminal tool


def apply_call(
    world: World, env: jax.Array, slots: jax.Array, tool: jax.Array, argument: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Runs one tool call: the first rule whose guard holds fires.

    Args:
      world: the tables.
      env: i32[], environment.
      slots: i32[Z], state.
      tool: i32[], tool slot in ``0..A-1``.
      argument: i32[], value of the argument, -1 for none.

    Returns:
      The new state, i32[Z], and what the answer tells, i32[3]: ids of code, result symbol and value.
    """
    need, put = world.need[env, tool], world.put[env, tool]  # [R, Z]
    asked = world.argument_is[env, tool]  # [R]
    guard = jnp.all((need < 0) | (need == slots[None]), axis=1) & ((asked < 0) | (slots[asked] == argument))
    guard &= world.rule_mask[env, tool]
    rule, fired = jnp.argmax(guard), guard.any()
    after = jnp.where(put[rule] >= 0, put[rule], slots)
    spoilt = slots.at[vocab.MISTAKE].set(1)
    slots_next = jnp.where(fired, after, jnp.where(world.mistake[env, tool], spoilt, slots))
    read = world.read[env, tool][rule]
    code = jnp.where(fired, world.code[env, tool][rule], vocab.Code.ERROR)
    told = fired & (code == vocab.Code.OK)
    answer = jnp.stack(
        [
            vocab.FIRST["code"] + code,
            jnp.where(told, world.gives[env, tool], 0),
            jnp.where(told & (read >= 0), vocab.FIRST["value"] + slots[read], 0),
        ]
    )
    return slots_next, answer


def verify(tasks: Tasks, state: State) -> tuple[jax.Array, jax.Array]:
    """Scores a final state.

    A task is solved if a terminal tool ended the episode, every check holds and no mistake was made. Reward of a
    solved task is 1. Else: ``binary`` 0; ``partial`` half the share of those checks that did not hold at the start, 0
    after a mistake; ``penalty`` -0.5 after a mistake, 0 otherwise.

    Returns:
      reward f32[], success bool[].
    """
    goal = tasks.goal[state.task]
    checked, spoilt = goal >= 0, state.slots[vocab.MISTAKE] == 1
    holds = state.slots == goal
    success = state.ended & jnp.all(~checked | holds) & ~spoilt
    was_open = checked & (tasks.init[state.task] != goal)
    share = jnp.sum(was_open & holds) / jnp.maximum(jnp.sum(was_open), 1)
    partial = jnp.where(spoilt, 0.0, 0.5 * share)
    failed = jnp.stack([jnp.zeros_like(partial), partial, jnp.where(spoilt, -0.5, 0.0)])[tasks.reward[state.task]]
    return jnp.where(success, 1.0, failed), success


def environment(world: World, tasks: Tasks) -> Environment:
    """Binds the tables to the functions that the rollout engine calls; all of them are about one episode."""
    world = World(*(jnp.asarray(x) for x in world))
    tasks = Tasks(*(jnp.asarray(x) for x in tasks))
    outputs = jnp.arange(vocab.NUM_OUTPUTS)
    is_argument = outputs > vocab.NO_ARGUMENT

    def prompt(task: jax.Array) -> tuple[jax.Array, jax.Array]:
        ids = jnp.concatenate([world.card[tasks.env[task]], tasks.tail[task]])
        return ids, ids[:, 0] > 0

    def reset(task: jax.Array) -> State:
        return State(task, tasks.init[task], jnp.int32(0), jnp.bool_(False))

    def legal(state: State, call: jax.Array, position: int) -> jax.Array:
        env = tasks.env[state.task]
        if position == 0:
            return (
                jnp.zeros(vocab.NUM_OUTPUTS, bool)
                .at[vocab.FIRST["tool"] + jnp.arange(vocab.TOOLS)]
                .set(world.tool_mask[env])
            )
        takes = world.takes_argument[env, call[0] - vocab.FIRST["tool"]]
        return jnp.where(takes, is_argument, outputs == vocab.NO_ARGUMENT)

    def feed(call: jax.Array, position: int) -> jax.Array:
        return jnp.zeros(vocab.NUM_FIELDS, jnp.int32).at[0].set(call[position])

    def step(state: State, call: jax.Array) -> tuple[State, jax.Array, jax.Array]:
        env = tasks.env[state.task]
        tool, argument = call[0] - vocab.FIRST["tool"], call[1] - vocab.NO_ARGUMENT - 1
        slots, answer = apply_call(world, env, state.slots, tool, argument)
        ended, turn = world.terminal[env, tool], state.turn + 1
        result = jnp.zeros(vocab.NUM_FIELDS, jnp.int32).at[0].set(call[1]).at[1:4].set(answer)
        return State(state.task, slots, turn, ended), result, ended | (turn >= tasks.budget[state.task])

    def verify_state(state: State) -> tuple[jax.Array, jax.Array]:
        return verify(tasks, state)

    start = jnp.zeros(vocab.NUM_FIELDS, jnp.int32).at[1].set(vocab.FIRST["code"] + vocab.Code.START)
    return Environment(
        num_fields=vocab.NUM_FIELDS,
        prompt_length=vocab.PROMPT_LENGTH,
        max_turns=vocab.MAX_TURNS,
        call_length=2,
        vocab_size=vocab.NUM_OUTPUTS,
        prompt=prompt,
        start=start,
        reset=reset,
        legal=legal,
        feed=feed,
        step=step,
        verify=verify_state,
    )
