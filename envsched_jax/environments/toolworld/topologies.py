"""The abstract topologies of ToolWorld: what kind of work an environment asks for, free of names.

Each topology is a function of a random generator that returns the tools of one environment and a sampler of scenarios.
Six recur across domains: ``chain``, ``fan_in``, ``lookup`` (read, then act with what was read), ``branch`` (what was
read decides which tools work), ``confirm`` (confirm, then commit; anything in between voids it) and ``undo`` (a step
may come out broken and has to be undone before the work goes on).
"""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from envsched_jax.environments.toolworld.vocabulary import COMMITTED, MAX_TURNS, SYMBOLS, VALUES, Code, Op


@dataclasses.dataclass(frozen=True)
class Rule:
    """Fires if every slot of ``need`` holds its value (and the argument equals slot ``argument_is``)."""

    need: Mapping[int, int]
    put: Mapping[int, int] = dataclasses.field(default_factory=dict)
    argument_is: int = -1
    read: int = -1  # slot whose value the answer tells
    code: Code = Code.OK


@dataclasses.dataclass(frozen=True)
class Tool:
    """A tool: its documentation (``op``, ``needs``, ``gives``, ``value``) and its rules, tried in order."""

    name: str
    op: Op
    rules: tuple[Rule, ...]
    needs: tuple[int, ...] = ()
    gives: int = -1
    value: int = -1
    takes_argument: bool = False
    mistake: bool = False  # a call for which no rule fires spoils the task for good
    terminal: bool = False


Call = tuple[str, int]  # tool name and argument, -1 for none


@dataclasses.dataclass(frozen=True)
class Scenario:
    """One problem: initial slots, goal slots, the fact that the user asks for, and a solution."""

    init: Mapping[int, int]
    goal: Mapping[int, int]
    target: int
    script: tuple[Call, ...]


Sampler = Callable[[np.random.Generator], Scenario]
Topology = Callable[[np.random.Generator], tuple[tuple[Tool, ...], Sampler]]

SUBMIT = Tool("submit", Op.SUBMIT, (Rule({}),), terminal=True)
DIRTY = 10  # undo: a broken step left its mess
READY = 10  # confirm: the last step was a confirmation
FIRST_HIDDEN = SYMBOLS


def _step(slot: int, parents: tuple[int, ...], op: Op = Op.CALL, put: Mapping[int, int] | None = None) -> Tool:
    """A plain tool that gives fact ``slot`` once its parents hold."""
    rule = Rule(dict.fromkeys(parents, 1), {slot: 1, **(put or {})})
    return Tool(f"do{slot}", op, (rule,), parents, slot)


def _from_dag(parents: Mapping[int, tuple[int, ...]], goals: tuple[int, ...], done_share: float) -> Sampler:
    """Scenarios over a directed acyclic graph of facts: reach one goal from a partly done state."""

    def ancestors(goal: int, seen: list[int]) -> list[int]:
        for parent in parents[goal]:
            ancestors(parent, seen)
        if goal not in seen:
            seen.append(goal)
        return seen

    def sample(rng: np.random.Generator) -> Scenario:
        goal = int(rng.choice(goals))
        path = ancestors(goal, [])
        done: dict[int, int] = {}
        for fact in sorted(parents, key=lambda f: (len(ancestors(f, [])), f)):
            share = done_share if fact in path else 0.15
            if fact != goal and rng.random() < share and all(p in done for p in parents[fact]):
                done[fact] = 1
        todo = [fact for fact in path if fact not in done]
        script = tuple((f"do{fact}", -1) for fact in todo)
        return Scenario(done, dict.fromkeys(todo, 1), goal, (*script, ("submit", -1)))

    return sample


