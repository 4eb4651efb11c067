"""Memory of training a model, by compiling for it without its weights, and without accelerators.

`XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m experiments.memory --workdir=DIR` is for the setting of
the published result. Bytes of arguments hold for every platform; those of temporaries are what XLA plans for a CPU,
where it fuses less than elsewhere, so they are too high rather than too low.
`--config.memory_layers="(1,3)"` saves most of the time that compiling 36 layers takes.
"""

import dataclasses
import functools
import math
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from ml_collections import ConfigDict

from envsched_jax.policy.transformer import Transformer, TransformerConfig
from envsched_jax.rollout import slots
from envsched_jax.train import build_agent, grpo, learner, sharding, transcripts
from envsched_jax.types import PyTree
from experiments import common

GIB = 2.0**30


def main(config: ConfigDict, workdir: Path) -> None:
    """Compiles one pass of the update, its step and decoding, and leaves summary.json in the workdir.

    With ``config.memory_layers``, two numbers, it compiles models of so many layers and goes on along the line: every
    layer takes the same.
    """
    started = time.time()
    whole = build_agent.model_config(config)
    if config.memory_layers:
        few, more = (dataclasses.replace(whole, num_layers=number) for number in config.memory_layers)
        line = [_measure(config, dimensions) for dimensions in (few, more)]
        share = (whole.num_layers - few.num_layers) / (more.num_layers - few.num_layers)
        found = jax.tree.map(lambda a, b: a + share * (b - a), *line)
    else:
        found = _measure(config, whole)
    devices = config.mesh.data * config.mesh.model
    for name, line in found["programs"].items():
        print(f"{name}: {line['arguments'] / GIB:.2f} GiB of arguments, {line['temporaries'] / GIB:.2f} GiB besides")
    kept = found["kept_bytes_per_device"] / GIB
    print(f"{found['parameters']:,.0f} parameters; weights and optimiser {kept:.2f} GiB on each of {devices} devices")
    common.write_summary(workdir, "memory", config, found, started)


def _measure(config: ConfigDict, dimensions: TransformerConfig) -> dict[str, Any]:
    mesh = sharding.make_mesh(**config.mesh)
    model = nnx.eval_shape(lambda: Transformer(dimensions, rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(model)
    optimizer = grpo.make_optimizer(**config.optimizer)
    train = config.train
    trained, fixed = jax.eval_shape(lambda p: learner.divide(p, train.lora_rank, jax.random.key(0)), params)
    merge = learner.merger(config.dtype, train.lora_rank, train.lora_scale)
    trained, fixed = _placed(mesh, trained), _placed(mesh, fixed)
    opt_state = _placed(mesh, jax.eval_shape(optimizer.init, trained))
    sums = _placed(mesh, jax.eval_shape(transcripts.nothing, trained))
    rows = _rows(config, mesh)
    options = {"clip_low": train.clip_low, "clip_high": train.clip_high}
    add = functools.partial(
        transcripts.add_part, graphdef=graphdef, merge=merge, temperature=train.temperature, options=options
    )
    total = jax.ShapeDtypeStruct((), jnp.float32)
    lines = {
        "pass": _compiled(jax.jit(add, donate_argnums=0), sums, trained, fixed, rows, total),
        "step": _compiled(
            jax.jit(functools.partial(transcripts.apply, optimizer=optimizer), donate_argnums=(0, 1)),
            trained,
            opt_state,
            sums,
        ),
    }
    state = jax.eval_shape(lambda: slots.empty(nnx.merge(graphdef, params), config.engine.slots, config.limits.context))
    where = sharding.of_slots(mesh, state)
    state = jax.tree.map(lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to), state, where)
    budget = jax.ShapeDtypeStruct((config.engine.slots,), jnp.int32)
    decode = functools.partial(slots.decode, tokens=config.engine.chunk, temperature=1.0, eos=(0,))
    policy = nnx.merge(graphdef, _placed(mesh, params))
    lines["decode"] = _compiled(jax.jit(decode, donate_argnums=1), policy, state, budget)
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    kept = _bytes(trained) + _bytes(opt_state) + _bytes(fixed)
    return {"parameters": float(count), "kept_bytes_per_device": kept, "programs": lines}


def _placed(mesh: jax.sharding.Mesh, tree: PyTree) -> PyTree:
    where = sharding.of_parameters(mesh, tree)
    return jax.tree.map(lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to), tree, where)


def _rows(config: ConfigDict, mesh: jax.sharding.Mesh) -> transcripts.Rows:
    """One pass: the context is divided into an eighth of prompt and the rest."""
    part, members, prompt = config.train.part, config.train.group_size, config.limits.context // 8
    shape = part, members, transcripts.padded(config.limits.context - prompt)
    rows = jax.eval_shape(
        lambda: transcripts.Rows(
            prompt=jnp.zeros((part, prompt), jnp.int32),
            prompt_length=jnp.zeros((part,), jnp.int32),
            ids=jnp.zeros(shape, jnp.int32),
            mask=jnp.zeros(shape, bool),
            log_prob=jnp.zeros(shape, jnp.float32),
            advantage=jnp.zeros(shape[:2], jnp.float32),
        )
    )
    where = sharding.of_rows(mesh, rows)
    return jax.tree.map(lambda x, to: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=to), rows, where)


def _bytes(tree: PyTree) -> float:
    """Returns bytes on each device."""

    def one(leaf: Any) -> float:
        return float(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize)

    return sum(map(one, jax.tree.leaves(tree)))


def _compiled(function: Any, *arguments: Any) -> dict[str, float]:
    begun = time.time()
    compiled = function.lower(*arguments).compile()
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
    return {
        "arguments": float(memory.argument_size_in_bytes),
        "outputs": float(memory.output_size_in_bytes),
        "shared": float(memory.alias_size_in_bytes),
        "temporaries": float(memory.temp_size_in_bytes),
        "flops": float(cost.get("flops", float("nan"))),
        "compile_s": time.time() - begun,
    }


if __name__ == "__main__":
    common.run_app(main, "configs/qwen3_8b_paper.py")
