"""The cycle as one program: vmapped seeds, exact resumption, charging, the filter, the oracle's truth, clear errors."""

import dataclasses
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import toolworld as toolworld_config
from envsched_jax.train import build, cycle
from envsched_jax.train.checkpoint import CheckpointError, Checkpoints
from envsched_jax.types import Status
from experiments import common, loop


@pytest.fixture(scope="module")
def config():
    return toolworld_config.get_config("smoke")


@pytest.fixture(scope="module")
def suite(config, tmp_path_factory):
    patch = pytest.MonkeyPatch()
    patch.setenv("ENVSCHED_CACHE", str(tmp_path_factory.mktemp("cache")))
    yield build.build_suite(config)
    patch.undo()


@pytest.fixture(scope="module")
def programs(suite, config):
    return build.build_arm(suite, config, scheduler={"name": "envsched"}, filter="none")


def equal(a, b):
    """Bit for bit, keys by their data."""

    def raw(x):
        return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x

    return all(
        np.array_equal(raw(x), raw(y), equal_nan=True)
        for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    )


@pytest.mark.slow
def test_seeds_run_alike_alone_and_together(programs):
    together, metrics = programs.run(programs.init(jnp.asarray([3, 4])))
    alone, metrics_alone = programs.run(programs.init(jnp.asarray([4])))
    np.testing.assert_array_equal(together.scheduler.history.visits[1], alone.scheduler.history.visits[0])
    np.testing.assert_allclose(metrics.reward_mean[1], metrics_alone.reward_mean[0], rtol=1e-5)
    for a, b in zip(jax.tree.leaves(together.params), jax.tree.leaves(alone.params), strict=True):
        np.testing.assert_allclose(a[1], b[0], atol=1e-5)
    assert not np.array_equal(together.scheduler.history.visits[0], together.scheduler.history.visits[1])


def test_seeds_take_turns_with_the_base_policies(suite, config):
    two = jax.tree.map(lambda x: jnp.concatenate([x, x + 1]), suite.bases)
    programs = build.build_arm(
        dataclasses.replace(suite, bases=two), config, scheduler={"name": "uniform"}, filter="none"
    )
    params = programs.init(jnp.asarray([0, 1, 2])).params
    for got, base in zip(jax.tree.leaves(params), jax.tree.leaves(suite.bases), strict=True):
        np.testing.assert_array_equal(got, jnp.concatenate([base, base + 1, base]))


def test_every_rollout_is_charged_and_observed(programs, config):
    state, metrics = programs.run(programs.init(jnp.asarray([0])))
    train = config.train
    groups = train.chunk * train.batch_size
    assert float(state.rollouts[0]) == groups * train.group_size
    assert int(state.scheduler.history.visits[0].sum()) == groups
    assert int(metrics.env_count[0].sum()) == groups
    assert float(state.tokens[0]) == float(metrics.tokens[0, -1]) > groups * train.group_size
    np.testing.assert_allclose(metrics.informative_share + metrics.solved_share + metrics.failed_share, 1, atol=1e-6)
    assert np.isfinite(metrics.loss).all()


def test_the_policy_is_scored_as_it_was_sampled(programs):
    """The largest gap between cached and teacher-forced log-probabilities, exported by every update."""
    _, metrics = programs.run(programs.init(jnp.asarray([0])))
    assert float(metrics.logp_gap.max()) < 1e-4


def test_unfilled_rows_leave_no_trace(programs):
    state = jax.tree.map(lambda x: x[0], programs.init(jnp.asarray([0])))
    pieces = build.build_pieces(programs)  # compiled: op by op these take most of a minute
    batch = pieces["select"](jax.random.key(0), state)
    half = batch._replace(mask=batch.mask.at[4:].set(False))
    trajectory = pieces["rollout"](jax.random.key(1), state, half)
    assert (trajectory.status[4:] == Status.ABSENT).all()
    assert (trajectory.status[:4] != Status.ABSENT).all()
    poisoned = trajectory._replace(reward=trajectory.reward.at[4:].set(jnp.nan))
    params, _, metrics = pieces["update"](state, poisoned)
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(params))
    short = jax.tree.map(lambda x: x[:4], trajectory)
    short_params, _, short_metrics = pieces["update"](state, short)
    np.testing.assert_allclose(metrics.loss, short_metrics.loss, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(short_params), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)
    scheduler = pieces["observe"](state, half, poisoned)
    assert int(scheduler.history.visits.sum()) == 4
    assert bool(jnp.isfinite(scheduler.history.s1).all())


def test_filter_charges_what_it_throws_away(suite, config):
    filtered = build.build_arm(suite, config, scheduler={"name": "uniform"}, filter="dapo")
    state, metrics = filtered.run(filtered.init(jnp.asarray([0])))
    train = config.train
    batches = float(state.rollouts[0]) / (train.batch_size * train.group_size)
    assert filtered.chunk < batches <= filtered.chunk * train.max_draws
    assert int(state.scheduler.history.visits[0].sum()) == batches * train.batch_size
    assert int(metrics.env_count[0].sum()) == batches * train.batch_size


