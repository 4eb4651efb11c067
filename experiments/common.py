"""What every experiment program shares: flags, metrics, summaries, intervals and a progress bar.

Only light modules are imported here; JAX, tensorboardX and tqdm are imported where they are used.
"""

import contextlib
import importlib.metadata
import importlib.util
import json
import math
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, NoReturn, TypeVar

import numpy as np
from absl import app, flags, logging
from ml_collections import config_dict, config_flags

SOURCE_ROOT = Path(__file__).resolve().parent.parent
METRICS = "metrics.jsonl"
SUMMARY = "summary.json"
_VERSIONED = ("jax", "jaxlib", "flax", "optax", "jraph", "numpy", "orbax-checkpoint", "envsched-jax")

Item = TypeVar("Item")


class RunError(ValueError):
    """A run directory is missing, unfinished or not readable; the message is one line for the user."""


def plain(value: Any) -> Any:
    """Turns `value` into what JSON can hold: dicts, lists, strings, numbers, booleans and None.

    Config references are resolved, arrays become (nested) lists, NaN and infinities become None.
    """
    if isinstance(value, config_dict.ConfigDict):
        value = value.copy_and_resolve_references().to_dict()
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return str(value)


def _repair(path: Path) -> None:
    """Cuts or completes a last line that a killed writer left without its newline."""
    with path.open("rb+") as file:
        data = file.read()
        if not data or data.endswith(b"\n"):
            return
        start = data.rfind(b"\n") + 1
        try:
            json.loads(data[start:])
        except ValueError:
            file.truncate(start)
        else:
            file.write(b"\n")


def _events_writer(folder: Path) -> Any:
    if importlib.util.find_spec("tensorboardX") is None:
        logging.warning("tensorboardX is not installed (extra 'experiments'): only %s is written", METRICS)
        return None
    import tensorboardX

    return tensorboardX.SummaryWriter(str(folder))


class MetricWriter:
    """Appends metrics to `workdir/metrics.jsonl` and to TensorBoard events under `workdir/tensorboard/`.

    One JSON line per call: `{"step": ..., <labels>, <scalars>}`. Lines are flushed at once, so a killed run loses at
    most the line it was writing, and the next writer removes that remnant. A resumed run may write a step again;
    `read_metrics` then takes the last row. Without `events` there are only the JSON lines.
    """

    def __init__(self, workdir: str | Path, *, events: bool = True):
        self._workdir = Path(workdir)
        self._with_events = events
        self._workdir.mkdir(parents=True, exist_ok=True)
        path = self._workdir / METRICS
        if path.exists():
            _repair(path)
        self._file: IO[str] = path.open("a", encoding="utf-8")
        self._events: dict[str, Any] = {}

    def write(self, step: int, scalars: Mapping[str, Any], **labels: Any) -> None:
        """Writes one row; scalars may be Python, NumPy or JAX numbers, NaN and infinities become null.

        Labels (such as `arm="envsched", seed=0`) are part of the row and name the folder of the events.

        Raises:
          ValueError: a scalar is not a single number, or is called like a label or `step`.
        """
        twice = ({"step"} | labels.keys()) & scalars.keys()
        if twice:
            raise ValueError(f"metrics also used as labels: {sorted(twice)}")
        values = {name: _scalar(name, value) for name, value in scalars.items()}
        row = {"step": int(step), **plain(labels), **values}
        self._file.write(json.dumps(row, allow_nan=False) + "\n")
        self._file.flush()
        folder = "_".join(f"{name}-{value}" for name, value in labels.items()).replace("/", "-")
        if self._with_events and folder not in self._events:
            self._events[folder] = _events_writer(self._workdir / "tensorboard" / folder)
        events = self._events.get(folder)
        for name, value in values.items():
            if events is not None and value is not None:
                events.add_scalar(name, value, int(step))

    def close(self) -> None:
        """Closes all files; closing twice is allowed."""
        self._file.close()
        for events in self._events.values():
            if events is not None:
                events.close()
        self._events = {}

    def __enter__(self) -> "MetricWriter":
        return self

    def __exit__(self, *unused: object) -> None:
        self.close()


def _scalar(name: str, value: Any) -> int | float | None:
    array = np.asarray(value)
    if array.size != 1 or array.dtype.kind in "OSUc":
        raise ValueError(f"metric {name!r} must be one number, got {value!r}")
    if array.dtype.kind in "biu":
        return int(array.reshape(()))
    number = float(array.reshape(()))  # bfloat16 comes this way too
    return number if math.isfinite(number) else None


