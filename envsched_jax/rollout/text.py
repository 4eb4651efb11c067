"""Generation of text with a cache: prompts of any length in one batch, several continuations of each."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from envsched_jax.policy.transformer import Transformer
from envsched_jax.types import Key


class Generated(NamedTuple):
    """Continuations of a batch of prompts."""

    ids: jax.Array  # i32[B, G, T], 0 after the end
    mask: jax.Array  # bool[B, G, T], true for what was generated, the id that ends a turn among it
    log_prob: jax.Array  # f32[B, G, T], of the ids, at the temperature used; 0 where the mask is false


def pad_prompts(prompts: list[list[int]], multiple: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """Returns ids i32[B, P] and mask bool[B, P], padded on the right; P is a multiple, so that few shapes compile."""
    longest = max(map(len, prompts))
    size = -(-longest // multiple) * multiple
    ids, mask = np.zeros((len(prompts), size), np.int32), np.zeros((len(prompts), size), bool)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)], mask[row, : len(prompt)] = prompt, True
    return ids, mask


def log_prob(logits: jax.Array, ids: jax.Array) -> jax.Array:
    """Returns ``f32[...]``, the log-probabilities of ids ``i32[...]`` by their logits ``f32[..., V]``."""
    return jnp.take_along_axis(logits, ids[..., None], axis=-1)[..., 0] - jax.nn.logsumexp(logits, axis=-1)


def generate(
    model: Transformer,
    key: Key,
    ids: jax.Array,
    mask: jax.Array,
    *,
    tokens: int,
    group: int = 1,
    temperature: float = 0.0,
    eos: tuple[int, ...] = (),
) -> Generated:
    """Continues every prompt, reading it once for all its continuations; stops when all have ended.

    Args:
      model: of ids one per position.
      key: consumed; not looked at where the temperature is 0.
      ids: i32[B, P], of prompts that begin at 0.
      mask: bool[B, P], false after the end of a prompt; every prompt has at least one id.
      tokens: T, the most to generate (static).
      group: G, continuations of each prompt (static).
      temperature: 0 takes the most likely id (static).
      eos: ids that end a continuation (static).
    """
    batch, size = ids.shape
    length = mask.sum(axis=1).astype(jnp.int32)
    place = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32)[None], (batch, size))
    hidden, prefix = model.prefill(ids[:, :, None], place, mask, bidirectional=False)
    last = jnp.take_along_axis(hidden, (length - 1)[:, None, None], axis=1)[:, 0]
    logits = jnp.broadcast_to(model.logits(last)[:, None], (batch, group, model.config.vocab_size))
    ends = jnp.asarray(eos, jnp.int32)

    def choose(logits: jax.Array, step: jax.Array) -> tuple[jax.Array, jax.Array]:
        if temperature > 0.0:
            logits = logits / temperature
            chosen = jax.random.categorical(jax.random.fold_in(key, step), logits)
        else:
            chosen = logits.argmax(axis=-1)
        return chosen.astype(jnp.int32), log_prob(logits, chosen)

    def more(carry: tuple) -> jax.Array:
        return (carry[0] < tokens) & ~carry[1].all()

    def one(carry: tuple) -> tuple:
        step, done, logits, cache, out = carry
        chosen, score = choose(logits, step)
        out = Generated(
            out.ids.at[:, :, step].set(jnp.where(done, 0, chosen)),
            out.mask.at[:, :, step].set(~done),
            out.log_prob.at[:, :, step].set(jnp.where(done, 0.0, score)),
        )
        done = done | (chosen[..., None] == ends[None, None]).any(axis=-1)
        where = jnp.broadcast_to((length + step)[:, None], (batch, group))
        hidden, cache = model.decode(chosen[..., None], where, prefix, cache, step)
        return step + 1, done, model.logits(hidden), cache, out

    shape = batch, group, tokens
    out = Generated(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, bool), jnp.zeros(shape, jnp.float32))
    carry = (jnp.zeros((), jnp.int32), jnp.zeros((batch, group), bool), logits)
    return jax.lax.while_loop(more, one, (*carry, model.init_cache(batch, group, tokens), out))[-1]


STATIC = ("tokens", "group", "temperature", "eos")
compiled = functools.partial(jax.jit, static_argnames=STATIC)(generate)
