"""ACEBench-Agent's tasks, executed: classes, tasks and answers of the user's own checkout of the benchmark.

The benchmark evaluates what a model writes with ``eval`` and keeps its objects in module globals. Here only methods
that a task describes are reached, and every conversation has objects of its own. The checks follow the benchmark's.

Chen et al. 2025, ACEBench: Who Wins the Match Point in Tool Usage? (2501.12851).
"""

import copy
import functools
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from envsched_jax.environments.calls import Call, CallError, parse
from envsched_jax.environments.checkout import Checkout, lines, literal
from envsched_jax.environments.conversation import Message, Schema
from envsched_jax.environments.users import STOPS, MakeUser, User, stops
from envsched_jax.pool.records import PoolError, Record, Verifier

KINDS = ("multi_step", "multi_turn")  # without and with a user who answers
MOST_MESSAGES = 40  # of one conversation; a call and its response are two, an answer and the user's next are two
_PACKAGE = "model_inference"
_END = STOPS[1]
_ALONE = f"Do the task with the tools, step by step. Nobody answers questions. Once all is done, write: {_END}"
_GO_ON = f"Nobody answers questions. Go on with the tools, or write: {_END}"
_TYPES = {"dict": "object", "list": "array", "tuple": "array", "float": "number", "int": "integer", "bool": "boolean"}


class Task(NamedTuple):
    """One task as the benchmark has it.

    Attributes:
      task_id: such as ``agent_multi_turn_0``.
      kind: one of ``KINDS``.
      language: en or zh.
      question: what the model is told, or in multi_turn, what the user wants and knows.
      time: what time it is, empty if the task does not say.
      config: where the objects start.
      classes: of the objects.
      tools: what is written of the tools, as JSON schemas of functions.
      answer: attributes in the end, by the name of a class.
      milestones: calls on the way as text, in order; several such lists where there are several ways.
    """

    task_id: str
    kind: str
    language: str
    question: str
    time: str
    config: dict[str, Any]
    classes: tuple[str, ...]
    tools: tuple[Schema, ...]
    answer: tuple[tuple[str, dict[str, Any]], ...]
    milestones: tuple[tuple[str, ...], ...]

    @property
    def solution(self) -> tuple[Call, ...]:
        """The first way's milestones as calls, those that can be read; they need not lead to the answer."""
        calls = []
        for stone in self.milestones[0] if self.milestones else ():
            try:
                calls += parse(stone, trusted=True)
            except CallError:  # quotation marks within quotation marks
                continue
        return tuple(calls)


def tasks(checkout: str | os.PathLike[str], kinds: Sequence[str] = KINDS, language: str = "en") -> dict[str, Task]:
    """Returns the tasks of some kinds by id, in the benchmark's order.

    Args:
      checkout: folder of the benchmark's repository.
      kinds: of ``KINDS``.
      language: en or zh.

    Raises:
      PoolError: a kind is unknown, or the checkout is not as expected.
    """
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise PoolError(f"kind {unknown[0]!r}: expected one of {', '.join(KINDS)}")
    code, found = _code(Path(checkout)), {}
    for kind in kinds:
        folder, name = f"data_{language}", f"data_agent_{kind}.json"
        path = code.file("data_all", folder, name)
        answers = code.file("data_all", folder, "possible_answer", name)
        possible = {row.get("id"): row for row in lines(answers)}
        for number, row in enumerate(lines(path), 1):
            task = _task(kind, language, row, possible.get(row.get("id")), f"{path}: task {number}", answers)
            found[task.task_id] = task
    return found


