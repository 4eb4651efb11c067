"""Text vectors of a local model: what is asked of the package, and clear errors where it cannot be used."""

import importlib
import types

import numpy as np
import pytest
from test_recorded import write_set

from experiments import recorded, replay, text_vectors
from experiments.text_vectors import TextModelError


class Encoder:
    """A stand-in for a sentence-embedding model: two numbers per text."""

    def __init__(self, path, local_files_only=False):
        if not local_files_only:
            raise AssertionError("nothing may be fetched")
        if path.endswith("broken"):
            raise OSError("no config.json")
        self.path = path

    def encode(self, texts, normalize_embeddings=False):
        rows = np.array([[len(text), text.count("1") + 1] for text in texts], np.float32)
        return rows / np.linalg.norm(rows, axis=1, keepdims=True) if normalize_embeddings else rows


@pytest.fixture
def package(monkeypatch):
    """The optional package, replaced."""
    module = types.SimpleNamespace(SentenceTransformer=Encoder)
    monkeypatch.setattr(text_vectors, "importlib", types.SimpleNamespace(import_module=lambda name: module))


@pytest.fixture
def data(tmp_path):
    write_set(tmp_path / "toy")
    return recorded.load(tmp_path / "toy")


def test_every_record_gets_the_unit_vector_of_its_text(package, data, tmp_path):
    model = text_vectors.load(tmp_path)
    assert model.path == str(tmp_path)
    got = text_vectors.embed(data.records, model)
    assert [r.task_id for r in got] == [r.task_id for r in data.records]
    np.testing.assert_allclose(np.linalg.norm([r.embedding for r in got], axis=1), 1, rtol=1e-6)
    text = data.records[1].text
    np.testing.assert_allclose(np.divide(*got[1].embedding), len(text) / (text.count("1") + 1), rtol=1e-6)
    assert data.records[1].embedding is None  # the records given stay as they were


def test_a_replay_uses_the_vectors_where_a_model_is_given(package, tmp_path):
    write_set(tmp_path / "toy")
    (_, plain), (_, vectors) = (replay._load(str(tmp_path / "toy"), model)[0] for model in (None, str(tmp_path)))
    assert all(r.embedding is None for r in plain.records)
    assert all(len(r.embedding) == 2 for r in vectors.records)
    marks = {replay._fingerprint(tmp_path / "toy", found, {}, {}) for found in (plain, vectors)}
    assert len(marks) == 2  # results of the one are not kept for the other


def test_a_missing_package_is_named_with_the_way_to_install_it(monkeypatch, tmp_path):
    def missing(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", missing)
    with pytest.raises(TextModelError, match=r"sentence-transformers .*pip install 'envsched-jax\[text\]'"):
        text_vectors.load(tmp_path)


def test_mistakes_end_in_clear_errors(package, tmp_path):
    with pytest.raises(TextModelError, match="no such folder"):
        text_vectors.load(tmp_path / "nowhere")
    (tmp_path / "broken").mkdir()
    with pytest.raises(TextModelError, match="not a sentence-embedding model"):
        text_vectors.load(tmp_path / "broken")


@pytest.mark.parametrize("rows", [np.ones((3, 2)), np.ones(40), np.full((40, 2), np.nan)])
def test_a_model_must_give_one_finite_vector_per_record(data, rows):
    model = types.SimpleNamespace(encode=lambda texts, normalize_embeddings: rows)
    with pytest.raises(TextModelError, match="expected 40 finite vectors"):
        text_vectors.embed(data.records, model)
