"""Makes a ToolWorld suite: environments as tables, tasks, their solutions, and the records that describe them."""

import dataclasses
import itertools
from typing import Any, NamedTuple

import numpy as np

from envsched_jax.environments.toolworld import topologies as topo
from envsched_jax.environments.toolworld import vocabulary as vocab
from envsched_jax.pool import Record, Verifier

TRAIN, HELD_OUT_TASK, HELD_OUT_ENV = 0, 1, 2  # values of ToolWorld.split


@dataclasses.dataclass(frozen=True)
class ToolWorldConfig:
    """Settings of one suite. ``structure`` says how well metadata predicts difficulty: see ``habits``."""

    seed: int = 0
    num_domains: int = len(vocab.DOMAINS)
    tasks_per_env: int = 64  # training tasks of one environment
    eval_per_env: int = 8  # held-out tasks of a training environment
    held_out_envs: int = 10
    eval_per_held_out_env: int = 24
    reward_mix: tuple[float, float, float] = (1.0, 0.0, 0.0)  # binary, partial, penalty; drawn per environment
    variants: int = 2  # tasks of one scenario that differ in what is irrelevant to it
    doc_noise: tuple[float, ...] = (
        0.0,
        0.0,
        0.25,
        0.5,
    )  # share of tool cards that hide their needs; drawn per environment
    structure: float = 1.0
    habit_seed: int = 0
    habit_scale: float = 1.8
    habit_shift: float = 0.0


Table = Any  # np.ndarray on the host, jax.Array on the device


class World(NamedTuple):
    """Every environment as a table; one step function serves all (A tools, R rules, Z slots)."""

    rule_mask: Table  # bool[E, A, R]
    need: Table  # i32[E, A, R, Z], -1 where a slot does not matter
    put: Table  # i32[E, A, R, Z], -1 where a slot is kept
    argument_is: Table  # i32[E, A, R], slot that the argument must equal, -1 for none
    read: Table  # i32[E, A, R], slot that the answer tells, -1 for none
    code: Table  # i32[E, A, R], a Code
    gives: Table  # i32[E, A], id of the result symbol, 0 for none
    tool_mask: Table  # bool[E, A]
    takes_argument: Table  # bool[E, A]
    mistake: Table  # bool[E, A]
    terminal: Table  # bool[E, A]
    card: Table  # i32[E, A, F], what the prompt tells of a tool


class Tasks(NamedTuple):
    """Every task as a row."""

    env: Table  # i32[N]
    init: Table  # i32[N, Z]
    goal: Table  # i32[N, Z], -1 where a slot is not checked
    budget: Table  # i32[N], turns
    reward: Table  # i32[N], a RewardKind
    tail: Table  # i32[N, 2 + VISIBLE, F], the prompt after the tool cards: goal, visible facts, header


@dataclasses.dataclass(frozen=True)
class ToolWorld:
    """A suite: tables, tasks, solutions and metadata, all aligned by task index."""

    config: ToolWorldConfig
    world: World
    tasks: Tasks
    records: tuple[Record, ...]
    split: np.ndarray  # i32[N]
    topology: np.ndarray  # i32[N]
    domain: np.ndarray  # i32[N]
    style: np.ndarray  # i32[N], how the request is worded; in no record
    script: np.ndarray  # i32[N, MAX_TURNS, 2], tool and argument ids of a solution, 0 after its end

    def where(self, split: int) -> np.ndarray:
        """Task indices of one split: TRAIN, HELD_OUT_TASK or HELD_OUT_ENV."""
        return np.flatnonzero(self.split == split).astype(np.int32)


def _world_row(
    rng: np.random.Generator, tools: tuple[topo.Tool, ...], domain: int, noise: float
) -> tuple[World, dict[str, int]]:
    """Compiles the tools of one environment into a row of tables; tools get shuffled slots."""
    a, r, z = vocab.TOOLS, vocab.RULES, vocab.SLOTS
    row = World(
        rule_mask=np.zeros((a, r), bool),
        need=np.full((a, r, z), -1, np.int32),
        put=np.full((a, r, z), -1, np.int32),
        argument_is=np.full((a, r), -1, np.int32),
        read=np.full((a, r), -1, np.int32),
        code=np.zeros((a, r), np.int32),
        gives=np.zeros(a, np.int32),
        tool_mask=np.zeros(a, bool),
        takes_argument=np.zeros(a, bool),
        mistake=np.zeros(a, bool),
        terminal=np.zeros(a, bool),
        card=np.zeros((a, vocab.NUM_FIELDS), np.int32),
    )
    slot_of = {tool.name: int(slot) for tool, slot in zip(tools, rng.permutation(a)[: len(tools)], strict=True)}
    for tool in tools:
        s = slot_of[tool.name]
        for j, rule in enumerate(tool.rules):
            row.rule_mask[s, j] = True
            row.need[s, j, list(rule.need)] = list(rule.need.values())
            row.put[s, j, list(rule.put)] = list(rule.put.values())
            row.argument_is[s, j], row.read[s, j], row.code[s, j] = rule.argument_is, rule.read, rule.code
        row.tool_mask[s], row.takes_argument[s] = True, tool.takes_argument
        row.mistake[s], row.terminal[s] = tool.mistake, tool.terminal
        row.gives[s] = vocab.symbol("result", domain, tool.gives) if tool.gives >= 0 else 0
        needs = [] if rng.random() < noise and not tool.terminal else list(tool.needs[:2])
        row.card[s] = [
            vocab.FIRST["tool"] + s,
            vocab.FIRST["op"] + tool.op,
            *[vocab.symbol("need", domain, n) for n in needs],
            *[0] * (2 - len(needs)),
            vocab.symbol("give", domain, tool.gives) if tool.gives >= 0 else 0,
            vocab.FIRST["card_value"] + tool.value if tool.value >= 0 else 0,
        ]
    return row, slot_of