def pool(checkout: str | os.PathLike[str], kinds: Sequence[str] = KINDS, language: str = "en") -> list[Record]:
    """Returns the tasks as a pool; their state is the checked classes and those of the milestones' tools."""
    records, first = [], dict[str, str]()
    for task in tasks(checkout, kinds, language).values():
        classes = [(name, _class(Path(checkout), task.kind, language, name)) for name in task.classes]
        names = [match[1] for stone in (task.milestones or ((),))[0] if (match := re.match(r"[\[\s]*(\w+)\(", stone))]
        owners = {tool: name for name, made in classes for tool in vars(made)}
        checked = tuple(dict.fromkeys(name for name, _ in task.answer if name in task.classes))
        records.append(
            Record(
                task_id=task.task_id,
                env_id="+".join(sorted(task.classes)),
                text=task.question,
                tools_available=tuple(sorted(tool["name"] for tool in task.tools)),
                gt_actions=tuple(names),
                n_turns=1 if task.kind == "multi_step" else None,
                state_reads=checked,
                state_writes=tuple(dict.fromkeys(owners[name] for name in names if name in owners)),
                verifier=Verifier("end_state_match", len(checked), False),
                domain=task.classes[-1],
                group_id=first.setdefault(task.question, task.task_id),  # variants differ in where they start
            )
        )
    return records


class Talk:
    """One conversation with objects of its own."""

    def __init__(self, checkout: str | os.PathLike[str], task: Task, user: MakeUser | None = None) -> None:
        """Begins.

        Args:
          checkout: folder of the benchmark's repository.
          task: one of its tasks.
          user: makes a user of the instruction; multi_step has none.

        Raises:
          PoolError: the checkout does not fit.
          ValueError: the task needs a user.
        """
        path = Path(checkout)
        if user is None and task.kind == "multi_turn":
            raise ValueError(f"task {task.task_id}: a multi_turn task needs a user")
        self._task = task
        self._user: User | None = user(task.question) if user and task.kind == "multi_turn" else None
        self._rules = _ALONE if self._user is None else _rules(path, task)
        self._saved = _saved(path, task.classes)
        self._objects = {
            name: _object(_class(path, task.kind, task.language, name), name, task) for name in task.classes
        }
        self._tools = {tool["name"]: tool for tool in task.tools}
        self._calls: list[set[str]] = []
        self._messages, self._done = 0, False

    def opening(self) -> tuple[list[Message], list[Schema]]:
        """Returns the rules as the system's message, the task or what the user says first, and the tools."""
        said = self._task.question if self._user is None else self._user.opening()
        self._done = self._user is not None and stops(said)
        rules = f"{self._rules}\n\n{self._task.time}".strip()
        return [{"role": "system", "content": rules}, {"role": "user", "content": said}], copy.deepcopy(
            list(self._task.tools)
        )

    def call(self, call: Call) -> str:
        """Executes a call on every object that has it and returns the last response.

        What a tool raises is an error text, as in the benchmark, and so is a described tool that no class has.

        Raises:
          CallError: the task describes no such tool, or the conversation is over; nothing has happened.
        """
        if self._done:
            raise CallError("the conversation is over")
        if call.name not in self._tools:
            raise CallError(f"there is no tool {call.name!r}")
        names = self._tools[call.name]["parameters"].get("properties", {})
        if len(call.args) > len(names):
            raise CallError(f"tool {call.name!r}: expected at most {len(names)} arguments, got {len(call.args)}")
        kwargs = dict(zip(names, call.args, strict=False)) | call.kwargs
        self._calls.append({_read(call.name, kwargs), _squeezed(call.name, kwargs)})
        self._count()
        return self._execute(call.name, kwargs)

    def reply(self, text: str) -> list[Message]:
        """Ends the turn; returns what the user answers, or in multi_step a reminder to go on."""
        self._count()
        self._done = self._done or _END in text
        if self._done:
            return []
        answer = _GO_ON if self._user is None else self._user.answer(text)
        self._done = self._user is not None and stops(answer)
        return [] if self._done else [{"role": "user", "content": answer}]

    def done(self) -> bool:
        """Tells whether the model or the user ended it, or it is as long as may be."""
        return self._done

    def score(self) -> tuple[float, bool]:
        """Returns progress and whether the task is solved, by the benchmark's end-to-end and process accuracy.

        Solved means: a tool was called, the answer has as many classes as the task, and each class that both name has
        the answer's attributes. Progress is 1 then, else the share of milestones before the first that is missing,
        of the best way. Calls are compared by their values, where the benchmark compares the text.
        """
        if self._solved():
            return 1.0, True
        shares = [self._reached(stones) / len(stones) for way in self._task.milestones if (stones := _stones(way))]
        return max(shares, default=0.0), False

    def _solved(self) -> bool:
        state = {
            name: {key: value for key, value in vars(made).items() if key in self._saved[name]}
            for name, made in self._objects.items()
        }
        state = json.loads(json.dumps(state, default=str))  # keys become texts, as they are in the answer
        same = all(_same(state[name], wanted) for name, wanted in self._task.answer if name in state)
        return bool(self._calls) and len(self._task.answer) == len(self._task.classes) and same

    def _reached(self, stones: Sequence[str]) -> int:
        reached = 0
        for keys in self._calls:
            if reached < len(stones) and stones[reached] in keys:
                reached += 1
        return reached

    def _count(self) -> None:
        self._messages += 2
        self._done = self._done or self._messages >= MOST_MESSAGES

    def _execute(self, name: str, kwargs: dict[str, Any]) -> str:
        methods = [getattr(made, name) for made in self._objects.values() if hasattr(made, name)]
        result: Any = f"Error during execution: no class has {name}"
        try:
            for method in methods:
                result = method(**copy.deepcopy(kwargs))
        except Exception as error:  # whatever a tool raises is its answer
            return f"Error during execution: {error}"
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)


