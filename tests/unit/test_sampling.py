from __future__ import annotations

import numpy as np
import pytest

from paceline.engine.sampler import Sampler, choice_seed, describe_failure, mix, token_logprob
from paceline.errors import ParameterError
from paceline.types import SamplingParams
from tests.unit.piece_tokenizer import PieceTokenizer

PIECES = PieceTokenizer(["<end>", "a", "b", " a", "c"])


def choose(params: SamplingParams, logits: list[float], output: tuple[int, ...] = ()) -> int:
    sampler = Sampler(5, [0], PIECES)
    state = sampler.state(
        params, 0, (4, 4), ends=params.stop_token_ids, bad_words=sampler.bad_words(params)
    )
    for token in output:
        state.commit(token)
    [token], _ = sampler.sample(np.array([logits], np.float32), [0], [state])
    return token


def test_choice_zero_keeps_the_seed_and_the_others_get_their_own() -> None:
    assert choice_seed(17, 0) == 17
    seeds = {choice_seed(seed, index) for seed in range(50) for index in range(20)}
    assert len(seeds) == 1000


@pytest.mark.parametrize("seed", [0, -1, 2**63 - 1, -(2**63)])
def test_mixed_seeds_are_valid_seeds(seed: int) -> None:
    for number in range(100):
        SamplingParams(seed=mix(seed, number))


def test_a_bad_word_is_forbidden_with_and_without_a_space() -> None:
    params = SamplingParams(temperature=0, bad_words=("a",))
    assert choose(params, [0, 5, 1, 4, 0]) == 2


def test_a_bad_word_of_two_tokens_needs_its_beginning() -> None:
    params = SamplingParams(temperature=0, bad_words=("ab",))
    assert choose(params, [0, 1, 5, 0, 0]) == 2
    assert choose(params, [0, 1, 5, 0, 0], output=(1,)) == 1
    assert choose(params, [0, 1, 5, 0, 0], output=(3,)) == 1
    assert choose(params, [0, 1, 5, 0, 0], output=(1, 4)) == 2


def test_min_tokens_forbids_end_and_stop_tokens() -> None:
    params = SamplingParams(temperature=0, min_tokens=2, stop_token_ids=(1,))
    assert choose(params, [9, 8, 1, 0, 0], output=(4,)) == 2
    assert choose(params, [9, 8, 1, 0, 0], output=(4, 4)) == 0


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(top_k=10**15, seed=1),
        SamplingParams(temperature=1e300, seed=1),
        SamplingParams(min_tokens=10**15),
        SamplingParams(repetition_penalty=1e300),
        SamplingParams(repetition_penalty=1e-300),
    ],
)
def test_absurd_but_valid_values_choose_a_token(params: SamplingParams) -> None:
    for logits in ([0.0] * 5, [3.0, -2.0, 0.0, 1.0, 50.0]):
        assert choose(params, logits, output=(4, 0)) >= 0


def test_every_failure_has_its_own_words() -> None:
    assert "not finite" in describe_failure(-1)
    assert "forbidden" in describe_failure(-2)


def test_no_rows_are_no_choices() -> None:
    assert Sampler(5, [0], PIECES).sample(np.zeros((0, 1), np.float32), [], []) == ([], [])


def test_log_probabilities_carry_rank_and_alternatives() -> None:
    entry = token_logprob(3, (-1.5, 2, [(1, -0.5), (3, -1.5)]))
    assert (entry.token_id, entry.logprob, entry.rank) == (3, -1.5, 2)
    assert entry.top == ((1, -0.5), (3, -1.5))


def test_a_number_of_tokens_beyond_all_counting_is_refused() -> None:
    with pytest.raises(ParameterError, match="max_tokens"):
        SamplingParams(max_tokens=10**400)
    assert SamplingParams(max_tokens=2**53).max_tokens == 2**53


def test_bad_words_are_bounded_in_all() -> None:
    SamplingParams(bad_words=("x" * 8192,) * 2)
    with pytest.raises(ParameterError, match="16385 characters in all") as caught:
        SamplingParams(bad_words=("x" * 8192, "y" * 8193))
    assert caught.value.param == "bad_words"
