"""BFCL's multi-turn tasks, executed: the Python API classes, tasks and checks of the package `bfcl-eval`.

The package evaluates what a model writes with ``eval`` and keeps its objects in module globals. Here a call is parsed
to a name and literals first, or refused; it reaches only methods that the task's documents describe; and every episode
has objects of its own. The package is needed for the tasks (`make bfcl`): its pinned dependencies are not.

Patil et al. 2025, The Berkeley Function Calling Leaderboard.
"""

import copy
import importlib
import importlib.util
import inspect
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from envsched_jax.environments.calls import Call, CallError, parse
from envsched_jax.environments.checkout import lines
from envsched_jax.environments.conversation import Message, Schema
from envsched_jax.pool.records import PoolError, Record, Verifier

CATEGORIES = ("base", "miss_func", "miss_param", "long_context")
ADDED = "I have updated some more functions you can choose from. What about now?"  # the benchmark's words
_PACKAGE = "bfcl_eval"
_LARGEST = {"exponent": 300, "precision": 1000}  # arguments of the maths tools: beyond, they do not come back
_ONE_AT_A_TIME = threading.Lock()  # the maths tools set the precision of a library for the whole process
_CHECKS = "bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker"


class Task(NamedTuple):
    """One task as the benchmark has it.

    Attributes:
      task_id: such as ``multi_turn_base_0``.
      questions: messages of every turn; an empty turn brings back a tool that was missing.
      solution: calls of every turn, as text.
      config: where the objects start.
      classes: of the objects.
      excluded: tools that no turn has.
      missing: tools that appear only with a turn, by the number of the turn.
    """

    task_id: str
    questions: tuple[tuple[dict[str, str], ...], ...]
    solution: tuple[tuple[str, ...], ...]
    config: dict[str, Any]
    classes: tuple[str, ...]
    excluded: frozenset[str]
    missing: dict[int, tuple[str, ...]]

    @property
    def long_context(self) -> bool:
        """Whether the objects are filled with much that does not matter."""
        return "long_context" in self.task_id


def available() -> bool:
    """Tells whether the package is installed."""
    return importlib.util.find_spec(_PACKAGE) is not None


def tasks(categories: Sequence[str] = CATEGORIES) -> dict[str, Task]:
    """Returns the tasks of some categories by id, 200 each.

    Raises:
      PoolError: the package is missing, or a category is unknown.
    """
    unknown = [name for name in categories if name not in CATEGORIES]
    if unknown:
        raise PoolError(f"category {unknown[0]!r}: expected one of {', '.join(CATEGORIES)}")
    found = {}
    for category in categories:
        solutions = {r["id"]: r["ground_truth"] for r in _lines(f"possible_answer/BFCL_v4_multi_turn_{category}.json")}
        for row in _lines(f"BFCL_v4_multi_turn_{category}.json"):
            found[row["id"]] = Task(
                task_id=row["id"],
                questions=tuple(tuple(turn) for turn in row["question"]),
                solution=tuple(tuple(turn) for turn in solutions[row["id"]]),
                config=row["initial_config"],
                classes=tuple(row["involved_classes"]),
                excluded=frozenset(row.get("excluded_function", ())),
                missing={int(turn): tuple(names) for turn, names in row.get("missed_function", {}).items()},
            )
    return found


