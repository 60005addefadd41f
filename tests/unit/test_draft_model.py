"""A draft model behind the engine, both scripted: what it reads, keeps and guesses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from paceline.backends.base import F32, StepLimits
from paceline.engine.block_pool import BlockPool
from paceline.engine.engine import Engine
from paceline.engine.sampler import Sampler
from paceline.engine.speculation.draft_model import DraftModel, _window_start
from paceline.engine.speculation.either import Either
from paceline.engine.speculation.load import NUM_VOCAB, parse_speculate
from paceline.engine.speculation.ngram import NgramProposer
from paceline.engine.speculation.shadows import Shadows
from paceline.engine.speculation.translation import ByText, SameTokens, Translation
from paceline.engine.step import StepBuilder
from paceline.errors import ParameterError
from paceline.text.tokenizer import Tokenizer, build_tokenizer
from paceline.types import SamplingParams
from tests.tiny import TinyTokenizer
from tests.tokenizers import bpe_data
from tests.unit.proposers import Eager
from tests.unit.scripted_backend import Script, ScriptedBackend, fixed_script, hashed_script
from tests.unit.scripted_engine import BLOCK_SIZE, LETTERS, VOCAB, make_engine, make_request, run

TARGET = hashed_script(VOCAB)
GREEDY = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)


class Drafting:
    """An engine whose draft model follows `script`; `steps` are the tokens of its steps."""

    def __init__(
        self,
        script: Script = TARGET,
        *,
        target: Script = TARGET,
        num_blocks: int = 64,
        window: int = 256,
        most: int = 4,
        num_ids: int = VOCAB,
        translation: Translation | None = None,
        min_confidence: float = 0.0,
        **options: Any,
    ) -> None:
        self.backend = ScriptedBackend(script, num_blocks=num_blocks, block_size=BLOCK_SIZE)
        limits = StepLimits(
            max_tokens=64, max_logit_rows=8, max_seqs=8, max_blocks_per_seq=num_blocks
        )
        self.shadows = Shadows(
            self.backend, pool=BlockPool(num_blocks), builder=StepBuilder(limits, BLOCK_SIZE),
            block_size=BLOCK_SIZE, max_tokens=64, clock_s=_Clock(),
        )  # fmt: skip
        self.shadows.cost.observe(1, 1.0)
        self.shadows.cost.observe(101, 11.0)  # a tenth of a second a token more
        self.model = DraftModel(
            self.shadows, translation or SameTokens(), Sampler(num_ids, (), LETTERS),
            eos_ids=frozenset(), max_tokens=8, window=window, max_len=num_blocks * BLOCK_SIZE,
            min_confidence=min_confidence,
        )  # fmt: skip
        self.engine: Engine = make_engine(
            target, proposer=self.model, pace=Eager(most), num_blocks=128, **options
        )

    @property
    def steps(self) -> list[int]:
        return self.backend.steps

    @property
    def accepted(self) -> tuple[int, int]:
        stats = self.engine.stats().speculation
        assert stats is not None
        return stats.num_accepted, stats.num_drafted


class _Clock:
    """Every look at it is a tenth of a second after the one before."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        self.now_s += 0.1
        return self.now_s


def spoilt(context: list[int]) -> F32:
    """The target's logits, of the next token over where the context sums to a multiple of 3."""
    logits = TARGET(context)
    return np.roll(logits, 1) if sum(context) % 3 == 0 else logits


def num_right(prompt: tuple[int, ...], num_tokens: int, most: int) -> int:
    """Return how many guesses of `spoilt` a run accepts, worked out without an engine."""
    text, right = [*prompt], 0
    text.append(int(TARGET(text).argmax()))
    end = len(prompt) + num_tokens
    while len(text) < end:
        guesses: list[int] = []
        for _ in range(min(most, end - len(text) - 1)):
            guesses.append(int(spoilt(text + guesses).argmax()))
        for guess in guesses:
            if guess != int(TARGET(text).argmax()):
                break
            text.append(guess)
            right += 1
        text.append(int(TARGET(text).argmax()))
    return right


