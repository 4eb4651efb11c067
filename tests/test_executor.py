import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import rollout_functions as rollouts

from envsched_jax import graph, schedulers
from envsched_jax.dispatch import (
    AsyncExecutor,
    Dispatcher,
    DispatchError,
    ExecutorError,
    ProcessExecutor,
    Rollout,
    Ticket,
    drive,
    feedback,
)
from envsched_jax.dispatch.executor import rollout_seed
from envsched_jax.dispatch.turns import Turns
from envsched_jax.pool import Record
from envsched_jax.testing import synthetic_pool
from envsched_jax.types import Status

GROUP = 4
ROOT = Path(__file__).parent.parent
LOST = {"env_timeout", "env_error", "verifier_error", "infra_error"}


def ticket(number=0, size=GROUP, env="e"):
    return Ticket(number, f"t{number}", env, size, 0)


def record(number=0, text="", env="e"):
    return Record(f"t{number}", env, str(text), ())


def names(given):
    return [Status(code).name.lower() for code in given.status]


def processes(function, **settings):
    return ProcessExecutor(function, **{"workers": 2, "deadline": 30.0} | settings)


async def run_all(executor, jobs):
    async with executor:
        return await asyncio.gather(*(executor.run(*job) for job in jobs))


def run_words(executor, text):
    """One ticket with a rollout for each word."""
    return asyncio.run(run_all(executor, [(ticket(size=len(text.split())), record(text=text))]))[0]


def alive(pid):
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pid, seconds=5.0):
    end = time.monotonic() + seconds
    while alive(pid) and time.monotonic() < end:
        time.sleep(0.02)
    return not alive(pid)


# ------------------------------------------------------------------------------------------------ one rollout each


def test_rollouts_become_feedback():
    given = asyncio.run(run_all(processes(rollouts.quick), [(ticket(7), record(7))]))[0]
    seeds = [rollout_seed(7, number) for number in range(GROUP)]
    assert given == feedback(7, [float(s % 2) for s in seeds], "ok", 10, 0.25)
    assert len(set(seeds)) == GROUP


def test_seeds_are_fixed_numbers():
    # Of every machine and version: an outcome can be made again from its ticket.
    assert [rollout_seed(0, 0), rollout_seed(0, 1), rollout_seed(12, 3)] == [1735201683, 3278692055, 2259462974]
    given = asyncio.run(run_all(processes(rollouts.seeded), [(ticket(12), record(12))]))[0]
    assert given.rewards == tuple(float(rollout_seed(12, number)) for number in range(GROUP))


def test_workers_are_reused_and_light():
    given = asyncio.run(run_all(processes(rollouts.who), [(ticket(n), record(n)) for n in range(5)]))
    assert 1 <= len({pid for one in given for pid in one.rewards}) <= 2
    assert {light for one in given for light in one.tokens} == {0.0}  # JAX was not imported
    assert os.getpid() not in {pid for one in given for pid in one.rewards}


@pytest.mark.parametrize(
    ("word", "status"),
    [
        *(("exit", "infra_error"), ("segfault", "infra_error"), ("killed", "infra_error"), ("raise", "env_error")),
        *(("leave", "env_error"), ("hang", "env_timeout"), ("spin", "env_timeout")),
    ],
)
def test_one_bad_rollout_costs_itself_only(word, status):
    given = run_words(processes(rollouts.misbehave, deadline=1.0), f"ok {word} truncated ok {word} policy_timeout")
    assert names(given) == ["ok", status, "truncated", "ok", status, "policy_timeout"]
    assert given.rewards == (1.0, None, 1.0, 1.0, None, 1.0)


def test_nonsense_is_an_infra_error(caplog):
    text = " ".join(rollouts.NONSENSE)
    given = run_words(processes(rollouts.misbehave), f"{text} ok")
    assert names(given) == ["infra_error"] * len(rollouts.NONSENSE) + ["ok"]
    assert "rollout 0, attempt 1: infra_error: expected a Rollout, got None" in caplog.text
    assert len(caplog.records) == len(rollouts.NONSENSE)


