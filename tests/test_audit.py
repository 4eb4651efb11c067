"""The audit finds every planted fault and nothing else; the search behind it against one in plain Python loops."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import ablation, drift, toolworld
from envsched_jax import graph
from envsched_jax.environments import audit
from envsched_jax.environments import toolworld as tw
from envsched_jax.environments.audit import Fault
from envsched_jax.environments.toolworld import reachability
from envsched_jax.environments.toolworld import vocabulary as vocab
from envsched_jax.pool import Record
from envsched_jax.train import build, imitation

CONFIG = tw.ToolWorldConfig(
    num_domains=3,
    tasks_per_env=12,
    eval_per_env=2,
    held_out_envs=2,
    eval_per_held_out_env=4,
    reward_mix=(0.4, 0.3, 0.3),
)
SUITE = tw.generate(CONFIG)


# ---------------------------------------------------------------- the oracle


def oracle_call(world, env, slots, tool, argument):
    """The state after one call: the first rule that fires, else perhaps a mistake."""
    for r in range(vocab.RULES):
        asked = world.argument_is[env, tool, r]
        guard = all(n < 0 or slots[z] == n for z, n in enumerate(world.need[env, tool, r]))
        if world.rule_mask[env, tool, r] and guard and (asked < 0 or slots[asked] == argument):
            return tuple(int(p) if p >= 0 else s for p, s in zip(world.put[env, tool, r], slots, strict=True))
    spoilt = [1 if z == vocab.MISTAKE and world.mistake[env, tool] else s for z, s in enumerate(slots)]
    return tuple(spoilt)


def oracle_shortest(world, tasks, row):
    """Calls of a shortest solution, None if there is none: all states, layer by layer."""
    env, goal = int(tasks.env[row]), tasks.goal[row]
    start = tuple(int(x) for x in tasks.init[row])
    layer, seen, length = [start], {start}, 1
    while layer:
        following = []
        for slots in layer:
            for tool in np.flatnonzero(world.tool_mask[env]):
                for argument in range(vocab.VALUES) if world.takes_argument[env, tool] else (-1,):
                    after = oracle_call(world, env, slots, tool, argument)
                    holds = all(g < 0 or after[z] == g for z, g in enumerate(goal))
                    if world.terminal[env, tool]:
                        if holds and after[vocab.MISTAKE] != 1:
                            return length
                    elif after not in seen:
                        seen.add(after)
                        following.append(after)
        layer, length = following, length + 1
    return None


def random_tasks(rng, count):
    """Tasks from random states with random checks: some solved, some open, some impossible."""
    init = rng.integers(0, 2, (count, vocab.SLOTS)) * (rng.random((count, vocab.SLOTS)) < 0.4)
    init[:, vocab.SYMBOLS : vocab.MISTAKE] = rng.integers(0, vocab.VALUES, (count, vocab.HIDDEN))
    init[:, vocab.MISTAKE] = rng.random(count) < 0.1
    goal = np.where(rng.random((count, vocab.SLOTS)) < 0.12, rng.integers(0, 2, (count, vocab.SLOTS)), -1)
    goal[:, vocab.SYMBOLS : vocab.MISTAKE] = -1
    env = rng.integers(0, len(SUITE.world.tool_mask), count)
    zero = np.zeros(count, np.int32)
    rows = (env, init, goal, rng.integers(1, 11, count), zero, np.zeros((count, 1, 1)))
    return tw.Tasks(*(np.asarray(x, np.int32) for x in rows))


# ---------------------------------------------------------------- planted faults


def plant(suite, each, seed=0):
    """Returns the suite with ``each`` broken tasks of every kind, and what is to be said of them."""
    rng = np.random.default_rng(seed)
    tasks = tw.Tasks(*(np.array(x) for x in suite.tasks))
    kinds = ("holds", "unchecked", "unsettable", "spoilt", "forbidden", "short", "scattered")
    order = rng.permutation(len(suite.records))[: each * len(kinds)]
    expected = {}
    for row, kind in zip(order, np.repeat(kinds, each), strict=True):
        checked = np.flatnonzero(tasks.goal[row] >= 0)
        fault, detail = Fault.UNSATISFIABLE, "none of the"
        if kind == "holds":
            tasks.goal[row, checked] = tasks.init[row, checked]
            fault, detail = Fault.NOOP_PASSES, "every check holds at the start"
        elif kind == "unchecked":
            tasks.goal[row] = -1
            fault, detail = Fault.NOOP_PASSES, "nothing is checked"
        elif kind == "unsettable":
            tasks.goal[row, checked[0]] = 2
            detail = "no tool sets"
        elif kind == "spoilt":
            tasks.init[row, vocab.MISTAKE] = 1
        elif kind == "forbidden":
            tasks.goal[row, vocab.MISTAKE] = 1
            detail = "a mistake"
        elif kind == "short":
            tasks.budget[row] = oracle_shortest(suite.world, tasks, row) - 1
            detail = "the shortest solution takes"
        else:  # another environment's goal
            other = rng.choice(np.flatnonzero(tasks.env != tasks.env[row]))
            tasks.goal[row] = suite.tasks.goal[other]
            length = oracle_shortest(suite.world, tasks, row)
            if length is not None and length <= tasks.budget[row]:
                held = all(g < 0 or g == i for g, i in zip(tasks.goal[row], tasks.init[row], strict=True))
                fault, detail = (Fault.NOOP_PASSES, "every check") if held else (None, "")
            else:
                detail = ""
        expected[suite.records[row].task_id] = (fault, detail)
    return dataclasses.replace(suite, tasks=tasks), {k: v for k, v in expected.items() if v[0] is not None}


@pytest.fixture(autouse=True)
def strict():
    with jax.numpy_dtype_promotion("strict"):
        yield


@pytest.fixture(scope="module")
def planted():
    suite, expected = plant(SUITE, each=6)
    return suite, expected, audit.audit(suite.records, tw.Auditor(suite))


def test_every_planted_fault_is_found_and_nothing_else(planted):
    suite, expected, report = planted
    assert {f.task_id: f.fault for f in report.findings} == {task: fault for task, (fault, _) in expected.items()}
    assert len(expected) > 36 and set(Fault) == {fault for fault, _ in expected.values()}
    for finding in report.findings:
        assert expected[finding.task_id][1] in finding.detail, finding
        assert finding.detail and finding.task_id.startswith(finding.env_id)
    assert report.unknown == () and report.num_tasks == len(suite.records)


def test_the_report_reads_well_and_takes_tasks_out(planted):
    suite, expected, report = planted
    lines = report.text().splitlines()
    noops = sum(fault is Fault.NOOP_PASSES for fault, _ in expected.values())
    assert lines[0] == (
        f"audit of {len(suite.records)} tasks: doing nothing passes: {noops}, "
        f"nothing can pass: {len(expected) - noops}, not known: 0"
    )
    assert lines[1] == f"  {report.task_ids[0]}: {report.findings[0].fault.value} ({report.findings[0].detail})"
    assert lines[-1] == f"  and {len(expected) - 20} more" and len(lines) == 22
    kept = audit.exclude(suite.records, report)
    assert [r.task_id for r in kept] == [r.task_id for r in suite.records if r.task_id not in expected]
    whole, index = graph.build(suite.records, k=2, num_patterns=4, feature_dim=8)
    rest = graph.retire(whole, index, report.task_ids)
    assert set(graph.retired(rest, index)) == set(expected)


def test_a_sound_suite_has_no_findings():
    """The scripts prove that every task of the default suite can be solved; the audit must not say otherwise."""
    suite = tw.generate(tw.ToolWorldConfig(reward_mix=(0.4, 0.3, 0.3)))
    environment = tw.environment(suite.world, suite.tasks)
    play = jax.jit(jax.vmap(lambda task, script: imitation.demonstrate(environment, task, script)))
    assert bool(play(jnp.arange(len(suite.records)), jnp.asarray(suite.script)).success.all())
    auditor = tw.Auditor(suite)
    report = audit.audit(suite.records, auditor)
    assert report == audit.Report((), (), len(suite.records))
    assert report.num_tasks > 2500 and report.text().count("\n") == 0
    found = auditor.search
    assert (found.calls <= (suite.script[:, :, 0] > 0).sum(axis=1)).all() and found.calls.min() > 1


# ---------------------------------------------------------------- the search


def test_shortest_solutions_equal_the_oracle():
    tasks = random_tasks(np.random.default_rng(1), 150)
    found = reachability.search(SUITE.world, tasks)
    expected = [oracle_shortest(SUITE.world, tasks, row) for row in range(len(tasks.env))]
    assert found.calls.tolist() == [-1 if e is None else e for e in expected]
    everything = np.iinfo(np.int64).max
    assert (found.tried == np.where(found.calls < 0, everything, found.calls)).all()
    lengths = set(expected)
    assert None in lengths and 1 in lengths and len(lengths) > 5


def test_a_world_where_mistakes_heal():
    """A rule that takes a mistake back: then spoilt states count, and solutions lead through them."""
    env = next(e for e in range(len(SUITE.world.tool_mask)) if SUITE.world.mistake[e].any())
    world = tw.World(*(np.array(x) for x in SUITE.world))
    free = int(np.flatnonzero(~world.tool_mask[env])[0])
    world.tool_mask[env, free] = world.rule_mask[env, free, 0] = True
    world.need[env, free, 0, vocab.MISTAKE] = 1
    world.put[env, free, 0, [vocab.MISTAKE, vocab.COMMITTED]] = 0, 2
    rows = np.flatnonzero(SUITE.tasks.env == env)[:3]
    tasks = tw.Tasks(*(np.array(x[rows]) for x in SUITE.tasks))
    tasks.goal[:, vocab.COMMITTED] = 2
    found = reachability.search(world, tasks)
    assert found.calls.tolist() == [oracle_shortest(world, tasks, row) for row in range(3)]
    assert (found.calls > 3).all()


def test_a_search_that_gives_up_says_nothing():
    few = tw.Auditor(SUITE, states=1)
    answers = [few.satisfiable(r.task_id) for r in SUITE.records]
    assert set(answers) == {None}  # none is solved by one call, and no budget is one
    report = audit.audit(SUITE.records[:5], few)
    assert report.findings == () and report.unknown == tuple(r.task_id for r in SUITE.records[:5])
    assert "not known: 5" in report.text()
    # What was tried counts: with one call allowed, all sequences of one call are enough.
    short = dataclasses.replace(SUITE, tasks=SUITE.tasks._replace(budget=np.ones_like(SUITE.tasks.budget)))
    assert {tw.Auditor(short, states=1).satisfiable(r.task_id) for r in SUITE.records} == {False}


def test_a_budget_of_nothing_still_plays_one_turn_and_none_beyond_the_most():
    tasks = SUITE.tasks._replace(budget=np.where(np.arange(len(SUITE.records)) % 2, 0, 99).astype(np.int32))
    auditor = tw.Auditor(dataclasses.replace(SUITE, tasks=tasks))
    answers = [auditor.satisfiable(r.task_id) for r in SUITE.records]
    assert answers == [i % 2 == 0 for i in range(len(answers))]
    assert "1 are allowed" in auditor.explain(SUITE.records[1].task_id)
    assert auditor.explain(SUITE.records[0].task_id) == ""


def test_an_environment_without_an_end_and_values_that_no_slot_holds():
    world = SUITE.world._replace(terminal=np.zeros_like(SUITE.world.terminal))
    auditor = tw.Auditor(dataclasses.replace(SUITE, world=world))
    assert auditor.explain(SUITE.records[0].task_id) == "no tool ends the episode"
    wrong = SUITE.tasks._replace(init=SUITE.tasks.init + 1)
    with pytest.raises(ValueError, match="init: values from 1 to 3: expected 0 to 2"):
        reachability.search(SUITE.world, wrong)
    with pytest.raises(KeyError, match="nobody"):
        auditor.satisfiable("nobody")


# ---------------------------------------------------------------- other environments


class Stub:
    """A host environment that knows a few answers."""

    def __init__(self, **answers):
        self.answers = answers

    def noop_passes(self, task):
        return self.answers[task][0]

    def satisfiable(self, task):
        return self.answers[task][1]

    def explain(self, task):
        return ""


def test_any_environment_can_be_asked():
    records = [Record(task, "env", "", ()) for task in "edcba"]
    host = Stub(a=(True, None), b=(False, False), c=(None, True), d=(False, True), e=(None, False))
    report = audit.audit(records, host)
    assert [(f.task_id, f.fault) for f in report.findings] == [
        ("e", Fault.UNSATISFIABLE),
        ("b", Fault.UNSATISFIABLE),
        ("a", Fault.NOOP_PASSES),
    ]
    assert report.unknown == ("c",)
    assert report.text().splitlines()[1] == "  e: nothing can pass"
    assert [r.task_id for r in audit.exclude(records, report)] == ["d", "c"]


# ---------------------------------------------------------------- before training


def test_a_suite_is_audited_as_the_config_says(planted, capsys):
    suite, expected, _ = planted
    train = suite.where(tw.TRAIN)
    names = [suite.records[i].task_id for i in train]
    broken = [name for name in names if name in expected]
    assert 0 < len(broken) < len(expected)  # some are in other splits, and no business of this one
    assert build.audited(suite, train, "off") is train and capsys.readouterr().out == ""

    kept = build.audited(suite, train, "report")
    text = capsys.readouterr().out
    np.testing.assert_array_equal(kept, train)
    assert text.startswith(f"audit of {len(train)} tasks: ")
    assert all(f"  {name}: " in text for name in broken[:20])

    kept = build.audited(suite, train, "exclude")
    assert capsys.readouterr().out == text
    assert [suite.records[i].task_id for i in kept] == [name for name in names if name not in expected]
    assert kept.dtype == train.dtype
    for mode in ("on", "", None):
        with pytest.raises(ValueError, match=f"audit must be 'off', 'report' or 'exclude', not {mode!r}"):
            build.audited(suite, train, mode)


def test_nothing_is_left_out_of_a_sound_suite(capsys):
    train = SUITE.where(tw.TRAIN)
    np.testing.assert_array_equal(build.audited(SUITE, train, "exclude"), train)
    assert "doing nothing passes: 0, nothing can pass: 0, not known: 0" in capsys.readouterr().out


@pytest.mark.parametrize("module", [ablation, drift, toolworld])
def test_configs_that_build_a_suite_say_whether_it_is_audited(module):
    assert module.get_config("smoke").audit in ("off", "report", "exclude")
