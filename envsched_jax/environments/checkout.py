"""Code in a checkout of a benchmark: loaded without its dependencies, and without a trace in ``sys.modules``.

A benchmark's packages import clients of models that its tools do not need, under names that another version may
already have. So a module is loaded with empty packages above it, and what was loaded is taken out of sight again.
"""

import ast
import importlib
import json
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from envsched_jax.pool.records import PoolError

_ONE_AT_A_TIME = threading.Lock()  # sys.modules is one for the whole process


class Checkout:
    """A folder with one package of a benchmark."""

    def __init__(self, root: Path, package: str, empty: Sequence[str] = ()) -> None:
        """Loads nothing yet.

        Args:
          root: the folder that has the package.
          package: its name.
          empty: packages that are never run, besides those above a module that is loaded.
        """
        self._root, self._package = root, package
        self._modules: dict[str, ModuleType] = {}
        for name in empty:
            self._add_empty(name)

    def file(self, *parts: str) -> Path:
        """Returns the path of a file in the checkout; raises PoolError if there is none."""
        path = self._root.joinpath(*parts)
        if not path.is_file():
            raise PoolError(f"{path}: no such file: expected one in a checkout with the package {self._package}")
        return path

    def provide(self, name: str, values: Mapping[str, Any]) -> None:
        """Puts a module with these values in the place of one of the package's, which is not run."""
        self._modules[name] = ModuleType(name)
        vars(self._modules[name]).update(values)

    def load(self, name: str) -> ModuleType:
        """Runs a module of the package once and returns it; the folder stays as it is.

        Raises:
          PoolError: it has no file, or running it fails.
        """
        parts = name.split(".")
        folder = self._root.joinpath(*parts)
        path = self.file(*parts, "__init__.py") if folder.is_dir() else self.file(*parts[:-1], f"{parts[-1]}.py")
        with _ONE_AT_A_TIME:
            for end in range(1, len(parts)):
                self._add_empty(".".join(parts[:end]))
            others = self._take_out()
            sys.modules.update(self._modules)
            written, sys.dont_write_bytecode = sys.dont_write_bytecode, True
            try:
                return importlib.import_module(name)
            except Exception as error:  # it is the checkout's code: whatever it raises, the checkout does not fit
                raise PoolError(self._why(path, error)) from error
            finally:
                sys.dont_write_bytecode = written
                self._modules = self._take_out()
                sys.modules.update(others)

    def _add_empty(self, name: str) -> None:
        if name not in self._modules:
            self._modules[name] = ModuleType(name)
            self._modules[name].__path__ = [str(self._root.joinpath(*name.split(".")))]

    def _take_out(self) -> dict[str, ModuleType]:
        mine = [key for key in sys.modules if key == self._package or key.startswith(f"{self._package}.")]
        return {key: sys.modules.pop(key) for key in mine}

    def _why(self, path: Path, error: Exception) -> str:
        if isinstance(error, ModuleNotFoundError) and error.name:
            if error.name.startswith(f"{self._package}."):
                return f"{self._root.joinpath(*error.name.split('.'))}.py: no such file, and {path} needs it"
            return f"{path}: needs the package {error.name!r}, which is not installed"
        where = error.filename if isinstance(error, SyntaxError) else path
        return f"{where}: {type(error).__name__}: {error}"


def literal(path: Path, name: str) -> Any:
    """Returns the value that a Python file gives a name at its top level, without running the file.

    Raises:
      PoolError: the file is broken, or has no such name with a literal value.
    """
    try:
        body = ast.parse(path.read_text(encoding="utf-8")).body
    except (SyntaxError, UnicodeDecodeError) as error:
        raise PoolError(f"{path}: {type(error).__name__}: {error}") from None
    for node in body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            try:
                return ast.literal_eval(node.value)
            except ValueError:
                break
    raise PoolError(f"{path}: expected '{name}' with a literal value")


def lines(path: Path) -> list[dict[str, Any]]:
    """Returns the objects of a JSON-lines file; raises PoolError with the line that is none."""
    found = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError as error:
            raise PoolError(f"{path}:{number}: not JSON: {error}") from None
        if not isinstance(value, dict):
            raise PoolError(f"{path}:{number}: expected a JSON object")
        found.append(value)
    return found