@pytest.mark.parametrize("status", sorted(LOST))
def test_a_rollout_may_say_what_it_lost(status):
    assert names(run_words(processes(rollouts.misbehave), status)) == [status]


def test_a_traceback_is_logged(caplog):
    run_words(processes(rollouts.misbehave), "raise")
    assert "in act" in caplog.text and "OddError: 1 and 2" in caplog.text


# ---------------------------------------------------------------------------------------------------------- deadline


@pytest.mark.parametrize(("word", "grace"), [("hang", 0.0), ("spin", 0.0), ("deaf-hang", 1.0), ("deaf-spin", 1.0)])
def test_the_deadline_is_kept(word, grace):
    async def timed():
        async with processes(rollouts.misbehave, workers=1, deadline=0.5) as executor:
            await executor.run(ticket(size=1), record(text="ok"))  # the worker is there
            begun = time.monotonic()
            given = await executor.run(ticket(size=1), record(text=word))
            return given, time.monotonic() - begun

    given, passed = asyncio.run(timed())
    assert names(given) == ["env_timeout"] and given.seconds == (0.5,)
    assert 0.5 + grace <= passed < 0.5 + grace + 0.9


def test_what_a_rollout_started_ends_with_it(tmp_path):
    asyncio.run(
        run_all(processes(rollouts.spawn_and_hang, deadline=0.7), [(ticket(size=1), record(text=tmp_path / "a"))])
    )
    assert gone(int((tmp_path / "a").read_text()))


def test_a_worker_may_clean_up(tmp_path):
    asyncio.run(run_all(processes(rollouts.on_term, deadline=0.5), [(ticket(size=1), record(text=tmp_path / "a"))]))
    asyncio.run(run_all(processes(rollouts.at_exit), [(ticket(size=1), record(text=tmp_path / "b"))]))
    assert (tmp_path / "a").read_text() == "cleaned" and (tmp_path / "b").read_text() == "closed"


def test_retries_are_for_infrastructure(tmp_path):
    def found(how, retries):
        for mark in tmp_path.iterdir():
            mark.unlink()
        executor = processes(rollouts.fails_once, retries=retries)
        return names(asyncio.run(run_all(executor, [(ticket(size=2), record(text=f"{tmp_path} {how}"))]))[0])

    assert found("exit", 1) == ["ok"] * 2
    assert found("exit", 0) == ["infra_error"] * 2
    assert found("raise", 1) == ["env_error"] * 2


# ------------------------------------------------------------------------------------------------------- concurrency


def overlap(spans):
    """Most spans at once."""
    edges = sorted([(begun, 1) for begun, _ in spans] + [(ended, -1) for _, ended in spans])
    most = now = 0
    for _, step in edges:
        now += step
        most = max(most, now)
    return most


def test_bounds_are_kept_and_used(tmp_path):
    envs = [f"e{n % 3}" for n in range(9)]
    jobs = [(ticket(n, 4, env), record(n, tmp_path, env)) for n, env in enumerate(envs)]
    asyncio.run(run_all(processes(rollouts.logged_nap, workers=4, per_env={"e0": 1, "e1": 2}), jobs))
    rows = [path.read_text().split() for path in tmp_path.iterdir()]
    spans = {env: [(float(b), float(e)) for name, _, b, e in rows if name == env] for env in set(envs)}
    assert {env: len(found) for env, found in spans.items()} == {"e0": 12, "e1": 12, "e2": 12}
    assert overlap(spans["e0"]) == 1
    assert overlap(spans["e1"]) == 2
    assert overlap([span for found in spans.values() for span in found]) == 4


async def order_of(turns, asked):
    """The order in which turns are given while all places are taken, one place at a time."""
    given = []

    async def one(env, number):
        async with turns.turn(env, number, 0):
            given.append((env, number))
            await asyncio.sleep(0)

    async with turns.turn("other", 0, 0):
        waiting = [asyncio.create_task(one(*each)) for each in asked]
        await asyncio.sleep(0)
    await asyncio.gather(*waiting)
    return given


