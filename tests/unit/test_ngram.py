from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.config import EngineConfig
from paceline.engine.speculation import history
from paceline.engine.speculation.history import History
from paceline.engine.speculation.index import NgramIndex
from paceline.engine.speculation.load import load_proposer, parse_speculate
from paceline.engine.speculation.ngram import NgramProposer
from paceline.errors import ParameterError
from paceline.types import SamplingParams
from tests.unit.proposers import Eager
from tests.unit.scripted_backend import spelling_script
from tests.unit.scripted_engine import VOCAB, make_engine, make_request, run


def look_up(tokens: list[int], limit: int = 4) -> tuple[int, list[int]]:
    index = NgramIndex(len(tokens))
    index.extend(tokens)
    return index.look_up(tokens, limit)


def test_what_followed_the_last_time_is_copied() -> None:
    assert look_up([1, 2, 3, 4, 5, 6, 9, 2, 3]) == (2, [4, 5, 6, 9])


def test_the_longest_match_counts_and_of_equal_ones_the_latest() -> None:
    assert look_up([1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3], 1) == (3, [7])
    assert look_up([1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3], 1) == (3, [8])


def test_a_text_that_repeats_goes_on_repeating() -> None:
    assert look_up([5, 1, 2, 3, 1, 2, 3], 7) == (3, [1, 2, 3, 1, 2, 3, 1])
    assert look_up([4, 4, 4], 5) == (2, [4, 4, 4, 4, 4])


@pytest.mark.parametrize("tokens", [[], [1], [1, 2], [1, 2, 3, 4, 5], [3, 1, 2, 3]])
def test_without_a_match_of_two_tokens_there_is_no_guess(tokens: list[int]) -> None:
    assert look_up(tokens) == (0, [])


def longest_match(tokens: list[int]) -> int:
    end = len(tokens) - 1
    lengths = [0]
    for place in range(end):
        length = 0
        while length < min(15, place + 1) and tokens[place - length] == tokens[end - length]:
            length += 1
        lengths.append(length)
    return max(lengths)


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 40))
def test_a_text_in_pieces_is_indexed_like_the_whole(tokens: list[int], size: int) -> None:
    index = NgramIndex(4)
    for end in range(size, len(tokens), size):
        index.extend(tokens[:end])
    index.extend(tokens)
    found = index.look_up(tokens, 5)
    assert found == look_up(tokens, 5)
    # Few texts here have more than twelve places to compare.
    if 2 <= found[0] < longest_match(tokens):
        assert len(tokens) > 12


def test_memory_is_bounded_by_the_text() -> None:
    tokens = list(range(200_000))
    index = NgramIndex(len(tokens))
    index.extend(tokens)
    assert len(index._latest) == 2**16
    assert len(index._earlier) == len(tokens) - 1


def test_a_repetitive_text_takes_fewer_steps_and_is_the_same() -> None:
    tokens = [9, 10, 11, 12, 13, 14] * 6
    request = make_request(params=SamplingParams(temperature=0, max_tokens=len(tokens)))
    script = spelling_script(VOCAB, 3, tokens)
    [plain] = run(make_engine(script), request).values()
    engine = make_engine(script, proposer=NgramProposer(8), pace=Eager(8))
    [answer] = run(engine, request).values()
    assert answer.outcome() == plain.outcome()
    assert engine.stats().num_steps <= 8 + 4  # eight until a pair comes again, then nine a step


def test_an_index_goes_with_its_sequence() -> None:
    proposer = NgramProposer(8)
    engine = make_engine(proposer=proposer, pace=Eager())
    run(engine, make_request("a"), make_request("b"))
    assert not proposer._indexes


def test_a_spec_names_the_proposer_and_its_longest_draft() -> None:
    assert load_proposer(parse_speculate("off")) is None
    assert isinstance(load_proposer(parse_speculate("ngram")), NgramProposer)
    proposer = load_proposer(parse_speculate("ngram:max=3"))
    assert isinstance(proposer, NgramProposer)
    engine = make_engine(
        spelling_script(VOCAB, 3, [9] * 20), proposer=proposer, pace=(pace := Eager(99))
    )
    run(engine, make_request(params=SamplingParams(temperature=0, max_tokens=20)))
    assert max(step["num_drafted"] for step in pace.seen) == 3


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("medusa", "choose one of off, ngram"),
        ("", "names nothing"),
        ("ngram:k=4", "no option 'k': known is max"),
        ("ngram:max=0", "max=0: it must be an integer from 1 to 63"),
        ("ngram:max=64", "max=64"),
        ("ngram:max=two", "max=two"),
        ("off:max=2", "no option 'max': it has none"),
        ("ngram:max", "not of the form key=value"),
    ],
)
def test_nonsense_is_refused_by_name(spec: str, message: str) -> None:
    with pytest.raises(ParameterError, match=message) as error:
        parse_speculate(spec)
    assert error.value.param == "speculate"


