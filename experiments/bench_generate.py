"""Tokens per second of reading and of greedy decoding, ours beside transformers, in turns in one process.

`python -m experiments.bench_generate --config.model=PATH --workdir=DIR`. Variants: `batch`, prompts that begin and end
together (`rollout.text`); `slots`, with continuous batching (`rollout.slots`); `transformers`, where it is installed.
Reading is timed as a generation of one token, decoding as what the others take more.
"""

import importlib.util
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from ml_collections import ConfigDict

from envsched_jax.policy import preset
from envsched_jax.policy.load import load
from envsched_jax.policy.transformer import Transformer
from envsched_jax.rollout import slots
from envsched_jax.rollout.text import compiled
from experiments import common

Generate = Callable[[np.ndarray, int], Any]  # ids i64[B, P], tokens -> waits until they are there


def main(config: ConfigDict, workdir: Path) -> None:
    """Measures every variant and leaves summary.json in the workdir."""
    started = time.time()
    model = load(config.model, config.dtype) if config.model else _random(config)
    variants = {"batch": _batch(model), "slots": _slots(model)}
    theirs = _transformers(config)
    if theirs is None:
        print("transformers, or a model that it could read, is not here: ours only")
    else:
        variants["transformers"] = theirs
    rows = []
    for size in config.batch_sizes:
        rng = np.random.default_rng(config.seed)
        ids = rng.integers(3, model.config.vocab_size, (size, config.prompt))
        times: dict[tuple[str, int], list[float]] = {}
        for round_ in range(config.rounds + 1):
            for name, generate in variants.items():
                for tokens in (1, config.tokens):
                    begun = time.perf_counter()
                    generate(ids, tokens)
                    if round_:  # the first compiles
                        times.setdefault((name, tokens), []).append(time.perf_counter() - begun)
        for name in variants:
            one, all_ = (float(np.median(times[name, tokens])) for tokens in (1, config.tokens))
            row = {
                "variant": name,
                "batch_size": size,
                "prefill_tokens_per_s": size * config.prompt / one,
                "decode_tokens_per_s": size * (config.tokens - 1) / max(all_ - one, 1e-9),
            }
            rows.append(row)
            print(
                f"{size:3d} {name:12s} {row['prefill_tokens_per_s']:8.0f} {row['decode_tokens_per_s']:8.0f}", flush=True
            )
    common.write_summary(workdir, "bench_generate", config, {"rows": rows}, started)


def _random(config: ConfigDict) -> Transformer:
    return Transformer(preset(config.preset, dtype=config.dtype, blank_id=None), rngs=nnx.Rngs(config.seed))


def _batch(model: Transformer) -> Generate:
    def generate(ids: np.ndarray, tokens: int) -> None:
        out = compiled(model, jax.random.key(0), ids.astype(np.int32), np.ones(ids.shape, bool), tokens=tokens)
        jax.block_until_ready(out.ids)

    return generate


def _slots(model: Transformer) -> Generate:
    def generate(ids: np.ndarray, tokens: int) -> None:
        size, length = ids.shape
        rows = np.arange(size, dtype=np.int32)
        state = slots.empty(model, size, -(-(length + tokens) // 64) * 64)
        keys = jax.random.split(jax.random.key(0), size)
        asked = ids.astype(np.int32)
        state = slots.begin_compiled(state, asked[:, 0], rows, keys)
        state = slots.read_compiled(model, state, asked[:, 1:], np.full(size, length - 1, np.int32), rows)
        budget = jnp.full((size,), tokens, jnp.int32)
        _, out = slots.decode_compiled(model, state, budget, tokens=tokens, temperature=0.0, eos=())
        jax.block_until_ready(out.ids)

    return generate


def _transformers(config: ConfigDict) -> Generate | None:
    if not config.model or any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")):
        return None
    import torch
    from transformers import AutoModelForCausalLM

    path, dtype = Path(config.model), getattr(torch, config.dtype)
    if path.is_file():
        model = AutoModelForCausalLM.from_pretrained(str(path.parent), gguf_file=path.name, dtype=dtype)
    else:
        model = AutoModelForCausalLM.from_pretrained(str(path), dtype=dtype)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model.to(device).eval()

    def generate(ids: np.ndarray, tokens: int) -> None:
        asked = torch.from_numpy(ids).to(device)
        with torch.no_grad():
            found = model.generate(asked, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0)
        found.cpu()

    return generate


if __name__ == "__main__":
    common.run_app(main, "configs/bench_generate.py")
