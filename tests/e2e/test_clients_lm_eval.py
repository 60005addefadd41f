"""lm-eval's local-completions: what it scores is what the reference computes."""

from __future__ import annotations

import numpy as np
import pytest

from paceline.weights.checkpoint import open_checkpoint
from tests.conftest import reference_logits
from tests.e2e.live import LiveServer
from tests.tiny import random_model, write_hf

# What these packages warn of is theirs.
pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("default")]
# The last fills the context but for the token that lm-eval asks for.
PAIRS = [("abc", "def"), ("the quick brown", " fox jumps"), ("0", "1"), ("x" * 89, "y" * 38)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    model = random_model("llama", seed=5, max_position_embeddings=128)
    return write_hf(model, tmp_path_factory.mktemp("lm-eval") / "random")


@pytest.fixture
def evaluated(folder):
    """Return lm-eval's model, which asks a server of `folder` with token ids."""
    completions = pytest.importorskip(
        "lm_eval.models.openai_completions", reason="pip install '.[clients-heavy]'"
    )
    with LiveServer(folder, kv_memory_bytes=8 * 2**20, num_threads=1, kv_dtype="f32") as server:
        yield completions.LocalCompletionsAPI(
            base_url=f"http://127.0.0.1:{server.port}/v1/completions", model=server.name,
            tokenizer=str(folder), tokenizer_backend="huggingface", max_length=128,
            num_concurrent=1, batch_size=2,
        )  # fmt: skip


def scored(folder, before: list[int], ids: list[int]) -> tuple[float, bool]:
    """Return the log-likelihood of `ids` after those `before`, and whether all are greedy."""
    logits = reference_logits(open_checkpoint(folder), ids).astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    places = range(len(before), len(ids))
    is_greedy = all(logprobs[i - 1].argmax() == ids[i] for i in places)
    return sum(logprobs[i - 1][ids[i]] for i in places), is_greedy


def test_likelihoods_are_those_of_the_reference(folder, evaluated):
    from lm_eval.api.instance import Instance

    asked = [Instance("loglikelihood", doc={}, arguments=pair, idx=0) for pair in PAIRS]
    for pair, (logprob, is_greedy) in zip(PAIRS, evaluated.loglikelihood(asked), strict=True):
        before, ids = evaluated.tok_encode(pair[0]), evaluated.tok_encode("".join(pair))
        wanted, is_really_greedy = scored(folder, before, ids)
        assert logprob == pytest.approx(wanted, abs=1e-2)
        assert is_greedy == is_really_greedy


def test_generations_end_where_they_are_told(evaluated):
    from lm_eval.api.instance import Instance

    options = {"until": ["\n\n"], "max_gen_toks": 8, "do_sample": False}
    asked = [Instance("generate_until", doc={}, arguments=("abc", options), idx=0)]
    [text] = evaluated.generate_until(asked)
    assert isinstance(text, str)