def test_the_config_takes_a_spec_and_nothing_else() -> None:
    assert EngineConfig(speculate="ngram:max=4").speculate == "ngram:max=4"
    with pytest.raises(ParameterError, match="speculate"):
        EngineConfig(speculate=8)  # type: ignore[arg-type]


def test_what_followed_in_an_earlier_answer_is_copied() -> None:
    answers = History()
    answers.add("", [1, 2, 3, 4])
    answers.add("", [9, 2, 3, 5])
    assert answers.look_up("", [7, 1, 2, 3], 4) == (3, [4])
    assert answers.look_up("", [8, 2, 3], 4) == (2, [5])
    assert answers.look_up("", [3, 4], 4) == (0, [])  # nothing of the next answer follows
    assert answers.look_up("", [4, 9], 4) == (0, [])  # and nothing begins in the one before


def test_of_equal_matches_the_texts_own_counts_and_a_longer_one_before_it() -> None:
    proposer = NgramProposer(4)

    def guesses(number: int, *tokens: int) -> tuple[list[int], list[int]]:
        seq: Any = SimpleNamespace(
            number=number, token_ids=list(tokens), num_prompt=0,
            request=SimpleNamespace(cache_salt=""),
        )  # fmt: skip
        forecast = proposer.forecast(seq, 9, 0.0)
        proposer.release(seq)
        return list(forecast.tokens), list(forecast.kinds)

    assert guesses(1, 5, 1, 2, 7) == ([], [])  # is an earlier answer for the next ones
    assert guesses(2, 6, 1, 2, 8, 9, 1, 2) == ([8, 9, 1, 2], [2, 3, 4, 5])
    assert guesses(3, 6, 1, 2, 8, 5, 1, 2) == ([7], [16 + 3])


def test_another_tenants_answers_are_no_guesses() -> None:
    answers = History()
    answers.add("one", [1, 2, 3, 4])
    assert answers.look_up("one", [1, 2, 3], 4) == (3, [4])
    assert answers.look_up("two", [1, 2, 3], 4) == answers.look_up("", [1, 2, 3], 4) == (0, [])


def test_the_latest_answers_are_kept_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "_MAX_TOKENS", 64)
    monkeypatch.setattr(history, "_MAX_TENANTS", 3)
    answers = History()
    for i in range(40):
        answers.add("a", [i, 100 + i, 200 + i, 7])
        assert answers.look_up("a", [i, 100 + i], 1) == (0, [])  # two tokens are no text yet
        assert answers.look_up("a", [5, i, 100 + i], 1) == (2, [200 + i])
        assert len(answers._tenants["a"]._tokens) <= 64
    assert answers.look_up("a", [5, 2, 102], 1) == (0, [])
    answers.add("a", list(range(500)))
    assert len(answers._tenants["a"]._tokens) <= 64
    for tenant in "bcd":
        answers.add(tenant, [1, 2, 3])
    assert list(answers._tenants) == ["b", "c", "d"]


def test_an_answer_written_before_is_drafted_and_gives_the_same_text() -> None:
    """The second time the answer is known; under another salt it is not."""
    engine = make_engine(proposer=NgramProposer(8), pace=Eager(8), num_blocks=128)
    params = SamplingParams(temperature=0, max_tokens=60)

    def accepted(request_id: str, prompt: tuple[int, ...], salt: str) -> int:
        before = engine.stats().speculation.copy()
        [answer] = run(engine, make_request(request_id, prompt, params, cache_salt=salt)).values()
        plain = run(make_engine(num_blocks=128), make_request(request_id, prompt, params))
        assert answer.outcome() == plain[request_id, 0].outcome()
        return engine.stats().speculation.num_accepted - before.num_accepted

    prompt = tuple(range(1, 20))
    first = accepted("a", prompt, "")
    assert accepted("b", prompt, "") > first + 30
    assert accepted("c", prompt, "another") == first
