"""Rollout functions for tests of executors; imports nothing heavy, since every worker imports it."""

import asyncio
import ctypes
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path


class OddError(Exception):
    """Cannot be unpickled: its constructor wants other arguments than it keeps."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def quick(record, seed, ticket):
    return (float(seed % 2), "ok", 10, 0.25)


def random_nap(record, seed, ticket):
    time.sleep(random.Random(seed).uniform(0.0, 0.02))
    return (float(seed % 2),)


def who(record, seed, ticket):
    return (float(os.getpid()), "ok", float("jax" in sys.modules))


def seeded(record, seed, ticket):
    assert isinstance(record, dict) and record["task_id"] == ticket["task_id"]
    return (float(seed),)


def misbehave(record, seed, ticket):
    """Does what the text of the task says, one word for each rollout of the group, in turn."""
    words = record["text"].split()
    word = words[_number_of(seed, ticket["ticket_id"], len(words))]
    print("a rollout prints what it likes")
    return act(word)


def _number_of(seed, ticket_id, count):
    from hashlib import blake2b

    seeds = [int.from_bytes(blake2b(f"{ticket_id}/{n}".encode(), digest_size=4).digest()) for n in range(count)]
    return seeds.index(seed)


def act(word):
    if word.startswith("deaf"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        word = word.removeprefix("deaf-")
    if word == "hang":
        time.sleep(60)
    if word == "spin":
        sum(range(10**13))  # never returns to the interpreter: no signal handler and no other thread runs
    if word == "exit":
        os._exit(3)
    if word == "leave":
        sys.exit("a rollout leaves")
    if word == "segfault":
        ctypes.string_at(0)
    if word == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "raise":
        raise OddError(1, 2)
    if word == "timeout":
        raise TimeoutError("of its own")
    return NONSENSE.get(word, (1.0, word))


NONSENSE = {
    "nothing": None,
    "text": "1.0",
    "lambda": lambda: 1,
    "empty": (),
    "long": (1.0, "ok", 1, 1.0, 1),
    "nan": (float("nan"),),
    "word": ("1.0",),
    "no_reward": (None,),
    "status": (1.0, "fine"),
    "tokens": (1.0, "ok", -1),
}


def spawn_and_hang(record, seed, ticket):
    child = subprocess.Popen(["sleep", "300"])
    Path(record["text"]).write_text(f"{child.pid}")
    time.sleep(60)


def deaf(record, seed, ticket):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    partial = Path(f"{record['text']}.part")
    partial.write_text(f"{os.getpid()}")
    partial.rename(record["text"])
    time.sleep(60)


def logged_nap(record, seed, ticket):
    """Writes when it began and ended to the folder that the text names."""
    begun = time.time()
    time.sleep(0.05)
    line = f"{ticket['env_id']} {ticket['ticket_id']} {begun} {time.time()}"
    (Path(record["text"]) / f"{ticket['ticket_id']}-{seed}").write_text(line)
    return (1.0,)


def fails_once(record, seed, ticket):
    folder, how = record["text"].split()
    mark = Path(folder) / f"{how}-{seed}"
    if not mark.exists():
        mark.write_text("")
        act(how)
    return (1.0,)


def at_exit(record, seed, ticket):
    import atexit

    atexit.register(Path(record["text"]).write_text, "closed")
    return (1.0,)


def on_term(record, seed, ticket):
    def clean(*unused):
        Path(record["text"]).write_text("cleaned")
        os._exit(0)

    signal.signal(signal.SIGTERM, clean)
    time.sleep(60)


async def async_act(record, seed, ticket):
    words = record["text"].split()
    word = words[_number_of(seed, ticket["ticket_id"], len(words))]
    if word == "hang":
        await asyncio.sleep(60)
    await asyncio.sleep(0)
    return act(word)