def _tail(scenario: topo.Scenario, domain: int, budget: int, reward: int, style: int) -> np.ndarray:
    """The part of the prompt that belongs to the task: goal, visible facts, header."""
    tail = np.zeros((2 + vocab.VISIBLE, vocab.NUM_FIELDS), np.int32)
    tail[0, 0] = vocab.symbol("goal", domain, scenario.target)
    facts = [slot for slot, value in sorted(scenario.init.items()) if value and slot < vocab.SYMBOLS]
    for i, slot in enumerate(facts[-vocab.VISIBLE :]):
        tail[1 + i, 0] = vocab.symbol("state", domain, slot)
    tail[-1, :3] = vocab.FIRST["budget"] + budget, vocab.FIRST["reward"] + reward, vocab.FIRST["style"] + style
    return tail


def _tool_title(name: str, tools: dict[str, topo.Tool], domain: str) -> str:
    """A readable tool name, such as ``travel.call_seat``."""
    tool, words = tools[name], vocab.LEXICON[domain]
    word = f"_{words[tool.gives]}" if tool.gives >= 0 else ""
    way = f"_{tool.value}" if tool.value >= 0 else ""
    return f"{domain}.{tool.op.name.lower()}{word}{way}"


def _record(
    name: str,
    env_id: str,
    scenario: topo.Scenario,
    tools: dict[str, topo.Tool],
    domain: str,
    group: str,
    kind: int,
    slack: int,
) -> Record:
    """The pool record of one task: what a scheduler may know of it."""
    words = (*vocab.LEXICON[domain], *(f"hidden{i}" for i in range(vocab.HIDDEN)), "mistake", "committed")
    done = [words[s] for s, v in sorted(scenario.init.items()) if v and s < vocab.SYMBOLS]
    checks = [words[s] for s in sorted(scenario.goal)]
    text = f"Please get {words[scenario.target]} done in {domain}." + (
        f" Already done: {', '.join(done)}." if done else ""
    )
    return Record(
        task_id=name,
        env_id=env_id,
        text=text,
        domain=domain,
        group_id=group,
        tools_available=tuple(sorted(_tool_title(t, tools, domain) for t in tools)),
        gt_actions=tuple(_tool_title(t, tools, domain) for t, _ in scenario.script),
        n_turns=len(scenario.script),
        state_reads=tuple(checks),
        state_writes=tuple(c for c in checks),
        verifier=Verifier(vocab.RewardKind(kind).name.lower(), len(checks), kind == vocab.RewardKind.PARTIAL),
        extra={"slack": slack},
    )


def _variants(rng: np.random.Generator, sampler: topo.Sampler, count: int) -> list[topo.Scenario]:
    """One scenario and up to ``count - 1`` near-duplicates: same goal and solution length, other irrelevant facts."""
    first = sampler(rng)
    out = [first]
    for _ in range(8 * (count - 1)):
        other = sampler(rng)
        if other.target == first.target and len(other.script) == len(first.script):
            out.append(other)
        if len(out) == count:
            break
    return out


