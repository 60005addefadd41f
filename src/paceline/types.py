"""All that crosses between a front end (server, CLI, LLM) and the engine."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from msgspec import Struct, field

from paceline.errors import ParameterError

if TYPE_CHECKING:
    from paceline.measure.ledger import Ledger
    from paceline.structured.grammar import Grammar

FinishReason = Literal["stop", "length", "abort", "error"]
MAX_LOGPROBS = 20
MAX_N = 128
_MAX_SHOWN = 80  # characters of a value in a message
_MAX_COUNT = 2**53  # of tokens: what a float still counts exactly
MAX_STOP_CHARS = 1024  # of one stop string: matching costs up to its length a token
MAX_BAD_WORDS_CHARS = 16_384  # of all bad words: a request's are tokenised before it is queued


def _require(ok: bool, param: str, value: object, rule: str) -> None:
    if not ok:
        shown = repr(value)[:_MAX_SHOWN]
        raise ParameterError(f"{param} is {shown}: it must be {rule}", param=param)


class Structured(Struct, frozen=True, kw_only=True):
    """What the text of an answer must be; exactly one of these is given.

    `json_object` is any JSON object and `json_schema` JSON that is valid by a schema (an object,
    or its text). `regex` (Rust's syntax) matches the whole text, `choice` is one of several texts,
    and `grammar` is in Lark's form as llguidance reads it.
    """

    json_object: bool = False
    json_schema: Mapping[str, Any] | bool | str | None = None
    regex: str | None = None
    choice: tuple[str, ...] = ()
    grammar: str | None = None

    def __post_init__(self) -> None:
        _require(isinstance(self.json_object, bool), "json_object", self.json_object, "a boolean")
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            _require(value is None or isinstance(value, str), name, value, "a string")
        texts = self.choice
        ok = isinstance(texts, tuple | list) and all(isinstance(t, str) and t for t in texts)
        _require(ok, "choice", texts, "a list of non-empty strings")
        given = [name for name in self.__struct_fields__ if getattr(self, name) not in (None, ())]
        given = [name for name in given if name != "json_object" or self.json_object]
        if len(given) != 1:
            raise ParameterError(
                f"structured has {' and '.join(given) or 'nothing'}: give exactly one of "
                f"{', '.join(self.__struct_fields__)}",
                param="structured",
            )


class SamplingParams(Struct, frozen=True, kw_only=True):
    """How to choose tokens. Validated on construction; raises ParameterError naming the field.

    Logits are processed in this order: logit_bias, min_tokens, bad_words, repetition / frequency /
    presence penalties, temperature, top_k, top_p, min_p, typical_p. `temperature=0` is greedy;
    `top_k` 0 or -1 is off. `repetition_penalty` counts prompt and output (Keskar 2019, CTRL);
    presence and frequency penalties count the output only. `logprobs=k` returns the chosen token's
    log-probability and the k most likely ones, from the model's raw logits; `prompt_logprobs=k` the
    same of the prompt's tokens, and then `max_tokens` may be 0. `structured` forbids
    every token that its structure does not allow; the answer ends where nothing more may follow,
    whatever min_tokens says.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[str, ...] = ()
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    n: int = 1
    structured: Structured | None = None

    def __post_init__(self) -> None:
        for name in (
            "temperature", "top_p", "min_p", "typical_p",
            "repetition_penalty", "presence_penalty", "frequency_penalty",
        ):  # fmt: skip
            value = getattr(self, name)
            _require(
                isinstance(value, int | float) and not isinstance(value, bool),
                name,
                value,
                "a number",
            )
            # An integer beyond the floats is no float either: isfinite would raise.
            _require(abs(value) <= sys.float_info.max, name, value, "finite")
        for name in ("top_k", "min_tokens", "n"):
            value = getattr(self, name)
            _require(
                isinstance(value, int) and not isinstance(value, bool), name, value, "an integer"
            )
        for name in ("max_tokens", "seed", "logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            ok = value is None or (isinstance(value, int) and not isinstance(value, bool))
            _require(ok, name, value, "an integer")
        least = 1 if self.prompt_logprobs is None else 0
        _require(
            self.max_tokens is None or least <= self.max_tokens <= _MAX_COUNT,
            "max_tokens",
            self.max_tokens,
            f"at least {least} and at most {_MAX_COUNT}",
        )
        _require(self.temperature >= 0, "temperature", self.temperature, "at least 0")
        _require(self.top_k >= -1, "top_k", self.top_k, "-1 or 0 (off) or positive")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "above 0 and at most 1")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "between 0 and 1")
        _require(0 < self.typical_p <= 1, "typical_p", self.typical_p, "above 0 and at most 1")
        _require(
            self.repetition_penalty > 0, "repetition_penalty", self.repetition_penalty, "above 0"
        )
        for name in ("presence_penalty", "frequency_penalty"):
            _require(-2 <= getattr(self, name) <= 2, name, getattr(self, name), "between -2 and 2")
        _require(self.min_tokens >= 0, "min_tokens", self.min_tokens, "at least 0")
        _require(
            self.max_tokens is None or self.min_tokens <= self.max_tokens,
            "min_tokens", self.min_tokens, f"at most max_tokens ({self.max_tokens})",
        )  # fmt: skip
        _require(1 <= self.n <= MAX_N, "n", self.n, f"between 1 and {MAX_N}")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require(
                value is None or 0 <= value <= MAX_LOGPROBS,
                name, value, f"between 0 and {MAX_LOGPROBS}",
            )  # fmt: skip
        _require(
            self.seed is None or -(2**63) <= self.seed < 2**63,
            "seed",
            self.seed,
            "a 64-bit integer",
        )
        for name in ("stop", "bad_words", "stop_token_ids"):
            value = getattr(self, name)
            _require(isinstance(value, tuple | list), name, value, "a tuple or a list")
        _require(isinstance(self.logit_bias, Mapping), "logit_bias", self.logit_bias, "a mapping")
        _require(
            self.structured is None or isinstance(self.structured, Structured),
            "structured", self.structured, "a Structured",
        )  # fmt: skip
        for text in self.stop:
            _require(isinstance(text, str) and text != "", "stop", text, "a non-empty string")
            if len(text) > MAX_STOP_CHARS:
                raise ParameterError(
                    f"stop holds a string of {len(text)} characters: at most {MAX_STOP_CHARS} are "
                    "allowed",
                    param="stop",
                )
        for text in self.bad_words:
            _require(isinstance(text, str) and text != "", "bad_words", text, "a non-empty string")
        if (num_chars := sum(map(len, self.bad_words))) > MAX_BAD_WORDS_CHARS:
            raise ParameterError(
                f"bad_words hold {num_chars} characters in all: at most {MAX_BAD_WORDS_CHARS} are "
                "allowed",
                param="bad_words",
            )
        for bias in self.logit_bias.values():
            _require(
                isinstance(bias, int | float) and -100 <= bias <= 100,
                "logit_bias", bias, "between -100 and 100",
            )  # fmt: skip


