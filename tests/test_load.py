"""Published weights: what is written is read back, other libraries agree, and what cannot be read is named."""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs.smollm2_bfcl_cpu import weights
from envsched_jax.policy.load import ModelError, load, read_config, save
from envsched_jax.policy.tokenizer import load_tokenizer
from envsched_jax.policy.transformer import Transformer, TransformerConfig
from envsched_jax.rollout.text import compiled, pad_prompts

LLAMA = TransformerConfig(
    vocab_size=97,
    num_layers=2,
    embed_dim=24,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    mlp_dim=40,
    rope_theta=5e4,
    qk_norm=False,
    tied=True,
    norm_eps=1e-5,
    blank_id=None,
)
QWEN = dataclasses.replace(LLAMA, qk_norm=True, tied=False, head_dim=8, rope_theta=1e6, norm_eps=1e-6)
CONFIGS = {"llama": LLAMA, "qwen3": QWEN}


def model_of(config, seed=0):
    model = Transformer(config, rngs=nnx.Rngs(seed))
    rng = np.random.default_rng(seed)  # norms that are not all one
    state = jax.tree.map(lambda x: jnp.asarray(x + 0.1 * rng.normal(size=x.shape), x.dtype), nnx.state(model))
    nnx.update(model, state)
    return model


def arrays(model):
    return {jax.tree_util.keystr(k): np.asarray(v) for k, v in jax.tree.leaves_with_path(nnx.state(model))}


@jax.jit
def logits(model, ids):
    place = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    hidden, _ = model.prefill(ids[:, :, None], place, jnp.ones(ids.shape, bool), False)
    return model.logits(hidden)


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("shard_bytes", [2**30, 4000])
def test_what_is_saved_is_loaded(family, shard_bytes, tmp_path):
    model = model_of(CONFIGS[family])
    save(model, tmp_path, shard_bytes)
    assert len(list(tmp_path.glob("*.safetensors"))) == (
        1 if shard_bytes > 4000 else len(list(tmp_path.glob("*-of-*")))
    )
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard_bytes == 4000)
    again = load(tmp_path, "float32")
    assert again.config == CONFIGS[family]
    for name, value in arrays(model).items():
        np.testing.assert_array_equal(arrays(again)[name], value)
    half = load(tmp_path)
    assert {value.dtype.name for value in arrays(half).values()} == {"bfloat16"}


@pytest.mark.parametrize("family", CONFIGS)
def test_transformers_agrees(family, tmp_path):
    pytest.importorskip("torch", reason="torch is not installed here: see `make test-trl`")
    transformers = pytest.importorskip("transformers")
    import torch

    for seed in range(3):
        model = model_of(CONFIGS[family], seed)
        save(model, tmp_path / str(seed), 20_000)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / str(seed), dtype=torch.float32)
        ids = np.random.default_rng(seed).integers(0, 97, (3, 17))
        with torch.no_grad():
            wanted = theirs(torch.from_numpy(ids)).logits.numpy()
        np.testing.assert_allclose(logits(model, ids), wanted, atol=1e-4)
        theirs.save_pretrained(tmp_path / f"theirs{seed}")
        again = load(tmp_path / f"theirs{seed}", "float32")
        np.testing.assert_allclose(logits(again, ids), wanted, atol=1e-4)


