"""Would scheduling pay? From a plain log of rollouts: `python -m experiments.headroom --rollouts=FILE`.

    python -m experiments.headroom --rollouts=FILE [--pool=FILE] [--workdir=DIR] [--group_size=G] [--batch_size=B]

FILE is JSON lines, one rollout a line: `task` (string), `reward` (number), and perhaps `environment` (string) and
`step` (integer, the order of time or the version of the policy). Rollouts of one task at one step are a group; a group
is *informative* if its rewards differ.

Told are: the share of informative groups as it was; the ceiling, what a perfect scheduler would reach with the same
batches (see `experiments.headroom_ceiling`); what EnvSched's belief would have picked knowing only the past, with the
graph and without (`experiments.headroom_replay`); and a recommendation (`experiments.headroom_words`). With a workdir
also `summary.json` and `report.md`.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from envsched_jax.pool import Record, read_jsonl
from experiments import common, headroom_estimate, headroom_log, headroom_words

REPORT = "report.md"


def main(argv: Sequence[str] | None = None) -> None:
    """Reads the log, prints the report and writes it to the workdir if there is one.

    Raises:
      LogError: the log cannot be used.
      PoolError: the pool cannot be used, or lacks a task of the log.
      ValueError: a number is out of range.
    """
    started = time.time()
    options = _parser().parse_args(argv)
    for name, least in (("window", 2), ("batch_size", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise ValueError(f"--{name} must be at least {least}, got {value}")
    log = headroom_log.read(options.rollouts, options.group_size)
    found = headroom_estimate.estimate(
        log, _pool(options.pool), window=options.window, batch=options.batch_size, seed=options.seed
    )
    print(headroom_words.text(found), flush=True)
    if options.workdir is not None:
        workdir = Path(options.workdir)
        verdict, reasons = headroom_words.advise(found)
        summary = {**found, "verdict": verdict, "reasons": reasons, "notes": headroom_words.notes(found)}
        common.write_summary(workdir, "headroom", vars(options), summary, started)
        (workdir / REPORT).write_text(headroom_words.markdown(found, Path(options.rollouts).name), encoding="utf-8")


def _pool(path: str | None) -> list[Record] | None:
    if path is None:
        return None
    if not Path(path).is_file():
        raise headroom_log.LogError(f"{path}: no such file")
    return read_jsonl(path)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m experiments.headroom", description=__doc__.split("\n")[0])
    parser.add_argument("--rollouts", required=True, help="log of rollouts, JSON lines")
    parser.add_argument("--pool", help="records of the tasks, JSON lines: the graph then knows their texts and tools")
    parser.add_argument("--workdir", help=f"where summary.json and {REPORT} go")
    parser.add_argument("--group_size", type=int, help="cut larger groups into groups of so many rollouts")
    parser.add_argument("--batch_size", type=int, help="tasks per step; by default those of the log")
    parser.add_argument("--window", type=int, help="steps of the log from which a replayed batch is picked")
    parser.add_argument("--seed", type=int, default=0, help="of all random draws")
    return parser


if __name__ == "__main__":
    common.use_compilation_cache()
    try:
        main()
    except Exception as error:
        message = common.explain(error, sys.argv)
        if message is None:
            raise
        common.fail(message)
