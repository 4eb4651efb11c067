"""Decoding with continuous batching: so many slots, each a sequence of any length with a cache of its own.

A sequence that ends frees its slot for the next one, and one that waits for a tool keeps its slot and its cache. The
programs have few shapes: slots and capacity are fixed, and what is read is read in pieces of one length.

Shapes: ``S`` slots, ``C`` capacity in positions, ``n`` sequences read at once, ``M`` ids decoded at once.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from envsched_jax.policy.transformer import SlotCache, Transformer
from envsched_jax.rollout.text import log_prob
from envsched_jax.types import Key


class Slots(NamedTuple):
    """What is known of every sequence."""

    cache: SlotCache  # of S rows
    length: jax.Array  # i32[S], positions in the cache
    last: jax.Array  # i32[S], the id to be read next
    key: Key  # key[S], of the draws of each sequence


class Decoded(NamedTuple):
    """What was sampled in one call; columns from ``length`` on are 0."""

    ids: jax.Array  # i32[S, M]
    log_prob: jax.Array  # f32[S, M], at the temperature used
    length: jax.Array  # i32[S]
    ended: jax.Array  # bool[S], the last one ends a turn


def empty(model: Transformer, slots: int, capacity: int) -> Slots:
    """Returns ``S`` free slots."""
    c = model.config
    shape = (slots, c.num_kv_heads, c.head_dim, capacity)
    cache = SlotCache(
        tuple(jnp.zeros(shape, c.dtype) for _ in range(c.num_layers)),
        tuple(jnp.zeros((*shape[:2], *shape[:1:-1]), c.dtype) for _ in range(c.num_layers)),
    )
    length, last = jnp.zeros((slots,), jnp.int32), jnp.zeros((slots,), jnp.int32)
    return Slots(cache, length, last, jax.random.split(jax.random.key(0), slots))


def widen(slots: Slots, capacity: int) -> Slots:
    """Returns the same slots with room for more positions, up to a capacity that is not smaller than theirs."""
    more = capacity - slots.cache.v[0].shape[2]
    keys = (jnp.pad(k, ((0, 0),) * 3 + ((0, more),)) for k in slots.cache.k)
    values = (jnp.pad(v, ((0, 0),) * 2 + ((0, more), (0, 0))) for v in slots.cache.v)
    return slots._replace(cache=SlotCache(tuple(keys), tuple(values)))


def begin(slots: Slots, first: jax.Array, to: jax.Array, key: Key) -> Slots:
    """Begins sequences anew.

    Args:
      slots: those named are free.
      first: ``i32[m]``, the first id of each.
      to: ``i32[m]``, its slot; one at or beyond S is padding.
      key: ``key[m]``, of its draws.
    """
    return slots._replace(
        length=slots.length.at[to].set(0, mode="drop"),
        last=slots.last.at[to].set(first, mode="drop"),
        key=slots.key.at[to].set(key, mode="drop"),
    )


def copy(slots: Slots, source: jax.Array, to: jax.Array, key: Key) -> Slots:
    """Begins sequences with what another one has read, so that what they share is read once.

    Args:
      slots: those named are free.
      source: ``i32[]``, the slot that has read it.
      to: ``i32[m]``, the slots; one at or beyond S is padding.
      key: ``key[m]``, of their draws.
    """
    return Slots(
        cache=jax.tree.map(lambda all: all.at[to].set(all[source], mode="drop"), slots.cache),
        length=slots.length.at[to].set(slots.length[source], mode="drop"),
        last=slots.last.at[to].set(slots.last[source], mode="drop"),
        key=slots.key.at[to].set(key, mode="drop"),
    )


def read(model: Transformer, slots: Slots, ids: jax.Array, length: jax.Array, to: jax.Array) -> Slots:
    """Reads a prompt after its first id, or what the environment says after the id that was sampled last.

    Args:
      model: of ids one per position.
      slots: of sequences under way.
      ids: ``i32[n, T]``, padded on the right.
      length: ``i32[n]``; with it a sequence still fits into the capacity.
      to: ``i32[n]``, the slots, all different; one at or beyond S is padding.
    """
    size, total = slots.last.shape[0], slots.cache.v[0].shape[2]
    row = jnp.minimum(to, size - 1)
    sequence = jnp.concatenate([slots.last[row][:, None], ids], axis=1)
    step = jnp.arange(ids.shape[1], dtype=jnp.int32)[None]
    place = jnp.where(step < length[:, None], slots.length[row][:, None] + step, total)
    mine = jax.tree.map(lambda x: x[row], slots.cache)
    _, filled = model.append(sequence[:, :-1, None], place, mine)
    return Slots(
        cache=jax.tree.map(lambda all, some: all.at[to].set(some, mode="drop"), slots.cache, filled),
        length=slots.length.at[to].add(length, mode="drop"),
        last=slots.last.at[to].set(jnp.take_along_axis(sequence, length[:, None], axis=1)[:, 0], mode="drop"),
        key=slots.key,
    )


def decode(
    model: Transformer,
    slots: Slots,
    budget: jax.Array,
    *,
    tokens: int,
    temperature: float = 1.0,
    eos: tuple[int, ...] = (),
) -> tuple[Slots, Decoded]:
    """Samples in all slots that may until they have ended their turns or used up their budgets.

    A draw belongs to the key of its sequence and its position: who shares the batch changes nothing.

    Args:
      model: of ids one per position.
      slots: under way.
      budget: ``i32[S]``, ids that a slot may sample; 0 for one that is free or waits. With them it fits the capacity.
      tokens: M, the most to sample in this call (static).
      temperature: 0 takes the most likely id (static).
      eos: ids that end a turn (static).
    """
    size, total = slots.last.shape[0], slots.cache.v[0].shape[2]
    ends = jnp.asarray(eos, jnp.int32)

    def choose(logits: jax.Array, length: jax.Array) -> tuple[jax.Array, jax.Array]:
        if temperature > 0.0:
            logits = logits / temperature
            keys = jax.vmap(jax.random.fold_in)(slots.key, length)
            chosen = jax.vmap(jax.random.categorical)(keys, logits)
        else:
            chosen = logits.argmax(axis=-1)
        return chosen.astype(jnp.int32), log_prob(logits, chosen)

    def more(carry: tuple[jax.Array, Slots, Decoded]) -> jax.Array:
        step, _, out = carry
        return (step < tokens) & (~out.ended & (out.length < budget)).any()

    def one(carry: tuple[jax.Array, Slots, Decoded]) -> tuple[jax.Array, Slots, Decoded]:
        step, now, out = carry
        live = ~out.ended & (out.length < budget)
        place = jnp.where(live, now.length, total)[:, None]
        hidden, cache = model.append(now.last[:, None, None], place, now.cache)
        chosen, score = choose(model.logits(hidden[:, 0]), now.length)
        decoded = Decoded(
            ids=out.ids.at[:, step].set(jnp.where(live, chosen, 0)),
            log_prob=out.log_prob.at[:, step].set(jnp.where(live, score, 0.0)),
            length=out.length + live,
            ended=out.ended | (live & (chosen[:, None] == ends[None]).any(axis=1)),
        )
        return step + 1, Slots(cache, now.length + live, jnp.where(live, chosen, now.last), now.key), decoded

    none = jnp.zeros((size, tokens), jnp.int32)
    nothing = Decoded(none, none.astype(jnp.float32), jnp.zeros((size,), jnp.int32), jnp.zeros((size,), bool))
    _, slots, out = jax.lax.while_loop(more, one, (jnp.zeros((), jnp.int32), slots, nothing))
    return slots, out


begin_compiled = jax.jit(begin, donate_argnames=("slots",))
copy_compiled = jax.jit(copy, donate_argnames=("slots",))
read_compiled = jax.jit(read, donate_argnames=("slots",))
decode_compiled = jax.jit(decode, donate_argnames=("slots",), static_argnames=("tokens", "temperature", "eos"))
