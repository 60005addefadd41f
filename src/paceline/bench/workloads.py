"""Workloads by spec: what each asks, with which lengths."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from paceline.bench.conversation import Conversation, Turn, Workload, single
from paceline.bench.lengths import (
    CHARS_PER_TOKEN,
    CHAT_PROMPT_CHARS,
    CHAT_REPLY_CHARS,
    CHAT_TURNS,
    Length,
    from_percentiles,
    parse_length,
)
from paceline.bench.options import SpecOptions
from paceline.bench.prose import Prose, TokenCounter, read_corpus
from paceline.bench.tool_workload import tools
from paceline.bench.workload_files import code, conversations, trace
from paceline.errors import ParameterError


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Prompts and answers of given lengths."""

    prose: Prose
    input_tokens: Length
    output_tokens: Length
    kind: str = "synthetic"
    fixes_length: bool = True

    @property
    def kinds(self) -> tuple[str, ...]:
        return (self.kind,)

    def conversation(self, seed: str, idx: int) -> Conversation:
        rng = random.Random(f"{seed}:{idx}")
        num_input, num_output = self.input_tokens(rng), self.output_tokens(rng)
        return single(self.kind, self.prose.text(rng, num_input), num_output)


@dataclass(frozen=True, slots=True)
class Chat:
    """Conversations with the lengths of a public chat log; replies in the history are ours, so
    that every server sees the same."""

    prose: Prose
    prompt_tokens: Length
    reply_tokens: Length
    num_turns: Length
    max_context: int
    fixes_length: bool = True
    kinds: tuple[str, ...] = ("chat",)

    def conversation(self, seed: str, idx: int) -> Conversation:
        rng = random.Random(f"{seed}:{idx}")
        turns: list[Turn] = []
        context = 0
        for _ in range(self.num_turns(rng)):
            num_prompt, num_reply = self.prompt_tokens(rng), self.reply_tokens(rng)
            context += num_prompt + num_reply
            if turns and context > self.max_context:
                break
            message = {"role": "user", "content": self.prose.text(rng, num_prompt)}
            reply = self.prose.text(rng, num_reply)
            turns.append(Turn(messages=(message,), max_tokens=num_reply, reply=reply))
        return Conversation(kind="chat", turns=tuple(turns))


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    """Families of requests that begin alike, such as those with one system prompt."""

    prose: Prose
    num_families: int
    prefix_tokens: int
    input_tokens: Length
    output_tokens: Length
    fixes_length: bool = True
    kinds: tuple[str, ...] = ("shared-prefix",)

    def conversation(self, seed: str, idx: int) -> Conversation:
        rng = random.Random(f"{seed}:{idx}")
        family = rng.randrange(self.num_families)
        prefix = self.prose.text(random.Random(f"{seed}:family:{family}"), self.prefix_tokens)
        messages = (
            {"role": "system", "content": prefix},
            {"role": "user", "content": self.prose.text(rng, self.input_tokens(rng))},
        )
        turn = Turn(messages=messages, max_tokens=self.output_tokens(rng))
        return Conversation(kind="shared-prefix", turns=(turn,))


@dataclass(frozen=True, slots=True)
class Rag:
    """A long context of passages, a question and a short answer."""

    prose: Prose
    input_tokens: Length
    output_tokens: Length
    fixes_length: bool = True
    kinds: tuple[str, ...] = ("rag",)

    def conversation(self, seed: str, idx: int) -> Conversation:
        rng = random.Random(f"{seed}:{idx}")
        left = self.input_tokens(rng)
        passages: list[str] = []
        while left > 0:
            size = min(left, rng.randint(150, 300))
            passages.append(f"[{len(passages) + 1}] {self.prose.text(rng, size)}")
            left -= size
        question = f"Which passage speaks of {self.prose.text(rng, 4)}? Answer in a sentence."
        text = "Passages:\n\n" + "\n\n".join(passages) + "\n\n" + question
        return single("rag", text, self.output_tokens(rng))


