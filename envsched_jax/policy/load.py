"""Published weights in and out: folders of safetensors as Hugging Face lays them out, and GGUF files. No torch.

Two families, which differ only in what ``TransformerConfig`` says: Llama (SmolLM2 among them) and Qwen3. Tensors are
read one at a time and cast as they come, so the peak of memory is the model and its largest tensor.
"""

import functools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from envsched_jax.policy.transformer import Transformer, TransformerConfig

FAMILIES = {"llama": False, "qwen3": True}  # whether queries and keys have norms
SHARD_BYTES = 4 * 2**30
_LINEAR = {
    "self_attn.q_proj": "q",
    "self_attn.k_proj": "k",
    "self_attn.v_proj": "v",
    "self_attn.o_proj": "o",
    "mlp.gate_proj": "gate",
    "mlp.up_proj": "up",
    "mlp.down_proj": "down",
}
_NORM = {
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "mlp_norm",
    "self_attn.q_norm": "q_norm",
    "self_attn.k_norm": "k_norm",
}
_GGUF = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}


class ModelError(ValueError):
    """A model that cannot be read. The message names the file, the field or tensor, and what was expected."""


def load(path: str | os.PathLike[str], dtype: str = "bfloat16") -> Transformer:
    """Returns a model with its weights.

    Args:
      path: a folder with ``config.json`` and safetensors, in one file or in shards, or a GGUF file.
      dtype: of the parameters; weights are cast to it one by one. On a CPU float32 is faster than bfloat16.

    Raises:
      ModelError: something is missing, of another shape, or of a family that is not known.
    """
    source = Path(path)
    if source.is_file():
        reader = open_gguf(source)
        config = gguf_config(reader, str(source), dtype)
        return _filled(config, _gguf_tensors(reader, config), str(source))
    config = read_config(source, dtype)
    return _filled(config, _safetensors(source), str(source))


def read_config(folder: str | os.PathLike[str], dtype: str = "bfloat16") -> TransformerConfig:
    """Returns the dimensions in a folder's ``config.json``; raises ModelError as ``load`` does."""
    path = Path(folder) / "config.json"
    try:
        fields = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: expected a JSON file: {error}") from None
    family = fields.get("model_type")
    if family not in FAMILIES:
        raise ModelError(f"{path}: model_type {family!r}: expected one of {', '.join(FAMILIES)}")
    for name, plain in (
        ("attention_bias", False),
        ("mlp_bias", False),
        ("hidden_act", "silu"),
        ("use_sliding_window", False),
    ):
        if fields.get(name, plain) not in (plain, None):
            raise ModelError(f"{path}: {name} is {fields[name]!r}: expected {plain!r}")
    rope = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if rope.get("rope_type", rope.get("type", "default")) != "default":
        raise ModelError(f"{path}: positions are scaled ({rope}): expected plain rotary positions")
    try:
        heads = fields["num_attention_heads"]
        return TransformerConfig(
            vocab_size=fields["vocab_size"],
            num_layers=fields["num_hidden_layers"],
            embed_dim=fields["hidden_size"],
            num_heads=heads,
            num_kv_heads=fields.get("num_key_value_heads") or heads,
            head_dim=fields.get("head_dim") or fields["hidden_size"] // heads,
            mlp_dim=fields["intermediate_size"],
            rope_theta=float(rope.get("rope_theta") or fields.get("rope_theta") or 1e4),
            qk_norm=FAMILIES[family],
            tied=bool(fields.get("tie_word_embeddings", False)),
            norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
            dtype=dtype,
            blank_id=None,
        )
    except KeyError as error:
        raise ModelError(f"{path}: field {error} is missing") from None


