"""The requirements of a dispatcher, R1 to R19, one test each, then the mistakes that callers make."""

import dataclasses
import functools
import json
import random
import types
from collections import Counter, defaultdict

import jax
import numpy as np
import pytest

import envsched_jax as es
from envsched_jax import dispatch, graph, schedulers, testing
from envsched_jax.dispatch import feedback, ledger, run
from envsched_jax.pool import Record, Verifier

G = 4
WEIGHTS = (0.5, 0.3, 0.2)
MIXED = (1.0, 0.0, 1.0, 0.0)


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Time stands still, so that tickets of two runs are equal."""
    monkeypatch.setattr(run, "time", types.SimpleNamespace(time=lambda: 1.0))


@functools.cache
def pool(n=200, envs=10):
    records = testing.synthetic_pool(n, envs)
    return records, graph.build(records, k=4, num_patterns=8)


@functools.cache
def recipe(name="envsched", **settings):
    """One scheduler for all dispatchers with these settings, so that each is compiled once."""
    sizes = {"batch_size": 8, "group_size": G}
    quick = {"belief": "diffusion"} if name == "envsched" and "belief" not in settings else {}
    return es.make_scheduler(name, **sizes | quick | settings)


def make(name="uniform", n=200, envs=10, limits=None, folder=None, seed=0, snapshot_every=1000, **settings):
    records, built = pool(n, envs)
    return es.Dispatcher(
        records,
        recipe(name, **settings),
        group_size=G,
        graph=built,
        seed=seed,
        limits=limits,
        folder=folder,
        fsync=False,
        snapshot_every=snapshot_every,
    )


def check(dispatcher):
    dispatcher._run.ledger.check()
    counts = dispatcher.counts()
    assert counts["proposed"] == sum(counts[kind] for kind in ("observed", "cancelled", "expired", "open"))


def ids(tickets):
    return [ticket.task_id for ticket in tickets]


def answer(dispatcher, tickets, reward=lambda ticket: MIXED, **more):
    return dispatcher.observe_many([feedback(t.ticket_id, reward(t), **more) for t in tickets])


def play(dispatcher, steps, reward=lambda ticket: MIXED):
    """Proposes and answers; returns the tickets of every step."""
    out = []
    for _ in range(steps):
        out.append(dispatcher.propose())
        answer(dispatcher, out[-1], reward)
    return out


def coin(ticket):
    """A group of rewards that depends on the ticket alone."""
    rng = random.Random(ticket.ticket_id)
    return [float(rng.random() < 0.4) for _ in range(ticket.group_size)]


def assert_same(one, other):
    """Two dispatchers are in the same state, bit for bit."""
    a, b = one.state_dict(), other.state_dict()
    assert a["digest"] == b["digest"], [key for key in a if key != "arrays" and a[key] != b[key]]
    jax.tree.map(np.testing.assert_array_equal, a["arrays"], b["arrays"])


# ---------------------------------------------------------------- R1 .. R19


@pytest.mark.parametrize(("n", "steps"), [(7, 1000), (14, 100), (10, 100), (5, 200), (3, 300), (1, 700)])
def test_r1_quotas_are_exact_over_any_window(n, steps):
    """Below one slot for whole batches; where a proposal ends within a batch it can be one slot, not more."""
    d = make("envsched", n=90, envs=3, batch_size=7, quota="weights", quota_weights=WEIGHTS)
    share = dict(zip(d.graph[1].env_ids, WEIGHTS, strict=True))
    assert d.metrics()["environments"] == {}
    got, total = Counter(), 0
    worst = 0.0
    for _ in range(steps):
        tickets = d.propose(n)
        answer(d, tickets)
        got.update(t.env_id for t in tickets)
        total += n
        worst = max(worst, *(abs(got[e] - share[e] * total) for e in share))
    assert worst < 1.0 if n % 7 == 0 else worst < 1.0 + 1e-6, worst
    assert d.metrics()["environments"][d.graph[1].env_ids[0]]["configured_share"] == pytest.approx(0.5)


def test_r1_quotas_count_what_was_accepted_and_a_deficit_shows():
    patient = es.Limits(retries=1000, env_retries=1000, quarantine=1)
    d = make("envsched", n=90, envs=3, batch_size=7, quota="weights", quota_weights=WEIGHTS, limits=patient)
    share = dict(zip(d.graph[1].env_ids, WEIGHTS, strict=True))
    worse = d.graph[1].env_ids[1]
    rng, got = random.Random(0), Counter()
    for _ in range(300):
        for t in d.propose():
            bad = t.env_id == worse and rng.random() < 0.6
            d.observe(t.ticket_id, [None] * G if bad else MIXED)
            got[t.env_id] += not bad
    shown = d.metrics()["environments"]
    total = sum(got.values())
    for env_id, want in share.items():
        assert shown[env_id]["share"] == pytest.approx(got[env_id] / total)
        assert shown[env_id]["configured_share"] == pytest.approx(want)
        assert abs(got[env_id] - want * total) < 8  # one batch and its rejects, after 2100 groups

    d = make("envsched", n=90, envs=3, batch_size=7, quota="weights", quota_weights=WEIGHTS)
    for _ in range(100):  # tasks that always fail are set aside, so the debt cannot be paid: it shows as a gap
        answer(d, d.propose(), lambda t: [None] * G if t.env_id == worse else MIXED)
    shown = d.metrics()["environments"][worse]
    assert shown["share"] == 0.0 and shown["configured_share"] == pytest.approx(0.3) and shown["failed"] > 0


def test_r1_quotas_hold_within_a_version_and_with_tickets_out():
    d = make("envsched", n=90, envs=3, batch_size=7, quota="weights", quota_weights=WEIGHTS)
    share = dict(zip(d.graph[1].env_ids, WEIGHTS, strict=True))
    got, late = Counter(), []
    for i in range(300):
        tickets = d.propose(policy_version=i // 10)  # ten batches between two updates
        late.append(tickets)
        if len(late) > 2:
            answer(d, late.pop(0))
        got.update(t.env_id for t in tickets)
        assert all(abs(got[e] - share[e] * 7 * (i + 1)) < 1.0 for e in share)


def test_r2_no_environment_starves_and_a_mended_grader_is_found_out():
    d = make("envsched", limits=es.Limits(floor=10))
    broken, share = d.graph[1].env_ids[3], []
    for step in range(300):
        tickets = d.propose()
        share.append(sum(t.env_id == broken for t in tickets))
        answer(d, tickets, lambda t, worst=step < 200: [0.0] * G if t.env_id == broken and worst else coin(t))
    waits = np.diff(np.flatnonzero(share[:200]))
    assert waits.max() <= 10
    assert sum(share[220:]) / 80 > 1.2 * sum(share[120:200]) / 80  # 20 steps later its share is back


def test_r3_nothing_is_solved_for_ever():
    d = make("envsched", n=60, envs=4)
    solved = d.graph[1].task_ids[5]
    drawn = [i for i, tickets in enumerate(play(d, 150, lambda t: [1.0] * G if t.task_id == solved else coin(t)))
             if solved in ids(tickets)]  # fmt: skip
    assert len(drawn) > 2 and np.diff([*drawn, 150]).max() <= 60


@pytest.mark.parametrize("name", ["uniform", "envsched"])
def test_r4_outcomes_come_late_in_any_order_or_never(name):
    rng = random.Random(1)
    d = make(name, limits=es.Limits(deadline_versions=12))
    due = defaultdict(list)
    for step in range(60):
        tickets = d.propose()
        assert len(tickets) == 8 == len(set(ids(tickets)))
        assert not set(ids(tickets)) & set(ids(d.open_tickets()[:-8]))  # what is out is not proposed again
        for t in tickets:
            if rng.random() > 0.1:
                due[step + rng.randint(0, 8)].append(t)
        back = due.pop(step, [])
        rng.shuffle(back)
        assert answer(d, back, coin) == [True] * len(back)
        assert answer(d, back, coin) == [False] * len(back)
        check(d)
    counts = d.counts()
    assert counts["proposed"] == 480 and counts["repeated"] == counts["observed"] and counts["expired"] > 20


@pytest.mark.parametrize("name", ["uniform", "envsched", "gaussian_field"])
def test_r5_a_killed_run_goes_on_exactly(name, tmp_path):
    settings = {"belief": name} if name == "gaussian_field" else {}
    kind = "uniform" if name == "uniform" else "envsched"

    def step(d, i):
        """Proposes, and answers part of what is out, the latest first; one ticket is never answered."""
        d.propose(5 + i % 5)
        for t in d.open_tickets()[:0:-2]:
            d.observe(t.ticket_id, coin(t), tokens=10.0 + t.ticket_id)
        return ids(d.open_tickets())

    steady = make(kind, **settings)
    killed = make(kind, folder=tmp_path, snapshot_every=7, **settings)
    for i in range(12):
        assert step(steady, i) == step(killed, i)
        copy = killed.state_dict()
        killed.close()  # nothing is written by it
        killed = make(kind, folder=tmp_path, snapshot_every=7, **settings)
        assert_same(steady, killed)
        other = make(kind, **settings)
        other.load_state_dict(json_and_back(copy))
        assert_same(steady, other)
    check(killed)
    killed.close()


def json_and_back(state):
    """A state as it comes out of a checkpoint."""
    plain = json.loads(json.dumps({name: value for name, value in state.items() if name != "arrays"}))
    return plain | {"arrays": {name: np.array(array) for name, array in state["arrays"].items()}}


@pytest.mark.parametrize("way", ["folder", "state_dict"])
@pytest.mark.parametrize("change", ["add", "remove", "rename", "edit"])
@pytest.mark.parametrize("name", ["uniform", "envsched"])
def test_r6_the_task_set_changed(way, change, name, tmp_path):
    records, built = pool()
    d = es.Dispatcher(records, recipe(name), group_size=G, graph=built, folder=tmp_path, fsync=False)
    play(d, 20, coin)
    d.propose(11)
    victim = d.open_tickets()[0].task_id
    seen = dict(zip(d.graph[1].task_ids, np.asarray(d.state.history.visits).tolist(), strict=False))
    assert seen[victim] == 0
    victims = {victim, max(seen, key=seen.get)}
    saved = d.state_dict()
    d.close()
    new = [dataclasses.replace(records[0], task_id=f"new-{i}", env_id=f"env-{i}") for i in range(2)]
    kept = [record for record in records if record.task_id not in victims]
    renamed = [dataclasses.replace(r, task_id=f"{r.task_id}-b") for r in records if r.task_id in victims]
    edited = [dataclasses.replace(r, text="other") for r in records if r.task_id in victims]
    changed = {"add": [*records, *new], "remove": kept, "rename": [*kept, *renamed], "edit": [*kept, *edited]}[change]
    rebuilt = graph.build(changed, k=4, num_patterns=8)
    folder = tmp_path if way == "folder" else None
    d = es.Dispatcher(changed, recipe(name), group_size=G, graph=rebuilt, folder=folder, fsync=False)
    if way == "state_dict":
        assert d.load_state_dict(saved) == d.change
    gone = victims if change in ("remove", "rename") else set()
    added = {"add": new, "rename": renamed}.get(change, [])
    assert set(d.change.added) == {r.task_id for r in added} and set(d.change.removed) == gone
    assert set(d.change.edited) == (victims if change == "edit" else set())
    index, visits = d.graph[1], np.asarray(d.state.history.visits)
    for task_id in index.task_ids:
        assert visits[index.node_of(task_id)] == (0 if task_id in d.change.added else seen[task_id])
    check(d)
    assert d.counts()["cancelled"] == len(gone & {victim})
    assert not gone & set(ids(d.open_tickets()))
    drawn = {task_id for tickets in play(d, 40, coin) for task_id in ids(tickets)}
    assert not gone & drawn
    if name == "uniform":
        assert set(d.change.added) <= drawn  # they come first until they have caught up
    d.close()
    if way == "folder":  # and once more: nothing has changed since
        d = es.Dispatcher(changed, recipe(name), group_size=G, graph=rebuilt, folder=folder, fsync=False)
        assert d.change == ((), (), ())
        d.close()


def test_r7_only_what_the_policy_did_counts():
    d = make()
    first, second, third = d.propose(3)
    d.observe(first.ticket_id, [None, 0.7, 5.0, None], status=["env_error", "verifier_error", "infra_error", 4])
    d.observe(second.ticket_id, [0.0, 1.0, 0.0, 0.5], status=["policy_timeout", "ok", "truncated", "env_timeout"])
    d.observe(third.ticket_id, [1.0, 0.0, 1.0, None])
    d.propose()
    index, history = d.graph[1], d.state.history
    n, s1 = (dict(zip(index.task_ids, np.asarray(x).tolist(), strict=False)) for x in (history.n, history.s1))
    assert [n[t.task_id] for t in (first, second, third)] == [0, 3, 3]
    assert [s1[t.task_id] for t in (first, second, third)] == [0, 1, 2]
    shown = d.metrics()["environments"]
    assert sum(env["failed"] for env in shown.values()) == 1
    assert sum(env["invalid_rollouts"] for env in shown.values()) == 6


def test_r8_groups_of_any_size_with_holes():
    d = make(n=200)
    rng = np.random.default_rng(0)
    expected = {}
    for size in range(1, 65):
        (t,) = d.propose(1)
        assert t.group_size == G
        rewards = [None if rng.random() < 0.3 else float(rng.random()) for _ in range(size)]
        assert d.observe(t.ticket_id, rewards)
        expected[t.task_id] = [r for r in rewards if r is not None]
    d.propose(64)
    index, history = d.graph[1], jax.device_get(d.state.history)
    for task_id, rewards in expected.items():
        node = index.node_of(task_id)
        assert history.n[node] == len(rewards) and history.dof[node] == max(0, len(rewards) - 1)
        if len(rewards) > 1:  # unbiased: the mean of it over many groups is the variance
            variance = history.ssw[node] / history.dof[node]
            assert variance == pytest.approx(np.var(rewards, ddof=1), rel=1e-4)


@pytest.mark.parametrize("name", ["uniform", "envsched"])
def test_r9_no_signal_at_all_raises_nothing_and_is_told_once(name):
    d = make(name, n=40, envs=4)
    for tickets in play(d, 60, lambda t: [0.0] * G):
        assert len(tickets) == 8
    told = [text for text in d.alarms() if "informative: the pool" in text]
    assert told == ["none of the latest 64 groups was informative: the pool may be too easy, or too hard"]


@pytest.mark.parametrize("way", ["observe", "cancel", "expire"])
def test_r10_a_task_that_always_fails_is_set_aside_and_others_are_not(way):
    limits = es.Limits(deadline_versions=1 if way == "expire" else None, retries=3, quarantine=30)
    d = make(n=24, envs=4, limits=limits)
    bad = d.graph[1].task_ids[7]
    drawn, others = [], Counter()
    for step in range(100):
        for t in d.propose():
            if t.task_id != bad:
                others[t.task_id] += 1
                d.observe(t.ticket_id, MIXED)
                continue
            drawn.append(step)
            assert t.attempt == len(drawn) - 1
            if way == "observe":
                d.observe(t.ticket_id, [None] * G)
            elif way == "cancel":
                d.cancel(t.ticket_id, "stuck", failed=True)
        check(d)
    waits = np.diff(drawn)
    lost = 2 if way == "expire" else 1  # versions until it is known
    assert 4 <= len(drawn) <= 7
    assert waits[0] >= lost + 1 and waits[1] >= lost + 2 and (waits[2:] >= lost + 30).all()
    assert len(others) == 23 and max(others.values()) - min(others.values()) <= 2


def test_r10_an_environment_that_always_fails_is_set_aside_and_comes_back():
    d = make(limits=es.Limits(env_retries=6, quarantine=20))
    bad = d.graph[1].env_ids[2]
    drawn = []
    for step in range(100):
        tickets = d.propose()
        assert len(tickets) == 8
        answer(d, tickets, lambda t, ill=step < 60: [None] * G if t.env_id == bad and ill else MIXED)
        drawn.append(sum(t.env_id == bad for t in tickets))
    assert 0 < sum(drawn[:60]) < 30 and 0 in drawn[:60] and sum(drawn[70:]) > 0
    assert not d._run.ledger.failing_envs


def test_r11_the_books_always_balance():
    rng = random.Random(4)
    d = make(limits=es.Limits(deadline_versions=3))
    for _ in range(60):
        d.propose(rng.randint(1, 12))
        check(d)
        for t in rng.sample(d.open_tickets(), len(d.open_tickets()) // 2):
            if rng.random() < 0.2:
                assert d.cancel(t.ticket_id, rng.choice("ab")) and not d.cancel(t.ticket_id)
            else:
                d.observe(t.ticket_id, MIXED)
            check(d)
        late = list(d._run.ledger.expired)[1::2]
        assert all(d.observe(number, MIXED) for number in late)
        assert not d.observe(10**9, MIXED)
        check(d)
    counts = d.counts()
    assert counts.pop("repeated") == counts["cancelled"] and min(counts.values()) > 0


def test_r12_the_order_of_arrival_changes_nothing():
    limits = es.Limits(retries=2, env_retries=3, quarantine=5)
    one, other = make("envsched", limits=limits), make("envsched", limits=limits)
    for version in range(25):
        a, b = one.propose(policy_version=version), other.propose(policy_version=version)
        assert a == b
        found = [
            feedback(t.ticket_id, [None] * G if t.ticket_id % 3 else [2.0 * r for r in coin(t)]) for t in a
        ]  # fmt: skip
        one.observe_many(found)
        for outcome in random.Random(version).sample(found, len(found)):
            other.observe_many([outcome])
    jax.tree.map(np.testing.assert_array_equal, one.state, other.state)
    third = make("envsched", seed=1)
    assert ids(third.propose()) != ids(make("envsched").propose())


def test_r13_age_is_counted_in_versions_from_making_to_use():
    gamma = 0.5

    def weight(proposed, made, seen):
        """What a group counts for that was proposed and made at these versions and taken in by ``seen``."""
        d = make("envsched", gamma=gamma)
        (t, *_) = d.propose(policy_version=proposed)
        d.propose(policy_version=seen - 1)
        d.observe(t.ticket_id, MIXED, policy_version=made)
        lag = d.metrics()["environments"][t.env_id]["lag"]
        d.propose(policy_version=seen)
        return float(d.state.history.n[d.graph[1].node_of(t.task_id)]) / G, lag

    assert weight(0, None, 1) == (1.0, 0)  # on policy
    assert weight(0, None, 2) == (gamma, 1)
    assert weight(0, None, 5) == (gamma**4, 4)
    assert weight(0, 3, 5) == (gamma, 1)  # begun late, with newer weights
    assert weight(0, 9, 5) == (1.0, 0)


def test_r14_no_task_twice_unless_the_pool_is_too_small():
    d = make(n=24, envs=4)
    assert len(set(ids(d.propose(20)))) == 20
    rest = d.propose(20)
    assert len(rest) == 4 and d.exhausted and d.propose() == [] and d.exhausted
    filled = d.propose(20, fill=True)
    assert len(set(ids(filled))) == 20 and not d.exhausted
    assert Counter(Counter(ids(d.propose(50, fill=True))).values()).keys() <= {2, 3}
    assert d.propose() == []  # nothing is left over of what was filled in
    check(d)
    answer(d, d.open_tickets())
    assert len(set(ids(d.propose()))) == 8


def test_r14_within_a_version_new_tasks_first():
    d = make(n=200, envs=4)
    drawn = []
    for _ in range(8):
        tickets = d.propose(policy_version=0)
        answer(d, tickets)
        drawn += ids(tickets)
    assert len(set(drawn)) == 64


def test_r15_rewards_of_any_scale():
    records, built = pool()
    env_ids = built[1].env_ids
    scale = {env_id: (-5.0, 5.0) if i % 2 else (0.0, 100.0) for i, env_id in enumerate(env_ids)}
    plain, scaled = make("envsched"), es.Dispatcher(
        records, recipe("envsched"), group_size=G, graph=built, reward_range=scale
    )  # fmt: skip
    for _ in range(15):
        a, b = plain.propose(), scaled.propose()
        assert ids(a) == ids(b)
        for t, u in zip(a, b, strict=True):
            lowest, highest = scale[t.env_id]
            assert u.predicted_mean == pytest.approx(lowest + (highest - lowest) * t.predicted_mean)
            assert u.predicted_variance == pytest.approx((highest - lowest) ** 2 * t.predicted_variance)
            plain.observe(t.ticket_id, coin(t))
            scaled.observe(u.ticket_id, [lowest + (highest - lowest) * r for r in coin(t)])
    before = scaled.state_dict()["digest"]
    number = scaled.propose()[0].ticket_id
    before = scaled.state_dict()["digest"]
    for bad in (float("nan"), float("inf"), "1", 1e308, 1j):
        with pytest.raises(es.DispatchError, match=rf"ticket {number}: rewards\[1\]: expected a finite number"):
            scaled.observe(number, [0.0, bad])
    assert scaled.state_dict()["digest"] == before
    assert scaled.observe(number, [-1e6, 1e6])  # widens the range of its environment
    assert np.isfinite([t.predicted_mean for t in scaled.propose()]).all()


def test_r16_cheaper_of_equals_and_never_below_the_floor():
    d = make("envsched", cost="tokens", limits=es.Limits(floor=15))
    dear = d.graph[1].env_ids[0]
    got = Counter()
    last = 0
    for step in range(150):
        tickets = d.propose()
        for t in tickets:
            d.observe(t.ticket_id, MIXED, tokens=5000.0 if t.env_id == dear else 50.0, seconds=[1, 2, 3, 4])
            got[t.env_id] += step >= 50
            if t.env_id == dear:
                assert step - last <= 16
                last = step
    assert 0 < got[dear] < 0.6 * np.mean([got[e] for e in d.graph[1].env_ids[1:]])
    shown = d.metrics()["environments"]
    assert shown[dear]["tokens"] == 5000.0 and shown[dear]["seconds"] == 2.5


def test_r17_what_there_is_to_see():
    d = make("envsched", n=90, envs=3, quota="weights", quota_weights=WEIGHTS, limits=es.Limits(deadline_versions=2))
    for tickets in [d.propose() for _ in range(5)]:
        answer(d, tickets[2:], coin)
    d.cancel(d.open_tickets()[-1].ticket_id, "lost")
    play(d, 20, coin)
    shown = d.metrics()
    json.dumps(shown, allow_nan=False)
    assert 0 < shown["tasks_seen"] <= 1 and shown["envs_seen"] == 3
    for name in ("informative_share", "predicted_informative", "realised_informative", "lately_informative"):
        assert 0.0 < shown[name] < 1.0
    envs = shown["environments"]
    assert sum(env["share"] for env in envs.values()) == pytest.approx(1.0)
    assert sum(env["configured_share"] for env in envs.values()) == pytest.approx(1.0)
    assert sum(env["discards"].get("lost", 0) for env in envs.values()) == 1
    assert sum(env["discards"].get("expired", 0) for env in envs.values()) == d.counts()["expired"] > 0
    assert all(env["last_batch"] == d._run.batches for env in envs.values())

    d = make("envsched")  # expected to be solved now and then, and never is: the verifier's fault?
    broken = d.graph[1].env_ids[0]
    play(d, 60, lambda t: [0.0] * G if t.env_id == broken else coin(t))
    assert any(f"{broken!r}: " in text and "verifier" in text for text in d.alarms())


def test_configured_shares_where_the_first_environment_has_none():
    d = make("envsched", n=90, envs=3, quota="weights", quota_weights=(0.0, 0.6, 0.4))
    assert list(d._run.engine.shares().values()) == pytest.approx([0.0, 0.6, 0.4])
    assert make("uniform")._run.engine.shares() == {}


def new_tasks(start, count, env="env-new"):
    return [Record(f"n{start + i}", env, f"do thing {i}", ("get", "set"), verifier=Verifier("v")) for i in range(count)]


@pytest.mark.parametrize("name", ["uniform", "envsched"])
def test_r18_tasks_come_and_go_while_it_runs(name, tmp_path):
    d = make(name, n=40, envs=4, folder=tmp_path)
    gone = set()
    for i in range(3):
        before = dict(zip(d.graph[1].task_ids, np.asarray(d.state.history.n).tolist(), strict=False))
        d.add_tasks(new_tasks(6 * i, 6, f"env-{i}"))
        after = dict(zip(d.graph[1].task_ids, np.asarray(d.state.history.n).tolist(), strict=False))
        assert after == before | {t.task_id: 0.0 for t in new_tasks(6 * i, 6)}
        leaving = [t for t in d.graph[1].task_ids if t not in gone][:5]
        d.retire_tasks(leaving)
        gone |= set(leaving)
        for tickets in play(d, 3, coin):
            assert len(tickets) == 8 and not gone & set(ids(tickets))
        check(d)
    assert d.change == ((), (), ())
    kept = d._run.ledger
    assert len(kept.seen) <= len(d.records) and len(kept.tallies) <= len(d.graph[1].env_ids)
    d.close()
    again = make(name, n=40, envs=4, folder=tmp_path)
    assert again.change == ((), (), ()) and set(again.records) == set(d.records)
    assert_same(d, again)
    again.close()


def test_r18_the_memory_is_bounded(monkeypatch):
    monkeypatch.setattr(ledger, "KEPT_EXPIRED", 20)
    d = make(n=40, envs=4, limits=es.Limits(deadline_versions=1))
    for i in range(60):
        tickets = d.propose()
        for t in tickets[:4]:
            d.cancel(t.ticket_id, f"error at 0x{i}{t.ticket_id}")
        answer(d, tickets[4:6], coin)
    kept = d._run.ledger
    assert len(kept.expired) == 20 and len(kept.recent) <= ledger.WINDOW
    assert len(kept.open) <= 40 and len(kept.seen) <= 40 and len(kept.failing) <= 40
    assert len(kept.verdicts) <= 16 and len(d._run._buffer) <= 16
    for tally in kept.tallies.values():
        assert len(tally.discards) <= ledger.KEPT_REASONS + 1
    check(d)


QUICK = ("learnability", "plr", "stratified", "uniform")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in QUICK else pytest.mark.slow) for n in sorted(schedulers.RECIPES)]
)
def test_r19_every_recipe_runs_and_resumes(name, tmp_path):
    d = make(name, n=60, envs=4, folder=tmp_path)
    for tickets in play(d, 4, coin):
        assert len(set(ids(tickets))) == 8
    d.close()
    again = make(name, n=60, envs=4, folder=tmp_path)
    assert_same(d, again)
    again.close()


# ---------------------------------------------------------------- mistakes, and going back


def test_mistakes_are_told_and_change_nothing(tmp_path):
    d = make(n=40, envs=4, folder=tmp_path)
    first, *_ = d.propose(policy_version=3)
    bare = new_tasks(0, 1)[0]
    mistakes = [
        (lambda: d.propose(0), "n: expected at least 1, got 0"),
        (lambda: d.propose(True), "n: expected a whole number"),
        (lambda: d.propose(policy_version=2), "policy_version: expected at least 3, got 2: after going back"),
        (lambda: d.propose(policy_version="4"), "policy_version: expected a whole number"),
        (lambda: d.observe("0", MIXED), "ticket '0': expected a whole number"),
        (lambda: d.observe(0, []), "rewards: expected 1 to 4096 of them, got 0"),
        (lambda: d.observe(0, 1.0), "rewards: expected one number per rollout, got 1.0"),
        (lambda: d.observe(0, [None], status="ok"), r"rewards\[0\] is None, yet its status is ok"),
        (lambda: d.observe(0, [1.0], status="done"), "status: expected one of ok, truncated"),
        (lambda: d.observe(0, [1.0], status=0), "status: expected one of"),
        (lambda: d.observe(0, [1.0, 0.0], tokens=[1.0]), "tokens: expected one for all rollouts or 2, got 1"),
        (lambda: d.observe(0, [1.0], tokens=-1.0), "tokens: expected at least 0, got -1.0"),
        (lambda: d.observe(0, [1.0], seconds=1e300), "seconds: expected a finite number, at most 1e"),
        (lambda: d.observe(0, [1.0], policy_version=-1), "policy_version: expected a whole number"),
        (lambda: d.observe_many([first]), r"observe_many: expected what feedback\(\) returns, got Ticket"),
        (lambda: d.observe_many([dispatch.Feedback(0, (float("nan"),), (1,), (0.0,), (0.0,))]), "a finite number"),
        (lambda: d.cancel(-1), "ticket: expected a whole number"),
        (lambda: d.add_tasks([bare, bare]), "add_tasks: records 1 and 2: field 'task_id'"),
        (lambda: d.add_tasks(pool(40, 4)[0][:1]), "is in the pool already"),
        (lambda: d.add_tasks([dataclasses.replace(bare, text=5)]), "add_tasks: record 1: field 'text'"),
        (lambda: d.add_tasks([dataclasses.replace(bare, extra={"x": float("nan")})]), "add_tasks: expected records"),
        (lambda: d.add_tasks([dataclasses.replace(bare, extra={"x": {1}})]), "add_tasks: expected records"),
        (lambda: d.add_tasks(["a"]), "add_tasks: expected records"),
        (lambda: d.retire_tasks(["nobody"]), "retire_tasks: 'nobody' is not in the pool"),
        (lambda: d.load_state_dict({}), "state: damaged or incomplete: KeyError"),
        (lambda: make(limits=es.Limits(retries=0)), "limits.retries: expected a number of at least 1"),
        (lambda: make(limits=es.Limits(deadline_versions="1")), "limits.deadline_versions: expected a number"),
        (lambda: es.Dispatcher(pool()[0], recipe(), group_size=0), "group_size: expected at least 1"),
        (lambda: es.Dispatcher(pool()[0][:9], recipe(), group_size=1, graph=pool()[1]), "graph: expected one of these"),
        (
            lambda: es.Dispatcher(pool()[0], recipe(), group_size=G, graph=pool()[1], reward_range=(1, 0)),
            "reward_range: expected a lowest below a highest",
        ),
    ]
    before = d.state_dict()["digest"]
    for call, message in mistakes:
        with pytest.raises(es.DispatchError, match=message):
            call()
        assert d.state_dict()["digest"] == before
    d.close()
    again = make(n=40, envs=4, folder=tmp_path)
    assert again.state_dict()["digest"] == before
    again.retire_tasks(again.records)
    with pytest.raises(es.DispatchError, match="propose: every task is retired"):
        again.propose()
    again.close()


def test_tasks_that_do_not_fit_the_pool_are_refused_and_the_folder_opens(tmp_path):
    records = [dataclasses.replace(r, embedding=(1.0, 0.5 * i)) for i, r in enumerate(testing.synthetic_pool(16, 2))]
    built = graph.build(records, k=4, num_patterns=8)
    d = es.Dispatcher(records, recipe("uniform"), group_size=G, graph=built, folder=tmp_path)
    tickets = d.propose()
    for bad in ([dataclasses.replace(new_tasks(0, 1)[0], embedding=(1.0,))], new_tasks(0, 1)):
        with pytest.raises(es.DispatchError, match="embedding"):
            d.add_tasks(bad)
    d.close()
    again = es.Dispatcher(records, recipe("uniform"), group_size=G, graph=built, folder=tmp_path)
    assert again.open_tickets() == tickets
    again.close()


def test_numbers_of_any_type_are_understood():
    d = make()
    tickets = d.propose(np.int64(5), policy_version=np.int32(3))
    for t, rewards in zip(tickets, (np.ones(4), jax.numpy.zeros(4), (True, False), [1, 0], range(2)), strict=True):
        assert d.observe(np.int64(t.ticket_id), rewards, tokens=np.float32(3.0), seconds=np.array(2.0), status="ok")
    assert d.metrics()["environments"][tickets[0].env_id]["tokens"] == 3.0
    d.propose(policy_version=2**40)  # a long pause is a long pause
    d.propose(policy_version=2**41)


def test_going_back_undoes_what_came_after(tmp_path):
    d = make("envsched", n=40, envs=4, folder=tmp_path)
    play(d, 3, coin)
    d.add_tasks(new_tasks(0, 3))
    saved = d.state_dict()
    first = play(d, 4, coin)
    d.retire_tasks(ids(first[-1])[:5])
    d.add_tasks(new_tasks(3, 30))
    play(d, 2)
    assert d.load_state_dict(saved) == ((), (), ())
    assert [ids(t) for t in play(d, 4, coin)] == [ids(t) for t in first]
    end = d.state_dict()["digest"]
    d.close()
    again = make("envsched", n=40, envs=4, folder=tmp_path)
    assert again.state_dict()["digest"] == end
    again.close()


def test_a_state_of_another_run_is_refused():
    d = make("envsched")
    saved = make("envsched", seed=1).state_dict()
    with pytest.raises(es.DispatchError, match="its seed is 1, this dispatcher's is 0"):
        d.load_state_dict(saved)
    with pytest.raises(es.DispatchError, match="state: format 2: expected 1"):
        d.load_state_dict({**saved, "format": 2})
    with pytest.raises(es.DispatchError, match="expected the state of this scheduler"):
        d.load_state_dict(make("envsched", belief="gaussian_field").state_dict())
    with pytest.raises(es.DispatchError, match="its digest does not match"):
        d.load_state_dict({**saved, "seed": 0})


def test_a_call_that_was_interrupted_half_way_is_not_built_upon(tmp_path, monkeypatch):
    d = make(folder=tmp_path)
    tickets, saved = d.propose(), d.state_dict()

    def interrupt(*unused):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(ledger.Ledger, "observe", interrupt)
        d.observe(tickets[0].ticket_id, MIXED)
    for call in (d.propose, d.state_dict, lambda: d.observe(1, MIXED)):
        with pytest.raises(es.DispatchError, match="interrupted half-way"):
            call()
    d.load_state_dict(saved)
    assert d.observe(tickets[0].ticket_id, MIXED)
    d.close()


def test_the_records_may_stand_in_another_order_than_the_graph_was_built_from():
    records, built = pool(40, 4)
    d = es.Dispatcher(records[::-1], recipe("uniform"), group_size=G, graph=built)
    d.add_tasks(new_tasks(0, 2))
    assert len(d.records) == 42


def test_two_dispatchers_compile_once():
    make("envsched").propose()
    programs = make("envsched")._run.engine._programs
    count = programs.select._cache_size()
    make("envsched").propose()
    assert make("envsched")._run.engine._programs is programs and programs.select._cache_size() == count


def test_a_state_stays_as_it_was_whatever_happens_to_those_who_took_it_up():
    first = make()
    tickets = first.propose()
    first.cancel(tickets[0].ticket_id, "gone", failed=True)
    state = first.state_dict()
    before = json.dumps({k: v for k, v in state.items() if k != "arrays"})
    for taker in (first, make()):
        taker.load_state_dict(state)
        for ticket in taker.open_tickets()[:4]:
            taker.cancel(ticket.ticket_id, "gone", failed=True)
        play(taker, 3, coin)
        assert json.dumps({k: v for k, v in state.items() if k != "arrays"}) == before
    make().load_state_dict(state)  # its digest still matches
