"""Writes the workloads of docs/explain.md into a folder.

busy.jsonl: twelve questions. mixed.jsonl: three streams, and 0.3 s later three long prompts.
system.jsonl: six questions under one long system prompt.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

WORD = "word "
TOPICS = ("the sea", "bread", "a bridge", "rain", "the moon", "tea")


def ask(text: str, *, system: str = "", **options: Any) -> dict[str, Any]:
    first = [{"role": "system", "content": system}] if system else []
    return {"messages": [*first, {"role": "user", "content": text}], **options}


WORKLOADS = {
    "busy": [ask(f"Tell me about {t}, {n}.", max_tokens=60) for t in TOPICS for n in (1, 2)],
    "mixed": [
        *(ask(f"Tell me about {topic}.", max_tokens=60, at_s=0) for topic in TOPICS[:3]),
        *(ask(f"{topic}: {WORD * 900}", max_tokens=1, at_s=0.3) for topic in TOPICS[3:]),
    ],
    "system": [ask(f"And {t}?", system=WORD * 950, max_tokens=16) for t in TOPICS],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", default=Path())
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, requests in WORKLOADS.items():
        lines = "".join(json.dumps(request) + "\n" for request in requests)
        (folder / f"{name}.jsonl").write_text(lines)


if __name__ == "__main__":
    main()