def documents(classes: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Returns what is written of the tools of some classes, by name, as JSON schemas of functions."""
    files = importlib.import_module(f"{_PACKAGE}.constants.executable_backend_config").MULTI_TURN_FUNC_DOC_FILE_MAPPING
    found = {}
    for name in classes:
        for tool in _lines(f"multi_turn_func_doc/{files[name]}"):
            fields = {key: tool[key] for key in ("name", "description", "parameters")}
            fields["parameters"] = {**fields["parameters"], "type": "object"}
            found[tool["name"]] = fields
    return found


def pool(categories: Sequence[str] = CATEGORIES) -> list[Record]:
    """Returns the tasks as a pool: what their tools are, which state they touch, and how they are checked.

    State comes from executing every reference solution, one to two milliseconds a task; see ``touched``.

    Raises:
      PoolError: the package is missing, or a category is unknown.
    """
    found = tasks(categories)
    docs = {name: documents([name]) for name in sorted({c for task in found.values() for c in task.classes})}
    return [_record(task, docs) for task in found.values()]


def _record(task: Task, docs: Mapping[str, Mapping[str, Any]]) -> Record:
    owner = {tool: name for name in task.classes for tool in docs[name]}
    actions = [parse(call)[0].name for turn in task.solution for call in turn]
    reads, writes = touched(task)
    texts = [f"[turn {i + 1}] {' '.join(m['content'] for m in turn)}" for i, turn in enumerate(task.questions) if turn]
    return Record(
        task_id=task.task_id,
        env_id="+".join(sorted(task.classes)),
        text="\n".join(texts),
        tools_available=tuple(sorted(set(owner) - task.excluded)),
        gt_actions=tuple(actions),
        n_turns=len(task.questions),
        state_reads=reads,
        state_writes=writes,
        verifier=Verifier("state_and_response_match_per_turn", sum(map(bool, task.solution)), False),
        domain=task.classes[-1],
        group_id=task.task_id.rsplit("_", 1)[1],
    )


def touched(task: Task) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Executes the reference solution and returns which state it reads and which it writes, as sorted names.

    A name is ``Class.attribute``, of public attributes: those that the benchmark compares. Read is what the solution's
    calls look up, for their responses are compared as well; written is what differs from the start after some turn.
    A private attribute that starts as the same object as a public one is another way to it: the current directory of a
    file system to its tree.
    That the state check compares all public attributes of all classes says the same of every task of an environment,
    so it does not count as reading.

    Raises:
      PoolError: the package is missing.
    """
    untouched, objects = _objects(task), _objects(task)
    reads: set[str] = set()
    writes: set[str] = set()
    owner = {tool: name for name in task.classes for tool in dir(objects[name]) if not tool.startswith("_")}
    for name, made in objects.items():
        made.__class__ = _watched(made, name, reads)
    for turn in task.solution:
        for text in turn:
            (call,) = parse(text, trusted=True)
            _execute(objects[owner[call.name]], call)
        for name, start in untouched.items():
            now = vars(objects[name])
            writes |= {f"{name}.{a}" for a, value in vars(start).items() if _counts(a) and now[a] != value}
    return tuple(sorted(reads)), tuple(sorted(writes))


def _counts(attribute: str) -> bool:
    """Tells whether an attribute is state: public, and not the switch that fills objects with what does not matter."""
    return not attribute.startswith("_") and attribute != "long_context"


def _watched(made: Any, name: str, reads: set[str]) -> type:
    """Returns a class like that of ``made`` whose objects note in ``reads`` which of their state is looked up."""
    public = {attribute: value for attribute, value in vars(made).items() if _counts(attribute)}
    places = {attribute: f"{name}.{attribute}" for attribute in public}
    for attribute, value in vars(made).items():
        same = [other for other, there in public.items() if there is value and hasattr(value, "__dict__")]
        if attribute not in public and same:
            places[attribute] = places[same[0]]

    def look_up(self: Any, attribute: str) -> Any:
        if attribute in places:
            reads.add(places[attribute])
        return object.__getattribute__(self, attribute)

    return type(type(made).__name__, (type(made),), {"__getattribute__": look_up})


class Episode:
    """One conversation. A turn is: show ``messages`` and ``tools``, ``call`` any number of times, ``end_turn``.

    Attributes:
      turn: number of the turn, from 0.
      passed: of the turns that are over, whether state and responses were right.
    """

    def __init__(self, task: Task) -> None:
        """Begins; raises PoolError if the package is missing."""
        self.task, self.turn = task, 0
        self.passed: list[bool] = []
        self._docs: dict[str, dict[str, Any]] = {}
        self._owner: dict[str, str] = {}
        self._mine, self._theirs = _objects(task), _objects(task)
        for name in task.classes:
            docs = documents([name])
            self._docs |= docs
            self._owner |= {tool: name for tool in docs if hasattr(self._mine[name], tool)}
        self._responses: list[str] = []
        self._called = False

    @property
    def done(self) -> bool:
        """Whether every turn is over."""
        return self.turn >= len(self.task.questions)

    def messages(self) -> list[dict[str, str]]:
        """Returns what the user says in this turn."""
        said = [dict(message) for message in self.task.questions[self.turn]]
        return said or [{"role": "user", "content": ADDED}]

    def tools(self) -> list[dict[str, Any]]:
        """Returns the schemas of the tools of this turn."""
        later = {tool for turn, names in self.task.missing.items() if turn > self.turn for tool in names}
        hidden = self.task.excluded | later
        return [self._docs[name] for name in self._owner if name not in hidden]

    def call(self, call: Call) -> str:
        """Executes a call and returns its response, as text; what a tool refuses is an error text, as in the benchmark.

        As there, a tool that this turn does not show works all the same (one reference solution uses such a one).

        Raises:
          CallError: the task has no such tool, or it would work on these numbers for ever; nothing has happened.
        """
        if call.name not in self._owner:
            raise CallError(f"there is no tool {call.name!r}")
        owner = self._mine[self._owner[call.name]]
        _check_size(getattr(owner, call.name), call)
        self._called = True
        response = _execute(owner, call)
        self._responses.append(response)
        return response

    def end_turn(self) -> bool:
        """Ends the turn and returns whether it passed, by the benchmark's own checks of state and responses."""
        checks = importlib.import_module(_CHECKS)
        solution = self.task.solution[self.turn]
        wanted = []
        for text in solution:
            (call,) = parse(text, trusted=True)
            wanted.append(_execute(self._theirs[self._owner[call.name]], call))
        passed = True
        if solution:
            passed = (
                self._called
                and checks.state_checker(self._mine, self._theirs)["valid"]
                and checks.response_checker(self._responses, wanted, self.turn)["valid"]
            )
        self.passed.append(passed)
        self.turn, self._called = self.turn + 1, False
        return passed

    def score(self) -> tuple[float, bool]:
        """Returns the share of turns passed before the first that failed, and whether all of them passed."""
        first = self.passed.index(False) if False in self.passed else len(self.passed)
        return first / len(self.task.questions), first == len(self.task.questions)


class Talk:
    """An episode as a conversation; tools that join later are shown in the message of their turn."""

    def __init__(self, task: Task) -> None:
        """Begins; raises PoolError if the package is missing."""
        self._episode = Episode(task)
        self._shown: list[str] = []

    def opening(self) -> tuple[list[Message], list[Schema]]:
        """Returns the first turn's messages and tools."""
        tools = self._episode.tools()
        self._shown = [tool["name"] for tool in tools]
        return self._episode.messages(), tools

    def call(self, call: Call) -> str:
        """Executes a call, see ``Episode``."""
        return self._episode.call(call)

    def reply(self, text: str) -> list[Message]:
        """Ends the turn; what the text says does not matter, as in the benchmark."""
        self._episode.end_turn()
        if self._episode.done:
            return []
        messages = self._episode.messages()
        new = [tool for tool in self._episode.tools() if tool["name"] not in self._shown]
        self._shown += [tool["name"] for tool in new]
        if new:
            described = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in new)
            messages[0]["content"] = f"{described}\n{messages[0]['content']}"
        return messages

    def done(self) -> bool:
        """Tells whether every turn is over."""
        return self._episode.done

    def score(self) -> tuple[float, bool]:
        """Returns the share of turns passed before the first that failed, and whether all passed."""
        return self._episode.score()


