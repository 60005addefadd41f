"""The native sampler against a plain definition in NumPy."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline import _native

MASK = 2**64 - 1
F64 = npt.NDArray[np.float64]


@dataclass
class Options:
    """The arguments of the native state, all off."""

    seed: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    bias: list[tuple[int, float]] = field(default_factory=list)
    bad_words: list[list[int]] = field(default_factory=list)
    end_ids: list[int] = field(default_factory=list)
    min_tokens: int = 0
    num_logprobs: int = -1
    prompt: list[int] = field(default_factory=list)

    def state(self, output: tuple[int, ...] = ()) -> Any:
        state = _native.SamplerState(**vars(self))
        for token in output:
            state.commit(token)
        return state


def mix(z: int) -> int:
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & MASK
    return z ^ (z >> 31)


def uniform(seed: int, num_output: int) -> float:
    golden = 0x9E3779B97F4A7C15
    return (mix((mix(seed + golden & MASK) + (num_output + 1) * golden) & MASK) >> 11) * 2.0**-53


def processed(logits: F64, o: Options, output: tuple[int, ...]) -> F64:
    """Bias, then min_tokens, bad words, repetition, frequency and presence."""
    x = logits.copy()
    for token, bias in o.bias:
        x[token] += bias
    if len(output) < o.min_tokens:
        x[o.end_ids] = -np.inf
    for word in o.bad_words:
        if tuple(word[:-1]) == output[len(output) - len(word) + 1 :]:
            x[word[-1]] = -np.inf
    for token in {*o.prompt, *output} if o.repetition != 1 else set():
        x[token] = x[token] / o.repetition if x[token] > 0 else x[token] * o.repetition
    for token in set(output):
        x[token] -= o.frequency * output.count(token) + o.presence
    return x


def kept(x: F64, o: Options) -> list[int]:
    """Ids that may be drawn: top_k, top_p, min_p, typical_p, each on what the last one left."""
    weights = np.exp((x - x.max()) / o.temperature)
    order = [i for i in np.lexsort((np.arange(len(x)), -x)).tolist() if weights[i] > 0]
    if o.top_k:
        order = order[: o.top_k]
    if o.top_p < 1:
        mass = np.cumsum(weights[order])
        order = order[: int(np.searchsorted(mass, o.top_p * mass[-1])) + 1]
    order = [i for i in order if weights[i] >= o.min_p]
    if o.typical_p < 1:
        p = weights[order] / weights[order].sum()
        distance = np.abs(-np.log(p) + (p * np.log(p)).sum())
        rank = np.argsort(distance, kind="stable")
        mass = np.cumsum(p[rank])
        order = [order[i] for i in rank[: int(np.searchsorted(mass, o.typical_p)) + 1]]
    return sorted(order)


def defined_choice(logits: F64, o: Options, output: tuple[int, ...]) -> tuple[int, bool]:
    """Return the chosen id, and whether float rounding could have decided otherwise."""
    x = processed(logits, o, output)
    if o.temperature < 1e-5 or o.top_k == 1 or o.min_p == 1:
        best = int(np.argmax(x))
        second = np.max(np.delete(x, best))
        return best, x[best] != second and abs(x[best] - second) < 1e-4
    ids = kept(x, o)
    nudged = [
        kept(x, Options(**{**vars(o), name: min(max(getattr(o, name) * factor, 1e-9), 1.0)}))
        for name in ("top_p", "min_p", "typical_p")
        for factor in (1 - 1e-5, 1 + 1e-5)
        if 0 < getattr(o, name) < 1
    ]
    weights = np.exp((x[ids] - x.max()) / o.temperature)
    mass = np.cumsum(weights) / weights.sum()
    u = uniform(o.seed, len(output))
    is_near = bool(np.min(np.abs(mass[:-1] - u), initial=1) < 1e-5) or any(n != ids for n in nudged)
    return ids[int(np.searchsorted(mass, u, side="right").clip(max=len(ids) - 1))], is_near


def native_choice(logits: F64, o: Options, output: tuple[int, ...] = ()) -> int:
    rows = logits.astype(np.float32)[None]
    ids, _ = _native.Sampler(rows.shape[1]).sample(rows, [0], [o.state(output)])
    return int(ids[0])


def random_logits(seed: int, vocab: int, scale: float = 3.0) -> F64:
    rows = (np.random.default_rng(seed).normal(size=vocab) * scale).astype(np.float32)
    return rows.astype(np.float64)


@st.composite
def cases(draw: st.DrawFn) -> tuple[F64, Options, tuple[int, ...]]:
    vocab = draw(st.sampled_from([2, 5, 63, 64, 65, 300, 1025]))
    token = st.integers(0, vocab - 1)
    chance = st.sampled_from
    options = Options(
        seed=draw(st.integers(0, MASK)),
        temperature=draw(chance([0.0, 0.3, 1.0, 1.7])),
        top_k=draw(chance([0, 0, 1, 2, 40, 2000])),
        top_p=draw(chance([1.0, 1.0, 0.9, 0.5, 1e-6])),
        min_p=draw(chance([0.0, 0.0, 0.05, 1.0])),
        typical_p=draw(chance([1.0, 1.0, 0.8, 0.2])),
        repetition=draw(chance([1.0, 1.3, 0.7])),
        presence=draw(chance([0.0, 1.5, -1.0])),
        frequency=draw(chance([0.0, 0.4, -0.3])),
        bias=list(
            draw(st.dictionaries(token, chance([-100.0, -2.0, 3.5, 100.0]), max_size=3)).items()
        ),
        bad_words=draw(st.lists(st.lists(token, min_size=1, max_size=3), max_size=2)),
        end_ids=draw(st.lists(token, max_size=1)),
        min_tokens=draw(chance([0, 0, 3])),
        prompt=draw(st.lists(token, max_size=6)),
    )
    logits = random_logits(draw(st.integers(0, 999)), vocab, draw(chance([0.0, 0.5, 4.0])))
    return logits, options, tuple(draw(st.lists(token, max_size=5)))


@settings(max_examples=150, deadline=None)
@given(cases())
def test_choice_is_the_defined_one(case: tuple[F64, Options, tuple[int, ...]]) -> None:
    logits, options, output = case
    if not np.isfinite(processed(logits, options, output)).any():
        assert native_choice(logits, options, output) == -2
        return
    expected, is_near = defined_choice(logits, options, output)
    if not is_near:
        assert native_choice(logits, options, output) == expected


@pytest.mark.parametrize("vocab", [1, 3, 64, 151, 49_152, 49_155])
def test_logprobs_are_the_log_softmax_of_the_raw_logits(vocab: int) -> None:
    logits = random_logits(7, vocab)
    exact = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
    options = Options(seed=3, bias=[(0, 5.0)], temperature=0.8, num_logprobs=5)
    sampler = _native.Sampler(vocab)
    [token], [(logprob, rank, top)] = sampler.sample(
        logits.astype(np.float32)[None], [0], [options.state()]
    )
    assert logprob == pytest.approx(exact[token], abs=2e-6)
    assert rank == 1 + (exact > exact[token]).sum()
    best = np.lexsort((np.arange(vocab), -exact))[:5]
    assert [i for i, _ in top] == best.tolist()
    assert [p for _, p in top] == pytest.approx(exact[best].tolist(), abs=2e-6)


def test_equal_logits_choose_and_rank_the_lowest_id_first() -> None:
    rows = np.full((1, 130), 2.0, np.float32)
    options = Options(temperature=0.0, num_logprobs=3)
    [token], [(_, rank, top)] = _native.Sampler(130).sample(rows, [0], [options.state()])
    assert (token, rank, [i for i, _ in top]) == (0, 1, [0, 1, 2])
    options = Options(temperature=0.0, bias=[(77, 1.0)], num_logprobs=0)
    [token], [(_, rank, _)] = _native.Sampler(130).sample(rows, [0], [options.state()])
    assert (token, rank) == (77, 78)


def test_a_row_is_chosen_the_same_in_any_batch() -> None:
    vocab = 517
    rows = np.stack([random_logits(i, vocab) for i in range(9)]).astype(np.float32)
    options = [
        Options(seed=i, temperature=0.9, top_p=[1.0, 0.8][i % 2], num_logprobs=2, bias=[(i, 2.0)])
        for i in range(9)
    ]
    sampler = _native.Sampler(vocab)
    alone = [sampler.sample(rows, [i], [options[i].state()]) for i in range(9)]
    order = [4, 0, 8, 8, 2, 1, 7, 3, 6, 5]
    ids, details = sampler.sample(rows, order, [options[i].state() for i in order])
    assert ids == [alone[i][0][0] for i in order]
    assert details == [alone[i][1][0] for i in order]


@pytest.mark.parametrize("position", [0, 3, 63, 64, 129])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_row_that_is_not_finite_is_reported_and_harms_no_other(
    position: int, value: float
) -> None:
    rows = np.stack([random_logits(i, 130) for i in range(3)]).astype(np.float32)
    states = [Options(temperature=t).state() for t in (0.0, 0.7, 0.7)]
    sampler = _native.Sampler(130)
    clean, _ = sampler.sample(rows, [0, 1, 2], states)
    rows[1, position] = value
    ids, _ = sampler.sample(rows, [0, 1, 2], states)
    assert ids == [clean[0], -1, clean[2]]


def test_padding_of_the_head_is_never_chosen_and_may_hold_anything() -> None:
    rows = np.zeros((1, 70), np.float32)
    rows[0, 60:] = np.nan
    rows[0, 61] = 100
    for options in (Options(temperature=0.0), Options(seed=5), Options(seed=6, top_p=0.99)):
        [token], _ = _native.Sampler(60).sample(rows, [0], [options.state()])
        assert 0 <= token < 60


def test_tiny_temperatures_are_greedy() -> None:
    logits = random_logits(1, 400)
    greedy = int(np.argmax(logits))
    for temperature in (0.0, 1e-30, 1e-12, 1e-6, 1e-4):
        for seed in range(20):
            assert native_choice(logits, Options(seed=seed, temperature=temperature)) == greedy
            options = Options(seed=seed, temperature=temperature, top_p=0.9)
            assert native_choice(logits, options) == greedy


@pytest.mark.parametrize("temperature", [1e30, 1e38, float("inf")])
def test_huge_temperatures_draw_any_allowed_token(temperature: float) -> None:
    logits = random_logits(1, 70)
    logits[5] = -np.inf
    options = {"temperature": temperature, "bad_words": [[0]]}
    seen = {native_choice(logits, Options(seed=seed, **options)) for seed in range(600)}
    assert len(seen) > 60
    assert not seen & {0, 5, -1, -2}
    assert max(seen) < 70


def test_off_values_of_top_k_reach_the_whole_vocabulary_and_one_token_when_it_is_one() -> None:
    logits = np.zeros(50)
    seen = {native_choice(logits, Options(seed=seed)) for seed in range(400)}
    assert len(seen) >= 40
    same = {native_choice(logits, Options(seed=seed, top_k=60)) for seed in range(400)}
    assert same == seen
    for options in ({"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}):
        assert len({native_choice(logits, Options(seed=s, **options)) for s in range(50)}) == 1


def test_draws_follow_the_distribution() -> None:
    logits = np.log(np.array([0.5, 0.3, 0.15, 0.05]))
    counts = np.zeros(4)
    for seed in range(4000):
        counts[native_choice(logits, Options(seed=seed), (1,) * (seed % 7))] += 1
    assert np.abs(counts / 4000 - [0.5, 0.3, 0.15, 0.05]).max() < 0.03


def test_the_stream_of_draws_is_a_function_of_seed_and_output_length() -> None:
    for seed in (0, 1, MASK):
        state = Options(seed=seed).state()
        for num_output in range(5):
            assert state.uniform() == uniform(seed, num_output)
            state.commit(3)


def test_rows_and_states_that_do_not_match_the_logits_are_refused() -> None:
    rows = np.zeros((2, 8), np.float32)
    sampler = _native.Sampler(8)
    with pytest.raises(IndexError):
        sampler.sample(rows, [2], [Options().state()])
    with pytest.raises(ValueError, match="length"):
        sampler.sample(rows, [0, 1], [Options().state()])
    with pytest.raises(ValueError, match="columns"):
        _native.Sampler(9).sample(rows, [0], [Options().state()])


# ---- masks ----


def bits(ids: set[int], num_words: int) -> npt.NDArray[np.uint32]:
    mask = np.zeros(num_words, np.uint32)
    for i in ids:
        mask[i // 32] |= np.uint32(1 << i % 32)
    return mask


@settings(max_examples=100, deadline=None)
@given(
    vocab=st.sampled_from([1, 5, 31, 32, 33, 64, 100, 257]),
    seed=st.integers(0, 2**32 - 1),
    share=st.sampled_from([0.02, 0.5, 1.0]),
    temperature=st.sampled_from([0.0, 1.0]),
    num_words_less=st.integers(0, 1),
)
def test_a_mask_is_the_same_as_logits_of_minus_infinity(
    vocab, seed, share, temperature, num_words_less
):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(2, vocab)).astype(np.float32)
    num_words = max(-(-vocab // 32) - num_words_less, 1)  # what the words do not reach is forbidden
    ids = {i for i in range(min(vocab, 32 * num_words)) if rng.random() < share}
    masks = np.stack([np.zeros(num_words, np.uint32), bits(ids, num_words)])
    options = Options(seed=seed, temperature=temperature, num_logprobs=2, bias=[(0, 50.0)])
    sampler = _native.Sampler(vocab)
    states = [options.state(), options.state()]
    chosen, details = sampler.sample(logits, [1, 0], states, masks, [1, -1])
    forbidden = logits.copy()
    forbidden[1, [i for i in range(vocab) if i not in ids]] = -np.inf
    expected, _ = sampler.sample(forbidden, [1, 0], states)
    _, raw = sampler.sample(logits, [0], [options.state()])
    if ids:
        assert chosen == expected
        assert chosen[0] in ids
        log_z = np.log(np.exp(logits[1].astype(np.float64)).sum())
        assert details[0][0] == pytest.approx(logits[1, chosen[0]] - log_z, abs=1e-5)  # unmasked
    else:
        assert chosen == [-2, expected[1]]
    assert details[1] == raw[0]


def test_mask_rows_are_checked():
    sampler, state = _native.Sampler(4), Options().state()
    logits, masks = np.zeros((1, 4), np.float32), np.ones((1, 1), np.uint32)
    for given_masks, rows in ((masks, [1]), (None, [0])):
        with pytest.raises(IndexError, match="mask row"):
            sampler.sample(logits, [0], [state], given_masks, rows)
    with pytest.raises(ValueError, match="differ in length"):
        sampler.sample(logits, [0], [state], masks, [0, 0])
    assert sampler.sample(logits, [0], [state], masks, [0])[0] == [0]
