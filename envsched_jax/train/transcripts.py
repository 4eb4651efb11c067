"""GRPO on conversations: rollouts of any lengths as arrays, their log-probabilities, and updates in parts.

Shapes: ``B`` groups of ``G`` rollouts, ``P`` ids of a prompt, ``T`` ids after it.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from envsched_jax.policy.transformer import Transformer
from envsched_jax.rollout.script import Transcript
from envsched_jax.rollout.text import log_prob
from envsched_jax.train.grpo import is_clipped, loss
from envsched_jax.types import PyTree

MULTIPLE = 128  # what lengths are rounded up to, at least
BLOCK = 128  # positions whose logits exist at a time


class Rows(NamedTuple):
    """Groups of rollouts that share a prompt."""

    prompt: jax.Array  # i32[B, P], padded on the right
    prompt_length: jax.Array  # i32[B]
    ids: jax.Array  # i32[B, G, T], padded on the right
    mask: jax.Array  # bool[B, G, T], what the policy sampled
    log_prob: jax.Array  # f32[B, G, T], when it was sampled
    advantage: jax.Array  # f32[B, G]


class Sums(NamedTuple):
    """What is added up over the parts of a batch."""

    gradient: PyTree
    loss: jax.Array  # f32[]
    clipped: jax.Array  # f32[], ids whose ratio left the range
    ids: jax.Array  # f32[]
    gap: jax.Array  # f32[], largest |log-probability now - when sampled|


def to_parts(
    groups: Sequence[Sequence[Transcript]], advantage: Sequence[Sequence[float] | np.ndarray], part: int = 1
) -> Iterator[Rows]:
    """Yields groups as arrays, ``part`` rows at a time; those of similar lengths together, the last part filled up.

    Rollouts of a group share a row where all begin with the same prompt in every group; else each has a row of its own.

    Args:
      groups: rollouts of a task each, without those that have no reward.
      advantage: of each of them.
      part: rows.
    """
    rows = [list(zip(group, gain, strict=True)) for group, gain in zip(groups, advantage, strict=True) if group]
    if any(one.prompt != row[0][0].prompt for row in rows for one, _ in row):
        rows = [[pair] for row in rows for pair in row]
    rows.sort(key=lambda row: max(len(one.ids) for one, _ in row))
    members = max((len(row) for row in rows), default=0)
    for begin in range(0, len(rows), part):
        some = rows[begin : begin + part]
        width = padded(max(len(row[0][0].prompt) for row in some))
        shape = part, members, padded(max(len(one.ids) for row in some for one, _ in row))
        prompt, lengths = np.zeros((part, width), np.int32), np.full(part, 1, np.int32)
        ids, mask, odds = np.zeros(shape, np.int32), np.zeros(shape, bool), np.zeros(shape, np.float32)
        gain = np.zeros(shape[:2], np.float32)
        for i, row in enumerate(some):
            lengths[i] = len(row[0][0].prompt)
            prompt[i, : lengths[i]] = row[0][0].prompt
            for k, (one, value) in enumerate(row):
                size = len(one.ids)
                ids[i, k, :size], mask[i, k, :size], odds[i, k, :size] = one.ids, one.mask, one.log_prob
                gain[i, k] = value
        yield Rows(*map(jnp.asarray, (prompt, lengths, ids, mask, odds, gain)))


def padded(length: int) -> int:
    """Returns a length rounded up to one of few, for every one is a program: at most 8 between a number and twice it.

    Longer ones grow by up to an eighth.
    """
    step = max(MULTIPLE, 1 << max((length - 1).bit_length() - 4, 0))
    return max(-(-length // step), 1) * step


def log_probs(model: Transformer, rows: Rows, temperature: float = 1.0) -> jax.Array:
    """Returns ``f32[B, G, T]``: log-probabilities of all ids after the prompt, at a temperature above 0.

    The prompt is read once per group. Logits exist for a block of positions at a time, also for a gradient.
    """
    place = jnp.broadcast_to(jnp.arange(rows.prompt.shape[1], dtype=jnp.int32)[None], rows.prompt.shape)
    before = place < rows.prompt_length[:, None] - 1  # its last id is read with what follows
    _, prefix = model.prefill(rows.prompt[:, :, None], place, before, bidirectional=False)
    last = jnp.take_along_axis(rows.prompt, rows.prompt_length[:, None] - 1, axis=1)
    last = jnp.broadcast_to(last[:, :, None], (*rows.ids.shape[:2], 1))
    inputs = jnp.concatenate([last, rows.ids[:, :, :-1]], axis=2)
    step = jnp.arange(inputs.shape[2], dtype=jnp.int32)[None, None]
    positions = jnp.broadcast_to(rows.prompt_length[:, None, None] - 1 + step, inputs.shape)
    hidden = model.extend(inputs[..., None], positions, prefix)

    @jax.checkpoint
    def some(args: tuple[jax.Array, jax.Array]) -> jax.Array:
        hidden, target = args
        return log_prob(model.logits(hidden) / temperature, target)

    block = min(BLOCK, inputs.shape[2])

    def split(x: jax.Array) -> jax.Array:
        return jnp.moveaxis(x.reshape(*x.shape[:2], -1, block, *x.shape[3:]), 2, 0)

    found = jax.lax.map(some, (split(hidden), split(rows.ids)))
    return jnp.moveaxis(found, 0, 2).reshape(rows.ids.shape)


Merge = Callable[[PyTree, PyTree], nnx.State]  # what is trained, what is not -> parameters of the model


def add_part(
    sums: Sums,
    trained: PyTree,
    fixed: PyTree,
    rows: Rows,
    total: jax.Array,
    *,
    graphdef: nnx.GraphDef,
    merge: Merge,
    temperature: float,
    options: Mapping[str, Any],
) -> Sums:
    """Adds the share that some groups have in the loss of a batch, and its gradient.

    Args:
      sums: so far.
      trained: what the gradient is taken of.
      fixed: what else ``merge`` needs.
      rows: the groups.
      total: f32[], policy ids of the whole batch, those of groups that are left out among them.
      graphdef: of the model.
      merge: makes parameters of ``trained`` and ``fixed``.
      temperature: at which the rollouts were sampled.
      options: of ``grpo.loss``, ``clip_low`` and ``clip_high`` among them.
    """

    def objective(trained: PyTree) -> tuple[jax.Array, jax.Array]:
        logp = log_probs(nnx.merge(graphdef, merge(trained, fixed)), rows, temperature)
        share = rows.mask.sum() / jnp.maximum(total, 1.0)
        return share * loss(logp, rows.log_prob, rows.advantage, rows.mask, **options), logp

    (value, logp), gradient = jax.value_and_grad(objective, has_aux=True)(trained)
    gap = jnp.where(rows.mask, logp - rows.log_prob, 0.0)
    clipped = rows.mask & is_clipped(gap, options["clip_low"], options["clip_high"])
    return Sums(
        gradient=jax.tree.map(lambda total, g: total + g.astype(total.dtype), sums.gradient, gradient),
        loss=sums.loss + value,
        clipped=sums.clipped + clipped.sum(),
        ids=sums.ids + rows.mask.sum(),
        gap=jnp.maximum(sums.gap, jnp.abs(gap).max()),
    )


def nothing(trained: PyTree) -> Sums:
    """Returns empty sums; gradients are added up in float32."""
    zero = jnp.zeros((), jnp.float32)
    return Sums(jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), trained), *[zero] * 4)


def apply(
    trained: PyTree, opt_state: optax.OptState, sums: Sums, *, optimizer: optax.GradientTransformation
) -> tuple[PyTree, optax.OptState, dict[str, jax.Array]]:
    """Takes the step of the optimiser; returns what is trained, its state, and figures of the update."""
    gradient = jax.tree.map(lambda g, x: g.astype(x.dtype), sums.gradient, trained)
    steps, opt_state = optimizer.update(gradient, opt_state, trained)
    figures = {
        "loss": sums.loss,
        "grad_norm": optax.tree.norm(sums.gradient),
        "clip_fraction": sums.clipped / jnp.maximum(sums.ids, 1.0),
        "logp_gap": sums.gap,
    }
    return optax.apply_updates(trained, steps), opt_state, figures


@functools.partial(jax.jit, static_argnames=("temperature",))
def score(model: Transformer, rows: Rows, temperature: float) -> jax.Array:
    """`log_probs`, compiled."""
    return log_probs(model, rows, temperature)