def start(checkout: str | os.PathLike[str], task_id: str, user: MakeUser | None = None, language: str = "en") -> Talk:
    """Begins a conversation about a task; to be given to ``conversation.Hosted``.

    Args:
      checkout: folder of the benchmark's repository.
      task_id: as in ``tasks``.
      user: makes a user of the instruction, such as ``users.plain`` or a partial of ``users.ServedUser``.
      language: en or zh.

    Raises:
      PoolError: no such task, or the checkout does not fit.
      ValueError: the task needs a user.
    """
    kind = task_id.removeprefix("agent_").rpartition("_")[0]
    found = tasks(checkout, [kind], language) if kind in KINDS else {}
    if task_id not in found:
        raise PoolError(f"task {task_id!r}: expected agent_<{'|'.join(KINDS)}>_<number of the benchmark>")
    return Talk(checkout, found[task_id], user)


@functools.cache
def _code(checkout: Path) -> Checkout:
    # The classes of one kind import the other's, whose package may import a client of models.
    return Checkout(checkout, _PACKAGE, [_PACKAGE, *(f"{_PACKAGE}.{kind}" for kind in KINDS)])


@functools.cache
def _class(checkout: Path, kind: str, language: str, name: str) -> Any:
    code = _code(checkout)
    path = code.file(_PACKAGE, kind, f"{kind}_utils.py")
    files = literal(path, f"CLASS_FILE_PATH_MAPPING_{language.upper()}")
    if name not in files:
        raise PoolError(f"{path}: CLASS_FILE_PATH_MAPPING_{language.upper()}: expected class {name!r}")
    module = code.load(files[name])
    if not hasattr(module, name):
        raise PoolError(f"{module.__file__}: expected class {name!r}")
    return getattr(module, name)


def _saved(checkout: Path, classes: Sequence[str]) -> dict[str, Sequence[str]]:
    """Returns the attributes of classes that are checked."""
    path = _code(checkout).file(_PACKAGE, "apimodel_inference.py")
    found = literal(path, "SAVED_CLASS")
    missing = [name for name in classes if name not in found]
    if missing:
        raise PoolError(f"{path}: SAVED_CLASS: expected class {missing[0]!r}")
    return {name: found[name] for name in classes}


