"""A dispatcher under any sequence of calls: the books balance, no task comes twice, nothing retired, nothing lost."""

import functools
import os
import tempfile
import types

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import envsched_jax as es
from envsched_jax import dispatch, graph, testing
from envsched_jax.dispatch import run
from envsched_jax.pool import Record

G = 4
MORE = [Record(f"new-{i}", f"env-{i % 3}", f"do {i}", ("get",)) for i in range(3)]  # the pool stays within its bucket
REWARDS = st.lists(st.one_of(st.none(), st.floats(-2.0, 2.0)), min_size=1, max_size=6)


@functools.cache
def parts():
    records = testing.synthetic_pool(20, 4)
    scheduler = es.make_scheduler("uniform", batch_size=8, group_size=G)
    return records, scheduler, graph.build(records, k=4, num_patterns=8, capacity=32, env_capacity=8)


class Machine(RuleBasedStateMachine):
    """Beside the dispatcher runs a plain count of what every call should have done."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.open, self.expired, self.retired, self.added = {}, {}, set(), set()
        self.counts = dict.fromkeys(("proposed", "observed", "cancelled", "expired", "unknown", "repeated"), 0)
        self.saved = []

    @initialize(deadline=st.one_of(st.none(), st.integers(1, 4)), every=st.sampled_from((3, 1000)))
    def start(self, deadline, every):
        self.deadline, self.every = deadline, every
        self.d = self.make()

    def make(self, folder=True):
        records, scheduler, built = parts()
        return es.Dispatcher(
            records,
            scheduler,
            group_size=G,
            graph=built,
            fsync=False,
            folder=self.folder.name if folder else None,
            snapshot_every=self.every,
            limits=es.Limits(deadline_versions=self.deadline, retries=2, quarantine=3, env_retries=6),
        )

    @rule(n=st.integers(1, 12), step=st.one_of(st.none(), st.integers(0, 3)), fill=st.booleans())
    def propose(self, n, step, fill):
        before = self.d.policy_version
        version = None if step is None else (before or 0) + step
        if len(self.retired) == len(self.d.records):
            return
        tickets = self.d.propose(n, policy_version=version, fill=fill)
        now = self.d.policy_version
        for number, ticket in list(self.open.items()):
            if self.deadline is not None and now - ticket.policy_version > self.deadline:
                self.expired[number] = self.open.pop(number)
                self.counts["expired"] += 1
        eligible = set(self.d.records) - self.retired
        chosen = [ticket.task_id for ticket in tickets]
        assert [t.ticket_id for t in tickets] == list(
            range(self.counts["proposed"], self.counts["proposed"] + len(tickets))
        )
        assert set(chosen) <= eligible and all(t.policy_version == now and t.group_size == G for t in tickets)
        assert len(set(chosen)) == len(chosen) or (fill and n > len(eligible))
        assert self.d.exhausted == (len(tickets) < n)
        if fill:
            assert len(tickets) == n
        for ticket in tickets:
            assert ticket.env_id == self.d.records[ticket.task_id].env_id
        self.open |= {t.ticket_id: t for t in tickets}
        self.counts["proposed"] += len(tickets)

    def known(self, number):
        """Counts the outcome of a ticket; returns whether it is one that counts."""
        for place in (self.open, self.expired):
            if place.pop(number, None) is not None:
                self.counts["observed"] += 1
                self.counts["expired"] -= place is self.expired
                return True
        self.counts["repeated" if number < self.counts["proposed"] else "unknown"] += 1
        return False

    def number(self, data):
        """Rather one that is open or has expired, else any."""
        waiting = [*self.open, *self.expired]
        some = st.integers(0, self.counts["proposed"] + 2)
        return data.draw(st.one_of(st.sampled_from(waiting), some) if waiting else some)

    @rule(data=st.data(), rewards=REWARDS)
    def observe(self, data, rewards):
        number = self.number(data)
        assert self.d.observe(number, rewards, tokens=3.0) == self.known(number)

    @rule(data=st.data(), size=st.integers(0, 9), rewards=REWARDS)
    def observe_many(self, data, size, rewards):
        numbers = [self.number(data) for _ in range(size)]
        found = self.d.observe_many([dispatch.feedback(number, rewards) for number in numbers])
        assert found == [self.known(number) for number in numbers]

    @rule(data=st.data(), failed=st.booleans())
    def cancel(self, data, failed):
        number = self.number(data)
        was_open = self.open.pop(number, None) is not None
        if was_open:
            self.counts["cancelled"] += 1
        else:
            self.counts["repeated" if number < self.counts["proposed"] else "unknown"] += 1
        assert self.d.cancel(number, "why", failed=failed) == was_open

    @precondition(lambda self: len(self.added) < len(MORE))
    @rule()
    def add_tasks(self):
        record = MORE[len(self.added)]
        self.d.add_tasks([record])
        self.added.add(record.task_id)

    @rule(data=st.data())
    def retire_tasks(self, data):
        task_id = data.draw(st.sampled_from(sorted(self.d.records)))
        self.d.retire_tasks([task_id])
        self.retired.add(task_id)

    @rule(graceful=st.booleans())
    def crash_and_reopen(self, graceful):
        before = self.d.state_dict()["digest"]
        if graceful:
            self.d.close()
        else:  # as the system does it
            self.d._journal._file.close()
            self.d._journal._lock.close()
        self.d = self.make()
        assert self.d.state_dict()["digest"] == before and self.d.change == ((), (), ())

    @precondition(lambda self: len(self.saved) < 3)
    @rule()
    def save(self):
        """Keeps the state, and shows that another dispatcher goes on from it with the same proposal."""
        state = self.d.state_dict()
        other = self.make(folder=False)
        assert other.load_state_dict(state) == ((), (), ())
        assert other.state_dict()["digest"] == state["digest"]
        books = (dict(self.open), dict(self.expired), set(self.retired), set(self.added), dict(self.counts))
        self.saved.append((state, books))

    @precondition(lambda self: self.saved)
    @rule(data=st.data())
    def go_back(self, data):
        state, books = self.saved[data.draw(st.integers(0, len(self.saved) - 1))]
        self.d.load_state_dict(state)
        self.open, self.expired, self.retired, self.added, self.counts = (type(book)(book) for book in books)

    @invariant()
    def balanced(self):
        if not hasattr(self, "d"):
            return
        self.d._run.ledger.check()
        assert self.d.counts() == {**self.counts, "open": len(self.open)}
        assert {t.ticket_id: t for t in self.d.open_tickets()} == self.open
        parts_of = ("observed", "cancelled", "expired")
        assert self.counts["proposed"] == sum(self.counts[k] for k in parts_of) + len(self.open)
        assert set(graph.retired(*self.d.graph)) == self.retired and self.added <= set(self.d.records)

    def teardown(self):
        if hasattr(self, "d"):
            self.d.close()
        self.folder.cleanup()


def play(examples, steps, monkeypatch):
    monkeypatch.setattr(run, "time", types.SimpleNamespace(time=lambda: 1.0))
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    wanted = settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, derandomize=True, suppress_health_check=checks
    )
    run_state_machine_as_test(Machine, settings=wanted)


def test_any_calls(monkeypatch):
    play(4, 50, monkeypatch)


@pytest.mark.slow
def test_very_many_calls(monkeypatch):
    """10,000 with ENVSCHED_THOROUGH=1, a fifth of that otherwise."""
    play(200 if os.environ.get("ENVSCHED_THOROUGH") else 40, 50, monkeypatch)
