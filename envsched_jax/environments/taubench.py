"""tau-bench's tasks, executed: tools, data, policies and checks of the user's own checkout of the benchmark.

Only tools, data and tasks are loaded, so that neither a client of models nor another package is needed. Every
conversation has data of its own, and the user is whoever is given: a script, or another model.

Yao et al. 2024, tau-bench: A Benchmark for Tool-Agent-User Interaction in Real-World Domains (2406.12045).
"""

import copy
import functools
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

from envsched_jax.environments.calls import Call, CallError
from envsched_jax.environments.checkout import Checkout
from envsched_jax.environments.conversation import Message, Schema
from envsched_jax.environments.users import MakeUser, stops
from envsched_jax.pool.records import PoolError, Record, Verifier

DOMAINS = ("retail", "airline")
ENDING = ("transfer_to_human_agents",)  # tools after which nothing more is said
_PACKAGE = "tau_bench"


class Task(NamedTuple):
    """One task as the benchmark has it.

    Attributes:
      task_id: such as ``retail/0``, or ``retail/train/0`` of another split than test.
      domain: such as ``retail``.
      instruction: what the user wants and knows.
      solution: calls that leave the data as they should be.
      outputs: texts that the model must have said.
    """

    task_id: str
    domain: str
    instruction: str
    solution: tuple[Call, ...]
    outputs: tuple[str, ...]


class _Domain(NamedTuple):
    policy: str
    tools: dict[str, Any]  # classes, by the name of the tool
    schemas: list[Schema]
    data: Callable[[], dict[str, Any]]


def tasks(checkout: str | os.PathLike[str], domains: Sequence[str] = DOMAINS, split: str = "test") -> dict[str, Task]:
    """Returns the tasks of some domains by id, in the benchmark's order.

    Args:
      checkout: folder of the benchmark's repository.
      domains: names of folders of environments.
      split: test, train or dev, where the domain has it.

    Raises:
      PoolError: the checkout has no such file, or it is not as expected.
    """
    found = {}
    for domain in domains:
        code = _code(Path(checkout))
        path = code.file(_PACKAGE, "envs", domain, f"tasks_{split}.py")
        module = vars(code.load(f"{_PACKAGE}.envs.{domain}.tasks_{split}"))
        name = next((name for name in (f"TASKS_{split.upper()}", "TASKS") if name in module), None)
        if name is None:
            raise PoolError(f"{path}: expected 'TASKS' or 'TASKS_{split.upper()}'")
        prefix = domain if split == "test" else f"{domain}/{split}"
        for number, row in enumerate(module[name]):
            found[f"{prefix}/{number}"] = _task(f"{prefix}/{number}", domain, row, f"{path}: task {number}")
    return found


def documents(checkout: str | os.PathLike[str], domain: str) -> dict[str, Schema]:
    """Returns what is written of the tools of a domain, by name, as JSON schemas of functions."""
    return {schema["name"]: schema for schema in _domain(Path(checkout), domain).schemas}


def pool(checkout: str | os.PathLike[str], domains: Sequence[str] = DOMAINS, split: str = "test") -> list[Record]:
    """Returns the tasks as a pool; their state is the tables that the code of the solution's tools names."""
    records = []
    for domain in domains:
        parts = _domain(Path(checkout), domain)
        tables = list(parts.data())
        named = {name: _constants(tool.invoke) for name, tool in parts.tools.items()}
        for task in tasks(checkout, [domain], split).values():
            names = {text for call in task.solution for text in named.get(call.name, ())}
            used = tuple(table for table in tables if table in names)
            kind = "db_state_match+output_check" if task.outputs else "db_state_match"
            records.append(
                Record(
                    task_id=task.task_id,
                    env_id=domain,
                    text=task.instruction,
                    tools_available=tuple(sorted(parts.tools)),
                    gt_actions=tuple(call.name for call in task.solution),
                    state_reads=used,
                    state_writes=used,
                    verifier=Verifier(kind, 1 + len(task.outputs), False),
                    domain=domain,
                )
            )
    return records


