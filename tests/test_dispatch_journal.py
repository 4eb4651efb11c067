"""Killed at any instruction, a full disk, two writers, damage: the run goes on exactly, or one clear error."""

import fcntl
import functools
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
import pytest

import envsched_jax as es
from envsched_jax import dispatch, graph, pool, testing
from envsched_jax.dispatch import journal, run

G = 4
EVERY = 6  # calls between snapshots: several generations within a short script


@functools.cache
def parts():
    records = testing.synthetic_pool(40, 4)
    scheduler = es.make_scheduler("uniform", batch_size=8, group_size=G)
    return records, scheduler, graph.build(records, k=4, num_patterns=8)


class Clock:
    """Time stands still, so that tickets of two runs are equal."""

    @staticmethod
    def time():
        return 1.0


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """What a process wrote outlives it without waiting for the disk."""
    monkeypatch.setattr(run, "time", Clock)
    monkeypatch.setattr(os, "fsync", lambda handle: None)


def open_run(folder=None, every=EVERY):
    records, scheduler, built = parts()
    return es.Dispatcher(
        records, scheduler, group_size=G, graph=built, folder=folder, snapshot_every=every,
        limits=es.Limits(deadline_versions=2),
    )  # fmt: skip


def script(d):
    """Calls that make use of everything, each a function of the dispatcher's own state, by the number of the call."""
    number = 0
    while True:
        kind, step = number % 7, random.Random(number)
        if kind in (0, 4):
            yield lambda: d.propose(5)
        elif kind == 6 and number % 3 == 0:
            yield lambda: d.cancel(d.open_tickets()[0].ticket_id, "lost", failed=True)
        elif kind == 6:
            yield lambda: d.retire_tasks([t for t in d.graph[1].task_ids if t not in retired(d)][:1])
        else:
            yield lambda step=step: observe(d, step)
        number += 1


def retired(d):
    return graph.retired(*d.graph)


def observe(d, rng):
    out = d.open_tickets()
    chosen = rng.sample(out, min(2, len(out)))
    return d.observe_many([dispatch.feedback(t.ticket_id, [rng.random() for _ in range(G)]) for t in chosen])


@functools.cache
def steady(calls):
    """Digests of the uninterrupted run before and after each call; they tell every proposal and every array."""
    d = open_run()
    digests, todo = [d.state_dict()["digest"]], script(d)
    for _ in range(calls):
        next(todo)()
        digests.append(d.state_dict()["digest"])
    return digests


def go_on(d, done, calls):
    """Does some of the calls that are left, and compares with the uninterrupted run."""
    todo = script(d)
    for _ in range(done):
        next(todo)
    for digest in steady(CALLS)[done : min(done + calls, CALLS)]:
        assert d.state_dict()["digest"] == digest
        next(todo)()
    assert d.state_dict()["digest"] == steady(CALLS)[min(done + calls, CALLS)]


class Killed(BaseException):
    """The process ends here."""


class Killer:
    """Lets the process die before or half-way through its k-th operation on files; from then on nothing works."""

    def __init__(self, monkeypatch, k, opened):
        self.left, self.rng, self.journal = k, random.Random(k), opened
        for module, name in ((os, "fsync"), (os, "replace"), (os, "truncate"), (Path, "unlink"), (journal, "open")):
            self.wrap(monkeypatch, module, name)
        real = journal._write

        def write(file, data):
            if self.left == 1:
                real(file, bytes(data)[: self.rng.randint(0, len(data))])  # a part of it is there
            self.step()
            real(file, data)

        monkeypatch.setattr(journal, "_write", write)

    def wrap(self, monkeypatch, module, name):
        real = getattr(module, name, open)

        def call(*args, **kwargs):
            self.step()
            return real(*args, **kwargs)

        monkeypatch.setattr(module, name, call, raising=False)

    def step(self):
        self.left -= 1
        if self.dead:
            self.journal._file.close()  # nor can the line be cut off any more
            raise Killed

    @property
    def dead(self):
        return self.left <= 0


def abandon(d):
    """Closes the files of a process that is dead, as the system does."""
    for file in (d._journal._file, d._journal._lock):
        if file is not None:
            file.close()


CALLS = 64


@pytest.mark.parametrize("part", range(4))
def test_killed_at_any_operation_on_files(part, tmp_path, monkeypatch):
    """Every operation of a run on files in turn; over 200 in the four parts together."""
    points, k = 0, part + 1
    while True:
        folder, done = tmp_path / str(k), 0
        with monkeypatch.context() as patch:
            d = open_run(folder)
            todo, killer = script(d), Killer(patch, k, d._journal)
            try:
                for _ in range(CALLS):
                    next(todo)()
                    done += 1
            except Killed:
                pass
        abandon(d)
        if not killer.dead:
            break
        points += 1
        again = open_run(folder)
        digest, known = again.state_dict()["digest"], steady(CALLS)
        assert digest in known[done : done + 2]  # what had returned is there; the call that was cut may be
        go_on(again, known.index(digest, done), 9)
        again.close()
        k += 4
    assert points > 50


