"""One decoder-only transformer of the Llama/Qwen3 family, scored with a teacher or decoded from a cache.

A position may carry several ids (a *compound token*): its embedding is the sum of theirs, so that one tool card,
or one observation, is one position. With one id per position this is an ordinary language model.

The ``G`` rollouts of a task share their prompt: its keys and values exist once per task and are never copied ``G``
times. Shapes: ``B`` tasks, ``G`` rollouts each, ``P`` prompt positions, ``T`` generated positions, ``F`` ids per
position, ``D`` width, ``K`` key/value heads, ``R`` query heads per key/value head, ``d`` head size, ``L`` layers.

References: Touvron et al. 2023 (Llama), Ainslie et al. 2023 (grouped queries), Su et al. 2021 (RoPE), Yang et al.
2025 (Qwen3, query and key norms).
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

_QUERIES = 128  # beyond so many, scores of a block of them exist at a time
_MASKED = -1e30  # finite, so that a row without a single valid key stays free of NaN


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """The dimensions of a transformer; every field is static.

    ``blank_id`` marks an unused slot of a compound token: that id embeds as zero. ``None`` makes every id count.
    ``dtype`` is that of parameters and activations; norms, softmax and logits are always float32. ``remat`` keeps of
    each layer only what goes in, and computes the rest again for a gradient.
    """

    vocab_size: int
    num_layers: int
    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    rope_theta: float = 1e4
    qk_norm: bool = True
    tied: bool = True
    norm_eps: float = 1e-6
    dtype: str = "float32"
    blank_id: int | None = 0
    remat: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError where the head counts or the head size cannot work."""
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads={self.num_heads} is not a multiple of num_kv_heads={self.num_kv_heads}")
        if self.head_dim % 2:
            raise ValueError(f"head_dim={self.head_dim} is odd; rotary positions need pairs")


class Prefix(NamedTuple):
    """What later positions need of the prompt, once per task; one entry per layer."""

    k: tuple[jax.Array, ...]  # L of f32[B, K, P, d]
    v: tuple[jax.Array, ...]  # L of f32[B, K, P, d]
    mask: jax.Array  # bool[B, P], false where the prompt is padding


class Cache(NamedTuple):
    """Keys and values of the generated positions, of fixed capacity ``T``; one entry per layer."""

    k: tuple[jax.Array, ...]  # L of f32[B, K, G, T, d]
    v: tuple[jax.Array, ...]  # L of f32[B, K, G, T, d]


class SlotCache(NamedTuple):
    """Keys and values of ``n`` sequences of any lengths up to the capacity ``C``; one entry per layer.

    Keys lie across, so that their product with a single query runs along memory: 2.7 times faster on a CPU.
    """

    k: tuple[jax.Array, ...]  # L of f32[n, K, d, C]
    v: tuple[jax.Array, ...]  # L of f32[n, K, C, d]