def chain(rng: np.random.Generator) -> tuple[tuple[Tool, ...], Sampler]:
    """A line of six facts with up to three side branches; every fact needs the one before it."""
    parents: dict[int, tuple[int, ...]] = {0: ()} | {i: (i - 1,) for i in range(1, 6)}
    for side in range(6, 9):
        root = int(rng.integers(-1, 4))
        parents[side] = (root,) if root >= 0 else ()
    tools = tuple(_step(fact, above) for fact, above in parents.items())
    return (*tools, SUBMIT), _from_dag(parents, tuple(parents), 0.3)


def fan_in(rng: np.random.Generator) -> tuple[tuple[Tool, ...], Sampler]:
    """Several independent lines of work that have to meet."""
    parents: dict[int, tuple[int, ...]] = {
        0: (),
        1: (),
        2: (0,),
        3: (1,),
        4: (),
        5: (0, 1),
        6: (2, 3),
        7: (6, 4),
        8: (0,),
    }
    if rng.random() < 0.5:
        parents |= {5: (2, 1), 7: (5, 4)}
    tools = tuple(_step(f, above, Op.JOIN if len(above) > 1 else Op.CALL) for f, above in parents.items())
    return (*tools, SUBMIT), _from_dag(parents, (2, 3, 5, 5, 5, 6, 6, 6, 7, 7, 7), 0.25)


def _side_tools() -> tuple[Tool, ...]:
    """Two tools that do something harmless and useless, so that a tool list is not a solution."""
    return tuple(Tool(f"side{i}", Op.CALL, (Rule({i: 1}, {8 + i: 1}),), (i,), 8 + i) for i in range(2))


def _side_facts(rng: np.random.Generator) -> dict[int, int]:
    """Irrelevant facts that may hold at the start."""
    return {fact: 1 for fact in (8, 9) if rng.random() < 0.3}


def lookup(rng: np.random.Generator) -> tuple[tuple[Tool, ...], Sampler]:
    """Stages of reading a hidden value and acting with it; acting with another value is a mistake."""
    del rng
    tools = []
    for i in range(3):
        before, above = ({i - 1: 1}, (i - 1,)) if i else ({}, ())
        tools.append(Tool(f"read{i}", Op.READ, (Rule(before, read=FIRST_HIDDEN + i),), above, 3 + i))
        act = Rule({**before, i: 0}, {i: 1}, argument_is=FIRST_HIDDEN + i)
        tools.append(Tool(f"act{i}", Op.ACT, (act,), (*above, 3 + i), i, takes_argument=True, mistake=True))

    def sample(rng: np.random.Generator) -> Scenario:
        depth = int(rng.integers(1, 4))
        start = int(rng.integers(0, depth)) if rng.random() < 0.35 else 0
        hidden = {FIRST_HIDDEN + i: int(rng.integers(VALUES)) for i in range(3)}
        script: list[Call] = []
        for i in range(start, depth):
            script += [(f"read{i}", -1), (f"act{i}", hidden[FIRST_HIDDEN + i])]
        goal = dict.fromkeys(range(start, depth), 1)
        init = {**dict.fromkeys(range(start), 1), **hidden, **_side_facts(rng)}
        return Scenario(init, goal, depth - 1, (*script, ("submit", -1)))

    return (*tools, *_side_tools(), SUBMIT), sample


def branch(rng: np.random.Generator) -> tuple[tuple[Tool, ...], Sampler]:
    """One reading decides which of three families of tools works from there on."""
    del rng
    tools = [Tool("read", Op.READ, (Rule({}, read=FIRST_HIDDEN),), (), 0)]
    for value in range(VALUES):
        for j in range(3):
            before = {j: 1} if j else {}
            rule = Rule({**before, FIRST_HIDDEN: value}, {j + 1: 1})
            tools.append(Tool(f"way{value}_{j}", Op.ACT, (rule,), (j,), j + 1, value, mistake=True))

    def sample(rng: np.random.Generator) -> Scenario:
        depth = int(rng.integers(1, 4))
        start = int(rng.integers(0, depth)) if rng.random() < 0.3 else 0
        value = int(rng.integers(VALUES))
        script = [("read", -1)] + [(f"way{value}_{j}", -1) for j in range(start, depth)]
        init = {**dict.fromkeys(range(1, start + 1), 1), FIRST_HIDDEN: value, **_side_facts(rng)}
        return Scenario(init, dict.fromkeys(range(start + 1, depth + 1), 1), depth, (*script, ("submit", -1)))

    return (*tools, SUBMIT), sample