def read_metrics(workdir: str | Path) -> list[dict[str, Any]]:
    """Rows of `workdir/metrics.jsonl` in order of first writing; of rows with equal step, arm and seed the last stands.

    A cut last line (a run that is still writing, or was killed) is left out. A missing file gives an empty list.

    Raises:
      RunError: another line is not a JSON object.
    """
    path = Path(workdir) / METRICS
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    rows: dict[tuple[tuple[str, str], ...], dict[str, Any]] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            if number == len(lines):
                break
            raise RunError(f"{path}:{number}: not a JSON line") from error
        labels = ((name, str(v)) for name, v in row.items() if name in ("step", "seed") or isinstance(v, str))
        rows[tuple(sorted(labels))] = row
    return list(rows.values())


def commit() -> str:
    """Commit of the source tree, with `-dirty` when tracked files differ from it, or `unknown` outside a checkout."""
    try:
        top = _git("rev-parse", "--show-toplevel")
        if Path(top).resolve() != SOURCE_ROOT:
            return "unknown"  # installed inside somebody else's checkout
        head = _git("rev-parse", "HEAD")
        return head + ("-dirty" if _git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return "unknown"


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(SOURCE_ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=30).stdout.strip()


def versions() -> dict[str, str]:
    """Versions of Python and of the installed packages that results depend on."""
    found = {"python": sys.version.split()[0]}
    for name in _VERSIONED:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def write_json(path: str | Path, value: Any) -> None:
    """Writes `plain(value)` as JSON atomically: readers see the old file or the new one, never a part."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.part")
    partial.write_text(json.dumps(plain(value), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    os.replace(partial, path)


def write_summary(workdir: str | Path, kind: str, config: Any, summary: Mapping[str, Any], started: float) -> Path:
    """Writes `workdir/summary.json` atomically and returns its path.

    Args:
      workdir: the run's folder, made if missing.
      kind: the program: `train`, `ablate`, `replay`, ...
      config: the resolved config (a ConfigDict or a mapping).
      summary: the program's own results, on the top level of the file.
      started: `time.time()` at the start; `wall_s` is the time since then in seconds.

    Raises:
      ValueError: `summary` uses one of the names that are filled in here.
    """
    import jax

    devices = jax.devices()
    common = {
        "kind": kind,
        "commit": commit(),
        "device": {"kind": devices[0].device_kind, "count": len(devices)},
        "versions": versions(),
        "config": config,
        "wall_s": time.time() - started,
    }
    if common.keys() & summary.keys():
        raise ValueError(f"reserved names in the summary: {sorted(common.keys() & summary.keys())}")
    path = Path(workdir) / SUMMARY
    write_json(path, common | dict(summary))
    return path


def read_summary(workdir: str | Path) -> dict[str, Any]:
    """Reads `workdir/summary.json`.

    Raises:
      RunError: the folder is missing, or the run has not finished (there is no summary), or the file is damaged.
    """
    workdir = Path(workdir)
    path = workdir / SUMMARY
    if not workdir.is_dir():
        raise RunError(f"{workdir}: no such run directory")
    if not path.exists():
        state = "is unfinished" if (workdir / METRICS).exists() else "holds no run"
        raise RunError(f"{workdir} {state}: {SUMMARY} is missing (run the program again to finish it)")
    try:
        summary = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(summary, dict) or "kind" not in summary:
        raise RunError(f"{path}: not a summary (no 'kind')")
    return summary


def t_quantile(dof: int) -> float:
    """The t with P(|T| <= t) = 0.95 for Student's T with `dof` >= 1 degrees of freedom.

    Inverts the closed form for whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4) by bisection on
    the angle atan(t / sqrt(dof)).
    """
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        low, high = (angle, high) if _within(angle, dof) < 0.95 else (low, angle)
    return math.sqrt(dof) * math.tan((low + high) / 2)


def _within(angle: float, dof: int) -> float:
    """P(|T| <= sqrt(dof) tan(angle))."""
    odd = dof % 2
    term = math.cos(angle) if odd else 1.0
    total = 0.0 if dof == 1 else term
    for power in range(2 + odd, dof - 1, 2):
        term *= (power - 1) / power * math.cos(angle) ** 2
        total += term
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total


def interval(values: Any, axis: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Mean and 95 % t-interval over `axis` (the seeds).

    Returns:
      `(mean, low, high)`, float64, each of the shape without `axis`. With one repetition `low` and `high` are NaN;
      a NaN in `values` makes its own mean and interval NaN.
    """
    array = np.moveaxis(np.asarray(values, np.float64), axis, 0)
    count, mean = array.shape[0], array.mean(axis=0)
    if count == 1:
        return mean, np.full_like(mean, np.nan), np.full_like(mean, np.nan)
    half = t_quantile(count - 1) * array.std(axis=0, ddof=1) / math.sqrt(count)
    return mean, mean - half, mean + half


