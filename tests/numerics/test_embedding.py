"""Vectors of texts: against transformers and the reference, and law 1 for texts side by side."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from paceline.config import EngineConfig
from paceline.embedding.build import EmbeddingModel, load_embedding_model
from paceline.embedding.embedder import MAX_TEXTS
from paceline.errors import ParameterError
from tests.tiny import random_model, write_hf
from tests.tiny_bert import WORDS, write_bert

LENGTHS = (1, 2, 3, 15, 16, 17, 31, 32, 33, 49, 50)


def load(
    path: Path, *, pooling: str | None = None, weights: str = "file", **config
) -> EmbeddingModel:
    return load_embedding_model(
        str(path), EngineConfig(**config), path=path, pooling=pooling, weights=weights
    )


def texts(*lengths: int, seed: int = 0, size: int = len(WORDS)) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, size, n).tolist() for n in lengths]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_bert(tmp_path_factory.mktemp("bert"))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_hf(random_model("llama"), tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("pooling", ["mean", "last", "first"])
@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.filterwarnings("default")  # transformers' own
def test_an_encoders_vectors_equal_those_of_transformers(
    bert: Path, pooling: str, backend: str
) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModel.from_pretrained(bert, attn_implementation="eager").eval()
    batch = texts(*LENGTHS)
    got = load(bert, pooling=pooling, backend=backend).open().embed(batch)
    for ids, vector in zip(batch, got, strict=True):
        with torch.no_grad():
            hidden = model(torch.tensor([ids])).last_hidden_state[0].numpy()
        want = {"mean": hidden.mean(0), "last": hidden[-1], "first": hidden[0]}[pooling]
        np.testing.assert_allclose(vector, want / np.linalg.norm(want), atol=2e-6)


@pytest.mark.parametrize("pooling", ["mean", "last", "first"])
@pytest.mark.parametrize("weights", ["file", "q8_0"])
def test_native_vectors_of_an_encoder_are_near_the_references(
    bert: Path, pooling: str, weights: str
) -> None:
    batch = texts(*LENGTHS)
    native, reference = (
        load(bert, pooling=pooling, weights=weights, backend=backend).open().embed(batch)
        for backend in ("native", "reference")
    )
    # With q8_0 the native backend rounds what linears read to int8, too.
    cosines = (native * reference).sum(axis=1)
    assert cosines.min() > (1 - 1e-6 if weights == "file" else 0.999)


@pytest.mark.parametrize(
    ("name", "pooling"),
    [("bert", "mean"), ("bert", "last"), ("bert", "first"), ("llama", "mean"), ("llama", "last")],
)
@pytest.mark.parametrize("weights", ["file", "q8_0"])
def test_a_texts_vector_is_the_same_bits_alone_and_among_others(
    name: str, pooling: str, weights: str, request: pytest.FixtureRequest
) -> None:
    path = request.getfixturevalue(name)
    rng = np.random.default_rng(3)
    batch = texts(*LENGTHS, *rng.integers(1, 50, 2 * MAX_TEXTS).tolist(), seed=4)
    alone = load(path, pooling=pooling, weights=weights, num_threads=1).open()
    together = load(path, pooling=pooling, weights=weights, num_threads=2).open()
    one_by_one = np.concatenate([alone.embed([ids]) for ids in batch])
    order = rng.permutation(len(batch))
    shuffled = together.embed([batch[i] for i in order])
    np.testing.assert_array_equal(shuffled.view(np.uint32), one_by_one[order].view(np.uint32))
    assert len(np.unique(one_by_one, axis=0)) > len(batch) / 2


def test_a_long_text_of_a_decoder_is_embedded_in_chunks(llama: Path) -> None:
    (long,) = texts(300, size=200)
    whole, in_chunks = (
        load(llama, max_batched_tokens=n).open().embed([[5, 6], long, [7]]) for n in (512, 64)
    )
    np.testing.assert_allclose(in_chunks, whole, atol=1e-6)
    np.testing.assert_array_equal(in_chunks[[0, 2]], whole[[0, 2]])


def test_a_decoders_vector_is_made_of_its_normed_hidden_states(llama: Path) -> None:
    """Against the reference, whose plan ends before the head in the same way as the native one."""
    batch = texts(1, 5, 40, size=200)
    native, reference = (
        load(llama, pooling="last", backend=backend, kv_dtype="f32").open().embed(batch)
        for backend in ("native", "reference")
    )
    np.testing.assert_allclose(native, reference, atol=2e-6)


def test_every_token_of_an_encoder_sees_the_last_one(bert: Path) -> None:
    first = load(bert, pooling="first").open()
    a, b = first.embed([[5, 6, 7, 8], [5, 6, 7, 9]])
    assert np.abs(a - b).max() > 1e-3


def test_a_model_saved_under_its_head_has_the_same_vectors(bert: Path, tmp_path: Path) -> None:
    headed = write_bert(tmp_path / "headed", prefix="bert.")
    batch = texts(*LENGTHS)
    np.testing.assert_array_equal(load(headed).open().embed(batch), load(bert).open().embed(batch))


def test_a_decoders_first_token_is_no_vector(llama: Path) -> None:
    with pytest.raises(ParameterError, match="first token sees no other: choose mean or last"):
        load(llama, pooling="first")
