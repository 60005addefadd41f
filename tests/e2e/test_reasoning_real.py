"""Thinking of a real model: SmolLM2, which does not reason, shown how to and made to.

The plain completion of the same prompt is what all APIs must tell, each in its own form.
"""

from __future__ import annotations

import json
import re

import pytest

from tests.e2e.live import LiveServer

pytestmark = pytest.mark.real
# SmolLM2's own, with the thinking of earlier turns: its markers are words like any other.
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"
)
SUMS = [(2, 2), (3, 5), (1, 6), (4, 4)]
MADE = {"regex": r"<think>\n?[A-Z][a-z ,']{20,60}\.\n?</think>\n\n[A-Z][a-z ,']{5,30}\."}


def shown():
    """Return turns that show how: a thought, and then an answer."""
    turns = []
    for a, b in SUMS:
        turns.append({"role": "user", "content": f"What is {a} + {b}?"})
        thought = f"The user asks for a sum. {a} + {b} = {a + b}"
        answer = {"role": "assistant", "content": f"It is {a + b}."}
        turns.append({**answer, "reasoning_content": thought})
    return [*turns, {"role": "user", "content": "What is 3 + 3?"}]


@pytest.fixture(scope="module")
def thinker(real_model):
    with LiveServer(
        real_model("smollm2-135m"), chat_template=TEMPLATE, kv_memory_bytes=256 * 2**20
    ) as live:
        yield live


def plain(thinker, messages, **options):
    """Return (thought, said) of the completion of the same prompt."""
    ids = thinker.post("/tokenize", messages=messages).json()["tokens"]
    text = thinker.complete(ids, temperature=0, **options)["choices"][0]["text"]
    found = re.fullmatch(r"\s*<think>\n?(.+?)\n?</think>\n*(.+)", text, re.DOTALL)
    assert found, text
    return found.groups()


def events_of(reply):
    assert reply.status_code == 200, reply.text
    data = [x[6:] for x in reply.text.splitlines() if x.startswith("data: ")]
    return [json.loads(event) for event in data if event != "[DONE]"]


def chat(thinker, *, stream, **body):
    reply = thinker.post("/v1/chat/completions", stream=stream, temperature=0, **body)
    if stream:
        deltas = [choice["delta"] for e in events_of(reply) for choice in e["choices"]]
        return tuple("".join(d.get(name) or "" for d in deltas)
                     for name in ("reasoning_content", "content"))  # fmt: skip
    message = reply.json()["choices"][0]["message"]
    return message["reasoning_content"], message["content"]


def response(thinker, messages, *, stream):
    items = []
    for turn in messages:
        if "reasoning_content" in turn:
            part = {"type": "reasoning_text", "text": turn["reasoning_content"]}
            items.append({"type": "reasoning", "content": [part]})
        items.append({"role": turn["role"], "content": turn["content"]})
    reply = thinker.post("/v1/responses", stream=stream, temperature=0, input=items,
                         max_output_tokens=60)  # fmt: skip
    if stream:
        told = events_of(reply)
        return tuple("".join(e["delta"] for e in told if e["type"] == f"response.{kind}.delta")
                     for kind in ("reasoning_text", "output_text"))  # fmt: skip
    return tuple(item["content"][0]["text"] for item in reply.json()["output"])


def message(thinker, messages, *, stream):
    turns = []
    for turn in messages:
        blocks = [{"type": "text", "text": turn["content"]}]
        if "reasoning_content" in turn:
            blocks.insert(0, {"type": "thinking", "thinking": turn["reasoning_content"]})
        turns.append({"role": turn["role"], "content": blocks})
    reply = thinker.post("/v1/messages", stream=stream, temperature=0, messages=turns,
                         max_tokens=60)  # fmt: skip
    if stream:
        deltas = [e["delta"] for e in events_of(reply) if e["type"] == "content_block_delta"]
        return tuple("".join(d.get(name, "") for d in deltas) for name in ("thinking", "text"))
    thinking, text = reply.json()["content"]
    return thinking["thinking"], text["text"]


@pytest.mark.parametrize("stream", [False, True])
def test_what_it_was_shown_to_think_is_told_apart_in_every_api(thinker, stream):
    messages = shown()
    wanted = plain(thinker, messages, max_tokens=60)
    assert chat(thinker, stream=stream, messages=messages, max_tokens=60) == wanted
    assert response(thinker, messages, stream=stream) == wanted
    assert message(thinker, messages, stream=stream) == wanted


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_structure_makes_it_think_is_told_apart(thinker, stream):
    asked = {"max_tokens": 120, "structured_outputs": MADE}
    for question in ("Why is the sky blue?", "Who are you?", "Tell me a story."):
        messages = [{"role": "user", "content": question}]
        wanted = plain(thinker, messages, **asked)
        assert chat(thinker, stream=stream, messages=messages, **asked) == wanted
