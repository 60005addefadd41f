"""A call whose structure is being compiled keeps no other waiting."""

import threading
from concurrent.futures import ThreadPoolExecutor

from tests.e2e.live import ALPHABET

WANTED = {"structured_outputs": {"choice": ["yes", "no"]}}


def test_others_are_answered_while_a_structure_compiles_and_it_compiles_once(server, monkeypatch):
    grammars = server.loaded.grammars
    compile_, has_begun, may_end = grammars._compile, threading.Event(), threading.Event()
    compiled = []

    def slow(index, source):
        has_begun.set()
        assert may_end.wait(30)
        compiled.append(source)
        return compile_(index, source)

    monkeypatch.setattr(grammars, "_compile", slow)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.chat, temperature=0, **WANTED)
        assert has_begun.wait(30)
        assert server.complete("a", temperature=0)["choices"][0]["text"] == ALPHABET[1:]
        assert not waiting.done()
        may_end.set()
        assert waiting.result()["choices"][0]["message"]["content"] in ("yes", "no")
    server.chat(temperature=0, **WANTED)
    assert len(compiled) == 1
