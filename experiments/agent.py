"""A language model learns from conversations with host environments. `python -m experiments.agent --workdir=DIR`.

Every step proposes tasks, makes rollouts, observes them and updates the policy. Policy, optimiser, scheduler and open
tickets are written together, after every step or so many, so that a run that was killed goes on as if it had not been.
"""

import json
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from ml_collections import ConfigDict

import envsched_jax as es
from envsched_jax.policy.load import save
from envsched_jax.policy.transformer import Transformer
from envsched_jax.rollout.script import Transcript, summarise
from envsched_jax.train import build_agent, learner
from envsched_jax.train.build import plain
from envsched_jax.train.checkpoint import Checkpoints
from experiments import common, loop

TRANSCRIPTS = "transcripts.jsonl"
TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja")


class _Saved(NamedTuple):
    """What a checkpoint holds beside JSON values."""

    learner: learner.State
    scheduler: dict[str, np.ndarray]


def main(config: ConfigDict, workdir: Path) -> None:
    """Runs the config and leaves metrics, transcripts, weights and summary.json in the workdir."""
    started, train = time.time(), config.train
    build_agent.check_reward(config.reward)
    for name in ("checkpoint_every", "save_every"):
        if train[name] < 1:
            raise ValueError(f"config.train.{name}: expected at least 1, got {train[name]}")
    world = build_agent.build_world(config.environment)
    chat = build_agent.build_chat(config.chat, config.model)
    teacher = build_agent.build_learner(config, build_agent.load_model(config))
    agent = build_agent.build_agent(config, chat, temperature=train.temperature)
    scheduler = es.make_scheduler(batch_size=train.batch_size, group_size=train.group_size, **plain(config.scheduler))
    top = 1.0 + config.reward.format
    dispatcher = es.Dispatcher(
        world.records, scheduler, group_size=train.group_size, seed=config.seed, reward_range=(0.0, top)
    )
    identity = {"code": loop.code_digest(), "config": common.plain(config)}
    state, done, rows = teacher.init(), 0, list[dict[str, Any]]()
    key = jax.random.fold_in(jax.random.key(config.seed), 1)
    print(f"{world.name}: {len(world.records)} tasks; {train.steps} steps of {train.batch_size} x {train.group_size}")
    with Checkpoints(workdir / "checkpoints", identity) as checkpoints, common.MetricWriter(workdir) as writer:
        like = _Saved(state, dispatcher.state_dict()["arrays"])
        restored = checkpoints.restore(like)
        if restored is not None:
            (state, arrays), progress = restored
            dispatcher.load_state_dict({**progress["dispatcher"], "arrays": jax.tree.map(np.asarray, arrays)})
            done, rows = progress["step"], progress["rows"]
        _forget_after(workdir / TRANSCRIPTS, done)
        for step in range(done, train.steps):
            begun = time.perf_counter()
            tickets = dispatcher.propose(policy_version=step)
            selected = time.perf_counter()
            jobs = [(ticket.task_id, member) for ticket in tickets for member in range(train.group_size)]
            made = agent.play(teacher.model(state), jax.random.fold_in(key, step), jobs, world.start)
            rolled = time.perf_counter()
            groups = [made[i : i + train.group_size] for i in range(0, len(made), train.group_size)]
            rewards = [[build_agent.reward(one, config.reward) for one in group] for group in groups]
            for ticket, group, given in zip(tickets, groups, rewards, strict=True):
                dispatcher.observe(
                    ticket.ticket_id,
                    given,
                    status=[one.status for one in group],
                    tokens=[one.tokens for one in group],
                    seconds=[one.seconds for one in group],
                )
            state, figures = teacher.update(state, *_counted(groups, rewards))
            pace, now = agent.pace, time.perf_counter()
            row = {
                **summarise(made),
                **_rewards(made, rewards),
                **figures,
                "informative_share": figures["informative"] / max(figures["groups"], 1),
                "seconds_select": selected - begun,
                "seconds_rollout": rolled - selected,
                "seconds_update": now - rolled,
                "seconds_wait": pace.wait,
                "prefill_tokens_per_s": pace.ids_read / max(pace.read, 1e-9),
                "decode_tokens_per_s": pace.ids_decoded / max(pace.decode, 1e-9),
            }
            writer.write(step + 1, row)
            _write_transcripts(workdir / TRANSCRIPTS, step, made, rewards, chat)
            rows.append(common.plain(row))
            print(
                f"step {step + 1}: reward {row['reward']:.3f}, progress {row['progress']:.3f}, informative"
                f" {figures['informative']} of {figures['groups']}, parsable {row['parsable_share']:.0%},"
                f" {row['calls']} calls, {row['tokens']} tokens, {now - begun:.0f} s",
                flush=True,
            )
            errors = [f"{one.task_id}: {one.status}: {one.error}" for one in made if one.error]
            if errors:
                print(f"  {len(errors)} of {len(made)} rollouts failed, such as {errors[0]}", flush=True)
            if (step + 1) % train.checkpoint_every == 0 or step + 1 == train.steps:
                saved = dispatcher.state_dict()
                meta = {"step": step + 1, "rows": rows, "dispatcher": {k: v for k, v in saved.items() if k != "arrays"}}
                checkpoints.save(step + 1, _Saved(state, saved["arrays"]), meta)
            if (step + 1) % train.save_every == 0 and step + 1 < train.steps:
                _save_model(teacher.model(state), config.model, workdir / "model")
        _save_model(teacher.model(state), config.model, workdir / "model")
    common.write_summary(workdir, "agent", config, _summary(rows), started)
    print(f"weights: {workdir / 'model'}")


