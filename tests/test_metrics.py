"""Belief metrics against SciPy, plain loops and hand-worked values."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats

from experiments import metrics


def pairs():
    return st.integers(4, 25).flatmap(
        lambda n: st.tuples(*[hnp.arrays(np.float64, n, elements=st.integers(0, 4).map(float)) for _ in range(2)])
    )


@settings(deadline=None)
@given(pairs())
def test_spearman_is_scipys_with_ties(pair):
    a, b = pair
    got = metrics.spearman(a, b)
    if np.ptp(a) == 0 or np.ptp(b) == 0:
        assert math.isnan(got)
    else:
        assert got == pytest.approx(stats.spearmanr(a, b).statistic, abs=1e-12)


@settings(deadline=None)
@given(pairs())
def test_auc_counts_pairs(pair):
    score, label = pair[0], pair[1] > 1
    won = [(s > t) + 0.5 * (s == t) for s in score[label] for t in score[~label]]
    got = metrics.auc(score, label)
    assert math.isnan(got) if not won else got == pytest.approx(np.mean(won), abs=1e-12)


@settings(deadline=None)
@given(pairs(), st.randoms(use_true_random=False))
def test_top_quarter_is_the_mean_over_all_ways_to_break_ties(pair, random):
    score, truth = pair[0][:8], pair[1][:8]  # 8 or fewer: n/4 is a whole number for 4 and 8
    if len(score) < 8:
        score, truth = score[:4], truth[:4]
    if truth.sum() == 0:
        assert math.isnan(metrics.top_quarter(score, truth))
        return
    quarter = len(score) // 4
    best = max(score[list(c)].sum() for c in itertools.combinations(range(len(score)), quarter))
    ways = [
        truth[list(c)].mean()
        for c in itertools.combinations(range(len(score)), quarter)
        if score[list(c)].sum() == best
    ]
    expected = np.mean(ways) / truth.mean()
    assert metrics.top_quarter(score, truth) == pytest.approx(expected, abs=1e-12)
    order = list(range(len(score)))
    random.shuffle(order)
    assert metrics.top_quarter(score[order], truth[order]) == pytest.approx(expected, abs=1e-12)


def test_top_quarter_of_a_constant_score_is_one_and_of_the_truth_is_the_best():
    truth = np.array([0.0, 0, 0, 0, 0, 0, 1, 3])
    assert metrics.top_quarter(np.ones(8), truth) == pytest.approx(1.0)
    assert metrics.top_quarter(truth, truth) == pytest.approx(2 / 0.5)


def test_calibration_error_by_hand():
    predicted, truth = np.array([0.05, 0.08, 0.95, 1.0]), np.array([0.0, 1.0, 1.0, 1.0])
    # lowest bin: predicted mean 0.065, truth 0.5; highest bin: predicted 0.975, truth 1
    assert metrics.calibration_error(predicted, truth) == pytest.approx((2 * 0.435 + 2 * 0.025) / 4)
    assert metrics.calibration_error(truth, truth) == 0


def test_log_loss_by_hand_and_its_floor():
    assert metrics.log_loss(np.array([0.5, 0.25]), np.array([1.0, 0.5])) == pytest.approx(
        -(math.log(0.5) + 0.5 * math.log(0.25) + 0.5 * math.log(0.75)) / 2
    )
    assert metrics.log_loss(np.array([0.0]), np.array([1.0]), floor=1e-4) == pytest.approx(-math.log(1e-4))


@given(hnp.arrays(np.float64, st.integers(1, 12), elements=st.integers(0, 9).map(float)))
def test_gini_is_half_the_relative_mean_difference(count):
    got = metrics.gini(count)
    if count.sum() == 0:
        assert math.isnan(got)
    else:
        difference = np.abs(count[:, None] - count[None, :]).mean()
        assert got == pytest.approx(difference / (2 * count.mean()), abs=1e-12)


def test_mae():
    assert metrics.mae(np.array([0.0, 1.0]), np.array([0.5, 1.0])) == 0.25
    assert math.isnan(metrics.mae(np.zeros(0), np.zeros(0)))


@settings(deadline=None)
@given(hnp.arrays(np.float64, (3, 6), elements=st.sampled_from([0.0, 0.5, 1.0, np.nan])), st.integers(1, 4))
def test_p_informative_counts_every_group(reward, size):
    got = metrics.p_informative(reward, size)
    for row, value in zip(reward, got, strict=True):
        trials = row[~np.isnan(row)]
        groups = [len(set(c)) > 1 for c in itertools.combinations(trials, size)]
        assert math.isnan(value) if not groups else value == pytest.approx(np.mean(groups), abs=1e-12)


@settings(deadline=None)
@given(hnp.arrays(np.float64, (2, 3, 5), elements=st.sampled_from([0.0, 0.3, 1.0, np.nan])))
def test_moments_are_numpys(reward):
    count, mean, variance = metrics.moments(reward)
    for place in np.ndindex(2, 3):
        trials = reward[place][~np.isnan(reward[place])]
        assert count[place] == len(trials)
        assert math.isnan(mean[place]) if not len(trials) else mean[place] == pytest.approx(trials.mean())
        if len(trials) < 2:
            assert math.isnan(variance[place])
        else:
            assert variance[place] == pytest.approx(trials.var(ddof=1), abs=1e-12)
