"""How deep a compiler goes down a structure: it recurses, and a stack that ends ends the process.

llguidance follows references of schemas and rules of grammars by recursion, without a bound of its
own: a chain of a thousand of either was the end of a stack of 8 MiB. What is counted here is never
less than the depth that it can reach, whatever the order in which it goes.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import unquote

MAX_SCHEMA_LEVELS = 4000  # 600 of them fit into 8 MiB, so these into _STACK_BYTES
MAX_PROPERTIES = 2000  # time goes by the square of an object's: 0.8 s of two thousand
MAX_GRAMMAR_PARTS = 1000  # rules and groups; these fit into 8 MiB, which masks need too
_STACK_BYTES = 64 * 2**20
_DEEP_LEVELS = 300  # from which a thread with such a stack is worth its start
_starting = threading.Lock()
_T = TypeVar("_T")


def schema_levels(schema: Any) -> int:
    """Return a bound of the levels of a schema with each of its references followed once."""
    heights, references = _heights(schema)
    told = heights[id(schema)]
    return told + sum(heights.get(id(_target(schema, ref)), told) for ref in references)


def num_properties(schema: Any) -> int:
    """Return how many properties all objects of a schema name together."""
    total, pending = 0, [schema]
    while pending:
        node = pending.pop()
        below = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
        pending += (part for part in below if isinstance(part, dict | list))
        if isinstance(node, dict) and isinstance(named := node.get("properties"), dict):
            total += len(named)
    return total


def grammar_levels(source: str) -> tuple[int, int, int]:
    """Return the rules and groups of a grammar in Lark's form, the levels of its schemas, and the
    properties of all of them.

    What may be a rule or a group counts as one, within texts and regexes, too.
    """
    parts: list[str] = []
    levels = properties = at = 0
    while (found := source.find("%json", at)) >= 0:
        begin = found + len("%json")
        begin += len(source[begin:]) - len(source[begin:].lstrip())
        parts.append(source[at:begin])
        try:
            schema, at = json.JSONDecoder().raw_decode(source, begin)
        except (ValueError, RecursionError):
            at = begin
        else:
            levels = max(levels, schema_levels(schema))
            properties += num_properties(schema)
    parts.append(source[at:])
    return sum(map("".join(parts).count, ":([{")), levels, properties


def with_deep_stack(levels: int, work: Callable[[], _T]) -> _T:
    """Return what `work` does, on a thread with a large stack where it goes down many levels."""
    if levels < _DEEP_LEVELS:
        return work()
    results: list[_T] = []
    problems: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as problem:
            problems.append(problem)

    thread = threading.Thread(target=run, name="deep", daemon=True)
    with _starting:  # the size is the process's, for threads to come
        usual = threading.stack_size(_STACK_BYTES)
        try:
            thread.start()
        finally:
            threading.stack_size(usual)
    thread.join()
    if problems:
        raise problems[0]
    return results[0]


def _heights(schema: Any) -> tuple[dict[int, int], set[str]]:
    """Return the height of each part by its id, a leaf's is 1, and all that `$ref` says."""
    heights: dict[int, int] = {}
    references: set[str] = set()
    pending = [(schema, False)]
    while pending:
        node, is_done = pending.pop()
        below = node.values() if isinstance(node, dict) else node if isinstance(node, list) else ()
        if is_done:
            heights[id(node)] = 1 + max((heights.get(id(part), 1) for part in below), default=0)
            continue
        pending.append((node, True))
        pending += ((part, False) for part in below if isinstance(part, dict | list))
        if isinstance(node, dict) and isinstance(reference := node.get("$ref"), str):
            references.add(reference)
    return heights, references


def _target(schema: Any, reference: str) -> Any:
    """Return the part that a reference within the schema names; else the whole."""
    node = schema
    for step in unquote(reference).removeprefix("#").split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        if isinstance(node, dict) and step in node:
            node = node[step]
        elif isinstance(node, list) and step.isdecimal() and int(step) < len(node):
            node = node[int(step)]
        else:
            return schema
    return node