@dataclass(frozen=True, slots=True)
class Mixed:
    """Chat streams, and now and then a long prompt; two classes, each with its own objective."""

    chat: Chat
    prose: Prose
    long_tokens: Length
    long_output: Length
    long_share: float
    fixes_length: bool = True
    kinds: tuple[str, ...] = ("chat", "long")

    def conversation(self, seed: str, idx: int) -> Conversation:
        rng = random.Random(f"{seed}:mix:{idx}")
        if rng.random() >= self.long_share:
            return self.chat.conversation(seed, idx)
        num_output = self.long_output(rng)
        return single("long", self.prose.text(rng, self.long_tokens(rng)), num_output)


def _synthetic(options: SpecOptions, prose: Prose) -> Workload:
    return Synthetic(prose, options.length("input", "512"), options.length("output", "128"))


def _text(options: SpecOptions, prose: Prose) -> Workload:
    return Synthetic(
        prose, options.length("input", "512"), options.length("output", "128"), kind="text"
    )


def _batch(options: SpecOptions, prose: Prose) -> Workload:
    return Synthetic(
        prose, options.length("input", "512"), options.length("output", "128"), kind="batch"
    )


def _chat(options: SpecOptions, prose: Prose) -> Chat:
    scale = options.number("scale", 1.0) / CHARS_PER_TOKEN
    max_input = options.integer("max_input", 2048)
    max_output = options.integer("max_output", 1024)
    turns = options.text("turns") or "1"
    if turns == "real":  # the log counts the messages of both sides
        num_turns = from_percentiles(CHAT_TURNS, scale=0.5, high=20)
    else:
        num_turns = parse_length(turns)
    return Chat(
        prose,
        from_percentiles(CHAT_PROMPT_CHARS, scale=scale, high=max_input),
        from_percentiles(CHAT_REPLY_CHARS, scale=scale, high=max_output),
        num_turns,
        options.integer("max_context", 4096),
    )


def _shared_prefix(options: SpecOptions, prose: Prose) -> Workload:
    return SharedPrefix(
        prose,
        options.integer("families", 4),
        options.integer("prefix", 1024),
        options.length("input", "64"),
        options.length("output", "64"),
    )


def _rag(options: SpecOptions, prose: Prose) -> Workload:
    return Rag(prose, options.length("input", "3000"), options.length("output", "48"))


def _mixed(options: SpecOptions, prose: Prose) -> Workload:
    share = options.number("share", 0.1)
    if share >= 1:
        raise ParameterError(f"share is {share}: it must be below 1")
    long_tokens, long_output = options.length("long", "4000"), options.length("long_output", "32")
    return Mixed(_chat(options, prose), prose, long_tokens, long_output, share)


_WORKLOADS: dict[str, Callable[[SpecOptions, Prose], Workload]] = {
    "synthetic": _synthetic,
    "chat": _chat,
    "text": _text,
    "conversations": conversations,
    "shared-prefix": _shared_prefix,
    "rag": _rag,
    "code": code,
    "batch": _batch,
    "tools": tools,
    "mixed": _mixed,
    "trace": trace,
}
NAMES = tuple(_WORKLOADS)


def build_workload(spec: str, *, count_tokens: TokenCounter | None = None) -> Workload:
    """Return the workload of `spec`, such as "chat" or "synthetic:input=64-512,output=128".

    Raises ParameterError for an unknown name or option.
    """
    options = SpecOptions(spec)
    build = _WORKLOADS.get(options.name)
    if build is None:
        raise ParameterError(
            f"no workload is called {options.name!r}: choose one of {', '.join(NAMES)}"
        )
    corpus = None
    if options.name == "text":
        corpus = read_corpus(options.required("file", "FILE"))
    elif options.name in ("rag", "synthetic", "shared-prefix"):
        file = options.text("file")
        corpus = None if file is None else read_corpus(file)
    workload = build(options, Prose(count_tokens=count_tokens, corpus=corpus))
    options.close()
    return workload
