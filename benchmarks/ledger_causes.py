"""What makes a part of the ledger large: each function causes one delay to the call `example`.

One that cannot know beforehand which call suffers returns its name.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from ledger_server import Server

from tests.tiny import TinyModel, random_model

WORD = "word "
MANY_VALUES = 1_990_000  # a body with more than two million is refused unread
TWIN = "twin"  # the same model under another name, where a server has two

# Three thousand turns of a loop for each letter; a template may take a second in all.
SLOW_TEMPLATE = (
    "{% for m in messages %}{% for c in m.content %}{% for i in range(3000) %}"
    "{% if c == i %}x{% endif %}{% endfor %}{% endfor %}{{ m.content }}{% endfor %}"
)


def tiny_model() -> TinyModel:
    """One layer, 32 wide: it computes next to nothing."""
    return random_model(hidden=32, layers=1, heads=2, kv_heads=1, head_dim=16, inner=32)


def long_prompt(server: Server) -> None:
    server.complete("example", prompt=WORD * 1500, max_tokens=1)


def long_answer(server: Server) -> None:
    server.complete("example", prompt="Once", max_tokens=150, ignore_eos=True)


def prompts_beside(server: Server) -> None:
    server.complete("alone", prompt="Once", max_tokens=20, ignore_eos=True)
    stream = server.start("example", prompt="Once", max_tokens=60, ignore_eos=True)
    time.sleep(0.2)
    others = [server.start(f"other-{i}", prompt=WORD * 900, max_tokens=1) for i in range(3)]
    for thread in (stream, *others):
        thread.join()


def prompts_together(server: Server) -> None:
    first = server.start("first", prompt=WORD * 60, max_tokens=1)
    time.sleep(0.03)  # the others arrive while its step runs, and share the next one
    names = ["example", *(f"other-{i}" for i in range(7))]
    threads = [first, *(server.start(n, prompt=WORD * 60, max_tokens=1) for n in names)]
    for thread in threads:
        thread.join()


def streams_beside(server: Server) -> None:
    server.complete("alone", prompt="Once", max_tokens=20, ignore_eos=True)
    names = ["example", *(f"other-{i}" for i in range(15))]
    threads = [server.start(n, prompt=n, max_tokens=60, ignore_eos=True) for n in names]
    for thread in threads:
        thread.join()


def one_seat(server: Server) -> None:
    first = server.start("first", prompt="Once", max_tokens=100, ignore_eos=True)
    time.sleep(0.2)
    server.complete("example", prompt="Once", max_tokens=5)
    first.join()


def little_memory(server: Server) -> None:
    first = server.start("first", prompt=WORD * 400, max_tokens=80, ignore_eos=True)
    time.sleep(0.2)
    server.complete("example", prompt=WORD * 400, max_tokens=5)
    first.join()


def outgrown_memory(server: Server) -> None:
    names = ("first", "example")
    threads = []
    for name in names:
        threads.append(server.start(name, prompt=WORD * 330, max_tokens=90, ignore_eos=True))
        time.sleep(0.05)
    for thread in threads:
        thread.join()


def pushed_aside(server: Server) -> None:
    """The only seat goes to one that matters more, again and again."""
    example = server.start("example", prompt=WORD * 1500, max_tokens=3, priority=1)
    number = 0
    while example.is_alive() and number < 6:
        example.join(0.5)
        number += 1
        server.complete(f"first-{number}", prompt="Once", max_tokens=1, priority=0)
    example.join()


def same_prompt_ahead(server: Server) -> None:
    """Both wait for the first one's step, and then one for the other, which fits into a step."""
    first = server.start("first", prompt="first " + WORD * 300, max_tokens=1)
    time.sleep(0.05)
    ahead = server.start("ahead", prompt=WORD * 1500, max_tokens=1)
    time.sleep(0.05)
    server.complete("example", prompt=WORD * 1500, max_tokens=1)
    first.join()
    ahead.join()


def from_disk(server: Server) -> None:
    """The first prompt goes to disk as the second one needs its memory, and comes back."""
    server.complete("first", prompt="first " + WORD * 1500, max_tokens=1)
    server.complete("second", prompt="second " + WORD * 1500, max_tokens=1)
    server.complete("example", prompt="first " + WORD * 1500, max_tokens=1)


