"""Differences paired by seed at equal rollouts and equal tokens, against hand-worked curves."""

import numpy as np
import pytest

from experiments import ablate, loop, paired


def curves(success, tokens, rollouts=((0, 0), (100, 100), (200, 200))):
    """Success of two seeds per evaluation: one number for all four tasks, or one per task."""
    return loop.Curves(
        steps=[10 * i for i in range(len(success))],
        success=[[np.broadcast_to(s, 4).tolist() for s in row] for row in success],
        rollouts=[list(row) for row in rollouts],
        tokens=[list(row) for row in tokens],
        informative=[[0.5, 0.5]] * (len(success) - 1),
    )


BASE = curves([[0.0, 0.0], [0.2, 0.2], [0.4, 0.4]], [[0, 0], [1000, 1000], [4000, 4000]])
# The same scores per rollout, for half the tokens, and a seed that stops at 1,800.
FRUGAL = curves([[0.0, 0.0], [0.2, 0.2], [0.4, 0.4]], [[0, 0], [500, 500], [2000, 1800]])
COSTLY = curves([[0.0, 0.0], [0.3, 0.5], [0.6, 0.8]], [[0, 0], [2000, 2000], [8000, 8000]])


def test_grid_of_tokens_ends_where_the_first_seed_does():
    assert paired.token_grid(BASE, (BASE, FRUGAL)).tolist() == [0, 1000, 1800]
    assert paired.token_grid(BASE, (BASE, COSTLY)).tolist() == [0, 1000, 4000]
    assert paired.token_grid(BASE, (COSTLY, COSTLY)).tolist() == [0, 1000, 4000]  # uniform's budget is everyone's


def test_equal_rollouts_hide_what_equal_tokens_show():
    at_rollouts, at_tokens = (paired.minus(FRUGAL, BASE, BASE, unit) for unit in ("rollouts", "tokens"))
    assert at_rollouts["final"]["mean"] == pytest.approx(0)
    assert at_rollouts["spent"] == 200
    assert at_tokens["spent"] == 1800
    # At 1,800 tokens: 0.2 + 0.2 * 1300 / 1500 and 0.4 against 0.2 + 0.2 * 800 / 3000.
    base = 0.2 + 0.2 * 800 / 3000
    gaps = np.array([0.2 + 0.2 * 1300 / 1500 - base, 0.4 - base])
    assert at_tokens["final"]["mean"] == pytest.approx(gaps.mean())
    half = 12.7062047 * abs(gaps[0] - gaps[1]) / 2
    assert at_tokens["final"]["ci"] == pytest.approx([gaps.mean() - half, gaps.mean() + half])


def test_average_over_tokens_weighs_by_tokens():
    found = paired.minus(COSTLY, BASE, BASE, "tokens")
    # Gaps of the seeds at 0, 1,000 and 4,000 tokens; three quarters of the tokens lie between the last two.
    one = np.array([0, 0.15 - 0.2, 0.3 + 0.3 * 2 / 6 - 0.4])
    two = np.array([0, 0.25 - 0.2, 0.5 + 0.3 * 2 / 6 - 0.4])
    area = [(g[0] + g[1]) / 2 * 0.25 + (g[1] + g[2]) / 2 * 0.75 for g in (one, two)]
    assert found["mean"]["mean"] == pytest.approx(np.mean(area))
    assert found["final"]["mean"] == pytest.approx((one[2] + two[2]) / 2)


def test_a_single_evaluation_has_an_average():
    start = curves([[0.1, 0.3]], [[0, 0]], [[0, 0]])
    assert paired.minus(start, start, start, "tokens")["mean"]["mean"] == 0


def test_splits_by_kind_of_task():
    unseen_env = np.array([False, True, True, True])
    arm = curves([[0.0, 0.0], [0.2, 0.2], [[0.9, 0.4, 0.4, 0.1], 0.4]], BASE.tokens)
    found = paired.splits(arm, BASE, unseen_env)
    assert found["score_tasks_minus_uniform"]["mean"] == pytest.approx((0.5 + 0) / 2)
    assert found["score_envs_minus_uniform"]["mean"] == pytest.approx((-0.1 + 0) / 2)
    assert set(paired.splits(arm, BASE, np.zeros(4, bool))) == {"score_tasks_minus_uniform"}


def test_summary_has_every_difference():
    unseen_env = np.array([False, False, True, True])
    arms = {"uniform": BASE, "envsched": COSTLY, "frugal": FRUGAL}
    summary = ablate.summarise(arms, unseen_env)
    assert summary["paired_tokens"]["frugal"]["tokens"] == 1800
    assert set(summary["paired"]["frugal"]) >= {"score_tasks_minus_uniform", "score_envs_minus_uniform"}
    assert set(summary["paired_tokens"]) == set(summary["paired"]) == {"envsched", "frugal"}
    for key in ("envsched_minus", "envsched_minus_tokens"):
        assert set(summary[key]) == {"uniform", "frugal"}
    same = summary["paired"]["envsched"]["score_final_minus_uniform"]
    assert summary["envsched_minus"]["uniform"]["final"] == same
    assert summary["envsched_minus"]["frugal"]["final"]["mean"] == pytest.approx(0.3)
    assert summary["arms"]["frugal"]["score_average"]["mean"] == pytest.approx(0.2)
    # Without the mask, and without EnvSched, the rest stands.
    bare = ablate.summarise({"uniform": BASE, "frugal": FRUGAL})
    assert "score_tasks_minus_uniform" not in bare["paired"]["frugal"]
    assert "envsched_minus" not in bare or bare["envsched_minus"] == {}
