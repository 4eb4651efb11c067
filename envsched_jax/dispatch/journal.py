"""What a dispatcher leaves on disk: a snapshot of everything, and the calls since, one checked line each.

A folder holds generations ``00000001.state``, ``00000001.journal``, ... The state is where the journal of the same
number starts. A new state is written aside, synchronised and renamed, so at any moment the newest state and its journal
tell everything; the generation before stays until the next one. Nothing is ever changed in place. The check of a line
goes on from that of the line before, so lines that are lost, doubled or swapped show as well.
"""

import contextlib
import fcntl
import hashlib
import io
import json
import logging
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from envsched_jax.dispatch.run import FORMAT
from envsched_jax.dispatch.tickets import DispatchError

MAGIC = b"envsched state "
_LOG = logging.getLogger(__name__)


class JournalError(DispatchError):
    """The folder cannot be read or written. The message names the file and what to do."""


class Found(NamedTuple):
    """What a folder held when it was opened."""

    state: dict[str, Any] | None
    events: list[tuple[str, dict[str, Any]]]  # since the state, in order, with file and line
    torn: int  # bytes of a last line that a crash cut short; that call had not returned


class Journal:
    """An open folder; one writer at a time.

    Attributes:
      folder: where.
      found: what was there.
    """

    def __init__(self, folder: str | os.PathLike[str], *, fsync: bool = True) -> None:
        """Opens the folder and makes it if it is not there.

        Raises:
          JournalError: another process writes here, or a file is damaged.
        """
        self.folder, self._fsync = Path(folder), fsync
        with _failing(self.folder, "opened"):
            self.folder.mkdir(parents=True, exist_ok=True)
            _sync(self.folder.parent)
            self._lock = open(self.folder / "lock", "a+b")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._lock.close()
            raise JournalError(
                f"{self.folder}: another process writes here: expected one dispatcher a folder"
            ) from None
        self._file: Any = None  # unbuffered: what could not be written must not come later
        self._torn = False  # whether the file may hold more than is in force
        try:
            self._generation, self._check, self.found = self._read()
            if self.found.state is not None:
                path = self._path("journal")
                with _failing(path, "opened"):
                    self._file = open(path, "ab", buffering=0)
                    self._size = path.stat().st_size
        except BaseException:
            self.close()
            raise

    def append(self, event: Mapping[str, Any]) -> None:
        """Writes one event; on return it outlives the process, and with ``fsync`` the machine.

        Raises:
          JournalError: the disk is full or gone; what was there before is untouched and the event is not there.
        """
        line, check = _line(event, self._check)
        try:
            if self._torn:
                self._file.truncate(self._size)
            self._torn = True
            _write(self._file, line)
            if self._fsync:
                os.fsync(self._file.fileno())
            self._size, self._check, self._torn = self._size + len(line), check, False
        except BaseException as error:
            with contextlib.suppress(OSError, ValueError):  # else the next call does it
                self._file.truncate(self._size)
                self._torn = False
            if isinstance(error, OSError | ValueError):
                raise JournalError(
                    f"{self._path('journal')}: cannot be written, nothing has changed: {error}"
                ) from error
            raise

    def start(self, state: Mapping[str, Any], *, replaces: bool = False) -> None:
        """Begins a generation with this state.

        Args:
          state: JSON values and NumPy arrays by name under ``arrays``.
          replaces: whether the state does not follow from what is here, which is then removed.

        Raises:
          JournalError: the disk is full or gone; the old generation stays in force.
        """
        number = self._generation + 1
        path = self.folder / f"{number:08d}.state"
        begun = path.with_suffix(".journal")
        line, check = _line({"kind": "begin", "format": FORMAT}, number)
        file = None
        try:
            if self._lock.closed:
                raise JournalError(f"{self.folder}: closed: expected an open dispatcher")
            with _failing(begun, "written"):
                file = open(begun, "ab", buffering=0)
                file.truncate(0)
                _write(file, line)
                os.fsync(file.fileno())
            save_state(path, state)
        except BaseException as error:
            if file is not None:
                file.close()
            if isinstance(error, JournalError):  # else the state may be there already, and needs its journal
                with contextlib.suppress(OSError):
                    begun.unlink(missing_ok=True)
            raise
        # The new state is in force: from here on nothing may fail.
        old, self._file = self._file, file
        self._generation, self._size, self._check, self._torn = number, len(line), check, False
        with contextlib.suppress(OSError):
            if old is not None:
                old.close()
            for before in _generations(self.folder):
                if before < number - (not replaces):
                    for suffix in ("state", "journal"):
                        (self.folder / f"{before:08d}.{suffix}").unlink(missing_ok=True)

    def close(self) -> None:
        """Lets go of the folder."""
        if self._file is not None:
            self._file.close()
        self._lock.close()

    def _path(self, suffix: str) -> Path:
        return self.folder / f"{self._generation:08d}.{suffix}"

    def _read(self) -> tuple[int, int, Found]:
        """Returns the generation in force, the check of its last line, and what there is."""
        with _failing(self.folder, "read"):
            numbers = _generations(self.folder)
        newest = max((n for n in numbers if (self.folder / f"{n:08d}.state").exists()), default=0)
        state, generation, check, torn = None, newest, 0, 0
        events: list[tuple[str, dict[str, Any]]] = []
        if newest:
            state = load_state(self.folder / f"{newest:08d}.state")
        for number in [n for n in numbers if n >= newest]:
            path = self.folder / f"{number:08d}.journal"
            if number == newest and not path.exists():
                raise JournalError(f"{path} is missing: what happened since {newest:08d}.state is in it")
            more, last, torn = _events(path, number, begun=number == newest)
            if number > newest and not more:  # a crash before its state was there
                with _failing(path, "removed"):
                    path.unlink()
            elif state is None:
                raise JournalError(f"{path} has calls, and the state that it starts from is missing")
            else:
                generation, check, events = number, last, events + more
        return generation, check, Found(state, events, torn)


