"""The page of a small ablation in a real browser, headless: light and dark, wide and narrow; and what the run left."""

import re
import shutil
import subprocess

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from matplotlib.image import imread

from configs import ablation
from experiments import ablate

pytestmark = pytest.mark.slow

NAMES = ("chromium", "chromium-browser", "google-chrome")
BROWSER = next(filter(None, map(shutil.which, NAMES)), None)
DARK, LIGHT = 0, 1  # Chromium's names of the two: blink::mojom::PreferredColorScheme
NARROW = 420


@pytest.fixture(scope="module")
def workdir(tmp_path_factory):
    """A finished run of two arms."""
    folder = tmp_path_factory.mktemp("ablation")
    config = ablation.get_config("smoke")
    for arm in set(config.arms) - {"uniform", "envsched"}:
        del config.arms[arm]
    ablate.main(config, folder)
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """Runs the browser on one file, (path, *flags) -> stdout; it finds no host but itself."""
    if BROWSER is None:
        pytest.skip(f"no browser: none of {', '.join(NAMES)} is on PATH")
    profile = tmp_path_factory.mktemp("profile")
    common = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}")

    def run(path, *flags):
        command = [BROWSER, *common, "--host-resolver-rules=MAP * ~NOTFOUND", *flags, path.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    return run


@pytest.fixture(scope="module")
def shots(workdir, browser, tmp_path_factory):
    """The page as pixels, f32[height, width, 3] from 0 to 1, by (scheme, width)."""
    folder, found = tmp_path_factory.mktemp("shots"), {}
    for scheme in (DARK, LIGHT):
        for width, height in ((1200, 2600), (NARROW, 4000)):
            path = folder / f"{scheme}-{width}.png"
            flags = (f"--blink-settings=preferredColorScheme={scheme}", f"--window-size={width},{height}")
            browser(workdir / "report.html", *flags, f"--screenshot={path}")
            found[scheme, width] = imread(path)[..., :3]
    return found


def background(pixels):
    """The brightness of the page's left margin, where nothing is drawn."""
    return float(pixels[:, 2:6].mean())


@pytest.mark.parametrize("width", [1200, NARROW])
def test_light_and_dark(shots, width):
    dark, light = shots[DARK, width], shots[LIGHT, width]
    assert background(light) > 0.95
    assert background(dark) < 0.15
    for pixels in (dark, light):
        drawn = np.abs(pixels - pixels[5, 4]).max(axis=2) > 0.3
        assert drawn.mean() > 0.02  # letters and curves stand out from the page
        # Everywhere: no quarter of the page, from heading to tables, is empty.
        last = np.flatnonzero(drawn.any(axis=1))[-1]
        assert all(part.any() for part in np.array_split(drawn[:last], 4))
    # What is drawn is not simply white on white in one of them: letters are dark on light and light on dark.
    assert light[:400].min() < 0.4 and dark[:400].max() > 0.7


def test_nothing_is_wider_than_a_narrow_page(workdir, browser, tmp_path):
    """Wide tables and figures scroll within themselves."""
    text = (workdir / "report.html").read_text(encoding="utf-8")
    ask = "<script>document.title = 'as wide as ' + document.body.scrollWidth</script></body>"
    narrow = text.replace("<body>", f'<body style="width:{NARROW}px">').replace("</body>", ask)
    (tmp_path / "asked.html").write_text(narrow, encoding="utf-8")
    found = browser(tmp_path / "asked.html", f"--window-size={NARROW},900", "--dump-dom")
    width = re.search(r"<title>as wide as (\d+)</title>", found)
    assert width is not None and int(width.group(1)) <= NARROW


def test_the_page_asks_for_nothing(workdir):
    text = (workdir / "report.html").read_text(encoding="utf-8")
    text = re.sub(r"(?<=base64,)[^\"]+", "", text)  # pixels may spell anything
    assert not re.search(r"https?:|//[a-z]|@import|<script|<link|<iframe", text)
    assert not re.search(r'(?:src|href)="(?!#|data:)|url\((?!#|data:)', text)
    assert "What envsched predicts of every task" in text
    assert "Held-out score against tokens" in text


def test_the_run_leaves_beliefs_and_tables(workdir):
    assert [path.name for path in workdir.glob("beliefs_*.npz")] == ["beliefs_envsched.npz"]  # uniform believes nothing
    with np.load(workdir / "beliefs_envsched.npz") as stored:
        found = dict(stored)
    n, m = len(found["mean"]), len(found["sender"])
    assert all(len(found[key]) == n for key in ("variance", "p_informative", "visits", "env", "pattern"))
    assert len(found["receiver"]) == len(found["weight"]) == m > n
    assert max(found["sender"].max(), found["receiver"].max()) < n and found["weight"].min() > 0
    assert (found["env"] < len(found["env_ids"])).all()
    with np.load(workdir / "schedule_envsched.npz") as stored:
        picks = stored["counts"].sum()  # over both seeds
    assert 0 < found["visits"].sum() < picks
    assert {path.name for path in (workdir / "tables").iterdir()} == {"arms.md", "arms.csv", "arms.tex"}
