"""The transformer against a float64 NumPy version in plain loops, and its laws."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from envsched_jax.policy import PRESETS, Transformer, TransformerConfig, preset

CONFIG = TransformerConfig(
    13, num_layers=2, embed_dim=12, num_heads=4, num_kv_heads=2, head_dim=6, mlp_dim=10, rope_theta=100.0
)
VARIANTS = [CONFIG, dataclasses.replace(CONFIG, qk_norm=False, tied=False, norm_eps=0.1, blank_id=None)]
B, G, P, T, F = 2, 3, 4, 5, 2
PROMPT_MASK = np.array([[True, True, True, False], [True, False, True, True]])


def make(config):
    model = Transformer(config, rngs=nnx.Rngs(3))
    graphdef, params = nnx.split(model)
    leaves, tree = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(4), len(leaves))
    noisy = [x + 0.3 * jax.random.normal(k, x.shape, x.dtype) for k, x in zip(keys, leaves, strict=True)]
    return nnx.merge(graphdef, jax.tree.unflatten(tree, noisy))  # norm scales that are not all one


def inputs():
    rng = np.random.default_rng(0)
    prompt, own = rng.integers(0, 13, (B, P, F)), rng.integers(0, 13, (B, G, T, F))
    at = np.broadcast_to(np.arange(P), (B, P))
    own_at = P + np.broadcast_to(np.arange(T), (B, G, T)) + np.arange(G)[None, :, None]
    return [jnp.asarray(x, jnp.int32) for x in (prompt, at, own, own_at)]


def norm(x, scale, eps):
    return x / math.sqrt(sum(float(a) ** 2 for a in x) / len(x) + eps) * scale


def turn(x, position, theta):
    half, out = len(x) // 2, np.zeros(len(x))
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def oracle(model, ids, positions, visible):
    """Hidden states [n, D] of one sequence of n positions; visible[i, j]: i sees j."""
    c, get = model.config, lambda variable: np.asarray(variable[...], np.float64)
    table, n = get(model.embedding), len(ids)
    x = np.zeros((n, c.embed_dim))
    for i in range(n):
        for one in ids[i]:
            x[i] += 0 if c.blank_id is not None and one == c.blank_id else table[one]
    for block in model.blocks:
        q, k, v = (np.zeros((n, heads, c.head_dim)) for heads in (c.num_heads, c.num_kv_heads, c.num_kv_heads))
        for i in range(n):
            h = norm(x[i], get(block.attention_norm.scale), c.norm_eps)
            for out, layer, scale in ((q, block.q, block.q_norm), (k, block.k, block.k_norm), (v, block.v, None)):
                flat = h @ get(layer.kernel)
                for head in range(out.shape[1]):
                    one = flat[head * c.head_dim : (head + 1) * c.head_dim]
                    one = norm(one, get(scale.scale), c.norm_eps) if scale is not None else one
                    out[i, head] = one if layer is block.v else turn(one, positions[i], c.rope_theta)
        for i in range(n):
            heads = []
            for head in range(c.num_heads):
                shared = head // (c.num_heads // c.num_kv_heads)
                weight = [math.exp(q[i, head] @ k[j, shared] / math.sqrt(c.head_dim)) * visible[i, j] for j in range(n)]
                heads.append(sum(weight[j] / sum(weight) * v[j, shared] for j in range(n)))
            x[i] = x[i] + np.concatenate(heads) @ get(block.o.kernel)
            h = norm(x[i], get(block.mlp_norm.scale), c.norm_eps)
            gate = h @ get(block.gate.kernel)
            x[i] = x[i] + (gate / (1 + np.exp(-gate)) * (h @ get(block.up.kernel))) @ get(block.down.kernel)
    return np.array([norm(row, get(model.norm.scale), c.norm_eps) for row in x])


def run(model, prompt, at, own, own_at, bidirectional=True):
    hidden, prefix = model.prefill(prompt, at, jnp.asarray(PROMPT_MASK), bidirectional)
    return hidden, model.extend(own, own_at, prefix)


@pytest.mark.parametrize("config", VARIANTS, ids=["qwen", "llama"])
@pytest.mark.parametrize("bidirectional", [True, False])
def test_equals_the_loops_in_float64(config, bidirectional):
    model = make(config)
    prompt, at, own, own_at = inputs()
    hidden, extended = jax.jit(lambda *a: run(model, *a, bidirectional))(prompt, at, own, own_at)
    logits = model.logits(extended)
    table = model.embedding[...].T if config.tied else model.head.kernel[...]
    for b in range(B):
        for g in range(G):
            ids = np.concatenate([prompt[b], own[b, g]])
            visible = np.tril(np.ones((P + T, P + T), bool))
            if bidirectional:
                visible[:P, :P] = True
            visible[:, :P] &= PROMPT_MASK[b]
            expected = oracle(model, ids, np.concatenate([at[b], own_at[b, g]]), visible)
            np.testing.assert_allclose(extended[b, g], expected[P:], atol=2e-5)
            np.testing.assert_allclose(hidden[b][PROMPT_MASK[b]], expected[:P][PROMPT_MASK[b]], atol=2e-5)
            np.testing.assert_allclose(logits[b, g], expected[P:] @ np.asarray(table, np.float64), atol=1e-4)


@pytest.mark.parametrize("config", VARIANTS, ids=["qwen", "llama"])
def test_decoding_from_the_cache_equals_teacher_forcing(config):
    model = make(config)
    prompt, at, own, own_at = inputs()

    @jax.jit
    def both(prompt, at, own, own_at):
        _, prefix = model.prefill(prompt, at, jnp.asarray(PROMPT_MASK), True)

        def read(cache, t):
            hidden, cache = model.decode(own[:, :, t], own_at[:, :, t], prefix, cache, t)
            return cache, hidden

        spare = model.init_cache(B, G, T + 2)  # capacity beyond what is read must not be seen
        return model.extend(own, own_at, prefix), jax.lax.scan(read, spare, jnp.arange(T))[1]

    expected, decoded = both(prompt, at, own, own_at)
    np.testing.assert_allclose(jnp.moveaxis(decoded, 0, 2), expected, atol=1e-5)


def test_nothing_flows_from_where_it_must_not():
    """The marker id 12 stands in one place only: the derivative by its row says who saw that place."""
    graphdef, params = nnx.split(make(dataclasses.replace(CONFIG, tied=False)))
    prompt, at, own, own_at = inputs()
    prompt, own = prompt % 12, own % 12

    @functools.partial(jax.jit, static_argnums=2)
    def influence(prompt, own, bidirectional=True):
        def outputs(row):
            marked = jax.tree.map(lambda x: x, params)  # a copy, to write into
            marked["embedding"] = params["embedding"].replace(params["embedding"][...].at[12].set(row))
            return run(nnx.merge(graphdef, marked), prompt, at, own, own_at, bidirectional)

        row = jax.random.normal(jax.random.key(0), (CONFIG.embed_dim,))
        return jax.tree.map(lambda x: jnp.abs(x).max(-1) > 0, jax.jvp(outputs, (row,), (jnp.cos(row),))[1])

    hidden, extended = influence(prompt, own.at[1, 2, 3, 0].set(12))
    expected = np.zeros((B, G, T), bool)
    expected[1, 2, 3:] = True
    assert not hidden.any()
    np.testing.assert_array_equal(extended, expected)

    hidden, extended = influence(prompt.at[0, 1, 0].set(12), own)
    np.testing.assert_array_equal(hidden, [[True] * 4, [False] * 4])
    assert extended[0].all() and not extended[1].any()

    hidden, extended = influence(prompt.at[0, 1, 0].set(12), own, False)
    np.testing.assert_array_equal(hidden[0], [False, True, True, True])

    hidden, extended = influence(prompt.at[1, 1, 0].set(12), own)  # padding: only that position itself has it
    np.testing.assert_array_equal(hidden, [[False] * 4, [False, True, False, False]])
    assert not extended.any()


def test_only_distances_between_positions_matter():
    extend = jax.jit(functools.partial(run, make(CONFIG)))
    prompt, at, own, own_at = inputs()
    one, two = extend(prompt, at, own, own_at)[1], extend(prompt, at + 7, own, own_at + 7)[1]
    np.testing.assert_allclose(one, two, atol=1e-4)
    assert float(jnp.abs(one - extend(prompt, at, own, own_at + 7)[1]).max()) > 1e-3


def test_compound_tokens_are_sums_and_the_blank_is_zero():
    model = make(CONFIG)
    table = model.embedding[...]
    ids = jnp.array([[3, 0, 5], [0, 0, 0], [5, 3, 0]])
    np.testing.assert_allclose(model.embed(ids), jnp.stack([table[3] + table[5], 0 * table[0], table[3] + table[5]]))
    every = make(dataclasses.replace(CONFIG, blank_id=None))
    np.testing.assert_allclose(every.embed(jnp.array([[0]])), every.embedding[...][:1])


def test_bfloat16_stays_close_to_float32():
    graphdef, params = nnx.split(make(CONFIG))
    low = Transformer(dataclasses.replace(CONFIG, dtype="bfloat16"), rngs=nnx.Rngs(0))
    half = nnx.merge(nnx.graphdef(low), jax.tree.map(lambda x: x.astype(jnp.bfloat16), params))
    args = inputs()
    a, b = (jax.jit(functools.partial(run, model))(*args)[1] for model in (nnx.merge(graphdef, params), half))
    assert b.dtype == jnp.bfloat16 and half.logits(b).dtype == jnp.float32
    assert 1e-4 < float(jnp.abs(a - b.astype(jnp.float32)).max()) < 0.3


@pytest.mark.parametrize(
    ("name", "millions"), [("qwen3_0_6b", 596), ("qwen3_1_7b", 1721), ("qwen3_4b", 4022), ("qwen3_8b", 8191)]
)
def test_published_sizes(name, millions):
    def count(layers):
        model = nnx.eval_shape(lambda: Transformer(preset(name, num_layers=layers), rngs=nnx.Rngs(0)))
        return sum(math.prod(x.shape) for x in jax.tree.leaves(nnx.state(model)))

    one, two = count(1), count(2)
    assert round((one + (PRESETS[name].num_layers - 1) * (two - one)) / 1e6) == millions


def test_presets():
    assert preset("tiny", vocab_size=77) == dataclasses.replace(PRESETS["tiny"], vocab_size=77)
    with pytest.raises(ValueError, match="unknown preset 'huge'; known: medium"):
        preset("huge")
    with pytest.raises(ValueError, match="num_heads=4 is not a multiple of num_kv_heads=3"):
        preset("tiny", num_kv_heads=3)
    with pytest.raises(ValueError, match="head_dim=5 is odd"):
        preset("tiny", head_dim=5)
