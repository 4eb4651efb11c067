"""The figure of a belief: who is predicted what, on small made-up graphs; and its place on the page."""

import re

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from experiments import figures_belief, report_loop
from experiments.common import RunError


def made(n=2000, count=30, seed=0):
    """A belief over n tasks of `count` environments; environment e lends to e + 1, most to the last."""
    random = np.random.default_rng(seed)
    env = np.sort(random.integers(0, count, n)).astype(np.int32)
    sender = random.integers(0, n, 4 * n).astype(np.int32)
    return {
        "mean": random.beta(2, 0.5, n).astype(np.float32),
        "variance": (0.25 * random.random(n)).astype(np.float32),
        "p_informative": random.random(n).astype(np.float32),
        "visits": random.poisson(2, n).astype(np.int32),
        "env": env,
        "pattern": np.zeros(n, np.int32),
        "env_ids": np.array([f"family/env-{i:02d}" for i in range(count)]),
        "sender": sender,
        "receiver": random.integers(0, n, 4 * n).astype(np.int32),
        "weight": np.ones(4 * n, np.float32),
    }


def test_the_svg_of_two_thousand_tasks_is_small(tmp_path):
    path = figures_belief.beliefs(made(), tmp_path / "deep" / "beliefs.png")
    text = path.with_suffix(".svg").read_text(encoding="utf-8")
    assert len(text) < 250_000
    assert "data:image/png;base64" in text  # the dots are pixels
    assert all(f"family/env-{i:02d}" in text for i in range(30))
    assert path.read_bytes().startswith(b"\x89PNG")


def test_height_keeps_the_order_and_bands_what_nobody_can_tell():
    rate = np.array([0.0, 0.0005, 0.002, 0.3, 0.5, 0.9, 0.9985, 0.9995, 1.0])
    height = figures_belief.height_of(rate)
    assert (np.diff(height[2:7]) > 0).all()
    assert height[4] == pytest.approx(0)
    top = np.log(figures_belief.EDGE / (1 - figures_belief.EDGE))
    assert (height[7:] > top).all() and (height[7:] <= top + figures_belief.BAND).all()
    solved = figures_belief.height_of(np.ones(500))
    assert (solved > top).all() and (solved <= top + figures_belief.BAND).all() and len(set(solved)) == 500
    assert (height[:2] < -top).all() and (height[:2] >= -top - figures_belief.BAND).all()


def test_links_add_both_ways_and_forget_the_inside():
    found = {
        "env": np.array([0, 0, 1, 2]),
        "sender": np.array([0, 2, 1, 3]),
        "receiver": np.array([1, 0, 2, 3]),
        "weight": np.array([5.0, 2.0, 3.0, 7.0]),
    }
    assert figures_belief.links(found, 3).tolist() == [[0, 5, 0], [5, 0, 0], [0, 0, 0]]


@pytest.mark.parametrize(("n", "count"), [(1, 1), (5, 2), (300, 80)])
def test_few_tasks_and_many_environments(tmp_path, n, count):
    found = made(n, count)
    text = figures_belief.beliefs(found, tmp_path / "b.png").with_suffix(".svg").read_text(encoding="utf-8")
    assert ("family/env-00" in text) == (count <= 64)
    assert ("80 environments" in text) == (count == 80)


def test_the_page_shows_envsched_before_others(tmp_path):
    for name in ("no_graph", "envsched"):
        np.savez(tmp_path / f"beliefs_{name}.npz", **made(40, 3))
    (shown,) = report_loop.beliefs(tmp_path, ["no_graph", "uniform", "envsched"])
    assert "What envsched predicts of every task" in shown
    assert not re.search(r'(?:src|href)="(?!#|data:)', shown)
    (shown,) = report_loop.beliefs(tmp_path, ["uniform", "no_graph"])
    assert "What no_graph predicts of every task" in shown
    assert report_loop.beliefs(tmp_path, ["uniform"]) == []
    (tmp_path / "beliefs_envsched.npz").write_bytes(b"PK\x03\x04 cut")
    with pytest.raises(RunError, match=r"beliefs_envsched\.npz: not readable"):
        report_loop.beliefs(tmp_path, ["envsched"])
