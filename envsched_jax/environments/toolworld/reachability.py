"""Which ToolWorld tasks can be solved at all: an exact search with the environment's own step and verifier.

ToolWorld is deterministic and its states are few, so the question is decided by breadth-first search. It runs for all
tasks at once: a layer is the set of (task, state) pairs first reached after so many calls, expanded in blocks of one
shape by one jitted program.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from envsched_jax.environments.toolworld import vocabulary as vocab
from envsched_jax.environments.toolworld.dynamics import State, apply_call, verify
from envsched_jax.environments.toolworld.generator import Tasks, ToolWorld, World

STATES = 20_000  # states of one task after which the search gives up; the default suite needs a few hundred
_BLOCK = 256  # pairs expanded by one call of the program
_SPAN = vocab.VALUES**vocab.SLOTS  # a pair is the number ``task * _SPAN + state``
_RADIX = vocab.VALUES ** np.arange(vocab.SLOTS, dtype=np.int64)


class Search(NamedTuple):
    """What is known of every task, i64[n] each."""

    calls: np.ndarray  # length of a shortest solution, -1 where none was found
    tried: np.ndarray  # no sequence of up to so many calls was left out; the largest integer where all were tried
    states: np.ndarray  # states that were reached


class _Calls(NamedTuple):
    """All legal calls of every environment, padded to the most of any: C."""

    tool: np.ndarray  # i32[E, C]
    argument: np.ndarray  # i32[E, C], -1 for none
    mask: np.ndarray  # bool[E, C]


def search(world: World, tasks: Tasks, *, states: int = STATES) -> Search:
    """Finds the length of a shortest solution of every task, whatever its budget.

    A solution is a sequence of legal calls of which the last ends the episode in a state that satisfies the verifier.

    Args:
      world: the tables, on the host.
      tasks: n rows, on the host.
      states: of one task, after which it is given up; at least 1.

    Raises:
      ValueError: a slot is given a value that a slot cannot hold.
    """
    _check_values(world, tasks)
    num_tasks = len(tasks.env)
    legal = _legal_calls(world)
    # Where no rule takes a mistake back the verifier is lost with it: such states need no expansion.
    heals = np.any((world.put[..., vocab.MISTAKE] >= 0) & (world.put[..., vocab.MISTAKE] != 1), axis=(1, 2))
    calls, tried = np.full(num_tasks, -1), np.zeros(num_tasks, np.int64)
    active = np.ones(num_tasks, bool)
    frontier = np.arange(num_tasks) * _SPAN + np.asarray(tasks.init, np.int64) @ _RADIX
    visited = frontier
    counts = np.ones(num_tasks, np.int64)
    while len(frontier):
        solved, after = _layer(world, tasks, legal, heals, frontier)
        tried[active] += 1
        calls[solved] = tried[solved]
        fresh = np.setdiff1d(after, visited, assume_unique=True)
        counts += np.bincount(fresh // _SPAN, minlength=num_tasks)
        active[solved] = False
        exhausted = active & (np.bincount(fresh // _SPAN, minlength=num_tasks) == 0)
        tried[exhausted] = np.iinfo(np.int64).max
        active &= ~exhausted & (counts <= states)
        frontier = fresh[active[fresh // _SPAN]]
        visited = np.union1d(visited[active[visited // _SPAN]], frontier)
    return Search(calls, tried, counts)


class Auditor:
    """Answers about the tasks of a suite, as ``environments.audit.Auditable``; an unknown task_id is a KeyError.

    Attributes:
      search: what was found, a row per task of the suite.
    """

    def __init__(self, suite: ToolWorld, *, states: int = STATES) -> None:
        """Searches all tasks of the suite, which takes seconds; ``states`` as for ``search``."""
        self._suite = suite
        self._row = {record.task_id: i for i, record in enumerate(suite.records)}
        self.search = search(suite.world, suite.tasks, states=states)
        self._noop = _noop_passes(suite.tasks)
        # The engine plays at least one turn and at most MAX_TURNS, whatever the budget.
        self._budget = np.clip(suite.tasks.budget, 1, vocab.MAX_TURNS)

    def noop_passes(self, task: str) -> bool:
        """Tells whether the verifier is satisfied if the episode ends in its initial state."""
        return bool(self._noop[self._row[task]])

    def satisfiable(self, task: str) -> bool | None:
        """Tells whether some legal sequence of calls within the budget solves the task; None where it gave up."""
        row = self._row[task]
        calls, tried, budget = self.search.calls[row], self.search.tried[row], self._budget[row]
        if 0 <= calls <= budget:
            return True
        return False if calls >= 0 or tried >= budget else None

    def explain(self, task: str) -> str:
        """Returns why the verifier of a broken task is wrong, in a few words; empty for a sound task."""
        row = self._row[task]
        if self._noop[row]:
            checked = (self._suite.tasks.goal[row] >= 0).any()
            return "every check holds at the start" if checked else "nothing is checked"
        if self.satisfiable(task) is not False:
            return ""
        if self.search.calls[row] > 0:
            return f"the shortest solution takes {self.search.calls[row]} calls, {self._budget[row]} are allowed"
        reasons = _never(self._suite.world, self._suite.tasks, row, self._words(row))
        return reasons or f"none of the {self.search.states[row]} states that its tools can reach passes"

    def _words(self, row: int) -> Sequence[str]:
        facts = vocab.LEXICON[vocab.DOMAINS[int(self._suite.domain[row])]]
        return (*facts, *(f"hidden{i}" for i in range(vocab.HIDDEN)), "mistake", "committed")


def _noop_passes(tasks: Tasks) -> np.ndarray:
    """Returns bool[n]: the verifier on the initial states, as if the episode had ended there."""
    rows = jax.tree.map(jnp.asarray, tasks)

    def passes(task: jax.Array) -> jax.Array:
        return verify(rows, State(task, rows.init[task], jnp.int32(0), jnp.bool_(True)))[1]

    return np.asarray(jax.vmap(passes)(jnp.arange(len(tasks.env), dtype=jnp.int32)))


def _never(world: World, tasks: Tasks, row: int, words: Sequence[str]) -> str:
    """Returns a reason that needs no search, if there is one: what no single tool can do, no sequence can."""
    env = tasks.env[row]
    rules = world.rule_mask[env] & world.tool_mask[env][:, None]
    if not (world.terminal[env] & world.tool_mask[env]).any():
        return "no tool ends the episode"
    if tasks.goal[row, vocab.MISTAKE] == 1:
        return "it asks for a mistake, which the verifier does not forgive"
    lacking = [
        f"{words[slot]} to {value}"
        for slot, value in enumerate(tasks.goal[row])
        if value >= 0 and tasks.init[row, slot] != value and not (rules & (world.put[env, ..., slot] == value)).any()
    ]
    return f"no tool sets {' nor '.join(lacking)}" if lacking else ""


def _check_values(world: World, tasks: Tasks) -> None:
    for name, table in (("put", world.put[world.put >= 0]), ("init", tasks.init)):
        if table.size and not 0 <= table.min() <= table.max() < vocab.VALUES:
            raise ValueError(f"{name}: values from {table.min()} to {table.max()}: expected 0 to {vocab.VALUES - 1}")


def _legal_calls(world: World) -> _Calls:
    """Lists what ``Environment.legal`` allows: every tool, with each value where it takes an argument."""
    rows = []
    for mask, takes in zip(world.tool_mask, world.takes_argument, strict=True):
        values = [(range(vocab.VALUES) if takes[tool] else (-1,)) for tool in range(len(mask))]
        rows.append([(tool, value) for tool in np.flatnonzero(mask) for value in values[tool]])
    width = max(1, *map(len, rows))
    table = np.array([row + [(0, -1)] * (width - len(row)) for row in rows], np.int32).reshape(len(rows), width, 2)
    return _Calls(table[..., 0], table[..., 1], np.arange(width)[None, :] < np.array([len(r) for r in rows])[:, None])


@jax.jit
def _expand(world: World, tasks: Tasks, calls: _Calls, task: jax.Array, slots: jax.Array) -> tuple[jax.Array, ...]:
    """Applies every call to every pair: states i32[F, C, Z], solved bool[F, C], and whether the episode goes on."""

    def one(task: jax.Array, slots: jax.Array, tool: jax.Array, argument: jax.Array) -> tuple[jax.Array, ...]:
        after, _ = apply_call(world, tasks.env[task], slots, tool, argument)
        ended = world.terminal[tasks.env[task], tool]
        solved = verify(tasks, State(task, after, jnp.int32(1), ended))[1]
        return after, solved, ~ended

    env = tasks.env[task]
    each_call = jax.vmap(one, (None, None, 0, 0))
    after, solved, goes_on = jax.vmap(each_call)(task, slots, calls.tool[env], calls.argument[env])
    return after, solved & calls.mask[env], goes_on & calls.mask[env]


def _layer(
    world: World, tasks: Tasks, calls: _Calls, heals: np.ndarray, frontier: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the tasks that one more call solves, and the pairs that it leads to, each once, sorted."""
    device = jax.tree.map(jnp.asarray, (world, tasks, calls))
    solved: list[np.ndarray] = []
    pairs = [frontier[:0]]
    for start in range(0, len(frontier), _BLOCK):
        block = frontier[start : start + _BLOCK]
        task = np.resize(block // _SPAN, _BLOCK)  # repeats pairs to fill the last block
        slots = np.resize(block % _SPAN, _BLOCK)[:, None] // _RADIX % vocab.VALUES
        after, done, goes_on = jax.device_get(_expand(*device, task.astype(np.int32), slots.astype(np.int32)))
        solved.append(task[done.any(axis=1)])
        alive = goes_on & (heals[tasks.env[task]][:, None] | (after[..., vocab.MISTAKE] != 1))
        pairs.append(np.unique((task[:, None] * _SPAN + after.astype(np.int64) @ _RADIX)[alive]))
    return np.unique(np.concatenate(solved)), np.unique(np.concatenate(pairs))
