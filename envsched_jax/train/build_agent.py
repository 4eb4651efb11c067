"""From a config to a pool, environments, a model and its learner: the module that reads the config of an agent."""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
from flax import nnx
from ml_collections import ConfigDict

from envsched_jax.environments import acebench, bfcl, taubench, users
from envsched_jax.environments.conversation import Conversation, Hosted
from envsched_jax.policy import preset
from envsched_jax.policy.chat import STYLES, Chat
from envsched_jax.policy.load import ModelError, load
from envsched_jax.policy.tokenizer import load_tokenizer
from envsched_jax.policy.transformer import Transformer, TransformerConfig
from envsched_jax.pool.records import PoolError, Record
from envsched_jax.rollout.agent import Agent
from envsched_jax.rollout.script import Limits, Transcript
from envsched_jax.train import grpo, sharding
from envsched_jax.train.learner import Learner

SHARES = ("all", "train", "held_out")
REWARDS = ("progress", "success")


@dataclasses.dataclass(frozen=True)
class World:
    """Tasks of one benchmark and how their conversations begin."""

    name: str
    records: list[Record]
    start: Callable[[str], Hosted]  # of a task's id


def build_world(config: ConfigDict) -> World:
    """Returns the world of a section such as ``config.environment``.

    ``share`` takes 'all' tasks, or those of the scenarios that are 'held_out', a fraction that is the same whoever
    asks, or the others, 'train'.

    Raises:
      PoolError: an unknown environment, task or share, a package or a checkout is missing, or no task is left.
    """
    name = config.name
    if name == "bfcl":
        records = bfcl.pool(tuple(config.categories))
        begin: Callable[..., Conversation] = bfcl.start
    elif name == "taubench":
        records = taubench.pool(_checkout(config), tuple(config.domains), config.split)
        begin = functools.partial(taubench.start, config.checkout, user=_user(config))
    elif name == "acebench":
        records = acebench.pool(_checkout(config), tuple(config.kinds), config.language)
        begin = functools.partial(acebench.start, config.checkout, user=_user(config), language=config.language)
    else:
        raise PoolError(f"environment: expected bfcl, taubench or acebench, got {name!r}")
    wanted = tuple(config.tasks)
    unknown = sorted(set(wanted) - {record.task_id for record in records})
    if unknown:
        raise PoolError(f"tasks of {name}: there is no {unknown[0]!r}")
    if wanted:
        records = [record for record in records if record.task_id in wanted]
    if config.share not in SHARES:
        raise PoolError(f"share of {name}: expected one of {', '.join(SHARES)}, got {config.share!r}")
    if config.share != "all":
        apart = config.share == "held_out"
        records = [record for record in records if _held_out(record, config.held_out) == apart]
    if not records:
        raise PoolError(f"share of {name}: no task is left with held_out={config.held_out}")
    return World(name, records, functools.partial(Hosted, begin, limit=config.limit_s))


def _held_out(record: Record, fraction: float) -> bool:
    """Tells whether a task is for evaluation only; all variants of a scenario are, or none."""
    return zlib.crc32((record.group_id or record.task_id).encode()) / 2**32 < fraction


def _checkout(config: ConfigDict) -> str:
    if not config.checkout:
        raise PoolError(f"checkout of {config.name}: expected the folder of a clone of its repository")
    return config.checkout


def _user(config: ConfigDict) -> users.MakeUser:
    """Returns what makes a user of a task's instruction: a model that is served, or one that says all at once."""
    if not config.user.url:
        return users.plain
    return functools.partial(users.ServedUser, config.user.url, config.user.model, key_name=config.user.key_name)


def build_chat(config: ConfigDict, model: str | None) -> Chat:
    """Returns the chat of a section such as ``config.chat`` for the model at a path.

    Raises:
      ModelError: files are missing, or a setting does not fit the style.
    """
    if config.style not in STYLES:
        raise ModelError(f"config.chat.style: expected one of {', '.join(STYLES)}, got {config.style!r}")
    if config.style == "hermes" and (config.brief or config.example):
        raise ModelError("config.chat: brief and example are not for the style hermes: its template shows the tools")
    return Chat(load_tokenizer(_given(model)), config.style, dict(config.more), config.brief, config.example)


def load_model(config: ConfigDict) -> Transformer:
    """Returns the model at ``config.model``, with weights of ``config.dtype`` that lie over ``config.mesh``.

    Raises:
      ModelError: there is no such model, or it cannot be read.
      ValueError: there are fewer devices than the mesh has.
    """
    mesh = sharding.make_mesh(**config.mesh)
    model = load(_given(config.model), config.dtype)
    model.config = dataclasses.replace(model.config, remat=config.train.remat)
    graphdef, params = nnx.split(model)
    return nnx.merge(graphdef, jax.device_put(params, sharding.of_parameters(mesh, params)))


def _given(model: str | None) -> str:
    if not model:
        raise ModelError("config.model: expected a folder of safetensors or a GGUF file")
    return model


def model_config(config: ConfigDict) -> TransformerConfig:
    """Returns the dimensions of ``config.preset``, for what is computed without weights."""
    return preset(config.preset, dtype=config.dtype, remat=config.train.remat)


def build_agent(config: ConfigDict, chat: Chat, *, temperature: float) -> Agent:
    """Returns the agent of ``config.limits``, ``config.engine`` and ``config.mesh``; raises ValueError as these do."""
    mesh = sharding.make_mesh(**config.mesh)
    return Agent(
        chat,
        Limits(**config.limits),
        temperature=temperature,
        place=functools.partial(sharding.place_slots, mesh),
        **config.engine,
    )


def build_learner(config: ConfigDict, model: Transformer) -> Learner:
    """Returns the learner of ``config.train``, ``config.optimizer`` and ``config.mesh``; raises ValueError likewise."""
    train = config.train
    return Learner(
        model,
        grpo.make_optimizer(**config.optimizer),
        mesh=sharding.make_mesh(**config.mesh),
        temperature=train.temperature,
        lora_rank=train.lora_rank,
        lora_scale=train.lora_scale,
        part=train.part,
        std=train.advantage_std,
        seed=config.seed,
        clip_low=train.clip_low,
        clip_high=train.clip_high,
    )


def check_reward(config: Mapping[str, Any]) -> None:
    """Raises ValueError if a section such as ``config.reward`` has an unknown kind."""
    if config["kind"] not in REWARDS:
        raise ValueError(f"config.reward.kind: expected one of {', '.join(REWARDS)}, got {config['kind']!r}")


def reward(transcript: Transcript, config: Mapping[str, Any]) -> float | None:
    """Returns what a rollout earns by a section such as ``config.reward``; None where the environment failed.

    ``kind`` is 'progress' or 'success'; ``format`` times the share of calling answers that could be parsed is added.

    Raises:
      ValueError: an unknown kind.
    """
    check_reward(config)
    if transcript.progress is None or transcript.success is None:
        return None
    share = 1.0 - transcript.refused / transcript.attempts if transcript.attempts else 0.0
    base = transcript.progress if config["kind"] == "progress" else float(transcript.success)
    return base + config["format"] * share