def test_a_draft_model_equal_to_the_target_is_always_right() -> None:
    """The scripted backend sees every stale or wrong KV slot, and would guess otherwise."""
    drafting = Drafting()
    requests = [make_request(str(i), tuple(range(1 + i, 30 + i)), GREEDY) for i in range(4)]
    answers = run(drafting.engine, *requests)
    plain = run(make_engine(TARGET, num_blocks=128), *requests)
    assert {k: a.outcome() for k, a in answers.items()} == {
        k: a.outcome() for k, a in plain.items()
    }
    num_accepted, num_drafted = drafting.accepted
    assert num_accepted == num_drafted > 100
    drafting.shadows.check_integrity()
    assert not drafting.shadows.num_live_blocks


@pytest.mark.parametrize("most", [1, 3, 7])
def test_after_wrong_guesses_it_goes_on_from_the_text(most: int) -> None:
    drafting = Drafting(spoilt, most=most)
    prompt = tuple(range(1, 30))
    run(drafting.engine, make_request(prompt=prompt, params=GREEDY))
    assert drafting.accepted[0] == num_right(prompt, 40, most)
    assert drafting.accepted[0] < drafting.accepted[1]


def test_a_chain_ends_where_the_model_is_unsure() -> None:
    """One that is sure three times of four: 0.95 for each guess, 0.5 for every fourth."""

    def script(context: list[int]) -> F32:
        sure = 0.5 if len(context) % 4 == 0 else 0.95
        logits = np.full(VOCAB, np.log((1 - sure) / (VOCAB - 1)), np.float32)
        logits[int(TARGET(context).argmax())] = np.log(sure)
        return logits

    free, bound = Drafting(script, most=8), Drafting(script, most=8, min_confidence=0.6)
    for drafting in (free, bound):
        run(drafting.engine, make_request(prompt=tuple(range(1, 30)), params=GREEDY))
        assert drafting.accepted[0] == drafting.accepted[1]
    longest = [
        sum(count > 0 for count in drafting.engine.stats().speculation.drafted_at)
        for drafting in (free, bound)
    ]
    assert longest == [8, 3]


def test_a_draft_model_that_knows_some_tokens_only_keeps_the_targets_distribution() -> None:
    """SPC-04 with a short head: token 3 is drawn as often as ever, and never guessed."""
    shares = np.array([0.6, 0.3, 0.1])
    target = np.full(VOCAB, -100.0, np.float32)
    target[1:4] = np.log(shares)

    knows_three = fixed_script(np.log([0.1, 0.3, 0.6]))  # ids 0, 1 and 2
    drafting = Drafting(knows_three, num_ids=3, target=fixed_script(target), max_num_seqs=32)
    plain = make_engine(fixed_script(target), max_num_seqs=32, num_blocks=128)
    requests = [
        make_request(str(seed), params=SamplingParams(temperature=1, seed=seed, max_tokens=4))
        for seed in range(600)
    ]
    answers = run(drafting.engine, *requests)
    assert answers.keys() == (expected := run(plain, *requests)).keys()
    assert all(answers[key].token_ids == expected[key].token_ids for key in answers)
    texts = [answer.token_ids for answer in answers.values()]
    for position in range(4):
        counts = np.bincount([text[position] for text in texts], minlength=4)[1:]
        chi_square = ((counts - 600 * shares) ** 2 / (600 * shares)).sum()
        assert chi_square < 13.8  # p = 0.001 with two degrees of freedom
    num_accepted, num_drafted = drafting.accepted
    assert 0 < num_accepted < num_drafted


def test_a_draft_model_whose_logits_are_broken_guesses_nothing_there() -> None:
    def script(context: list[int]) -> F32:
        logits = TARGET(context)
        return logits * np.float32(np.nan) if len(context) % 3 == 0 else logits

    drafting = Drafting(script)
    request = make_request("a", tuple(range(1, 30)), GREEDY)
    answers = run(drafting.engine, request)
    assert answers["a", 0].token_ids == run(make_engine(TARGET), request)["a", 0].token_ids
    num_accepted, num_drafted = drafting.accepted
    assert num_accepted == num_drafted > 10
    drafting.shadows.check_integrity()


def test_one_step_guesses_for_all_sequences() -> None:
    drafting = Drafting(most=2)
    requests = [make_request(str(i), tuple(range(1 + i, 10 + i)), GREEDY) for i in range(4)]
    run(drafting.engine, *requests)
    # Each draft is two steps; the first also reads the last right guess and the token after it.
    assert drafting.steps.count(8) > 5
    assert drafting.steps.count(4) > 5
    assert drafting.steps.count(1) == drafting.steps.count(2) == 0