def test_a_journal_cut_at_any_byte(tmp_path):
    d = open_run(tmp_path / "a", every=1000)
    todo = script(d)
    sizes = []
    file = tmp_path / "a" / "00000001.journal"
    for _ in range(CALLS):
        sizes.append(file.stat().st_size)
        next(todo)()
    d.close()
    data, state = file.read_bytes(), (tmp_path / "a" / "00000001.state").read_bytes()
    digests = steady(CALLS)
    for cut in [*range(sizes[0], sizes[0] + 300, 17), *range(sizes[0] + 300, len(data), 211), *sizes]:
        folder = tmp_path / "b"
        folder.mkdir(exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
        (folder / "00000001.state").write_bytes(state)
        (folder / "00000001.journal").write_bytes(data[:cut])
        again = open_run(folder)
        done = sum(size <= cut for size in sizes) - 1
        assert again.state_dict()["digest"] == digests[done]
        again.close()


CHILD = """
import sys
import jax
jax.config.update("jax_compilation_cache_dir", {cache!r})
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)
sys.path.insert(0, {tests!r})
import test_dispatch_journal as t
t.run.time = t.Clock
d = t.open_run({folder!r})
todo = t.script(d)
for _ in range(int(sys.argv[1])):
    next(todo)
print("open", flush=True)
while True:
    next(todo)()
    print("done", flush=True)
"""


def child(folder, done):
    cache = jax.config.jax_compilation_cache_dir
    code = CHILD.format(cache=cache, tests=str(Path(__file__).parent), folder=str(folder))
    root = Path(__file__).resolve().parents[1]
    return subprocess.Popen(
        [sys.executable, "-c", code, str(done)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=root
    )


def test_processes_that_are_really_killed(tmp_path):
    done = 0
    digests = steady(400)
    for calls in (3, 17, 12):
        process = child(tmp_path, done)
        for _ in range(calls + 1):
            assert process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        more = len(process.stdout.read().split())  # it may have gone on until the signal came
        process.wait()
        process.stdout.close()
        least = done + calls + more
        d = open_run(tmp_path)
        digest = d.state_dict()["digest"]
        d.close()
        assert digest in digests[least : least + 2]
        done = digests.index(digest, least)


# ---------------------------------------------------------------- disks


@pytest.mark.parametrize("room", [0, 1, 40])
def test_a_full_disk_changes_nothing_and_it_can_go_on(room, tmp_path):
    d = open_run(tmp_path, every=1000)
    tickets = d.propose()
    before, size = d.state_dict()["digest"], (tmp_path / "00000001.journal").stat().st_size
    kept, limits = signal.signal(signal.SIGXFSZ, signal.SIG_IGN), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + room, limits[1]))
    try:
        for _ in range(3):
            for call in (
                lambda: d.observe(tickets[0].ticket_id, [1.0] * G),
                d.propose,
                lambda: d.cancel(0),
                lambda: d.load_state_dict(d.state_dict()),
            ):
                with pytest.raises(es.JournalError, match=r"0000000[12]\.(journal|state): cannot be written"):
                    call()
                assert d.state_dict()["digest"] == before
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, kept)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["00000001.journal", "00000001.state", "lock"]
    assert d.observe(tickets[1].ticket_id, [1.0] * G)
    after = d.state_dict()["digest"]
    d.close()
    again = open_run(tmp_path)
    assert again.state_dict()["digest"] == after
    again.close()