def save(model: Transformer, folder: str | os.PathLike[str], shard_bytes: int = SHARD_BYTES) -> None:
    """Writes a model so that ``load``, and libraries that read Hugging Face folders, get it back.

    Args:
      model: of float32, float16 or bfloat16 weights.
      folder: made if it is not there; ``config.json`` and the weights in it are replaced.
      shard_bytes: the most that one file holds, unless one tensor is larger.
    """
    from safetensors.flax import save_file

    target, c = Path(folder), model.config
    target.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, jax.Array]] = [{}]
    size = total = 0
    for name, weight in _named(model):
        if shards[-1] and size + weight.nbytes > shard_bytes:
            shards.append({})
            size = 0
        shards[-1][name] = weight
        size, total = size + weight.nbytes, total + weight.nbytes
    files = ["model.safetensors"]
    if len(shards) > 1:
        files = [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
        where = {name: file for file, shard in zip(files, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    for file, shard in zip(files, shards, strict=True):
        save_file(shard, target / file, metadata={"format": "pt"})
    family = next(name for name, norms in FAMILIES.items() if norms == c.qk_norm)
    fields = {
        "architectures": [{"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}[family]],
        "model_type": family,
        "vocab_size": c.vocab_size,
        "num_hidden_layers": c.num_layers,
        "hidden_size": c.embed_dim,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "intermediate_size": c.mlp_dim,
        "rope_theta": c.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": c.rope_theta},
        "tie_word_embeddings": c.tied,
        "rms_norm_eps": c.norm_eps,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": c.dtype,
    }
    (target / "config.json").write_text(json.dumps(fields, indent=1))


# ------------------------------------------------------------------------------------------------- names and tensors


def _places(config: TransformerConfig) -> dict[str, tuple[tuple[Any, ...], bool]]:
    """Returns by Hugging Face name where a weight lives in the model, and whether it is transposed there."""
    places: dict[str, tuple[tuple[Any, ...], bool]] = {
        "model.embed_tokens.weight": (("embedding",), False),
        "model.norm.weight": (("norm", "scale"), False),
    }
    if not config.tied:
        places["lm_head.weight"] = (("head", "kernel"), True)
    for i in range(config.num_layers):
        for name, mine in _LINEAR.items():
            places[f"model.layers.{i}.{name}.weight"] = (("blocks", i, mine, "kernel"), True)
        for name, mine in _NORM.items():
            if config.qk_norm or not name.endswith(("q_norm", "k_norm")):
                places[f"model.layers.{i}.{name}.weight"] = (("blocks", i, mine, "scale"), False)
    return places


def _filled(config: TransformerConfig, tensors: Iterator[tuple[str, Callable[[], Any]]], where: str) -> Transformer:
    """Returns the model of these tensors, given by name and a function that reads one."""
    graph, state = nnx.split(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))
    leaves = dict(nnx.to_flat_state(state))
    places, left = _places(config), set(_places(config))
    for name, read in tensors:
        if name not in places:
            if name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq"):
                continue  # a copy of the tied table; frequencies that follow from the config
            raise ModelError(f"{where}: tensor {name!r} is not one of this family's")
        path, transposed = places[name]
        weight = jnp.asarray(read(), config.dtype)
        weight = weight.T if transposed else weight
        if weight.shape != leaves[path].shape:
            raise ModelError(f"{where}: tensor {name!r}: shape {weight.shape}: expected {leaves[path].shape}")
        leaves[path] = leaves[path].replace(weight)
        left.discard(name)
    if left:
        raise ModelError(f"{where}: {len(left)} tensors are missing, {sorted(left)[0]!r} among them")
    return nnx.merge(graph, nnx.from_flat_state(list(leaves.items())))


def _named(model: Transformer) -> Iterator[tuple[str, jax.Array]]:
    leaves = dict(nnx.to_flat_state(nnx.state(model)))
    for name, (path, transposed) in _places(model.config).items():
        weight = leaves[path][...]
        yield name, jnp.asarray(weight.T if transposed else weight)


def _safetensors(folder: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    files = ["model.safetensors"]
    if index.exists():
        try:
            files = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise ModelError(f"{index}: expected a weight_map: {error!r}") from None
    for file in files:
        try:
            with safe_open(folder / file, "flax") as opened:
                for name in opened.keys():
                    yield name, functools.partial(opened.get_tensor, name)
        except (OSError, SafetensorError) as error:
            raise ModelError(f"{folder / file}: cannot be read: {error}") from None


# ------------------------------------------------------------------------------------------------------------- GGUF


def open_gguf(path: Path) -> Any:
    """Returns the ``gguf.GGUFReader`` of a file; raises ModelError if it is none."""
    from gguf import GGUFReader

    try:
        return GGUFReader(path)
    except (OSError, ValueError) as error:
        raise ModelError(f"{path}: expected a GGUF file: {error}") from None


def field(reader: Any, name: str, where: str) -> Any:
    """Returns a field of a GGUF file's metadata; raises ModelError if it is missing."""
    found = reader.fields.get(name)
    if found is None:
        raise ModelError(f"{where}: field {name!r} is missing")
    return found.contents()


def gguf_config(reader: Any, where: str, dtype: str) -> TransformerConfig:
    """Returns the dimensions in a GGUF file's metadata; raises ModelError as ``load`` does."""
    family = field(reader, "general.architecture", where)
    if family not in FAMILIES:
        raise ModelError(f"{where}: architecture {family!r}: expected one of {', '.join(FAMILIES)}")
    if f"{family}.rope.scaling.type" in reader.fields:
        raise ModelError(f"{where}: positions are scaled: expected plain rotary positions")
    names = [tensor.name for tensor in reader.tensors]
    embed, heads = (field(reader, f"{family}.{name}", where) for name in ("embedding_length", "attention.head_count"))
    size = reader.fields.get(f"{family}.attention.key_length")
    return TransformerConfig(
        vocab_size=len(field(reader, "tokenizer.ggml.tokens", where)),
        num_layers=field(reader, f"{family}.block_count", where),
        embed_dim=embed,
        num_heads=heads,
        num_kv_heads=field(reader, f"{family}.attention.head_count_kv", where),
        head_dim=embed // heads if size is None else size.contents(),
        mlp_dim=field(reader, f"{family}.feed_forward_length", where),
        rope_theta=float(field(reader, f"{family}.rope.freq_base", where)),
        qk_norm=FAMILIES[family],
        tied="output.weight" not in names,
        norm_eps=float(field(reader, f"{family}.attention.layer_norm_rms_epsilon", where)),
        dtype=dtype,
        blank_id=None,
    )


def _gguf_tensors(reader: Any, config: TransformerConfig) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yields the tensors under their Hugging Face names, dequantised to float32 when read."""
    from gguf.quants import dequantize

    whole = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    for tensor in reader.tensors:
        stem = tensor.name.removesuffix(".weight")
        parts = stem.split(".")
        name = whole.get(stem, stem)
        if parts[0] == "blk":
            name = f"model.layers.{parts[1]}.{_GGUF.get(parts[2], parts[2])}"

        def read(tensor: Any = tensor, kind: str = parts[-1]) -> np.ndarray:
            weight = dequantize(tensor.data, tensor.tensor_type)
            if kind in ("attn_q", "attn_k") and not config.qk_norm:
                # Llama's files interleave the two halves of every head, for another layout of rotary positions.
                heads = weight.shape[0] // config.head_dim
                weight = weight.reshape(heads, config.head_dim // 2, 2, -1).swapaxes(1, 2).reshape(weight.shape)
            return weight

        yield f"{name}.weight", read
