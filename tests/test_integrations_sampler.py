"""The sampler and what trainers do to it: repetition, look-ahead, epochs that end, resuming."""

import functools
import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

import envsched_jax as es
from envsched_jax import graph, testing
from envsched_jax.dispatch import load_state, save_state
from envsched_jax.integrations.sampler import TicketSampler, batches

SIZE = 4


@functools.cache
def pool():
    records = testing.synthetic_pool(40, 4)
    return records, graph.build(records, k=4, num_patterns=4)


@functools.cache
def recipe():
    return es.make_scheduler("envsched", belief="diffusion", batch_size=SIZE, group_size=2)


def dispatcher(folder=None):
    return es.Dispatcher(pool()[0], recipe(), group_size=2, graph=pool()[1], folder=folder, fsync=False)


def ids():
    return [record.task_id for record in pool()[0]]


def rewards(rows):
    return [float((7 * row + i) % 3 == 0) for i, row in enumerate(rows)]


def test_rows_come_in_groups_and_passes_as_a_trainer_expects():
    sampler = TicketSampler(dispatcher(), ids(), copies=2, passes=3)
    rows = list(itertools.islice(sampler, 3 * 2 * SIZE))
    tasks = rows[: 2 * SIZE : 2]
    assert len(set(tasks)) == SIZE
    assert rows == [row for _ in range(3) for row in tasks for _ in range(2)]
    assert [ids()[row] for row in tasks] == [ticket.task_id for ticket in sampler.delivered]
    assert len(sampler) == 2 * 3 * 40


def look_ahead(sampler, steps, rows=2 * SIZE):
    """What accelerate does: a batch is drawn before the one before it is trained on. Yields the rows of each step."""
    stream = iter(sampler)
    ahead = list(itertools.islice(stream, rows))
    for _ in range(steps):
        now, ahead = ahead, list(itertools.islice(stream, rows))
        sampler.observe(rewards(now), task_ids=[ids()[row] for row in now])
        yield now


def test_resumed_at_any_step_it_goes_on_as_if_nothing_had_happened(tmp_path):
    whole = list(look_ahead(TicketSampler(dispatcher(), ids(), copies=2), 8))
    for step in range(1, 8):
        sampler = TicketSampler(dispatcher(), ids(), copies=2)
        run = look_ahead(sampler, 8)
        first = [next(run) for _ in range(step)]
        save_state(tmp_path / "state", sampler.state_dict())
        next(run, None)  # the trainer goes on for a while before it dies
        sampler = TicketSampler(dispatcher(), ids(), copies=2)
        sampler.load_state_dict(load_state(tmp_path / "state"))
        assert first + list(look_ahead(sampler, 8 - step)) == whole
        counts = sampler.dispatcher.counts()
        assert counts["observed"] == 8 * SIZE and counts["repeated"] == 0


def test_what_an_epoch_drew_in_advance_comes_again_in_the_next():
    sampler = TicketSampler(dispatcher(), ids(), copies=2)
    drawn = list(itertools.islice(sampler, 3 * 2 * SIZE))
    sampler.observe(rewards(drawn[: 2 * SIZE]))
    assert list(itertools.islice(sampler, 2 * 2 * SIZE)) == drawn[2 * SIZE :]


def test_open_tickets_of_an_uneven_number_are_filled_up():
    source = dispatcher()
    first = source.propose(3)
    again = next(batches(source, SIZE))
    assert again[:3] == first and len({ticket.task_id for ticket in again}) == SIZE


def test_a_batch_larger_than_the_pool_repeats_tasks():
    tickets = next(batches(dispatcher(), 60))
    assert len(tickets) == 60 and len({ticket.task_id for ticket in tickets}) == 40


def test_missing_rewards_never_become_zero():
    sampler = TicketSampler(dispatcher(), ids(), copies=2)
    list(itertools.islice(sampler, 2 * SIZE))
    sampler.observe([None] * 2 + [1.0] * (2 * SIZE - 2))
    history = sampler.dispatcher.metrics()["environments"]
    assert sum(env["failed"] for env in history.values()) == 1
    assert {env["reward"] for env in history.values()} <= {1.0, None}


def test_mistakes_are_named_and_change_nothing():
    with pytest.raises(es.DispatchError, match="no row for 'task"):
        TicketSampler(dispatcher(), ids()[1:])
    sampler = TicketSampler(dispatcher(), ids(), copies=2)
    rows = list(itertools.islice(sampler, 2 * SIZE))
    with pytest.raises(es.DispatchError, match="groups of 2"):
        sampler.observe([1.0] * 3)
    with pytest.raises(es.DispatchError, match="up to 4 groups"):
        sampler.observe([1.0] * 4 * SIZE)
    with pytest.raises(es.DispatchError, match="switch its shuffling off"):
        sampler.observe(rewards(rows), task_ids=[ids()[row] for row in reversed(rows)])
    with pytest.raises(es.DispatchError, match="finite"):
        sampler.observe([float("nan")] * 2 * SIZE)
    assert len(sampler.delivered) == SIZE and sampler.dispatcher.counts()["observed"] == 0


def test_with_torch_itself():
    data = pytest.importorskip("torch.utils.data", reason="torch is not installed here: see `make test-trl`")
    sampler = TicketSampler(dispatcher(), ids(), copies=2)
    loader = data.DataLoader(list(range(40)), sampler=sampler, batch_size=2 * SIZE)
    plain = TicketSampler(dispatcher(), ids(), copies=2)
    stream = iter(plain)
    for batch, _ in zip(loader, range(4), strict=False):
        rows = list(itertools.islice(stream, 2 * SIZE))
        assert batch.tolist() == rows
        for each in (sampler, plain):
            each.observe(rewards(rows))


def test_the_page_about_torch():
    pytest.importorskip("torch.utils.data", reason="torch is not installed here: see `make test-trl`")
    page = (Path(__file__).parents[1] / "docs/trainers/torch.md").read_text()
    (block,) = re.findall(r"```python\n(.*?)```", page, re.S)
    done = subprocess.run([sys.executable, "-c", block], capture_output=True, text=True)
    assert done.returncode == 0 and "'observed': 20" in done.stdout, done.stderr
