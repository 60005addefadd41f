"""The tools workload: function calls, and answers in JSON by a schema."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

from paceline.bench.conversation import Conversation, Expectation, Turn, Workload
from paceline.bench.options import SpecOptions
from paceline.bench.prose import Prose

_CITIES = (
    "Lisbon",
    "Nairobi",
    "Oslo",
    "Lima",
    "Hanoi",
    "Quebec",
    "Turin",
    "Perth",
    "Accra",
    "Graz",
)
_DAYS = ("today", "tomorrow", "on Friday", "on Sunday", "next week")


def _function(name: str, description: str, **properties: Any) -> dict[str, Any]:
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    return {
        "type": "function",
        "function": {"name": name, "description": description, "parameters": schema},
    }


_TOOLS = [
    _function(
        "get_weather",
        "The weather at a place on a day.",
        city={"type": "string"},
        day={"type": "string"},
        unit={"type": "string", "enum": ["celsius", "fahrenheit"]},
    ),
    _function(
        "book_table",
        "Book a table in a restaurant.",
        city={"type": "string"},
        day={"type": "string"},
        people={"type": "integer"},
    ),
]
_RESPONSE_FORMAT = {
    "type": "json_schema",
    "json_schema": {
        "name": "booking",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "day": {"type": "string"},
                "people": {"type": "integer"},
            },
            "required": ["city", "day", "people"],
            "additionalProperties": False,
        },
    },
}


@dataclass(frozen=True, slots=True)
class Tools:
    """Requests that want a call of a function, or an object by a schema, or both in turn."""

    mode: str
    max_tokens: int
    fixes_length: bool = False

    @property
    def kinds(self) -> tuple[str, ...]:
        names = {"call": ("tool-call",), "json": ("json",)}
        return names.get(self.mode, ("tool-call", "json"))

    def conversation(self, seed: str, idx: int) -> Conversation:
        rng = random.Random(f"{seed}:{idx}")
        mode = ("call", "json")[idx % 2] if self.mode == "both" else self.mode
        city, day, people = rng.choice(_CITIES), rng.choice(_DAYS), rng.randint(2, 9)
        text = f"Book a table in {city} {day} for {people} people (request {rng.randrange(10**6)})."
        fields: dict[str, Any]
        expects: Expectation
        if mode == "call":
            fields, expects = {"tools": _TOOLS, "tool_choice": "auto"}, "tool_call"
        else:
            fields, expects = {"response_format": _RESPONSE_FORMAT}, "json"
            text += " Answer with a JSON object of city, day and people."
        turn = Turn(
            messages=({"role": "user", "content": text},),
            max_tokens=self.max_tokens,
            expects=expects,
            fields=fields,
        )
        return Conversation(kind=expects.replace("_", "-"), turns=(turn,))


def tools(options: SpecOptions, prose: Prose) -> Workload:
    mode = options.choice("mode", ("both", "call", "json"))
    return Tools(mode, options.integer("output", 128))
