"""What each API of the server may be asked: for every field one use of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from paceline.server.embeddings import EmbeddingRequest
from paceline.server.messages.schema import CountRequest, MessageRequest
from paceline.server.prefixes import PrefixRequest
from paceline.server.responses.schema import ResponseRequest
from paceline.server.schema import ChatRequest, CompletionRequest, Fields
from paceline.server.tokens import DetokenizeRequest, TokenizeRequest
from tests.e2e.test_tools import HI, WEATHER

Uses = Mapping[str, dict[str, Any]]

FUNCTION = WEATHER["function"]
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"],
          "additionalProperties": False}  # fmt: skip
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA, "strict": True}}
LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")  # a body has one of them


class Api(msgspec.Struct, frozen=True):
    """A route, its body, a body that asks for nothing more, and the uses of its fields.

    `refused` are fields that this model, which does not reason, has no use of.
    """

    path: str
    kind: type[msgspec.Struct]
    body: dict[str, Any]
    uses: Uses
    refused: frozenset[str] = frozenset()

    def named(self, name: str) -> dict[str, Any]:
        """Return a body that uses the field `name`."""
        return self.beside(name)

    def beside(self, *names: str) -> dict[str, Any]:
        """Return a body that uses the fields of `names` together."""
        used = {field: value for name in names for field, value in self.uses[name].items()}
        if any(limit in used for limit in LIMITS):
            return {**{f: v for f, v in self.body.items() if f not in LIMITS}, **used}
        return {**self.body, **used}

    @property
    def fields(self) -> set[str]:
        """All that the body may hold, of which each has a use or is in the body anyway."""
        known = set(self.kind.__struct_fields__)
        if issubclass(self.kind, Fields):
            known |= self.kind.noted.keys()
        return known


def plain(**values: Any) -> Uses:
    """Return uses of fields that stand alone."""
    return {name: {name: value} for name, value in values.items()}


SHARED = plain(
    stream=True, temperature=0.5, top_p=0.5, top_k=2, seed=1, deadline_ms=60_000, timings=True,
    priority=1, cache_salt="s",
)  # fmt: skip
NOTED = plain(user="u", metadata={"a": "b"}, safety_identifier="i", prompt_cache_key="k")
SAMPLED = {
    **SHARED, **NOTED,
    **plain(
        n=2, stop=["L", "x", "y", "z", "q"], stop_token_ids=[76], max_tokens=3, min_p=0.1,
        typical_p=0.9, repetition_penalty=1.1, presence_penalty=0.5, frequency_penalty=0.5,
        logit_bias={"76": -1}, bad_words=["LO"], min_tokens=2, ignore_eos=True,
        structured_outputs={"regex": "a{1,3}"}, service_tier="flex", skip_special_tokens=False,
        include_stop_str_in_output=True,
    ),
    "stream_options": {"stream": True, "stream_options": {
        "include_usage": True, "continuous_usage_stats": True}},
}  # fmt: skip

CHATS = Api(
    "/v1/chat/completions", ChatRequest, {"messages": HI, "max_tokens": 12},
    {
        **SAMPLED,
        **plain(
            max_completion_tokens=3, logprobs=True, response_format=FORMAT, tools=[WEATHER],
            parallel_tool_calls=False, reasoning_effort="none", thinking_token_budget=5,
            chat_template_kwargs={"enable_thinking": True},
        ),
        "top_logprobs": {"logprobs": True, "top_logprobs": 2},
        "tool_choice": {"tools": [WEATHER], "tool_choice": {
            "type": "function", "function": {"name": "weather"}}},
    },
    frozenset({"thinking_token_budget", "chat_template_kwargs"}),
)  # fmt: skip
COMPLETIONS = Api(
    "/v1/completions", CompletionRequest, {"prompt": "a", "max_tokens": 12},
    {**SAMPLED, **plain(echo=True, logprobs=2)},
)  # fmt: skip
RESPONSES = Api(
    "/v1/responses", ResponseRequest, {"input": "Hi", "max_output_tokens": 12},
    {
        **SHARED, **NOTED,
        **plain(
            background=True, instructions="Be brief.", max_output_tokens=3,
            parallel_tool_calls=False, reasoning={"effort": "none"}, service_tier="flex",
            store=False, text={"format": {"type": "json_schema", "name": "a", "schema": SCHEMA}},
            tools=[{"type": "function", **FUNCTION}], previous_response_id="resp_none",
        ),
        "stream_options": {"stream": True, "stream_options": {"include_obfuscation": False}},
        "tool_choice": {"tools": [{"type": "function", **FUNCTION}],
                        "tool_choice": {"type": "function", "name": "weather"}},
    },
    frozenset({"previous_response_id"}),
)  # fmt: skip
CLAUDES_TOOL = {"name": "weather", "input_schema": FUNCTION["parameters"]}
PROMPTS = {
    **plain(
        system="Be brief.", tools=[CLAUDES_TOOL], thinking={"type": "disabled"},
        output_config={"format": {"type": "json_schema", "schema": SCHEMA}},
        cache_control={"type": "ephemeral"},
    ),
    "tool_choice": {"tools": [CLAUDES_TOOL], "tool_choice": {"type": "tool", "name": "weather"}},
}  # fmt: skip
MESSAGES = Api(
    "/v1/messages", MessageRequest, {"messages": HI, "max_tokens": 12},
    {**SHARED, **PROMPTS, **plain(max_tokens=3, stop_sequences=["L"], metadata={"user_id": "u"})},
)  # fmt: skip
COUNTS = Api("/v1/messages/count_tokens", CountRequest, {"messages": HI}, PROMPTS)
EMBEDDINGS = Api(
    "/v1/embeddings", EmbeddingRequest, {"input": "a"},
    plain(input=["a", "bc"], encoding_format="base64", dimensions=1, user="u"),
    frozenset({"dimensions"}),
)  # fmt: skip
TOKENS = Api(
    "/tokenize", TokenizeRequest, {"prompt": "a"},
    {
        **plain(add_special_tokens=False, return_token_strs=True),
        "messages": {"prompt": None, "messages": HI},
        "tools": {"prompt": None, "messages": HI, "tools": [WEATHER]},
        "chat_template_kwargs": {"prompt": None, "messages": HI,
                                 "chat_template_kwargs": {"enable_thinking": True}},
    },
    frozenset({"chat_template_kwargs"}),
)  # fmt: skip
TEXTS = Api("/detokenize", DetokenizeRequest, {"tokens": [97]}, plain(tokens=[97, 98]))
PREFIXES = Api(
    "/v1/cache/prefixes", PrefixRequest, {"prompt": "abc" * 20},
    {
        **plain(pin=True, cache_salt="s", priority=1, deadline_ms=60_000),
        "messages": {"prompt": None, "messages": HI},
        "tools": {"prompt": None, "messages": HI, "tools": [WEATHER]},
    },
)  # fmt: skip
APIS = {
    "chats": CHATS, "completions": COMPLETIONS, "responses": RESPONSES, "messages": MESSAGES,
    "counts": COUNTS, "embeddings": EMBEDDINGS, "tokens": TOKENS, "texts": TEXTS,
    "prefixes": PREFIXES,
}  # fmt: skip