def test_gguf_files_of_llama_are_unpermuted(tmp_path):
    gguf = pytest.importorskip("gguf")
    model = model_of(LLAMA)
    save(model, tmp_path)
    from safetensors.numpy import load_file

    tensors = load_file(tmp_path / "model.safetensors")
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_block_count(2)
    writer.add_embedding_length(24)
    writer.add_feed_forward_length(40)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(5e4)
    writer.add_token_list([f"t{i}" for i in range(97)])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    for name, weight in tensors.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):  # as the converter of these files does
            heads = weight.shape[0] // 6
            weight = weight.reshape(heads, 2, 3, 24).swapaxes(1, 2).reshape(weight.shape)
        writer.add_tensor(names.get_name(name, (".weight",)), np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    again = load(tmp_path / "model.gguf", "float32")
    assert dataclasses.replace(again.config, norm_eps=1e-5) == LLAMA
    for name, value in arrays(model).items():
        np.testing.assert_array_equal(arrays(again)[name], value)


def test_what_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json: expected a JSON file"):
        load(tmp_path)
    save(model_of(QWEN), tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())

    def write(**changed):
        (tmp_path / "config.json").write_text(json.dumps({k: v for k, v in (fields | changed).items() if v != "gone"}))

    for changed, message in (
        ({"model_type": "mamba"}, "model_type 'mamba': expected one of llama, qwen3"),
        ({"vocab_size": "gone"}, "field 'vocab_size' is missing"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "positions are scaled"),
        ({"mlp_dim": 1, "intermediate_size": 41}, r"shape .*: expected \(41, 24\)"),
        ({"num_hidden_layers": 3}, "9 tensors are missing|11 tensors are missing"),
        ({"num_hidden_layers": 1}, "is not one of this family's"),
    ):
        write(**changed)
        with pytest.raises(ModelError, match=message):
            load(tmp_path, "float32")
    write(num_key_value_heads=None, rope_parameters=None, head_dim=None)
    assert read_config(tmp_path).num_kv_heads == 4 and read_config(tmp_path).head_dim == 6
    assert read_config(tmp_path).rope_theta == 1e6
    write()
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[: len(data) // 2])
    with pytest.raises(ModelError, match="cannot be read"):
        load(tmp_path)
    (tmp_path / "odd.gguf").write_bytes(b"nothing like it")
    with pytest.raises(ModelError, match="expected a GGUF file"):
        load(tmp_path / "odd.gguf")
    with pytest.raises(ModelError, match="cannot be read"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("family", CONFIGS)
def test_generation_with_a_cache_is_generation_without(family):
    model = model_of(CONFIGS[family], 3)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, 97, size).tolist() for size in (3, 11, 7)]
    ids, mask = pad_prompts(prompts, 16)
    out = compiled(model, jax.random.key(0), ids, mask, tokens=8)
    for row, prompt in enumerate(
        prompts
    ):  # read at once, the generated ids are the likeliest after what is before them
        whole = np.zeros((1, 20), np.int32)
        whole[0, : len(prompt) + 8] = [*prompt, *out.ids[row, 0].tolist()]
        scores = jax.nn.log_softmax(logits(model, whole)[0, len(prompt) - 1 : len(prompt) + 7])
        np.testing.assert_array_equal(out.ids[row, 0], scores.argmax(axis=-1))
        np.testing.assert_allclose(out.log_prob[row, 0], scores.max(axis=-1), atol=1e-4)
    assert out.mask.all()


def test_groups_differ_and_end_where_they_should():
    model = model_of(LLAMA, 5)
    ids, mask = pad_prompts([[1, 2, 3], [4, 5, 6, 7]], 8)
    many = compiled(model, jax.random.key(1), ids, mask, tokens=12, group=6, temperature=1.0, eos=tuple(range(20)))
    drawn, valid = np.asarray(many.ids), np.asarray(many.mask)
    assert len({tuple(row) for row in drawn[0]}) > 1
    for group, own in zip(drawn.reshape(-1, 12), valid.reshape(-1, 12), strict=True):
        size = own.sum()
        assert own[:size].all() and not group[size:].any()
        assert (group[: size - 1] >= 20).all() and (size == 12 or group[size - 1] < 20)
    again = compiled(model, jax.random.key(1), ids, mask, tokens=12, group=6, temperature=1.0, eos=tuple(range(20)))
    np.testing.assert_array_equal(again.ids, drawn)


@pytest.mark.slow
@pytest.mark.skipif(weights() is None, reason="the weights of SmolLM2 are not here: `make smollm2` brings them")
def test_smollm2_says_what_another_implementation_says():
    model, tokenizer = load(weights(), "float32"), load_tokenizer(weights())
    rows = json.loads((Path(__file__).parent / "data/smollm2.json").read_text())
    for row in rows:
        assert tokenizer.chat(row["messages"]) == row["text"]
        assert tokenizer.encode(row["text"]) == row["ids"]
        assert tokenizer.decode(row["ids"], special=True) == row["text"]
        best = np.asarray(logits(model, pad_prompts([row["ids"]])[0]))[0, len(row["ids"]) - 1]
        np.testing.assert_allclose(best[row["best"]], row["logits"], atol=2e-3)
    ids, mask = pad_prompts([row["ids"] for row in rows])
    out = compiled(model, jax.random.key(0), ids, mask, tokens=32, eos=tokenizer.eos)
    for i, row in enumerate(rows):
        assert np.asarray(out.ids[i, 0])[np.asarray(out.mask[i, 0])].tolist() == row["continuation"]