def encode(state: Mapping[str, Any]) -> bytes:
    """Returns the bytes of a state: JSON values, and NumPy arrays by name under ``arrays``."""
    meta = json.dumps({k: v for k, v in state.items() if k != "arrays"}, allow_nan=False)
    names = list(state["arrays"])
    columns: dict[str, Any] = {f"a{i}": np.asarray(state["arrays"][name]) for i, name in enumerate(names)}
    buffer = io.BytesIO()
    text = json.dumps([names, meta])
    np.savez(buffer, meta=np.frombuffer(text.encode(), np.uint8), **columns)
    body = buffer.getvalue()
    return MAGIC + f"{FORMAT} {hashlib.sha256(body).hexdigest()}\n".encode() + body


def decode(data: bytes, where: str) -> dict[str, Any]:
    """Returns the state of ``encode``.

    Raises:
      JournalError: the bytes are damaged or of a newer format.
    """
    head, _, body = data.partition(b"\n")
    parts = head[len(MAGIC) :].split()
    if not head.startswith(MAGIC) or len(parts) != 2 or not parts[0].isdigit() or len(parts[0]) > 9:
        raise JournalError(f"{where}: expected a saved state of a dispatcher, got something else")
    if int(parts[0]) > FORMAT:
        raise JournalError(f"{where}: format {int(parts[0])}: expected at most {FORMAT}: use a newer envsched-jax")
    if parts[1] != hashlib.sha256(body).hexdigest().encode():
        raise JournalError(
            f"{where}: damaged: its checksum does not match. If the generation before is there, remove this file: the "
            "journals tell the rest"
        )
    with np.load(io.BytesIO(body), allow_pickle=False) as columns:
        names, meta = json.loads(columns["meta"].tobytes())
        return {**json.loads(meta), "arrays": {name: columns[f"a{i}"] for i, name in enumerate(names)}}


def save_state(path: str | os.PathLike[str], state: Mapping[str, Any]) -> None:
    """Writes a ``Dispatcher.state_dict()`` to a file, whole or not at all; raises JournalError if it cannot."""
    target = Path(path)
    aside = target.with_name(target.name + ".tmp")
    data = encode(state)
    try:
        with _failing(target, "written"):
            with open(aside, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, target)
    except JournalError:
        with contextlib.suppress(OSError):
            aside.unlink(missing_ok=True)
        raise
    _sync(target.parent)


def load_state(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Returns the state of ``save_state``; raises JournalError if the file is missing or damaged."""
    source = Path(path)
    with _failing(source, "read"):
        data = source.read_bytes()
    return decode(data, str(source))


def _sync(folder: Path) -> None:
    """Makes names in a folder outlive a crash of the machine, where the file system can do that."""
    try:
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        _LOG.warning("%s: cannot be synchronised: %s", folder, error)


def _generations(folder: Path) -> list[int]:
    found = (path.name.partition(".") for path in folder.iterdir())
    known = {stem for stem, _, suffix in found if suffix in ("state", "journal") and len(stem) == 8}
    return sorted(int(stem) for stem in known if stem.isascii() and stem.isdigit())


def _line(event: Mapping[str, Any], before: int) -> tuple[bytes, int]:
    """Returns the line of an event, and its check; ``before`` is that of the line before, first the generation."""
    text = json.dumps(event, separators=(",", ":"), allow_nan=False).encode()
    check = zlib.crc32(text, before)
    return b"%08x %s\n" % (check, text), check


def _write(file: Any, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[file.write(left) :]


def _events(path: Path, generation: int, begun: bool) -> tuple[list[tuple[str, dict[str, Any]]], int, int]:
    """Returns the events of a journal without its first line, the last check, and the bytes cut off at its end.

    ``begun`` tells that the first line must be there: the state that follows on it is.
    """
    with _failing(path, "read"):
        data = path.read_bytes()
    *lines, rest = data.split(b"\n")
    if rest:
        _LOG.warning("%s: the last call was cut short by a crash; its %d bytes are dropped", path, len(rest))
        with _failing(path, "mended"):
            os.truncate(path, len(data) - len(rest))
    events, check = [], generation
    for number, line in enumerate(lines, start=1):
        written, _, text = line.partition(b" ")
        check = zlib.crc32(text, check)
        if written != b"%08x" % check:
            raise JournalError(
                f"{path}:{number}: damaged: its checksum does not match. What stands before it can be kept by cutting "
                "the file off here, which gives up what follows"
            )
        events.append((f"{path}:{number}", json.loads(text)))
    if not events and not begun:
        return [], check, 0
    first = events[0][1] if events else {}
    if first.get("kind") != "begin":
        raise JournalError(f"{path}:1: expected the first line of a journal")
    if first["format"] > FORMAT:
        raise JournalError(f"{path}:1: format {first['format']}: expected at most {FORMAT}: use a newer envsched-jax")
    return events[1:], check, len(rest)


@contextlib.contextmanager
def _failing(path: Path, what: str) -> Any:
    try:
        yield
    except OSError as error:
        raise JournalError(f"{path}: cannot be {what}: {error}") from error