@pytest.mark.slow
def test_filter_keeps_informative_groups_first(suite, config):
    filtered = build.build_arm(suite, config, scheduler={"name": "uniform"}, filter="dapo")
    state = jax.tree.map(lambda x: x[0], filtered.init(jnp.asarray([1])))
    key = jax.random.fold_in(state.key, 0)
    first = cycle._draw(filtered.setup, key, state.params, state.scheduler)
    drawn = cycle._refill(filtered.setup, key, state.params, first)
    flags = np.asarray(cycle.informative_groups(drawn.trajectory))
    assert flags.sum() == min(config.train.batch_size, int(drawn.sums.informative))
    assert (np.sort(flags)[::-1] == flags).all()
    assert flags.sum() >= int(first.sums.informative)


def test_truth_is_the_share_of_informative_subsets():
    """The estimator against all subsets of a few rollouts."""
    for wins, total, group in [(0, 6, 3), (1, 6, 3), (3, 6, 3), (6, 6, 3), (5, 8, 4)]:
        rewards = [1] * wins + [0] * (total - wins)
        subsets = list(itertools.combinations(rewards, group))
        expected = np.mean([len(set(s)) > 1 for s in subsets])
        found = cycle.share_of_mixed_groups(jnp.asarray([rewards], jnp.float32), group)
        assert math.isclose(float(found[0]), expected, abs_tol=1e-6)
    graded = [0.0, 0.0, 0.0, 0.25, 0.25, 1.0]
    expected = np.mean([len(set(s)) > 1 for s in itertools.combinations(graded, 3)])
    assert math.isclose(float(cycle.share_of_mixed_groups(jnp.asarray([graded]), 3)[0]), expected, abs_tol=1e-6)


def test_oracle_reads_fresh_rollouts_that_are_not_charged(suite, config):
    oracle = build.build_arm(suite, config, scheduler={"name": "oracle"}, filter="none")
    assert oracle.reveal is not None
    state = oracle.reveal(oracle.init(jnp.asarray([0])))
    truth, mask = np.asarray(state.scheduler.truth[0]), np.asarray(suite.graph.nodes.mask)
    assert truth[mask].max() > 0
    assert not truth[~mask].any()
    assert ((truth >= -1e-6) & (truth <= 1 + 1e-6)).all()
    assert float(state.rollouts[0]) == 0


def arm(name, suite, config, programs, folder, steps):
    """Runs an arm for a number of steps as the experiments do."""
    config = config.copy_and_resolve_references()
    config.train.steps = steps
    measures = loop.Measures(suite, config)
    with common.MetricWriter(folder) as writer:
        return loop.run_arm(
            name, [0, 1], programs, measures, writer, folder / "checkpoints", {"pool": suite.fingerprint}
        )


def test_a_killed_run_goes_on_bit_for_bit(suite, config, programs, tmp_path):
    whole = arm("envsched", suite, config, programs, tmp_path / "whole", 8)
    arm("envsched", suite, config, programs, tmp_path / "killed", 4)  # all that a run killed after step 4 leaves behind
    resumed = arm("envsched", suite, config, programs, tmp_path / "killed", 8)
    ignore = {"seconds": 0.0, "timed_steps": 0}  # clocks
    assert dataclasses.asdict(whole) | ignore == dataclasses.asdict(resumed) | ignore
    states = []
    for run in ("whole", "killed"):
        with Checkpoints(
            tmp_path / run / "checkpoints", {"pool": suite.fingerprint, "arm": "envsched", "seeds": [0, 1]}
        ) as kept:
            restored = kept.restore(programs.init(jnp.asarray([0, 1])))
            assert restored is not None
            states.append(restored[0])
    assert int(states[0].step[0]) == 8
    assert equal(*states)


def test_checkpoint_of_another_pool_is_refused(suite, config, programs, tmp_path):
    arm("envsched", suite, config, programs, tmp_path, 4)
    other = dataclasses.replace(suite, fingerprint="another")
    before = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    with pytest.raises(CheckpointError, match=r"checkpoint of step 4 .*its pool is .*, this run's is 'another'"):
        arm("envsched", other, config, programs, tmp_path, 8)
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == before


def test_settings_that_do_not_exist_are_errors(suite, config):
    with pytest.raises(ValueError, match="unknown scheduler 'best'"):
        build.build_arm(suite, config, scheduler={"name": "best"}, filter="none")
    with pytest.raises(TypeError, match="powr"):
        build.build_arm(suite, config, scheduler={"name": "envsched", "powr": 2.0}, filter="none")
    with pytest.raises(ValueError, match="filter must be 'none' or 'dapo', not 'dap'"):
        build.build_arm(suite, config, scheduler={"name": "uniform"}, filter="dap")