def test_older_tickets_go_first():
    asked = [("e", 3), ("f", 4), ("e", 1), ("f", 2)]
    assert asyncio.run(order_of(Turns(1, None), asked)) == [("e", 1), ("f", 2), ("e", 3), ("f", 4)]


def test_places_are_shared_by_environments():
    async def held():
        turns, running = Turns(4, None), []

        async def one(env, number):
            async with turns.turn(env, number, 0):
                running.append(env)
                await asyncio.sleep(0.01)

        # The first environment has all the old tickets, yet the second gets its half.
        asked = [("e", n) for n in range(8)] + [("f", n) for n in range(8, 12)]
        tasks = [asyncio.create_task(one(*each)) for each in asked]
        await asyncio.gather(*tasks)
        return running

    running = asyncio.run(held())
    assert running[:4] == ["e"] * 4  # they were there when nobody else was
    assert sorted(running[4:8]) == ["e", "e", "f", "f"]


def test_a_turn_that_is_given_up_is_free():
    async def give_up():
        turns, running, most = Turns(1, None), 0, 0

        async def one(number):
            nonlocal running, most
            async with turns.turn("e", number, 0):
                running += 1
                most = max(most, running)
                await asyncio.sleep(0)
                running -= 1
                return number

        async with turns.turn("e", 0, 0):
            first, second = asyncio.create_task(one(1)), asyncio.create_task(one(2))
            await asyncio.sleep(0)
            first.cancel()
        # Granted to the first in the same breath as it was cancelled, or skipped: either way the second runs.
        third = asyncio.create_task(one(3))
        await asyncio.sleep(0)
        third.cancel()
        found = await asyncio.wait_for(asyncio.gather(second, *(one(number) for number in (4, 5, 6))), 5.0)
        return found, most

    assert asyncio.run(give_up()) == ([2, 4, 5, 6], 1)


# ------------------------------------------------------------------------------------------------- start and close


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"workers": 0}, "rollouts at once: expected at least 1"),
        ({"per_env": 0}, "per_env: expected at least 1"),
        ({"per_env": {"e": 0}}, r"per_env\['e'\]: expected at least 1"),
        ({"deadline": 0.0}, "deadline: expected seconds above 0"),
        ({"deadline": float("nan")}, "deadline: expected seconds above 0"),
        ({"retries": -1}, "retries: expected at least 0"),
    ],
)
def test_arguments_are_checked(settings, message):
    with pytest.raises(DispatchError, match=message):
        processes(rollouts.quick, **settings)


@pytest.mark.parametrize("function", [lambda record, seed, ticket: (1.0,), rollouts.async_act, 3])
def test_functions_that_workers_cannot_find_are_refused(function):
    with pytest.raises(ExecutorError, match="function at the top of a module"):
        processes(function)