def test_a_new_text_is_read_once_and_a_known_beginning_never_again() -> None:
    drafting = Drafting()
    prompt = tuple(i % VOCAB for i in range(1, 120))
    run(drafting.engine, make_request("a", prompt, GREEDY))
    first = sum(drafting.steps)
    assert first < len(prompt) + 2 * 40
    run(drafting.engine, make_request("b", prompt, GREEDY))
    assert sum(drafting.steps) - first < 60


def test_what_another_tenant_had_read_is_read_again() -> None:
    drafting = Drafting()
    prompt = tuple(i % VOCAB for i in range(1, 120))
    run(drafting.engine, make_request("a", prompt, GREEDY, cache_salt="one"))
    first = sum(drafting.steps)
    run(drafting.engine, make_request("b", prompt, GREEDY, cache_salt="two"))
    assert sum(drafting.steps) == 2 * first


def test_of_a_long_text_it_reads_the_last_window() -> None:
    drafting = Drafting(window=48)
    prompt = tuple(i % VOCAB for i in range(1, 240))
    run(drafting.engine, make_request("a", prompt, GREEDY))
    assert 24 <= drafting.steps[0] < 48
    assert max(drafting.steps[1:]) <= 2
    assert _window_start(48, 48) == 0
    starts = [_window_start(n, 48) for n in range(49, 400)]
    assert all(24 <= n - start < 48 for n, start in zip(range(49, 400), starts, strict=True))
    assert len(set(starts)) < 20


def test_it_reads_no_more_than_can_be_paid_for() -> None:
    drafting = Drafting(window=128)
    [seq] = sequences_of(drafting, tuple(i % VOCAB for i in range(1, 120)))
    whole = drafting.model.forecast(seq, 4, math.inf)
    some = drafting.model.forecast(seq, 4, 6.0)
    none = drafting.model.forecast(seq, 4, 1.0)
    assert whole.setup_s == pytest.approx(0.1 * 118, rel=0.01)
    assert 3.0 < some.setup_s <= 6.0
    assert len(some.kinds) == 4
    assert not none.kinds


def test_costs_that_kept_it_from_running_are_doubted_until_it_runs() -> None:
    drafting = Drafting(window=128)
    [seq] = sequences_of(drafting, tuple(i % VOCAB for i in range(1, 120)))
    assert not drafting.model.forecast(seq, 4, 1.0).kinds
    assert drafting.model.round_s(1) == pytest.approx(1.0)
    for _ in range(300):
        drafting.model.forecast(seq, 4, 1.0)
    assert drafting.model.round_s(1) == pytest.approx(0.2)
    forecast = drafting.model.forecast(seq, 4, 1.0)
    assert forecast.kinds
    drafting.model.propose([(seq, forecast, 2)])
    assert drafting.model.round_s(1) > 0.5


def test_a_pool_too_small_for_all_drops_those_drafted_for_longest_ago() -> None:
    drafting = Drafting(num_blocks=7)
    requests = [make_request(str(i), tuple(range(1 + i, 30 + i)), GREEDY) for i in range(4)]
    answers = run(drafting.engine, *requests)
    plain = run(make_engine(TARGET, num_blocks=128), *requests)
    assert {k: a.token_ids for k, a in answers.items()} == {
        k: a.token_ids for k, a in plain.items()
    }
    num_accepted, num_drafted = drafting.accepted
    assert num_accepted == num_drafted > 10
    drafting.shadows.check_integrity()


def test_a_text_longer_than_its_context_goes_on_with_a_new_window() -> None:
    drafting = Drafting(num_blocks=4, window=24)  # 64 tokens
    params = SamplingParams(temperature=0, max_tokens=150, ignore_eos=True)
    run(drafting.engine, make_request("a", tuple(range(1, 20)), params))
    assert drafting.accepted[1] > 100
    drafting.shadows.check_integrity()