def other_model_computes(server: Server) -> None:
    server.complete("load", model=TWIN, prompt="Once", max_tokens=1)
    other = server.start("other", model=TWIN, prompt=WORD * 3000, max_tokens=1)
    time.sleep(0.2)
    server.complete("example", prompt="Once", max_tokens=10, ignore_eos=True)
    other.join()


def unloaded_model(server: Server) -> None:
    server.complete("example", model=TWIN, prompt="Once", max_tokens=1)


def guesses(server: Server) -> None:
    """Counting repeats itself, so guesses are right; the first answer warms the estimates."""
    prompt = "1 2 3 4 5 6 7 8 9 10 " * 12
    server.complete("first", prompt=prompt, max_tokens=60, ignore_eos=True)
    server.complete("example", prompt=prompt, max_tokens=600, ignore_eos=True)


def first_structure(server: Server) -> None:
    """The first structure that a server is asked for has it index the vocabulary."""
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
              "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    messages = [{"role": "user", "content": "Is water wet?"}]
    server.chat("example", messages=messages, max_tokens=20, response_format=form)


def slow_template(server: Server) -> None:
    messages = [{"role": "user", "content": WORD * 4}]
    server.chat("example", messages=messages, max_tokens=1)


@contextmanager
def bodies_being_parsed(server: Server) -> Iterator[None]:
    """Four clients send nearly as many values as a body may have, over and over.

    Reading them holds the GIL.
    """
    is_over = threading.Event()
    content = server.content({"prompt": [7] * MANY_VALUES, "max_tokens": 1})

    def send(name: str) -> None:
        while not is_over.is_set():
            server.send("completions", name, content)

    threads = [threading.Thread(target=send, args=(f"body-{i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    try:
        time.sleep(2.0)
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def stream_beside_bodies(server: Server) -> None:
    with bodies_being_parsed(server):
        server.complete("example", prompt="Once", max_tokens=60, ignore_eos=True)


def token_beside_bodies(server: Server) -> str:
    """Return the one of twenty that waited longest between threads: where one waits is chance."""
    names = [f"token-{i}" for i in range(20)]
    with bodies_being_parsed(server):
        for name in names:
            server.complete(name, prompt="Once", max_tokens=1)
    return max(names, key=lambda name: server.ledger(name)["parts_ms"].get("handoff", 0.0))


def slow_upload(server: Server) -> None:
    connection = server.connect("example", {"prompt": WORD * 100, "max_tokens": 1})
    connection.socket.sendall(connection.head)
    for begin in range(0, len(connection.content), 100):
        connection.socket.sendall(connection.content[begin : begin + 100])
        time.sleep(0.5)
    connection.read_all()


def slow_reader(server: Server) -> None:
    # The kernel takes some 3 MB of an answer before the server feels that nobody reads.
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 300, "n": 8,
            "stream": True, "logprobs": True, "top_logprobs": 20, "ignore_eos": True}  # fmt: skip
    connection = server.connect("example", body, receive_bytes=4096)
    connection.socket.sendall(connection.head + connection.content)
    time.sleep(40)
    connection.read_all()


def too_long(server: Server) -> None:
    server.complete("example", prompt=WORD * 12_000, max_tokens=1)


def big_nonsense(server: Server) -> None:
    """Many small values to read; the last one is not what it should be."""
    server.complete("example", prompt=[7] * MANY_VALUES + ["word"], max_tokens=1)


def many_choices(server: Server) -> None:
    server.complete("example", prompt="Once", max_tokens=30, n=32, temperature=1.5, top_p=0.99,
                    repetition_penalty=1.2, logprobs=20, ignore_eos=True)  # fmt: skip


def many_stops(server: Server) -> None:
    """Texts are looked through for the beginnings of stop strings that never come whole."""
    stop = [letter * 999 + "." for letter in "abcdefghijklmnop"]
    server.complete("example", prompt="Once", max_tokens=200, n=32, temperature=1.5, stop=stop,
                    ignore_eos=True)  # fmt: skip


def many_tiny_answers(server: Server) -> None:
    """Each step has a little to compute, and 32 sequences to be placed, rows and tables to fill."""
    server.complete("first", prompt="Once", max_tokens=20, n=32, ignore_eos=True)
    server.complete("example", prompt="Once", max_tokens=200, n=32, ignore_eos=True)