def confirm(rng: np.random.Generator) -> tuple[tuple[Tool, ...], Sampler]:
    """Work, confirm, commit: every piece of work voids the confirmation, a commit without one is a mistake."""
    del rng
    work = tuple(_step(i, (i - 1,) if i else (), put={READY: 0}) for i in range(5))
    agree = Tool("confirm", Op.CONFIRM, (Rule({}, {READY: 1}),), (), READY)
    commit_rule = Rule({READY: 1}, {COMMITTED: 1})
    commit = Tool("commit", Op.COMMIT, (commit_rule,), (READY,), 11, mistake=True, terminal=True)

    def sample(rng: np.random.Generator) -> Scenario:
        depth = int(rng.integers(1, 6))
        start = int(rng.integers(0, depth)) if rng.random() < 0.4 else 0
        script = [(f"do{i}", -1) for i in range(start, depth)] + [("confirm", -1), ("commit", -1)]
        goal = {**dict.fromkeys(range(start, depth), 1), COMMITTED: 1}
        init = {**dict.fromkeys(range(start), 1), **_side_facts(rng)}
        return Scenario(init, goal, depth - 1, tuple(script))

    return (*work, agree, commit, *_side_tools(), SUBMIT), sample


def undo(rng: np.random.Generator) -> tuple[tuple[Tool, ...], Sampler]:
    """A chain whose steps may come out broken: undo with the tool of that half, then do the step again."""
    del rng
    tools = []
    for i in range(4):
        before, above = ({i - 1: 1}, (i - 1,)) if i else ({}, ())
        sound = Rule({**before, DIRTY: 0, FIRST_HIDDEN + i: 0}, {i: 1})
        broken = Rule({**before, DIRTY: 0, FIRST_HIDDEN + i: 1, i: 0}, {DIRTY: 1}, code=Code.BROKEN)
        tools.append(Tool(f"do{i}", Op.CALL, (sound, broken), above, i))
    for half in range(2):
        stages = (2 * half, 2 * half + 1)
        rules = tuple(
            Rule({**({i - 1: 1} if i else {}), DIRTY: 1, FIRST_HIDDEN + i: 1, i: 0}, {DIRTY: 0, FIRST_HIDDEN + i: 0})
            for i in stages
        )
        tools.append(Tool(f"undo{half}", Op.UNDO, rules, stages, DIRTY, value=half, mistake=True))

    def sample(rng: np.random.Generator) -> Scenario:
        depth = int(rng.integers(1, 5))
        start = int(rng.integers(0, depth)) if rng.random() < 0.4 else 0
        broken = rng.random(4) < 0.5
        while depth - start + 2 * int(broken[start:depth].sum()) + 1 > MAX_TURNS - 1:
            broken = rng.random(4) < 0.5
        script: list[Call] = []
        for i in range(start, depth):
            script += [(f"do{i}", -1)] + ([(f"undo{i // 2}", -1), (f"do{i}", -1)] if broken[i] else [])
        hidden = {FIRST_HIDDEN + i: int(broken[i]) for i in range(4)}
        init = {**dict.fromkeys(range(start), 1), **hidden, **_side_facts(rng)}
        goal = {**dict.fromkeys(range(start, depth), 1), DIRTY: 0}
        return Scenario(init, goal, depth - 1, (*script, ("submit", -1)))

    return (*tools, *_side_tools(), SUBMIT), sample


TOPOLOGIES: dict[str, Topology] = {
    "chain": chain,
    "fan_in": fan_in,
    "lookup": lookup,
    "branch": branch,
    "confirm": confirm,
    "undo": undo,
}