def bar(iterable: Iterable[Item], desc: str = "", total: int | None = None) -> Iterable[Item]:
    """Shows a progress bar on a terminal; elsewhere, and without tqdm, just gives the items."""
    if not sys.stderr.isatty() or importlib.util.find_spec("tqdm") is None:
        return iterable
    import tqdm

    return tqdm.tqdm(iterable, desc=desc, total=total, leave=False)


def use_compilation_cache() -> None:
    """Turns on JAX's compilation cache on disk, so that a second run starts at once.

    The folder is JAX_COMPILATION_CACHE_DIR if set, else `envsched_jax/jax` under XDG_CACHE_HOME or ~/.cache.
    """
    import jax

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "envsched_jax" / "jax"
    jax.config.update("jax_compilation_cache_dir", os.environ.get("JAX_COMPILATION_CACHE_DIR", str(cache)))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.5)


def fail(message: str) -> NoReturn:
    """Prints one line `error: ...` and leaves with exit code 2."""
    print("error: " + " ".join(message.split()), file=sys.stderr)
    raise SystemExit(2)


def explain(error: Exception, argv: Sequence[str] = ()) -> str | None:
    """One line for an error that the user can mend (config keys, types and values, files), None for any other.

    Args:
      error: what was raised while flags were parsed or by the program.
      argv: the command line, searched for the flag that names an unknown config key.
    """
    from_config = any("ml_collections" in frame.filename for frame in traceback.extract_tb(error.__traceback__)[-1:])
    text = str(error.args[0] if isinstance(error, KeyError) and error.args else error).strip()
    if isinstance(error, (AttributeError, KeyError)) and from_config:
        lines = text.replace("\\n", "\n").replace("\\'", "'").split("\n")
        key = lines[0].strip("\"' ")
        if key.startswith("Key "):
            return None  # the program assigned a new key: its fault, not the user's
        given = [flag.lstrip("-").split("=")[0] for flag in argv if flag.lstrip("-").startswith("config.")]
        name = next((flag for flag in given if key in flag.split(".")), key)
        return " ".join([f"unknown config key '{name}'.", *lines[1:]]).rstrip("'")
    if isinstance(error, (flags.Error, OSError)):
        lines = [line.strip() for line in text.split("\n") if line.strip()]
        # A faulty config file is reported with a whole traceback; its last line says what is wrong.
        return text if len(lines) < 3 else f"{lines[0]} {lines[-1]}"
    if isinstance(error, TypeError) and (from_config or "keyword argument" in text):
        return text  # a wrong type, or a config section with a key that its function does not take
    if isinstance(error, (ValueError, FloatingPointError)):
        return text
    return None


@contextlib.contextmanager
def _one_line_errors(argv: Sequence[str]) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        message = explain(error, argv)
        if message is None:
            raise
        if logging.level_debug():
            traceback.print_exc()
        fail(message)


def run_app(main: Callable[[config_dict.ConfigDict, Path], Any], config_path_default: str) -> NoReturn:
    """Runs `main(config, workdir)` as a program with the flags `--config`, `--config.KEY` and `--workdir`.

    The config is locked, the workdir is made, the compilation cache is on. Errors that the user can mend end in one
    line and exit code 2; `--v=1` shows their traceback as well.

    Args:
      main: the program.
      config_path_default: the config file when `--config` is not given, relative to the source tree.
    """
    with _one_line_errors(sys.argv):  # a default config is read, with its overrides, as soon as it is defined
        default = str(SOURCE_ROOT / config_path_default)
        config_flags.DEFINE_config_file("config", default, "Config file, `path.py` or `path.py:preset`.")
    flags.DEFINE_string("workdir", None, "Folder of the run; an unfinished run there is resumed.", required=True)

    def parse(argv: list[str]) -> Any:
        with _one_line_errors(argv):
            return flags.FLAGS(argv)

    def start(argv: list[str]) -> None:
        if len(argv) > 1:
            fail(f"unexpected argument {argv[1]!r}")
        with _one_line_errors(sys.argv):
            workdir = Path(flags.FLAGS.workdir)
            workdir.mkdir(parents=True, exist_ok=True)
            if not flags.FLAGS["verbosity"].present:
                logging.set_verbosity(logging.WARNING)  # libraries tell every step of every checkpoint
            use_compilation_cache()
            main(flags.FLAGS.config, workdir)

    app.run(start, flags_parser=parse)
    raise SystemExit(0)