def generate(config: ToolWorldConfig) -> ToolWorld:
    """Builds a suite.

    Environments are all pairs of topology and domain; ``held_out_envs`` of them are held out whole, at most two per
    topology and per domain. The same config always gives the same suite.

    Args:
      config: the settings; ``num_domains`` up to 8.

    Returns:
      The suite. Every script solves its task and doing nothing solves none (``tests/test_toolworld.py`` runs them all).

    Raises:
      ValueError: if so many environments cannot be held out.
    """
    rng = np.random.default_rng([config.seed, 7])
    pairs = [(t, d) for t in range(len(topo.TOPOLOGIES)) for d in range(config.num_domains)]
    held = _held_out(rng, pairs, config.held_out_envs)
    rows: list[World] = []
    columns: dict[str, list] = {
        k: [] for k in (*Tasks._fields, "split", "topology", "domain", "style", "script", "record")
    }
    for env, (t, d) in enumerate(pairs):
        topology, domain = list(topo.TOPOLOGIES)[t], vocab.DOMAINS[d]
        tools, sampler = topo.TOPOLOGIES[topology](rng)
        kind = int(rng.choice(3, p=config.reward_mix))
        row, slot_of = _world_row(rng, tools, d, float(rng.choice(config.doc_noise)))
        rows.append(row)
        by_name = {tool.name: tool for tool in tools}
        want = config.eval_per_held_out_env if (t, d) in held else config.tasks_per_env + config.eval_per_env
        found = _scenarios(rng, sampler, want, config.variants)
        evaluated: set[tuple] = set()
        if (t, d) not in held:
            evaluated, found = _evaluation(rng, found, config.eval_per_env)
        for i, (group, scenario, slack) in enumerate(found):
            budget = len(scenario.script) + slack
            style = int(rng.integers(vocab.STYLES))
            init = np.zeros(vocab.SLOTS, np.int32)
            init[list(scenario.init)] = list(scenario.init.values())
            goal = np.full(vocab.SLOTS, -1, np.int32)
            goal[list(scenario.goal)] = list(scenario.goal.values())
            script = np.zeros((vocab.MAX_TURNS, 2), np.int32)
            for j, (name, argument) in enumerate(scenario.script):
                script[j] = vocab.FIRST["tool"] + slot_of[name], vocab.NO_ARGUMENT + 1 + argument
            split = HELD_OUT_ENV if (t, d) in held else HELD_OUT_TASK if _content(scenario) in evaluated else TRAIN
            env_id = f"{domain}/{topology}"
            values = dict(
                env=env,
                init=init,
                goal=goal,
                budget=budget,
                reward=kind,
                tail=_tail(scenario, d, budget, kind, style),
                split=split,
                topology=t,
                domain=d,
                style=style,
                script=script,
                record=_record(
                    f"{env_id}/{i:04d}", env_id, scenario, by_name, domain, f"{env_id}/s{group:04d}", kind, slack
                ),
            )
            for key, value in values.items():
                columns[key].append(value)
    arrays = {k: np.asarray(v, np.int32) for k, v in columns.items() if k != "record"}
    return ToolWorld(
        config=config,
        world=World(*(np.stack(column) for column in zip(*rows, strict=True))),
        tasks=Tasks(**{k: arrays[k] for k in Tasks._fields}),
        records=tuple(columns["record"]),
        **{k: arrays[k] for k in ("split", "topology", "domain", "style", "script")},
    )


def _held_out(rng: np.random.Generator, pairs: list[tuple[int, int]], count: int) -> set[tuple[int, int]]:
    """Draws ``count`` pairs, at most two per topology and per domain."""
    held: set[tuple[int, int]] = set()
    for i in rng.permutation(len(pairs)):
        t, d = pairs[i]
        if len(held) < count and sum(h[0] == t for h in held) < 2 and sum(h[1] == d for h in held) < 2:
            held.add((t, d))
    if len(held) < count:
        raise ValueError(f"held_out_envs={count}: only {len(held)} of {len(pairs)} environments can be held out")
    return held


Found = list[tuple[int, topo.Scenario, int]]  # group, scenario, slack


def _content(scenario: topo.Scenario) -> tuple:
    """What a policy could learn by heart: the visible facts, the target and the solution."""
    facts = tuple(slot for slot, value in sorted(scenario.init.items()) if value and slot < vocab.SYMBOLS)
    return facts[-vocab.VISIBLE :], scenario.target, scenario.script


def _evaluation(rng: np.random.Generator, found: Found, count: int) -> tuple[set[tuple], Found]:
    """Holds out contents with about ``count`` tasks; near-duplicates of theirs with other content are dropped.

    Returns:
      The contents to evaluate on, and the tasks that remain for training or evaluation.
    """
    chosen: set[tuple] = set()
    for i in rng.permutation(len(found)):
        if sum(_content(scenario) in chosen for _, scenario, _ in found) >= count:
            break
        chosen.add(_content(found[i][1]))
    groups = {group for group, scenario, _ in found if _content(scenario) in chosen}
    return chosen, [f for f in found if _content(f[1]) in chosen or f[0] not in groups]


def _scenarios(rng: np.random.Generator, sampler: topo.Sampler, want: int, variants: int) -> Found:
    """Up to ``want`` distinct tasks as (group, scenario, slack); small topologies have fewer."""
    found: Found = []
    seen: set[tuple] = set()
    last = 0  # the last group that had something new
    for group in itertools.count():
        if len(found) == want or group - last > 50:
            break
        for scenario in _variants(rng, sampler, variants):
            slack = int(rng.integers(0, min(3, vocab.MAX_TURNS + 1 - len(scenario.script))))
            key = (tuple(sorted(scenario.init.items())), tuple(sorted(scenario.goal.items())), scenario.target, slack)
            if key not in seen and len(found) < want:
                seen.add(key)
                found.append((group, scenario, slack))
                last = group
    return found