def test_a_module_that_cannot_be_imported_says_so(tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("def rollout(record, seed, ticket): return (1.0,)\n")
    monkeypatch.syspath_prepend(tmp_path)
    import only_here

    executor = processes(only_here.rollout)
    (tmp_path / "only_here.py").write_text("import nowhere_at_all\n")
    with pytest.raises(ExecutorError, match=r"(?s)cannot import only_here\.rollout.*No module named 'nowhere_at_all'"):
        asyncio.run(run_all(executor, [(ticket(), record())]))


def test_a_function_of_the_script_itself(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, "-W", "error", tmp_path / "script.py"], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["1.0", "1.0"]


SCRIPT = """
import sys
ONE = 1.0

def helper():
    return ONE

def rollout(record, seed, ticket):
    return (helper(), "ok", float(sys.stdin.read() == ""))

if __name__ == "__main__":
    import asyncio
    from envsched_jax.dispatch import ProcessExecutor, Ticket
    from envsched_jax.pool import Record

    async def main():
        async with ProcessExecutor(rollout, workers=1, deadline=20.0) as executor:
            print(*(await executor.run(Ticket(0, "t", "e", 2, 0), Record("t", "e", "", ()))).rewards)

    asyncio.run(main())
"""


@pytest.mark.parametrize("after", [0.0, 0.02, 0.1, 0.6])
def test_close_ends_what_is_under_way(after):
    async def closed():
        executor = processes(rollouts.misbehave)
        running = asyncio.create_task(executor.run(ticket(size=3), record(text="hang hang ok")))
        await asyncio.sleep(after)  # before, while, or after the workers start
        begun = time.monotonic()
        await executor.close()
        with pytest.raises(ExecutorError, match="closed"):
            await running
        with pytest.raises(ExecutorError, match="closed"):
            await executor.run(ticket(), record())
        return time.monotonic() - begun

    assert asyncio.run(closed()) < 5.0


def test_a_cancelled_run_leaves_the_executor_in_order():
    async def cancelled():
        async with processes(rollouts.misbehave) as executor:
            running = asyncio.create_task(executor.run(ticket(size=4), record(text="hang hang ok ok")))
            await asyncio.sleep(0.5)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            return await executor.run(ticket(size=2), record(text="ok truncated"))

    assert names(asyncio.run(cancelled())) == ["ok", "truncated"]


@pytest.mark.parametrize("cancelled_after", [0.1, 0.6])
def test_a_worker_that_is_being_ended_ends_though_its_run_is_cancelled(tmp_path, cancelled_after):
    where = tmp_path / "pid"

    async def main():
        executor = processes(rollouts.deaf, workers=1, deadline=0.2)
        running = asyncio.create_task(executor.run(ticket(size=1), record(text=where)))
        while not where.exists():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.2 + cancelled_after)  # past the deadline, within the second that it has to end
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return alive(int(where.read_text()))

    assert not asyncio.run(main())


def test_a_worker_that_died_at_rest_costs_nothing():
    async def main():
        async with processes(rollouts.who, workers=1) as executor:
            before = await executor.run(ticket(size=1), record())
            os.kill(int(before.rewards[0]), signal.SIGKILL)
            await asyncio.sleep(0.3)
            return before, await executor.run(ticket(1, size=1), record(1))

    before, after = asyncio.run(main())
    assert names(after) == ["ok"] and after.rewards != before.rewards


def test_workers_end_with_their_parent(tmp_path):
    (tmp_path / "orphan.py").write_text(ORPHAN)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import orphan; orphan.main({str(tmp_path / 'pid')!r})"
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    while not (tmp_path / "pid").exists():
        time.sleep(0.05)
        assert parent.poll() is None
    time.sleep(0.1)
    parent.kill()
    parent.wait()
    assert gone(int((tmp_path / "pid").read_text()))


ORPHAN = """
import os, pathlib, time

def rollout(record, seed, ticket):
    pathlib.Path(record["text"]).write_text(str(os.getpid()))
    time.sleep(60)

def main(path):
    import asyncio
    from envsched_jax.dispatch import ProcessExecutor, Ticket
    from envsched_jax.pool import Record

    executor = ProcessExecutor(rollout, workers=1, deadline=60.0)
    asyncio.run(executor.run(Ticket(0, "t", "e", 1, 0), Record("t", "e", path, ())))
"""


# -------------------------------------------------------------------------------------------------- in the event loop


def test_async_rollouts():
    words = ["ok", "hang", "raise", "timeout", "nothing", "truncated", "verifier_error"]
    executor = AsyncExecutor(rollouts.async_act, concurrency=8, deadline=0.3)
    given = run_words(executor, " ".join(words))
    assert names(given) == [
        *("ok", "env_timeout", "env_error", "env_error", "infra_error", "truncated", "verifier_error")
    ]
    assert given.seconds[1] == 0.3


def test_async_rollouts_are_bounded():
    running = most = 0

    async def rollout(record, seed, ticket):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.002)
        running -= 1
        return Rollout(1.0)

    jobs = [(ticket(n, 8), record(n)) for n in range(10)]
    given = asyncio.run(run_all(AsyncExecutor(rollout, concurrency=5, deadline=1.0), jobs))
    assert most == 5
    assert all(one.rewards == (1.0,) * 8 for one in given)


def test_records_that_are_not_json_fail_to_start():
    odd = Record("t0", "e", "", (), extra={"handle": object()})
    with pytest.raises(TypeError, match="JSON"):
        asyncio.run(run_all(AsyncExecutor(rollouts.async_act, concurrency=1, deadline=1.0), [(ticket(), odd)]))