def test_the_way_that_promises_more_is_taken_for_each_sequence() -> None:
    """The pace of this test takes turns: both ways guess, and each learns of its own guesses."""
    drafting = Drafting()
    engine = make_engine(
        TARGET, proposer=Either(NgramProposer(4), drafting.model), pace=Eager(4), num_blocks=128
    )
    prompt = (1, 2, 3, 4) * 6
    answers = run(engine, make_request("a", prompt, GREEDY), make_request("b", prompt, GREEDY))
    plain = run(make_engine(TARGET, num_blocks=128), make_request("a", prompt, GREEDY))
    assert answers["a", 0].token_ids == answers["b", 0].token_ids == plain["a", 0].token_ids
    stats = engine.stats().speculation
    assert stats is not None
    assert stats.num_accepted > 20
    assert drafting.shadows.num_read > 24


def sequences_of(drafting: Drafting, prompt: tuple[int, ...]) -> list[Any]:
    drafting.engine.submit(make_request("x", prompt, GREEDY), lambda delta: None)
    return drafting.engine.running("x")


# ---- tokenizers ----


def gguf_tokenizer(tiny: TinyTokenizer) -> Tokenizer:
    num_normal = len(tiny.tokens) - len(tiny.control)
    return build_tokenizer(
        bpe_data(
            tokens=tiny.tokens, token_types=[1] * num_normal + [3] * len(tiny.control),
            merges=[f"{a} {b}" for a, b in tiny.merges], bos_id=tiny.bos_id, eos_id=tiny.eos_id,
            eot_id=tiny.eot_id, add_bos=False,
        )
    )  # fmt: skip


def test_text_goes_to_other_tokens_and_guesses_come_back() -> None:
    target = gguf_tokenizer(TinyTokenizer(words=("hello", "Ġworld")))
    draft = gguf_tokenizer(TinyTokenizer(words=("he", "Ġwor", "ld")))
    words = ByText(target, draft)
    text = target.encode("say hello", add_special=False)
    assert draft.decode(words.to_draft(text, 0)) == "say hello"
    guessed = draft.encode(" world!", add_special=False)
    assert words.to_target(text, guessed) == target.encode(" world!", add_special=False)


def test_half_a_character_is_no_guess() -> None:
    target, draft = gguf_tokenizer(TinyTokenizer()), gguf_tokenizer(TinyTokenizer(words=("he",)))
    words = ByText(target, draft)
    text = target.encode("ab", add_special=False)
    euro = draft.encode("x€", add_special=False)
    assert words.to_target(text, euro[:2]) == target.encode("x", add_special=False)
    assert words.to_target([*text, 0xE2], euro) == []


def test_a_marker_is_the_other_models_marker() -> None:
    target, draft = gguf_tokenizer(TinyTokenizer()), gguf_tokenizer(TinyTokenizer(words=("he",)))
    words = ByText(target, draft)
    end = target.special_tokens["<|im_end|>"]
    assert words.to_draft([97, end], 0) == [97, draft.special_tokens["<|im_end|>"]]
    assert words.to_target([97], [draft.special_tokens["<|im_end|>"]]) == [end]


def test_the_same_tokens_are_seen_to_be_the_same() -> None:
    one, two = gguf_tokenizer(TinyTokenizer()), gguf_tokenizer(TinyTokenizer())
    assert one.has_ids_of(two)
    assert not one.has_ids_of(gguf_tokenizer(TinyTokenizer(words=("he",))))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("draft", "name a small model, as in draft:model="),
        ("draft+ngram:max=3", "name a small model"),
        ("draft:model=a,k=3", "no option 'k': known is model, max, window, vocab"),
        ("draft:model=a,vocab=some", "vocab=some: it must be all or an integer from 1"),
        ("draft:model=a,vocab=0", "vocab=0: it must be all or an integer from 1"),
        ("ngram:vocab=all", "no option 'vocab'"),
        ("draft:model=a,window=0", "window=0: it must be an integer from 1"),
        ("ngram:model=a", "no option 'model'"),
    ],
)
def test_nonsense_is_refused_by_name(spec: str, message: str) -> None:
    with pytest.raises(ParameterError, match=message) as error:
        parse_speculate(spec)
    assert error.value.param == "speculate"


def test_how_many_tokens_a_draft_model_knows_is_said_in_the_spec() -> None:
    assert parse_speculate("draft:model=a").num_vocab == NUM_VOCAB
    assert parse_speculate("draft+ngram:model=a,vocab=512").num_vocab == 512
    assert parse_speculate("draft:model=a,vocab=all").num_vocab is None
