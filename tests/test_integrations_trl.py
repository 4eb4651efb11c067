"""TRL's trainer on a dispatcher's tasks: the script of the documentation, as it is, also killed and resumed.

Runs where trl is installed, see `make test-trl`; what needs no trainer is in test_integrations_sampler.py.
"""

import json
import os
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("trl", reason="trl is not installed here: `make test-trl` has an environment for it")
pytestmark = pytest.mark.slow

KILLS = int(os.environ.get("ENVSCHED_KILLS", "2"))
PAGE = Path(__file__).parents[1] / "docs/trainers/trl.md"
WATCH = """
def reward(completions, task_id, _reward=reward, **columns):
    with open(output_dir + ".seen", "a") as file:
        file.write(json.dumps([columns["trainer_state"].global_step, task_id[::2]]) + chr(10))
    return _reward(completions, task_id, **columns)
"""
END = """
import hashlib
numbers = [dispatcher.state_dict()["arrays"], {n: p.detach().numpy() for n, p in model.named_parameters()}]
print("end", *(hashlib.sha256(b"".join(x[k].tobytes() for k in sorted(x))).hexdigest() for x in numbers))
"""


def script():
    (code,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    head, args = code.split("args = GRPOConfig(")
    return "import json\n" + head + WATCH + "args = GRPOConfig(" + args + END


def start(path, output_dir, steps):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [sys.executable, str(path), str(output_dir), str(steps)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env=environment, cwd=Path(path).parent, **pipes)


def lines(output_dir):
    path = Path(f"{output_dir}.seen")
    return path.read_text().splitlines() if path.exists() else []


def seen(output_dir):
    """Tasks by step; a step that was done twice must have had the same tasks."""
    steps = {}
    for line in lines(output_dir):
        step, tasks = json.loads(line)
        assert steps.setdefault(step, tasks) == tasks, step
    return steps


def ends(text):
    return [line for line in text.splitlines() if line.startswith(("tickets", "end"))]


def killed(path, output_dir, rng):
    """Runs until a random moment of the training; returns what it printed if it got to its end before."""
    before = len(lines(output_dir))
    process = start(path, output_dir, 20)
    while process.poll() is None and len(lines(output_dir)) == before:
        time.sleep(0.05)
    try:
        text, _ = process.communicate(timeout=rng.uniform(0.0, 1.0))
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return None
    assert process.returncode == 0, text[-3000:]
    return text


def test_a_run_that_is_killed_again_and_again_ends_as_one_that_is_not(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(script())
    process = start(path, tmp_path / "whole", 20)
    text, _ = process.communicate(timeout=600)
    assert process.returncode == 0, text[-3000:]
    whole = seen(tmp_path / "whole")
    assert sorted(whole) == list(range(20))
    assert "'observed': 80" in text and "'repeated': 0, 'open': 4" in text
    rng, died, runs = random.Random(0), 0, 0
    while died < KILLS:
        output_dir, again = tmp_path / f"killed{runs}", None
        while again is None:
            again = killed(path, output_dir, rng)
            died += again is None
            if died == KILLS:
                process = start(path, output_dir, 20)
                again, _ = process.communicate(timeout=600)
        runs += 1
        assert seen(output_dir) == whole
        assert ends(again) == ends(text)