# ------------------------------------------------------------------------------------------------------------- drive


@pytest.fixture(scope="module")
def world():
    pool = synthetic_pool(60, 6)
    return pool, graph.build(pool, k=4, num_patterns=4)


def dispatcher(world, **settings):
    scheduler = schedulers.make("uniform", batch_size=8, group_size=4)
    return Dispatcher(world[0], scheduler, group_size=GROUP, graph=world[1], **settings)


def check_books(counts, **expected):
    assert counts["proposed"] == counts["observed"] + counts["cancelled"] + counts["expired"] + counts["open"]
    assert {name: counts[name] for name in expected} == expected


async def coin(record, seed, ticket):
    await asyncio.sleep((seed % 7) * 0.001)
    return Rollout(float(seed % 2))


def coins(function=coin, **settings):
    return AsyncExecutor(function, **{"concurrency": 16, "deadline": 30.0} | settings)


def test_drive_in_processes(world):
    batches = []

    async def main(chosen):
        async with processes(rollouts.random_nap) as executor:
            await drive(chosen, executor, batches=4, on_batch=batches.append)

    chosen = dispatcher(world)
    asyncio.run(main(chosen))
    check_books(chosen.counts(), proposed=32, observed=32, open=0)
    assert [[given.ticket_id for given in batch] for batch in batches] == [
        list(range(n, n + 8)) for n in (0, 8, 16, 24)
    ]
    assert chosen.policy_version == 3


def test_arrival_in_any_order_changes_nothing(world):
    async def slow_first(record, seed, ticket):
        await asyncio.sleep(0.01 * (8 - ticket["ticket_id"] % 8))
        return Rollout(float(seed % 2))

    first, second = dispatcher(world), dispatcher(world)
    asyncio.run(drive(first, coins(), batches=3))
    asyncio.run(drive(second, coins(slow_first), batches=3))
    assert [t.task_id for t in first.propose()] == [t.task_id for t in second.propose()]


def test_versions_and_training(world):
    trained = []

    async def train(given):
        await asyncio.sleep(0)
        trained.append(len(given))

    chosen = dispatcher(world)
    asyncio.run(drive(chosen, coins(), batches=3, policy_version=lambda: 10 * len(trained), on_batch=train))
    assert trained == [8, 8, 8] and chosen.policy_version == 20


class Picky:
    """Starts some tickets only."""

    def __init__(self, refuses):
        self.refuses = refuses

    async def run(self, ticket, record):
        await asyncio.sleep(0)
        if self.refuses(ticket.ticket_id):
            raise ExecutorError(f"no room for {ticket.ticket_id}")
        return feedback(ticket.ticket_id, [1.0, 0.0])

    async def close(self):
        return None


def test_tickets_that_do_not_start_are_cancelled(world):
    chosen = dispatcher(world)
    asyncio.run(drive(chosen, Picky(lambda number: number % 4 == 0), batches=2))
    check_books(chosen.counts(), proposed=16, observed=12, cancelled=4, open=0)


def test_a_batch_of_which_nothing_starts_is_an_error(world):
    chosen = dispatcher(world)
    with pytest.raises(ExecutorError, match="no room"):
        asyncio.run(drive(chosen, Picky(lambda number: number >= 8), batches=5))
    check_books(chosen.counts(), proposed=16, observed=8, cancelled=8, open=0)


def test_interrupted_and_resumed(world, tmp_path):
    async def stuck(record, seed, ticket):
        await asyncio.sleep(60 if ticket["ticket_id"] >= 13 else 0.0)
        return Rollout(1.0)

    async def interrupted(chosen):
        task = asyncio.create_task(drive(chosen, coins(stuck, concurrency=99), batches=9))
        while chosen.counts()["observed"] < 13:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with dispatcher(world, folder=tmp_path) as chosen:
        asyncio.run(interrupted(chosen))
        check_books(chosen.counts(), proposed=16, observed=13, open=3)
    batches = []
    with dispatcher(world, folder=tmp_path) as chosen:
        asyncio.run(drive(chosen, coins(), batches=2, on_batch=batches.append))
        check_books(chosen.counts(), proposed=32, observed=32, open=0)
    assert [given.ticket_id for given in batches[0]] == [13, 14, 15]
    assert [len(batch) for batch in batches] == [3, 8, 8]