def start(task_id: str) -> Talk:
    """Begins a conversation about a task; to be given to ``conversation.Hosted``.

    Raises:
      PoolError: no such task, or the package is missing.
    """
    category = task_id.removeprefix("multi_turn_").rsplit("_", 1)[0]
    found = tasks([category])
    if task_id not in found:
        raise PoolError(f"task {task_id!r}: expected multi_turn_<category>_<number of the benchmark>")
    return Talk(found[task_id])


def _objects(task: Task) -> dict[str, Any]:
    """Returns new objects of a task, one per class."""
    backend = importlib.import_module(f"{_PACKAGE}.constants.executable_backend_config")
    found = {}
    for name in task.classes:
        made = getattr(importlib.import_module(backend.CLASS_FILE_PATH_MAPPING[name]), name)()
        if name not in backend.STATELESS_CLASSES:
            made._load_scenario(copy.deepcopy(task.config.get(name, {})), long_context=task.long_context)
        found[name] = made
    return found


def _check_size(tool: Callable[..., Any], call: Call) -> None:
    """Raises CallError where the maths tools would compute for ever; what does not fit the tool is left to it."""
    try:
        given = inspect.signature(tool).bind_partial(*call.args, **call.kwargs).arguments
    except TypeError:
        return
    for name, most in _LARGEST.items():
        value = given.get(name)
        if isinstance(value, int | float) and abs(value) > most:
            raise CallError(f"{name}: expected at most {most}")


def _execute(owner: Any, call: Call) -> str:
    """Calls a method and writes down what it returns, or raises, as the benchmark does."""
    try:
        with _ONE_AT_A_TIME:
            result = getattr(owner, call.name)(*call.args, **call.kwargs)
    except Exception as error:  # whatever a tool raises is its answer
        return f"Error during execution: {error}"
    if isinstance(result, str):
        return result
    if isinstance(result, dict):
        try:
            return json.dumps(result)
        except (TypeError, ValueError):
            return str(result)
    return str(result)


def _lines(name: str) -> list[dict[str, Any]]:
    spec = importlib.util.find_spec(_PACKAGE)
    if spec is None or spec.origin is None:
        raise PoolError("the package bfcl-eval is not installed: `make bfcl` installs it without its dependencies")
    return lines(Path(spec.origin).parent / "data" / name)