class Request(Struct, frozen=True, kw_only=True):
    """One prompt to continue, `params.n` times. Lower `priority` runs first.

    Requests share the computation of a common prefix only where their `cache_salt` is the same.
    Tenants (a server's API keys) share the engine fairly (`paceline.policies.turns`).
    `pin` names a pin that is to hold the prompt's blocks (`paceline.engine.pins`).
    `grammar` is `params.structured`, compiled (`LoadedModel.grammar`).
    """

    id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    cache_salt: str = ""
    tenant: str = ""
    pin: str = ""
    arrival_ns: int = 0
    grammar: Grammar | None = None


class TokenLogprob(Struct, frozen=True):
    """Log-probability of a chosen token, and the most likely alternatives, best first.

    The first token of a prompt follows nothing: its `logprob` is NaN and its `rank` 0.
    """

    token_id: int
    logprob: float
    rank: int  # 1 is the most likely
    top: tuple[tuple[int, float], ...] = ()


class Usage(Struct, frozen=True, kw_only=True):
    """Tokens of one choice; `cached_tokens` of the prompt were not computed but found."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class Timings(Struct, frozen=True, kw_only=True):
    """Seconds of one choice on the monotonic clock. `tpot_s` is None for one-token answers."""

    queue_s: float
    ttft_s: float
    tpot_s: float | None
    e2e_s: float
    num_preemptions: int = 0
    num_drafted: int = 0  # tokens that speculation guessed
    num_accepted: int = 0  # and those that were right
    num_forced: int = 0  # tokens that a structure forced: they took no step of their own


class Delta(Struct, frozen=True, kw_only=True):
    """News of one choice: text that is safe to show, and at the end why it ended.

    `token_ids` are the tokens committed since the last delta; their text may still be held back
    (partial UTF-8, partial stop string) and then comes with a later delta. The last delta of a
    choice has `finish_reason`, `usage`, `timings`, and its `ledger` where the engine keeps one.
    An `error` that the request itself asked for has an `error_param`, the field to change.
    """

    request_id: str
    index: int
    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()  # in the first delta, where asked for
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: str | None = None
    error_param: str | None = None
    usage: Usage | None = None
    timings: Timings | None = None
    ledger: Ledger | None = None
