"""Plays groups of episodes on the device, and scores them again with a teacher.

One turn is ``C`` sampled tokens and one step of the environment; policy and environment positions interleave as
``start -> token 0 -> feed -> token 1 -> ... -> result -> token 0 of the next turn``, ``T = max_turns * C`` in all.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from envsched_jax.environments.base import Environment
from envsched_jax.policy.transformer import Cache, Prefix, Transformer
from envsched_jax.types import Key, PyTree, Status

_ILLEGAL = -1e30


class Trajectory(NamedTuple):
    """``G`` episodes for each of ``B`` tasks; position ``t`` reads ``inputs[t]`` and samples ``target[t]``."""

    task: jax.Array  # i32[B]
    inputs: jax.Array  # i32[B, G, T, F]
    target: jax.Array  # i32[B, G, T]
    legal: jax.Array  # bool[B, G, T, V], the tokens allowed at that position
    logp: jax.Array  # f32[B, G, T], of the target under the policy that sampled it; 0 where mask is false
    mask: jax.Array  # bool[B, G, T], sampled before the episode was done
    reward: jax.Array  # f32[B, G]
    success: jax.Array  # bool[B, G]
    turns: jax.Array  # i32[B, G]
    tokens: jax.Array  # f32[B, G], sampled tokens: the sum of mask
    status: jax.Array  # i8[B, G], OK where the episode ended by itself, TRUNCATED where it ran out of turns


class _Play(NamedTuple):
    """The carry of the loop over turns."""

    state: PyTree  # leaves [B, G, ...]
    position: jax.Array  # i32[B, G, F], what the policy reads next
    done: jax.Array  # bool[B, G]
    turns: jax.Array  # i32[B, G]
    cache: Cache


def _prefix(model: Transformer, environment: Environment, task: jax.Array) -> Prefix:
    ids, mask = jax.vmap(environment.prompt)(task)
    positions = jnp.broadcast_to(jnp.arange(environment.prompt_length), mask.shape)
    return model.prefill(ids, positions, mask, environment.bidirectional)[1]


def _distribution(logits: jax.Array, legal: jax.Array, temperature: float | jax.Array) -> jax.Array:
    """Returns log-probabilities ``f32[..., V]`` over the legal tokens at this temperature."""
    return jax.nn.log_softmax(jnp.where(legal, logits / temperature, _ILLEGAL), axis=-1)


def _over(function: Callable[..., Any]) -> Callable[..., Any]:
    """Maps a function of one episode over tasks and group."""
    return jax.vmap(jax.vmap(function))


def _streams(key: Key, uid: jax.Array, group_size: int) -> Key:
    """Returns one key per episode, ``key[B, G]``."""
    of_task = jax.vmap(jax.random.fold_in, (None, 0))(key, uid)
    members = jax.vmap(jax.random.fold_in, (None, 0))
    return jax.vmap(members, (0, None))(of_task, jnp.arange(group_size))


def _where(condition: jax.Array, yes: jax.Array, no: jax.Array) -> jax.Array:
    """Selects whole episodes: ``condition: bool[B, G]``, the others ``[B, G, ...]``."""
    return jnp.where(jnp.expand_dims(condition, range(2, yes.ndim)), yes, no)


def _join_turns(records: jax.Array) -> jax.Array:
    """``[M, B, G, C, ...]`` to ``[B, G, M * C, ...]``."""
    moved = jnp.moveaxis(records, 0, 2)
    return moved.reshape(*moved.shape[:2], -1, *moved.shape[4:])


def _at(values: jax.Array, index: jax.Array) -> jax.Array:
    return jnp.take_along_axis(values, index[..., None], axis=-1)[..., 0]


def _choose(keys: Key | None, log_probs: jax.Array) -> jax.Array:
    """Draws one token ``i32[B, G]`` from ``log_probs: f32[B, G, V]``, each sequence with its own key; None: arg-max.

    Inverts the cumulative distribution: one random number per token, where Gumbel noise takes ``V``.
    """
    if keys is None:
        return jnp.argmax(log_probs, axis=-1).astype(jnp.int32)
    mass = jnp.where(log_probs > 0.5 * _ILLEGAL, jnp.cumsum(jnp.exp(log_probs), axis=-1), 0.0)  # never an illegal one
    level = _over(jax.random.uniform)(keys) * mass.max(axis=-1)
    return jnp.argmax(mass > level[..., None], axis=-1).astype(jnp.int32)


def rollout(
    key: Key,
    model: Transformer,
    environment: Environment,
    task: jax.Array,
    uid: jax.Array | None = None,
    *,
    group_size: int,
    temperature: float | jax.Array = 1.0,
    greedy: bool = False,
) -> Trajectory:
    """Plays ``group_size`` episodes of each task.

    Every draw belongs to (key, uid of the task, member of the group, position), so that neither the order of the
    batch nor its padding changes an episode. The same uid twice in a batch gives the same episodes twice.

    Args:
      key: consumed.
      model: the policy; merge it once, outside of any loop.
      environment: static.
      task: ``i32[B]``.
      uid: ``u32[B]``, the stream of each row's draws; the task itself if None.
      group_size: ``G``, static.
      temperature: divides the logits, in sampling and in the recorded log-probabilities.
      greedy: take the most probable token instead of drawing; static.

    Returns:
      The :class:`Trajectory`; nothing in it changes for an episode once that is done.
    """
    length = environment.call_length
    batch = (task.shape[0], group_size)
    prefix = _prefix(model, environment, task)
    streams = _streams(key, task if uid is None else uid, group_size)

    def turn(play: _Play, number: jax.Array) -> tuple[_Play, tuple[jax.Array, ...]]:
        call = jnp.zeros((*batch, length), jnp.int32)
        position, cache, records = play.position, play.cache, []
        for j in range(length):  # static and short
            index = number * length + j
            place = jnp.broadcast_to(environment.prompt_length + index, batch)
            hidden, cache = model.decode(position, place, prefix, cache, index)
            legal = _over(lambda state, call, j=j: environment.legal(state, call, j))(play.state, call)
            log_probs = _distribution(model.logits(hidden, environment.vocab_size), legal, temperature)
            keys = None if greedy else _over(lambda stream, index=index: jax.random.fold_in(stream, index))(streams)
            token = _choose(keys, log_probs)
            call = call.at[..., j].set(token)
            records.append((position, token, legal, jnp.where(play.done, 0.0, _at(log_probs, token)), ~play.done))
            if j < length - 1:
                position = _over(lambda call, j=j: environment.feed(call, j))(call)
        state, result, ended = _over(environment.step)(play.state, call)
        frozen = functools.partial(_where, play.done)
        following = _Play(
            state=jax.tree.map(frozen, play.state, state),
            position=frozen(play.position, result),
            done=play.done | ended,
            turns=play.turns + ~play.done,
            cache=cache,
        )
        return following, jax.tree.map(lambda *columns: jnp.stack(columns, axis=2), *records)

    first = _Play(
        state=jax.tree.map(lambda x: jnp.repeat(x[:, None], group_size, axis=1), jax.vmap(environment.reset)(task)),
        position=jnp.broadcast_to(environment.start[None, None], (*batch, environment.num_fields)),
        done=jnp.zeros(batch, bool),
        turns=jnp.zeros(batch, jnp.int32),
        cache=model.init_cache(*batch, environment.max_turns * length),
    )
    last, records = jax.lax.scan(turn, first, jnp.arange(environment.max_turns))
    inputs, target, legal, logp, mask = jax.tree.map(_join_turns, records)
    reward, success = _over(environment.verify)(last.state)
    status = jnp.where(last.done, jnp.int8(Status.OK), jnp.int8(Status.TRUNCATED))
    tokens = mask.sum(axis=-1).astype(jnp.float32)
    return Trajectory(task, inputs, target, legal, logp, mask, reward, success, last.turns, tokens, status)


def log_probs(
    model: Transformer, environment: Environment, trajectory: Trajectory, temperature: float | jax.Array = 1.0
) -> jax.Array:
    """Returns ``f32[B, G, T, V]``: the log-probabilities of all tokens at every position, teacher-forced."""
    prefix = _prefix(model, environment, trajectory.task)
    places = environment.prompt_length + jnp.arange(trajectory.target.shape[-1])
    hidden = model.extend(trajectory.inputs, jnp.broadcast_to(places, trajectory.target.shape), prefix)
    return _distribution(model.logits(hidden, environment.vocab_size), trajectory.legal, temperature)


def score(
    model: Transformer, environment: Environment, trajectory: Trajectory, temperature: float | jax.Array = 1.0
) -> jax.Array:
    """Returns ``f32[B, G, T]``: the log-probability of each target under ``model``, 0 where the mask is false.

    With the model and the temperature that sampled the trajectory this is ``trajectory.logp``, up to rounding.
    """
    values = _at(log_probs(model, environment, trajectory, temperature), trajectory.target)
    return jnp.where(trajectory.mask, values, 0.0)


def evaluate(
    key: Key,
    model: Transformer,
    environment: Environment,
    tasks: jax.Array,
    *,
    group_size: int,
    temperature: float | jax.Array = 1.0,
    chunk: int = 64,
    greedy: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Plays many tasks, ``chunk`` at a time; the result does not depend on the chunk.

    Args:
      key: consumed.
      model: the policy.
      environment: static.
      tasks: ``i32[N]``; a task that occurs twice gets the same episodes twice.
      group_size: ``G``, static.
      temperature: as in :func:`rollout`.
      chunk: tasks per pass, static; bounds the memory.
      greedy: as in :func:`rollout`.

    Returns:
      reward ``f32[N, G]`` and success ``bool[N, G]``.
    """
    count = tasks.shape[0]
    chunk = min(chunk, count)
    padded = jnp.pad(tasks, (0, -count % chunk), mode="edge").reshape(-1, chunk)

    def play(rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        trajectory = rollout(
            key, model, environment, rows, group_size=group_size, temperature=temperature, greedy=greedy
        )
        return trajectory.reward, trajectory.success

    reward, success = jax.lax.map(play, padded)
    return reward.reshape(-1, group_size)[:count], success.reshape(-1, group_size)[:count]
