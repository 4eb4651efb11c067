"""Warm start: imitation of scripted solutions by an expert that lapses, on other environments of the same family."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from envsched_jax.environments.base import Environment
from envsched_jax.policy import Transformer


class Demonstrations(NamedTuple):
    """Scripted episodes, teacher-forced. T positions, V outputs, P prompt positions, F ids per position."""

    prompt: jax.Array  # i32[N, P, F]
    prompt_mask: jax.Array  # bool[N, P]
    inputs: jax.Array  # i32[N, T, F]
    target: jax.Array  # i32[N, T]
    legal: jax.Array  # bool[N, T, V]
    mask: jax.Array  # bool[N, T], true for the tokens of the solution
    reward: jax.Array  # f32[N], of the verifier
    success: jax.Array  # bool[N]


def demonstrate(environment: Environment, task: jax.Array, script: jax.Array) -> Demonstrations:
    """Plays one script.

    Args:
      environment: whose functions to call.
      task: i32[], the task.
      script: i32[M, C], ids of each call, 0 after the last call.

    Returns:
      The episode, without the leading axis N; vmap for more.
    """
    length = environment.call_length

    def turn(carry: tuple, call: jax.Array) -> tuple[tuple, tuple]:
        state, fed, done = carry
        live = ~done & (call[0] > 0)
        legal = jnp.stack([environment.legal(state, call, j) for j in range(length)])
        inputs = jnp.stack([fed, *[environment.feed(call, j) for j in range(length - 1)]])
        after, result, ended = environment.step(state, call)
        state = jax.tree.map(lambda new, old: jnp.where(live, new, old), after, state)
        return (state, jnp.where(live, result, fed), done | (live & ended)), (
            inputs,
            call,
            legal,
            jnp.full(length, live),
        )

    start = (environment.reset(task), environment.start, jnp.bool_(False))
    (state, _, _), columns = jax.lax.scan(turn, start, script)
    inputs, target, legal, mask = (x.reshape(-1, *x.shape[2:]) for x in columns)
    prompt, prompt_mask = environment.prompt(task)
    return Demonstrations(prompt, prompt_mask, inputs, target, legal, mask, *environment.verify(state))


def lapsed_targets(demos: Demonstrations, lapse: jax.Array, submit: jax.Array, call_length: int) -> jax.Array:
    """Distribution that the lapsing expert draws each token from.

    With probability ``1 - e_t`` the solution's token, else half and half the submitting tool or any legal token; for
    arguments any legal one. ``e_t = 1 - (1 - e)^(1 + t/4)`` at turn t: attention wanes over a long episode.

    Args:
      demos: N episodes.
      lapse: f32[N], e.
      submit: i32[N], id of the tool that submits.
      call_length: C.

    Returns:
      f32[N, T, V], rows sum to 1.
    """
    outputs = demos.legal.shape[-1]
    position = jnp.arange(demos.target.shape[1])
    e = 1 - (1 - lapse[:, None]) ** (1 + 0.25 * (position // call_length)[None])
    legal = demos.legal / demos.legal.sum(-1, keepdims=True)
    early = jnp.where((position % call_length == 0)[None, :, None], jax.nn.one_hot(submit, outputs)[:, None], legal)
    slip = 0.5 * legal + 0.5 * early
    return (1 - e)[..., None] * jax.nn.one_hot(demos.target, outputs) + e[..., None] * slip


def imitation_loss(model: Transformer, demos: Demonstrations, targets: jax.Array) -> jax.Array:
    """Cross entropy, f32[], of the policy against ``targets`` f32[N, T, V], mean over the tokens of the solutions."""
    n, size = demos.prompt.shape[:2]
    positions = jnp.broadcast_to(jnp.arange(size), (n, size))
    _, prefix = model.prefill(demos.prompt, positions, demos.prompt_mask, True)
    own = jnp.broadcast_to(size + jnp.arange(demos.inputs.shape[1]), (n, 1, demos.inputs.shape[1]))
    logits = model.logits(model.extend(demos.inputs[:, None], own, prefix), demos.legal.shape[-1])[:, 0]
    logp = jax.nn.log_softmax(jnp.where(demos.legal, logits, -1e9))
    entropy = -jnp.sum(jnp.where(demos.legal, targets * logp, 0.0), axis=-1)
    return jnp.sum(jnp.where(demos.mask, entropy, 0.0)) / jnp.maximum(jnp.sum(demos.mask), 1)


def rename(
    key: jax.Array, demos: Demonstrations, targets: jax.Array, names: tuple[int, int]
) -> tuple[Demonstrations, jax.Array]:
    """Renames interchangeable ids at random, alike in prompt, inputs and targets, for each episode anew.

    An environment gives its tools arbitrary names. Without this, imitation learns by heart which name does what in the
    environments that it has seen, instead of reading it from the tool cards.

    Args:
      key: consumed.
      demos: n episodes.
      targets: f32[n, T, V].
      names: first of the interchangeable ids and their number.
    """
    first, count = names
    n, outputs = targets.shape[0], targets.shape[-1]
    order = jax.vmap(lambda k: jax.random.permutation(k, count))(jax.random.split(key, n))
    new = jnp.broadcast_to(jnp.arange(outputs), (n, outputs)).at[:, first : first + count].set(first + order)
    old = jnp.argsort(new, axis=1)

    def ids(x: jax.Array) -> jax.Array:
        flat = x.reshape(n, -1)
        renamed = jnp.take_along_axis(new, jnp.minimum(flat, outputs - 1), axis=1)
        return jnp.where(flat < outputs, renamed, flat).reshape(x.shape)

    def columns(x: jax.Array) -> jax.Array:
        return jnp.take_along_axis(x, old[:, None], axis=2)

    renamed = demos._replace(
        prompt=ids(demos.prompt), inputs=ids(demos.inputs), target=ids(demos.target), legal=columns(demos.legal)
    )
    return renamed, columns(targets)


def imitate(
    key: jax.Array,
    model: Transformer,
    demos: Demonstrations,
    targets: jax.Array,
    *,
    names: tuple[int, int],
    steps: int,
    clean_share: float,
    batch_size: int,
    learning_rate: float,
) -> tuple[nnx.State, jax.Array]:
    """Trains by AdamW with warm-up and cosine decay; one program.

    First the solutions alone, then the lapsing expert: a policy that knows the solution before it learns to lapse can
    be brought back by a handful of rewards, as a real base policy can.

    Args:
      key: consumed; draws the minibatches.
      model: its parameters are the starting point and stay as they are.
      demos: N episodes.
      targets: f32[N, T, V], see :func:`lapsed_targets`.
      names: ids that are renamed at random, see :func:`rename`.
      steps: number of updates.
      clean_share: share of the updates, at the beginning, without lapses.
      batch_size: episodes per update.
      learning_rate: at the peak.

    Returns:
      The trained parameters and the losses, f32[steps].
    """
    graphdef, params = nnx.split(model)
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, max(steps // 15, 1), steps, learning_rate * 0.05)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=1e-3))

    def loss(params: nnx.State, chosen: Demonstrations, wanted: jax.Array) -> jax.Array:
        return imitation_loss(nnx.merge(graphdef, params), chosen, wanted)

    def update(carry: tuple, step: jax.Array) -> tuple[tuple, jax.Array]:
        params, state = carry
        draw, naming = jax.random.split(jax.random.fold_in(key, step))
        index = jax.random.randint(draw, (batch_size,), 0, demos.target.shape[0])
        chosen = jax.tree.map(lambda x: x[index], demos)
        solution = jax.nn.one_hot(chosen.target, targets.shape[-1])
        wanted = jnp.where(step < clean_share * steps, solution, targets[index])
        value, gradient = jax.value_and_grad(loss)(params, *rename(naming, chosen, wanted, names))
        updates, state = optimizer.update(gradient, state, params)
        return (optax.apply_updates(params, updates), state), value

    (params, _), losses = jax.lax.scan(update, (params, optimizer.init(params)), jnp.arange(steps))
    return params, losses