def _rules(checkout: Path, task: Task) -> str:
    path = _code(checkout).file(_PACKAGE, f"prompt_{task.language}.py")
    names = {"Travel": "TRAVEL_PROMPT", "BaseApi": "BASE_PROMPT"}
    texts = [literal(path, f"{names[name]}_{task.language.upper()}") for name in names if name in task.classes]
    return "\n\n".join(texts)


def _object(made: Any, name: str, task: Task) -> Any:
    """Returns a new object, which is told its own start and then that of the device, as in the benchmark."""
    new = made()
    for config in (task.config.get(name, {}), task.config.get("BaseApi", {})):
        new._load_scenario(copy.deepcopy(config), long_context=False)
    return new


def _task(
    kind: str, language: str, row: dict[str, Any], answer: dict[str, Any] | None, where: str, answers: Path
) -> Task:
    for field, expected in (
        ("id", str),
        ("question", str),
        ("initial_config", dict),
        ("involved_classes", list),
        ("function", list),
    ):
        if not isinstance(row.get(field), expected):
            raise PoolError(f"{where}: field '{field}': expected {expected.__name__}")
    if not all(isinstance(tool, dict) and isinstance(tool.get("name"), str) for tool in row["function"]):
        raise PoolError(f"{where}: field 'function': expected objects with a name")
    if answer is None:
        raise PoolError(f"{answers}: expected an answer to task {row['id']!r}")
    truth, ways = answer.get("ground_truth"), answer.get("mile_stone")
    truth = [truth] if isinstance(truth, dict) else truth
    if not isinstance(truth, list) or not all(isinstance(item, dict) and item for item in truth):
        raise PoolError(f"{answers}: task {row['id']!r}: field 'ground_truth': expected a list of objects")
    if not isinstance(ways, list):
        raise PoolError(f"{answers}: task {row['id']!r}: field 'mile_stone': expected list")
    ways = ways if ways and isinstance(ways[0], list) else [ways]
    return Task(
        task_id=row["id"],
        kind=kind,
        language=language,
        question=row["question"],
        time=str(row.get("time", "")),
        config=row["initial_config"],
        classes=tuple(row["involved_classes"]),
        tools=tuple(
            {
                "name": tool["name"],
                "description": tool.get("description", ""),
                "parameters": _json_types(tool.get("parameters", {})),
            }
            for tool in row["function"]
        ),
        answer=tuple(next(iter(item.items())) for item in truth),  # one class each
        milestones=tuple(tuple(way) for way in ways if way),
    )


def _json_types(value: Any) -> Any:
    """Returns a schema with JSON's names of types instead of Python's."""
    if isinstance(value, list):
        return [_json_types(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        key: _TYPES.get(item, item) if key == "type" and isinstance(item, str) else _json_types(item)
        for key, item in value.items()
    }


def _same(mine: dict[str, Any], wanted: dict[str, Any]) -> bool:
    """Tells whether attributes are as wanted: each is named, and a dictionary may hold more than wanted."""
    for name, value in mine.items():
        if name not in wanted:
            return False
        if isinstance(wanted[name], dict) and isinstance(value, dict):
            if any(key not in value or value[key] != item for key, item in wanted[name].items()):
                return False
        elif value != wanted[name]:
            return False
    return True


def _stones(way: Sequence[str]) -> list[str]:
    """Returns the keys of milestones; one of several calls counts as several."""
    keys = []
    for stone in way:
        try:
            keys += [_read(call.name, call.kwargs) for call in parse(stone, trusted=True)]
        except CallError:  # quotation marks within quotation marks
            keys.append(re.sub(r"[\s'\"\\\[\]]", "", stone))
    return keys


def _read(name: str, kwargs: dict[str, Any]) -> str:
    return f"{name}{json.dumps(kwargs, sort_keys=True, default=str)}"


def _squeezed(name: str, kwargs: dict[str, Any]) -> str:
    """Returns a call as text without blanks and quotation marks, to be compared with a milestone that is no Python."""
    text = ",".join(f"{key}={value!r}" for key, value in kwargs.items())
    return re.sub(r"[\s'\"\\\[\]]", "", f"{name}({text})")
