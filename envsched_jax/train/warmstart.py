"""The base policy of a ToolWorld suite: made once per setting, then read from a cache."""

import dataclasses
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from envsched_jax.environments import toolworld
from envsched_jax.environments.toolworld import vocabulary as vocab
from envsched_jax.policy import Transformer, TransformerConfig
from envsched_jax.train import imitation

PACKAGE = Path(__file__).resolve().parent.parent
SOURCES = (
    "environments/toolworld",
    "policy",
    "train/imitation.py",
    "train/warmstart.py",
)  # what a base policy depends on


@dataclasses.dataclass(frozen=True)
class WarmStartConfig:
    """How base policies are made: imitation on ``pools`` suites of the same family but other seeds.

    ``policies`` of them differ in the seed of imitation alone (initial parameters, order of the data): ``seed``,
    ``seed + 1``, and so on. What a scheduler gains depends on where it starts, so a claim about schedulers needs
    several. After half of these ``steps`` most seeds still do not know the solutions, and rewards teach them little.
    """

    steps: int = 2000
    clean_share: float = 0.7
    batch_size: int = 64
    learning_rate: float = 3e-3
    pools: int = 4
    tasks_per_env: int = 40
    seed: int = 0
    policies: int = 1

    def __post_init__(self) -> None:
        if self.policies < 1:
            raise ValueError(f"policies: expected at least 1, got {self.policies}")


def cache_folder() -> Path:
    """Folder of cached base policies: ``$ENVSCHED_CACHE`` or the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("ENVSCHED_CACHE") or Path(base) / "envsched_jax")


def _source_digest() -> str:
    """Identifies the code that makes base policies: a cached one is not used after a change of it."""
    digest = hashlib.blake2b(digest_size=8)
    for name in SOURCES:
        path = PACKAGE / name
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            digest.update(file.read_bytes())
    return digest.hexdigest()


def demonstrations(
    world_config: toolworld.ToolWorldConfig, config: WarmStartConfig
) -> tuple[imitation.Demonstrations, jax.Array]:
    """Solutions of ``pools`` other suites and the distribution that the lapsing expert follows.

    Returns:
      Demonstrations of N episodes and targets f32[N, T, V].
    """
    habit = toolworld.habits(world_config)
    parts, targets = [], []
    for pool in range(config.pools):
        suite = toolworld.generate(
            dataclasses.replace(
                world_config,
                seed=10_000 + 100 * world_config.seed + pool,
                tasks_per_env=config.tasks_per_env,
                held_out_envs=0,
                eval_per_env=0,
            )
        )
        environment = toolworld.environment(suite.world, suite.tasks)
        play = jax.jit(jax.vmap(lambda task, script, env=environment: imitation.demonstrate(env, task, script)))
        demos = play(jnp.arange(len(suite.records)), jnp.asarray(suite.script))
        lapse = jnp.asarray(habit[suite.topology, suite.domain, suite.style], jnp.float32)
        submits = suite.world.card[:, :, 1] == vocab.FIRST["op"] + vocab.Op.SUBMIT
        submit = jnp.asarray(vocab.FIRST["tool"] + submits.argmax(1)[suite.tasks.env])
        targets.append(
            jax.jit(imitation.lapsed_targets, static_argnums=3)(demos, lapse, submit, environment.call_length)
        )
        parts.append(demos)
    return jax.tree.map(lambda *x: jnp.concatenate(x), *parts), jnp.concatenate(targets)


def base_policies(
    model_config: TransformerConfig, world_config: toolworld.ToolWorldConfig, config: WarmStartConfig
) -> nnx.State:
    """Parameters of all base policies, stacked: a leading axis of ``config.policies``."""
    each = [
        base_policy(model_config, world_config, dataclasses.replace(config, seed=config.seed + i, policies=1))
        for i in range(config.policies)
    ]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)


def base_policy(
    model_config: TransformerConfig, world_config: toolworld.ToolWorldConfig, config: WarmStartConfig
) -> nnx.State:
    """Parameters of the base policy of ``config.seed``, from the cache if the same settings were trained before.

    The cache file is written whole or not at all, so a killed run leaves nothing half-made.
    """
    settings = [
        _source_digest(),
        jax.__version__,
        *(dataclasses.asdict(c) for c in (model_config, world_config, config)),
    ]
    name = hashlib.blake2b(json.dumps(settings, sort_keys=True).encode(), digest_size=12).hexdigest()
    path = cache_folder() / "base_policies" / f"{name}.npz"
    model = Transformer(model_config, rngs=nnx.Rngs(config.seed))
    graphdef, params = nnx.split(model)
    leaves, treedef = jax.tree.flatten(params)
    if path.exists():
        with np.load(path) as kept:
            return jax.tree.unflatten(treedef, [jnp.asarray(kept[f"leaf{i}"]) for i in range(len(leaves))])
    demos, targets = demonstrations(world_config, config)
    train = jax.jit(
        lambda key, params: imitation.imitate(
            key,
            nnx.merge(graphdef, params),
            demos,
            targets,
            names=(vocab.FIRST["tool"], vocab.TOOLS),
            steps=config.steps,
            clean_share=config.clean_share,
            batch_size=config.batch_size,
            learning_rate=config.learning_rate,
        )
    )
    params, _ = train(jax.random.key(config.seed), params)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}.npz")
    stored: dict[str, Any] = {f"leaf{i}": np.asarray(x) for i, x in enumerate(jax.tree.leaves(params))}
    np.savez(unfinished, **stored)
    unfinished.replace(path)
    return params
