"""A C++ kernel for propagation on the CPU, built on demand with the system's compiler and called through ``jax.ffi``.

Nothing here runs unless it is asked for: ``load`` (or ``available``) builds ``propagate.cc`` once per source, compiler,
JAX and processor into the user's cache, and registers it. What needs no compiler is ``belief.propagate``.
"""

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

import jax

SOURCE = Path(__file__).with_name("propagate.cc")
TARGET = "envsched_diffuse"
# No -ffast-math: channels are vectors already, so the compiler need not reorder sums, and NaN stays NaN.
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fPIC", "-shared")
COMPILERS = ("c++", "g++", "clang++")
SECONDS = 300  # the most that a build may take

_lock = threading.Lock()
_library: ctypes.CDLL | None = None
_failure: str | None = None


class NativeError(RuntimeError):
    """The C++ kernel cannot be built or loaded here; the message says why."""


def load() -> None:
    """Builds the kernel if it is not in the cache, loads it and registers it with JAX; a second call does nothing.

    Raises:
      NativeError: there is no compiler, or building or loading fails. Later calls fail at once with the same message.
    """
    global _library, _failure
    with _lock:
        if _library is not None:
            return
        if _failure is None:
            try:
                library = ctypes.CDLL(str(_build()))
                jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(library.EnvschedDiffuse), platform="cpu")
                _library = library
                return
            except (NativeError, OSError, AttributeError, subprocess.SubprocessError) as error:
                _failure = f"the native propagation kernel is not available: {error}"
                logging.getLogger(__name__).warning("%s; use method='gather', which needs no compiler", _failure)
        raise NativeError(_failure)


def available() -> bool:
    """Loads the kernel if that is possible and returns whether it is loaded; the log and ``failure`` say why not."""
    try:
        load()
    except NativeError:
        return False
    return True


def loaded() -> bool:
    """Whether an earlier call of ``load`` or ``available`` loaded the kernel; tries nothing itself."""
    return _library is not None


def failure() -> str | None:
    """Why the kernel could not be loaded; None if it was, or if nobody has tried."""
    return _failure


def cache_folder() -> Path:
    """The folder of built kernels: ``envsched_jax/native`` under XDG_CACHE_HOME or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "envsched_jax" / "native"


def _compiler() -> str:
    """Path of the compiler: CXX if set, else the first that is found."""
    wanted = (os.environ["CXX"],) if os.environ.get("CXX") else COMPILERS
    for name in wanted:
        if found := shutil.which(name):
            return found
    raise NativeError(f"no C++ compiler found (looked for {', '.join(wanted)})")


def _processor() -> str:
    """What ``-march=native`` depends on: name and features of the processor."""
    info = Path("/proc/cpuinfo")
    first = info.read_text(encoding="utf-8", errors="replace").split("\n\n")[0] if info.exists() else ""
    kept = [line for line in first.split("\n") if line.startswith(("model name", "flags", "Features", "CPU part"))]
    return "\n".join([platform.machine(), platform.processor(), *kept])


def _build() -> Path:
    """Path of the built library, from the cache where it is there."""
    compiler = _compiler()
    version = _run([compiler, "--version"])
    basis = (SOURCE.read_text(encoding="utf-8"), *FLAGS, compiler, version, jax.__version__, _processor())
    path = cache_folder() / f"{hashlib.sha256(chr(0).join(basis).encode()).hexdigest()[:32]}.so"
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:  # then moved, so that nobody loads half a file
        made = Path(folder) / path.name
        _run([compiler, *FLAGS, f"-I{jax.ffi.include_dir()}", str(SOURCE), "-o", str(made)])
        os.replace(made, path)
    return path


def _run(command: list[str]) -> str:
    """What a command prints; of its errors the first is the one that tells."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    if done.returncode:
        lines = done.stderr.splitlines()
        telling = [line for line in lines if "error" in line.lower()] or lines or [f"exit status {done.returncode}"]
        raise NativeError(f"{command[0]} failed: {telling[0].strip()}")
    return done.stdout