def _save_model(model: Transformer, source: str, target: Path) -> None:
    """Writes a model, with the tokenizer of the folder that it came from, so that it can be loaded again."""
    save(model, target)
    for name in TOKENIZER:
        if (Path(source) / name).is_file():
            shutil.copyfile(Path(source) / name, target / name)


def _forget_after(path: Path, done: int) -> None:
    """Takes out of the transcripts what a run that was killed wrote of steps that come again."""
    if not path.exists():
        return
    whole = path.read_text(encoding="utf-8").split("\n")[:-1]  # what follows the last newline was cut
    kept = [line for line in whole if json.loads(line)["step"] <= done]
    partial = path.with_name(f".{path.name}.part")
    partial.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")
    os.replace(partial, path)


def _counted(
    groups: Sequence[Sequence[Transcript]], rewards: Sequence[Sequence[float | None]]
) -> tuple[list[list[Transcript]], list[list[float]]]:
    """Leaves out rollouts without a reward, and groups without such."""
    kept, given = [], []
    for group, values in zip(groups, rewards, strict=True):
        pairs = [(one, value) for one, value in zip(group, values, strict=True) if value is not None]
        if pairs:
            kept.append([one for one, _ in pairs])
            given.append([value for _, value in pairs])
    return kept, given


def _rewards(made: Sequence[Transcript], rewards: Sequence[Sequence[float | None]]) -> dict[str, float]:
    counted = [value for group in rewards for value in group if value is not None]
    progress = [one.progress for one in made if one.progress is not None]
    success = [one.success for one in made if one.success is not None]
    return {
        "reward": float(np.mean(counted)) if counted else float("nan"),
        "progress": float(np.mean(progress)) if progress else float("nan"),
        "success": float(np.mean(success)) if success else float("nan"),
    }


def _write_transcripts(
    path: Path, step: int, made: Sequence[Transcript], rewards: Sequence[Sequence[float | None]], chat: Any
) -> None:
    flat = [value for group in rewards for value in group]
    with path.open("a", encoding="utf-8") as file:
        for one, value in zip(made, flat, strict=True):
            row = {
                "step": step + 1,
                "task": one.task_id,
                "member": one.member,
                "reward": value,
                "progress": one.progress,
                "success": one.success,
                "status": one.status,
                "error": one.error,
                "tokens": one.tokens,
                "text": chat.tokenizer.decode(one.ids, special=True),
            }
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    def total(name: str) -> float:
        return float(np.sum([row[name] for row in rows]))

    def mean(name: str) -> float | None:
        values = [row[name] for row in rows if row[name] is not None]
        return float(np.mean(values)) if values else None

    means = ("reward", "progress", "success", "informative_share", "parsable_share", "truncated_share")
    paces = ("prefill_tokens_per_s", "decode_tokens_per_s")
    return {
        "steps": len(rows),
        "rollouts": int(total("rollouts")),
        "tokens": int(total("tokens")),
        "calls": int(total("calls")),
        **{name: mean(name) for name in (*means, *paces)},
        "seconds_per_step": {name: mean(f"seconds_{name}") for name in ("select", "rollout", "update")},
        "curve": [{name: row[name] for name in ("reward", "progress", "informative_share")} for row in rows],
    }


if __name__ == "__main__":
    common.run_app(main, "configs/agent.py")
