"""Whatever a reader may run, runs: README blocks, notebooks, configs; and the layout keeps its rules."""

import ast
import importlib
import re
import subprocess
import sys
from pathlib import Path

import nbclient
import nbformat
import pytest

import envsched_jax

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"```python\n(.*?)```", re.S)
PAGES = ("README.md", "docs/dispatcher.md", "docs/trainers/loop.md")  # others need a trainer: see their adapters' tests
BLOCKS = {f"{page}-{i}": block for page in PAGES for i, block in enumerate(BLOCK.findall((ROOT / page).read_text()))}
CONFIGS = sorted(p.stem for p in (ROOT / "configs").glob("*.py") if p.stem != "__init__")
# Lower storeys first; a package may import only from its own or lower ones.
STOREYS = (
    "types",
    "pool",
    "graph",
    "belief",
    "select",
    "schedulers",
    "environments",
    "policy",
    "rollout",
    "train",
    "dispatch",
    "integrations",
    "testing",
)


@pytest.mark.parametrize(
    "name", [name if name.startswith("README") else pytest.param(name, marks=pytest.mark.slow) for name in BLOCKS]
)
def test_blocks_of_the_documents_run(name, tmp_path):
    script = tmp_path / "block.py"  # a file, since worker processes import the script they came from
    script.write_text(BLOCKS[name])
    done = subprocess.run([sys.executable, "-W", "error", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    if name == "README.md-0":
        picks = ast.literal_eval(done.stdout.strip())
        assert picks.count("inbox") > 4  # as the comment promises


def test_documents_have_blocks():
    assert len(BLOCKS) == 6


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted((ROOT / "colab").glob("*.ipynb")), ids=lambda p: p.stem)
def test_notebooks_run(path, monkeypatch):
    monkeypatch.delenv("MPLBACKEND", raising=False)  # the kernel's own backend shows figures in the notebook
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # a reader has none, and a notebook may choose its own
    book = nbformat.read(path, 4)
    assert all(not c.get("outputs") for c in book.cells if c.cell_type == "code"), "strip the outputs"
    done = nbclient.NotebookClient(book, timeout=900, resources={"metadata": {"path": str(path.parent)}}).execute()
    images = [o for c in done.cells for o in c.get("outputs", []) if "image/png" in o.get("data", {})]
    assert images


@pytest.mark.parametrize("name", CONFIGS)
def test_every_config_and_preset_builds(name):
    module = importlib.import_module(f"configs.{name}")
    presets = re.findall(r"`(\w+)`", module.__doc__.split("Presets:")[1].split("\n\n")[0])
    assert len(presets) >= 2
    for preset in presets:
        assert module.get_config(preset) == module.get_config(preset)
    module.get_config()  # works without a preset
    with pytest.raises(ValueError, match=r"unknown preset 'nosuch'; there are: "):
        module.get_config("nosuch")


def test_public_names_exist_and_are_sorted():
    assert envsched_jax.__all__ == sorted(envsched_jax.__all__)
    assert all(hasattr(envsched_jax, name) for name in envsched_jax.__all__)


def test_importing_the_package_is_light():
    code = (
        "import sys, envsched_jax;"
        "heavy = {'torch', 'tensorflow', 'tensorflow_datasets', 'flax', 'orbax', 'ray'} & set(sys.modules);"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def imported(path):
    """Packages of this library that a file imports."""
    for node in ast.walk(ast.parse(path.read_text())):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{a.name}" for a in node.names] if node.module == "envsched_jax" else [node.module]
        yield from (n.split(".")[1] for n in names if n.startswith("envsched_jax."))


def test_imports_go_down_only():
    upward, jraph = [], []
    for path in sorted((ROOT / "envsched_jax").rglob("*.py")):
        text = path.read_text()
        if re.search(r"^\s*(import|from) jraph", text, re.M):
            jraph.append(path.name)
        part = path.relative_to(ROOT / "envsched_jax").parts[0].removesuffix(".py")
        if part == "__init__":
            continue
        assert part in STOREYS, f"{part} has no storey"
        assert "experiments" not in re.findall(r"^(?:from|import) (\w+)", text, re.M)
        upward += [(str(path), other) for other in imported(path) if STOREYS.index(other) > STOREYS.index(part)]
    assert not upward
    assert jraph == ["build.py"]