def test_a_disk_that_cannot_even_be_mended_is_mended_later(tmp_path, monkeypatch):
    d = open_run(tmp_path)
    tickets = d.propose()

    class Broken:
        """A file that takes half of a line and cannot be cut."""

        def __init__(self, file):
            self.file = file

        def write(self, data):
            self.file.write(data[: len(data) // 2])
            raise OSError("gone")

        def truncate(self, size):
            raise OSError("gone")

    real = d._journal._file
    d._journal._file = Broken(real)
    for _ in range(2):
        with pytest.raises(es.JournalError, match="gone"):
            d.observe(tickets[0].ticket_id, [1.0])
    d._journal._file = real
    assert d.observe(tickets[0].ticket_id, [1.0])
    digest = d.state_dict()["digest"]
    d.close()
    again = open_run(tmp_path)
    assert again.state_dict()["digest"] == digest
    again.close()


def test_an_interrupt_while_writing_leaves_no_half_line(tmp_path, monkeypatch):
    d = open_run(tmp_path)
    tickets, saved = d.propose(), d.state_dict()

    def interrupt(handle):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "fsync", interrupt)
        d.observe(tickets[0].ticket_id, [1.0])
    d.close()
    again = open_run(tmp_path)
    assert again.state_dict()["digest"] == saved["digest"]
    again.close()


@pytest.mark.parametrize("broken", ["save_state", "fsync"])
def test_a_snapshot_that_fails_fails_no_call(broken, tmp_path, monkeypatch, caplog):
    d = open_run(tmp_path, every=3)
    tickets = d.propose()
    d.observe(tickets[0].ticket_id, [1.0])

    def fail(*unused):
        raise OSError("no room")

    with monkeypatch.context() as patch:
        if broken == "save_state":
            patch.setattr(os, "replace", fail)
        else:  # the folder cannot be synchronised, after the new state is in force
            patch.setattr(os, "open", fail)
        assert d.observe(tickets[1].ticket_id, [1.0])
    assert "no room" in caplog.text
    for t in tickets[2:]:
        assert d.observe(t.ticket_id, [1.0])
    digest = d.state_dict()["digest"]
    d.close()
    again = open_run(tmp_path)
    assert again.state_dict()["digest"] == digest
    again.close()


def test_a_closed_dispatcher_writes_nothing(tmp_path):
    d = open_run(tmp_path)
    saved = d.state_dict()
    d.close()
    d.close()
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    for call in (d.propose, lambda: d.load_state_dict(saved)):
        with pytest.raises(es.JournalError):
            call()
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_one_writer_at_a_time(tmp_path):
    d = open_run(tmp_path)
    with pytest.raises(es.JournalError, match="another process writes here: expected one dispatcher a folder"):
        open_run(tmp_path)
    assert d.propose()  # the first one is not disturbed
    d.close()
    with open(tmp_path / "lock", "a+b") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(es.JournalError, match="another process writes here"):
            open_run(tmp_path)
    open_run(tmp_path).close()


def test_folders_that_cannot_be_used(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(es.JournalError, match="cannot be opened"):
        open_run(tmp_path / "file")
    with pytest.raises(es.JournalError, match="cannot be read"):
        dispatch.load_state(tmp_path / "nothing.state")


# ---------------------------------------------------------------- damage


@functools.cache
def written():
    """Name to bytes of a folder with a state and calls after it, and the digest of the run."""
    with tempfile.TemporaryDirectory() as name:
        d = open_run(name, every=1000)
        todo = script(d)
        for _ in range(20):
            next(todo)()
        digest = d.state_dict()["digest"]
        d.close()
        files = {p.name: p.read_bytes() for p in Path(name).iterdir()}
    return files, digest


def lay(folder, **changed):
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    for name, data in written()[0].items():
        data = changed.get(name.partition(".")[2], data)
        if data is not None:
            (folder / name).write_bytes(data)


def test_damage_and_newer_formats_are_told_with_file_and_line(tmp_path):
    files, _ = written()
    state, log = files["00000001.state"], files["00000001.journal"]
    lines = log.splitlines(keepends=True)
    first = journal._line({"kind": "begin", "format": 2}, 1)[0]
    begin, check = journal._line({"kind": "begin", "format": 1}, 1)
    strange = begin + journal._line({"kind": "dance"}, check)[0]
    beyond = begin + journal._line({"kind": "observe", "outcomes": [[1]]}, check)[0]
    cases = [
        ({"state": state[:-1] + b"x"}, "00000001.state: damaged: its checksum does not match"),
        ({"state": state[:-1]}, "00000001.state: damaged"),
        ({"state": b"", "journal": log}, "00000001.state: expected a saved state"),
        ({"state": state.replace(b"envsched state 1", b"envsched state 2", 1)}, "00000001.state: format 2: expected"),
        ({"state": state.replace(b"envsched state 1", b"envsched state " + b"1" * 5000, 1)}, "expected a saved state"),
        ({"state": None}, "00000001.journal has calls, and the state that it starts from is missing"),
        ({"journal": None}, "00000001.journal is missing: what happened since 00000001.state is in it"),
        ({"journal": b""}, "00000001.journal:1: expected the first line of a journal"),
        ({"journal": first}, "00000001.journal:1: format 2: expected at most 1"),
        ({"journal": b"".join([*lines[:3], lines[3].replace(b"1", b"2", 1), *lines[4:]])}, "journal:4: damaged"),
        ({"journal": b"".join([*lines[:3], *lines[4:]])}, "journal:4: damaged"),  # lost
        ({"journal": b"".join([*lines[:4], *lines[3:]])}, "journal:5: damaged"),  # doubled
        ({"journal": b"".join([*lines[:3], lines[4], lines[3], *lines[5:]])}, "journal:4: damaged"),  # swapped
        ({"journal": strange}, "00000001.journal:2: makes no sense: KeyError"),
        ({"journal": beyond}, "00000001.journal:2: makes no sense: ValueError"),
    ]
    for changed, message in cases:
        lay(tmp_path / "f", **changed)
        with pytest.raises(es.JournalError, match=message):
            open_run(tmp_path / "f")
    lay(tmp_path / "f")
    with pytest.raises(es.DispatchError, match=r"f: state: its group_size is 4, this dispatcher's is 5"):
        es.Dispatcher(parts()[0], parts()[1], group_size=5, graph=parts()[2], folder=tmp_path / "f")
    open_run(tmp_path / "f").close()


def mutate(data, rng):
    """Bytes with a few things wrong."""
    data = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        place, size = rng.randrange(len(data) + 1), rng.choice((1, 1, 4, 50))
        kind = rng.randrange(5)
        if kind == 0:
            data[place : place + size] = rng.randbytes(size)
        elif kind == 1:
            del data[place : place + size]
        elif kind == 2:
            data[place:place] = rng.randbytes(size)
        elif kind == 3:
            data[place:place] = data[place : place + size]
        elif place < len(data):
            data[place] ^= 1 << rng.randrange(8)
    return bytes(data)


def fuzz_files(folder, count, seed):
    files, digest = written()
    rng = random.Random(seed)
    prefixes = set(steady(20))
    for _ in range(count):
        which = rng.choice(("state", "journal"))
        lay(folder, **{which: mutate(files[f"00000001.{which}"], rng)})
        try:
            d = open_run(folder)
        except es.DispatchError as error:
            assert str(folder) in str(error)
            continue
        found = d.state_dict()["digest"]
        d.close()
        assert found == digest or (which == "journal" and found in prefixes)  # a torn end is what a crash leaves


def places(value, path=()):
    """All places in nested containers."""
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in inner:
        yield from places(item, (*path, key))


STRANGE = (None, True, -1, 0, 3, 2**70, 1.5, float("nan"), "", "x", [], {}, [[]], np.zeros(3), np.array("a"), object())


def fuzz_states(count, seed):
    rng = random.Random(seed)
    d = open_run()
    todo = script(d)
    for _ in range(20):
        next(todo)()
    saved, d = d.state_dict(), open_run()
    plain = json.dumps({name: value for name, value in saved.items() if name != "arrays"})
    spots = list(places(json.loads(plain) | {"arrays": saved["arrays"]}))[1:]
    before = d.state_dict()["digest"]
    for _ in range(count):
        state = json.loads(plain) | {"arrays": {k: v.copy() for k, v in saved["arrays"].items()}}
        *path, last = rng.choice(spots)
        inner = functools.reduce(lambda value, key: value[key], path, state)
        if rng.random() < 0.3:
            del inner[last]
        else:
            inner[last] = rng.choice(STRANGE)
        try:
            d.load_state_dict(state)
        except es.DispatchError:
            assert d.state_dict()["digest"] == before
            continue
        assert d.state_dict()["digest"] == saved["digest"]
        before = saved["digest"]
        d.propose()
        d.load_state_dict(saved)


def fuzz_pools(path, count, seed):
    rng = random.Random(seed)
    records = parts()[0][:6]
    pool.write_jsonl(path, records)
    data = path.read_bytes()
    for _ in range(count):
        path.write_bytes(mutate(data, rng))
        try:
            assert pool.read_jsonl(path)
        except es.PoolError as error:
            assert str(error).startswith(str(path))


def test_damaged_files_never_mislead(tmp_path):
    fuzz_files(tmp_path / "f", 200, 0)


def test_damaged_states_never_mislead():
    fuzz_states(300, 0)


def test_damaged_pools_never_mislead(tmp_path):
    fuzz_pools(tmp_path / "pool.jsonl", 1000, 0)


@pytest.mark.slow
def test_much_damage(tmp_path):
    """10,000 damaged inputs with ENVSCHED_THOROUGH=1, a fifth of that otherwise."""
    share = 1 if os.environ.get("ENVSCHED_THOROUGH") else 5
    fuzz_files(tmp_path / "f", 4000 // share, 1)
    fuzz_states(4000 // share, 1)
    fuzz_pools(tmp_path / "pool.jsonl", 2000 // share, 1)