class Talk:
    """One conversation with data of its own."""

    def __init__(self, checkout: str | os.PathLike[str], task: Task, user: MakeUser) -> None:
        """Begins; ``user`` makes a user of the task's instruction. Raises PoolError if the checkout does not fit."""
        self._task, self._domain = task, _domain(Path(checkout), task.domain)
        self._data = self._domain.data()
        self._user = user(task.instruction)
        self._said: list[str] = []
        self._done = False

    def opening(self) -> tuple[list[Message], list[Schema]]:
        """Returns the domain's policy as the system's message, the user's first message, and the tools."""
        said = self._user.opening()
        messages = [{"role": "system", "content": self._domain.policy}, {"role": "user", "content": said}]
        self._done = stops(said)
        return messages, copy.deepcopy(self._domain.schemas)

    def call(self, call: Call) -> str:
        """Executes a call and returns its response; what a tool raises is an error text, as in the benchmark.

        Raises:
          CallError: the domain has no such tool, or the conversation is over; nothing has happened.
        """
        if self._done:
            raise CallError("the conversation is over")
        if call.name not in self._domain.tools:
            raise CallError(f"there is no tool {call.name!r}")
        response = self._execute(self._data, call)
        self._done = call.name in ENDING
        return response

    def reply(self, text: str) -> list[Message]:
        """Tells the user; returns the user's answer, or nothing if the user stops."""
        self._said.append(text)
        answer = self._user.answer(text)
        self._done = stops(answer)
        return [] if self._done else [{"role": "user", "content": answer}]

    def done(self) -> bool:
        """Tells whether the user stopped, or a call handed over to a person."""
        return self._done

    def score(self) -> tuple[float, bool]:
        """Returns 1 or 0, and whether the task is solved.

        Solved means, as in the benchmark: the conversation came to its end, the data are those that the solution
        leaves, and each output occurs in something that was said, whatever its case and without commas.
        """
        wanted = self._domain.data()
        for call in self._task.solution:
            if call.name in self._domain.tools and call.name not in ENDING:
                self._execute(wanted, call)
        said = [text.lower().replace(",", "") for text in self._said]
        told = all(any(output.lower() in text for text in said) for output in self._task.outputs)
        solved = self._done and told and _written(self._data) == _written(wanted)
        return float(solved), solved

    def _execute(self, data: dict[str, Any], call: Call) -> str:
        # Some tools put an argument into the data and change it there later: the task's own must stay as they are.
        args, kwargs = copy.deepcopy((call.args, call.kwargs))
        try:
            return str(self._domain.tools[call.name].invoke(data, *args, **kwargs))
        except Exception as error:  # whatever a tool raises is its answer
            return f"Error: {error}"


def start(checkout: str | os.PathLike[str], task_id: str, user: MakeUser) -> Talk:
    """Begins a conversation about a task; to be given to ``conversation.Hosted``.

    Args:
      checkout: folder of the benchmark's repository.
      task_id: as in ``tasks``.
      user: makes a user of the instruction, such as ``users.plain`` or a partial of ``users.ServedUser``.

    Raises:
      PoolError: no such task, or the checkout does not fit.
    """
    domain, _, rest = task_id.partition("/")
    split = rest.rpartition("/")[0] or "test"
    found = tasks(checkout, [domain], split) if rest else {}
    if task_id not in found:
        raise PoolError(f"task {task_id!r}: expected <domain>/<number> or <domain>/<split>/<number> of the benchmark")
    return Talk(checkout, found[task_id], user)


@functools.cache
def _code(checkout: Path) -> Checkout:
    code = Checkout(checkout, _PACKAGE)
    code.file(_PACKAGE, "envs", "tool.py")
    # The benchmark's own need pydantic; a task is only a bundle of fields.
    code.provide(f"{_PACKAGE}.types", {"Action": SimpleNamespace, "Task": SimpleNamespace})
    return code


@functools.cache
def _domain(checkout: Path, domain: str) -> _Domain:
    code = _code(checkout)
    path = code.file(_PACKAGE, "envs", domain, "tools", "__init__.py")
    policy = code.file(_PACKAGE, "envs", domain, "wiki.md").read_text(encoding="utf-8")
    tools = vars(code.load(f"{_PACKAGE}.envs.{domain}.tools")).get("ALL_TOOLS")
    data = vars(code.load(f"{_PACKAGE}.envs.{domain}.data")).get("load_data")
    if not isinstance(tools, list):
        raise PoolError(f"{path}: expected a list 'ALL_TOOLS'")
    if not callable(data):
        raise PoolError(f"{path.parents[1] / 'data' / '__init__.py'}: expected a function 'load_data'")
    owners, schemas = {}, []
    for tool in tools:
        try:
            info = tool.get_info()["function"]
            schemas.append({key: info[key] for key in ("name", "description", "parameters")})
        except (AttributeError, LookupError, TypeError) as error:
            raise PoolError(f"{path}: tool {tool!r}: get_info(): {type(error).__name__}: {error}") from None
        owners[info["name"]] = tool
    return _Domain(policy, owners, schemas, data)


def _task(task_id: str, domain: str, row: Any, where: str) -> Task:
    for field, kind in (("instruction", str), ("actions", list), ("outputs", list)):
        if not isinstance(getattr(row, field, None), kind):
            raise PoolError(f"{where}: field '{field}': expected {kind.__name__}")
    solution = []
    for action in row.actions:
        if not isinstance(getattr(action, "name", None), str) or not isinstance(getattr(action, "kwargs", None), dict):
            raise PoolError(f"{where}: field 'actions': expected actions with a name and kwargs")
        solution.append(Call(action.name, (), action.kwargs))
    return Task(task_id, domain, row.instruction, tuple(solution), tuple(map(str, row.outputs)))


def _constants(function: Any) -> set[str]:
    """Returns the texts that a function's own code has in it."""
    return {value for value in function.__code__.co_consts if isinstance(value, str)}


def _written(data: Any) -> str:
    """Returns data as text, so that 1, 1.0 and true differ, as they do in the benchmark's hash."""
    return json.dumps(data, sort_keys=True, default=sorted)