class RMSNorm(nnx.Module):
    """``x / sqrt(mean(x^2) + eps) * scale`` over the last axis, computed in float32."""

    def __init__(self, size: int, eps: float, dtype: str):
        self.scale = nnx.Param(jnp.ones((size,), dtype))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns the normalised ``x``, in its own dtype and shape."""
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.eps)
        return (y * jnp.expand_dims(self.scale[...], range(x.ndim - 1)).astype(jnp.float32)).astype(x.dtype)


def rotary(positions: jax.Array, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Returns cosine and sine ``f32[n, 1, d/2]`` of the angles ``position * theta^(-2i/d)``; positions ``i32[n]``."""
    frequency = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    angle = positions.astype(jnp.float32)[:, None, None] * frequency[None, None, :]
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotates the pairs ``(x_i, x_{i + d/2})`` of ``x: [n, heads, d]`` by their angles (the halves convention)."""
    cos, sin = rope
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
    prefix: tuple[jax.Array, jax.Array, jax.Array] | None = None,
) -> jax.Array:
    """Softmax attention over own keys and, where given, a prefix shared by the ``G`` sequences of a row.

    ``B`` and ``K`` come first because they batch both products: no operand has to be transposed or repeated.

    Args:
      q: ``[B, K, G, R, T, d]``.
      k: ``[B, K, G, S, d]``.
      v: ``[B, K, G, S, d]``.
      mask: ``bool[B or 1, T, S]``, which own keys each query sees.
      prefix: keys ``[B, K, P, d]``, values ``[B, K, P, d]`` and their mask ``bool[B, P]``.

    Returns:
      ``[B, K, G, R, T, d]``.
    """
    size = q.shape[4]
    if size > _QUERIES:  # a block of queries at a time, also for a gradient

        @jax.checkpoint
        def some(args: tuple[jax.Array, jax.Array]) -> jax.Array:
            return _attend(args[0], k, v, args[1], prefix)

        more = -size % _QUERIES
        q = jnp.pad(q, ((0, 0),) * 4 + ((0, more), (0, 0)))
        mask = jnp.pad(mask, ((0, 0), (0, more), (0, 0)))
        queries = q.reshape(*q.shape[:4], -1, _QUERIES, q.shape[5])
        masks = mask.reshape(mask.shape[0], -1, _QUERIES, mask.shape[2])
        found = jax.lax.map(some, (jnp.moveaxis(queries, 4, 0), jnp.moveaxis(masks, 1, 0)))
        return jnp.moveaxis(found, 0, 4).reshape(q.shape)[..., :size, :]
    return _attend(q, k, v, mask, prefix)


def _attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
    prefix: tuple[jax.Array, jax.Array, jax.Array] | None,
) -> jax.Array:
    q = q * jnp.asarray(1.0 / math.sqrt(q.shape[-1]), q.dtype)
    scores = jnp.einsum("bkgrtd,bkgsd->bkgrts", q, k, preferred_element_type=jnp.float32)
    scores = jnp.where(mask[:, None, None, None], scores, _MASKED)
    if prefix is None:
        return jnp.einsum("bkgrts,bkgsd->bkgrtd", jax.nn.softmax(scores, axis=-1).astype(v.dtype), v)
    prefix_k, prefix_v, prefix_mask = prefix
    shared = jnp.einsum("bkgrtd,bkpd->bkgrtp", q, prefix_k, preferred_element_type=jnp.float32)
    shared = jnp.where(prefix_mask[:, None, None, None, None], shared, _MASKED)
    weights = jax.nn.softmax(jnp.concatenate([shared, scores], axis=-1), axis=-1).astype(v.dtype)
    size = prefix_k.shape[2]
    own = jnp.einsum("bkgrts,bkgsd->bkgrtd", weights[..., size:], v)
    return own + jnp.einsum("bkgrtp,bkpd->bkgrtd", weights[..., :size], prefix_v)


class Block(nnx.Module):
    """One layer: attention and a gated MLP, each normed before and added to the stream after."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        c = config
        linear = functools.partial(nnx.Linear, use_bias=False, param_dtype=c.dtype, rngs=rngs)
        small = nnx.initializers.normal(0.02)  # the stream starts close to the embeddings
        self.config = c
        self.q = linear(c.embed_dim, c.num_heads * c.head_dim)
        self.k = linear(c.embed_dim, c.num_kv_heads * c.head_dim)
        self.v = linear(c.embed_dim, c.num_kv_heads * c.head_dim)
        self.o = linear(c.num_heads * c.head_dim, c.embed_dim, kernel_init=small)
        self.gate = linear(c.embed_dim, c.mlp_dim)
        self.up = linear(c.embed_dim, c.mlp_dim)
        self.down = linear(c.mlp_dim, c.embed_dim, kernel_init=small)
        self.attention_norm = RMSNorm(c.embed_dim, c.norm_eps, c.dtype)
        self.mlp_norm = RMSNorm(c.embed_dim, c.norm_eps, c.dtype)
        self.q_norm = RMSNorm(c.head_dim, c.norm_eps, c.dtype) if c.qk_norm else None
        self.k_norm = RMSNorm(c.head_dim, c.norm_eps, c.dtype) if c.qk_norm else None

    def qkv(
        self, x: jax.Array, rope: tuple[jax.Array, jax.Array], lead: tuple[int, int, int]
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns queries ``[B, K, G, R, T, d]``, keys and values ``[B, K, G, T, d]``.

        Args:
          x: the stream ``[B * G * T, D]``; flat, because a product of two matrices is what runs fast.
          rope: from :func:`rotary`.
          lead: ``(B, G, T)``.
        """
        c = self.config
        h = self.attention_norm(x)
        q = self.q(h).reshape(-1, c.num_heads, c.head_dim)
        k = self.k(h).reshape(-1, c.num_kv_heads, c.head_dim)
        v = self.v(h).reshape(*lead, c.num_kv_heads, c.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q = rotate(q, rope).reshape(*lead, c.num_kv_heads, c.num_heads // c.num_kv_heads, c.head_dim)
        k = rotate(k, rope).reshape(v.shape)
        return q.transpose(0, 3, 1, 4, 2, 5), k.transpose(0, 3, 1, 2, 4), v.transpose(0, 3, 1, 2, 4)

    def mix(self, x: jax.Array, attended: jax.Array) -> jax.Array:
        """Adds what attention found, ``[B, K, G, R, T, d]``, and then the MLP, to the stream ``[B * G * T, D]``."""
        x = x + self.o(attended.transpose(0, 2, 4, 1, 3, 5).reshape(x.shape[0], -1))
        h = self.mlp_norm(x)
        return x + self.down(jax.nn.silu(self.gate(h)) * self.up(h))


class Transformer(nnx.Module):
    """The policy network. Every method is pure; positions are always given."""

    def __init__(self, config: TransformerConfig, *, rngs: nnx.Rngs):
        c = config
        self.config = c
        table = nnx.initializers.normal(c.embed_dim**-0.5)  # logits of a tied head start with a spread near one
        self.embedding = nnx.Param(table(rngs.params(), (c.vocab_size, c.embed_dim), jnp.dtype(c.dtype)))
        self.blocks = nnx.List([Block(c, rngs=rngs) for _ in range(c.num_layers)])
        self.norm = RMSNorm(c.embed_dim, c.norm_eps, c.dtype)
        self.head = (
            None if c.tied else nnx.Linear(c.embed_dim, c.vocab_size, use_bias=False, param_dtype=c.dtype, rngs=rngs)
        )

    def embed(self, ids: jax.Array) -> jax.Array:
        """Returns ``f32[..., D]``: the sum over the last axis of the embeddings of ``ids: i32[..., F]``."""
        rows = self.embedding[...][ids]
        if self.config.blank_id is not None:
            rows = jnp.where((ids != self.config.blank_id)[..., None], rows, jnp.zeros((), rows.dtype))
        return rows.sum(axis=-2)

    def logits(self, hidden: jax.Array, outputs: int | None = None) -> jax.Array:
        """Returns ``f32[..., V]``, scores of the next id given ``hidden: f32[..., D]``.

        ``outputs`` (static) asks for the first so many ids only, where a policy writes fewer than it reads.
        """
        if self.head is not None:
            return self.head(hidden)[..., :outputs].astype(jnp.float32)
        return jnp.einsum("...d,vd->...v", hidden, self.embedding[...][:outputs], preferred_element_type=jnp.float32)

    def prefill(
        self, ids: jax.Array, positions: jax.Array, mask: jax.Array, bidirectional: bool
    ) -> tuple[jax.Array, Prefix]:
        """Reads the prompts.

        Args:
          ids: ``i32[B, P, F]``.
          positions: ``i32[B, P]``.
          mask: ``bool[B, P]``, false for padding, which no position attends to.
          bidirectional: every prompt position sees the whole prompt (a prefix language model); static.

        Returns:
          hidden ``f32[B, P, D]`` (to feed to :meth:`logits`) and the :class:`Prefix`.
        """
        batch, size, _ = ids.shape
        seen = jnp.broadcast_to(mask[:, None, :], (batch, size, size))
        if not bidirectional:
            seen &= jnp.tril(jnp.ones((1, size, size), bool))
        x, rope = self._enter(ids, positions)
        keys, values = [], []

        def layer(block: Block, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            q, k, v = block.qkv(x, rope, (batch, 1, size))
            return block.mix(x, attend(q, k, v, seen)), k[:, :, 0], v[:, :, 0]

        for block in self.blocks:
            x, k, v = (jax.checkpoint(layer) if self.config.remat else layer)(block, x)
            keys.append(k)
            values.append(v)
        return self.norm(x).reshape(batch, size, -1), Prefix(tuple(keys), tuple(values), mask)

    def extend(self, ids: jax.Array, positions: jax.Array, prefix: Prefix) -> jax.Array:
        """Reads whole continuations at once, each position seeing the prompt and its own past (teacher forcing).

        Args:
          ids: ``i32[B, G, T, F]``.
          positions: ``i32[B, G, T]``.
          prefix: of the same ``B`` tasks.

        Returns:
          hidden ``f32[B, G, T, D]``.
        """
        lead = ids.shape[0], ids.shape[1], ids.shape[2]
        causal = jnp.tril(jnp.ones((1, lead[2], lead[2]), bool))
        x, rope = self._enter(ids, positions)

        def layer(block: Block, x: jax.Array, prefix_k: jax.Array, prefix_v: jax.Array) -> jax.Array:
            q, k, v = block.qkv(x, rope, lead)
            return block.mix(x, attend(q, k, v, causal, (prefix_k, prefix_v, prefix.mask)))

        for number, block in enumerate(self.blocks):
            read = jax.checkpoint(layer) if self.config.remat else layer
            x = read(block, x, prefix.k[number], prefix.v[number])
        return self.norm(x).reshape(*lead, -1)

    def init_cache(self, batch: int, group: int, capacity: int) -> Cache:
        """Returns an empty cache for ``capacity`` positions of ``batch * group`` sequences."""
        c = self.config
        zeros = jnp.zeros((batch, c.num_kv_heads, group, capacity, c.head_dim), c.dtype)
        return Cache((zeros,) * c.num_layers, (zeros,) * c.num_layers)

    def decode(
        self, ids: jax.Array, positions: jax.Array, prefix: Prefix, cache: Cache, index: jax.Array
    ) -> tuple[jax.Array, Cache]:
        """Reads one more position of every sequence; equals one column of :meth:`extend`.

        Args:
          ids: ``i32[B, G, F]``.
          positions: ``i32[B, G]``.
          prefix: of the same ``B`` tasks.
          cache: holds the ``index`` positions read so far.
          index: ``i32[]``, where to write, below the capacity.

        Returns:
          hidden ``f32[B, G, D]`` and the new cache.
        """
        batch, group, _ = ids.shape
        seen = (jnp.arange(cache.k[0].shape[3]) <= index)[None, None]
        x, rope = self._enter(ids, positions)
        keys, values = [], []
        for layer, block in enumerate(self.blocks):
            q, k, v = block.qkv(x, rope, (batch, group, 1))
            keys.append(jax.lax.dynamic_update_slice_in_dim(cache.k[layer], k, index, axis=3))
            values.append(jax.lax.dynamic_update_slice_in_dim(cache.v[layer], v, index, axis=3))
            shared = (prefix.k[layer], prefix.v[layer], prefix.mask)
            x = block.mix(x, attend(q, keys[-1], values[-1], seen, shared))
        return self.norm(x).reshape(batch, group, -1), Cache(tuple(keys), tuple(values))

    def append(self, ids: jax.Array, positions: jax.Array, cache: SlotCache) -> tuple[jax.Array, SlotCache]:
        """Reads the next ``T`` positions of ``n`` sequences of any lengths, each with a cache of its own.

        Args:
          ids: ``i32[n, T, F]``.
          positions: ``i32[n, T]``, where each is read and written; one at or beyond the capacity is padding.
          cache: filled below the first position of each sequence.

        Returns:
          hidden ``f32[n, T, D]`` and the new cache.
        """
        count, size, _ = ids.shape
        c, row = self.config, jnp.arange(count)[:, None]
        seen = jnp.arange(cache.v[0].shape[2])[None, None, :] <= positions[:, :, None]
        x, rope = self._enter(ids, positions)
        keys, values = [], []
        for layer, block in enumerate(self.blocks):
            q, k, v = block.qkv(x, rope, (count, 1, size))
            keys.append(cache.k[layer].at[row, :, :, positions].set(k[:, :, 0].swapaxes(1, 2), mode="drop"))
            values.append(cache.v[layer].at[row, :, positions].set(v[:, :, 0].swapaxes(1, 2), mode="drop"))
            q = q[:, :, 0].reshape(count, c.num_kv_heads, -1, c.head_dim)  # queries that share a head, then positions
            scores = jnp.einsum("nkqd,nkdc->nkqc", q, keys[-1], preferred_element_type=jnp.float32)
            scores = scores.reshape(count, c.num_kv_heads, -1, size, seen.shape[2]) * c.head_dim**-0.5
            weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, _MASKED), axis=-1).astype(v.dtype)
            weights = weights.reshape(*q.shape[:3], -1)
            found = jnp.einsum("nkqc,nkcd->nkqd", weights, values[-1])
            x = block.mix(x, found.reshape(count, c.num_kv_heads, 1, -1, size, c.head_dim))
        return self.norm(x).reshape(count, size, -1), SlotCache(tuple(keys), tuple(values))

    def _enter(self, ids: jax.Array, positions: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """Returns the stream ``[n, D]`` and the rotations of all ``n`` positions."""
        x = self.embed(ids).reshape(-1, self.config.embed_dim)
        return x, rotary(positions.reshape(-1), self.config.head_dim, self.config.rope_theta)