def test_what_is_done_when_interrupted_is_observed(world):
    done = asyncio.Event()

    class Racing:
        async def run(self, ticket, record):
            if ticket.ticket_id < 5:
                await done.wait()
            else:
                await asyncio.sleep(60)
            return feedback(ticket.ticket_id, [1.0])

        async def close(self):
            return None

    async def main(chosen):
        task = asyncio.create_task(drive(chosen, Racing(), batches=1))
        await asyncio.sleep(0.05)
        done.set()
        await asyncio.sleep(0)  # the groups end in this step of the loop, the loop of drive has not seen them
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    chosen = dispatcher(world)
    asyncio.run(main(chosen))
    check_books(chosen.counts(), proposed=8, observed=5, open=3)


# -------------------------------------------------------------------------------------------------------------- slow


def test_two_hundred_rollouts_over_two_workers():
    jobs = [(ticket(n, 8, f"e{n % 5}"), record(n, env=f"e{n % 5}")) for n in range(25)]
    begun = time.monotonic()
    given = asyncio.run(run_all(processes(rollouts.quick), jobs))
    assert [one.ticket_id for one in given] == list(range(25))
    assert all(names(one) == ["ok"] * 8 for one in given)
    assert time.monotonic() - begun < 10.0


@pytest.mark.slow
def test_a_storm_of_failures():
    words = ["ok", "exit", "raise", "ok", "killed", "hang", "nothing", "ok", "segfault", "spin"]
    expected = ["ok", "infra_error", "env_error", "ok", "infra_error", "env_timeout", "infra_error", "ok"]
    jobs = [(ticket(n, 10), record(n, " ".join(words))) for n in range(10)]
    given = asyncio.run(run_all(processes(rollouts.misbehave, workers=3, deadline=1.0), jobs))
    assert all(names(one) == [*expected, "infra_error", "env_timeout"] for one in given)


@pytest.mark.slow
def test_ctrl_c_stops_a_program(tmp_path):
    (tmp_path / "script.py").write_text(LOOP)
    command = [sys.executable, tmp_path / "script.py", tmp_path / "folder"]
    started = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert started.stdout.readline() == "batch 8\n"
    time.sleep(0.2)
    started.send_signal(signal.SIGINT)
    out, errors = started.communicate(timeout=30)
    assert errors.strip().endswith("KeyboardInterrupt"), errors
    counts = eval(out.splitlines()[-1])
    check_books(counts, open=8 - counts["observed"] % 8)
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env={**os.environ, "BATCHES": "1"})
    assert again.returncode == 0, again.stderr
    check_books(eval(again.stdout.splitlines()[-1]), open=0)


LOOP = """
import os, sys, time

def rollout(record, seed, ticket):
    time.sleep(0.03)
    return (float(seed % 2),)

if __name__ == "__main__":
    import asyncio
    from envsched_jax import graph, schedulers
    from envsched_jax.dispatch import Dispatcher, ProcessExecutor, drive
    from envsched_jax.testing import synthetic_pool

    async def main(dispatcher):
        async with ProcessExecutor(rollout, workers=2, deadline=20.0) as executor:
            await drive(
                dispatcher,
                executor,
                batches=int(os.environ.get("BATCHES", 1000)),
                on_batch=lambda given: print("batch", len(given), flush=True),
            )

    pool = synthetic_pool(60, 6)
    built = graph.build(pool, k=4, num_patterns=4)
    scheduler = schedulers.make("uniform", batch_size=8, group_size=4)
    with Dispatcher(pool, scheduler, group_size=4, graph=built, folder=sys.argv[1]) as dispatcher:
        try:
            asyncio.run(main(dispatcher))
        finally:
            print(dispatcher.counts(), flush=True)
"""
