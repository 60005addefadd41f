"""Loads a peer, computes one token and prints a byte: the least that a fresh process needs.

python first_token.py MODULE MODEL '{"num_threads": 2, "context": 256, "num_streams": 1}'
"""

from __future__ import annotations

import json
import os
import sys

from worker import FIRST_ID, load_engine


def main() -> None:
    module, model, options = sys.argv[1:]
    answer = os.dup(1)
    os.dup2(2, 1)
    engine = load_engine(module, model, json.loads(options))
    engine.submit(1, [FIRST_ID, FIRST_ID + 1])
    while not engine.step():
        pass
    os.write(answer, b"1")
    os._exit(0)  # what a library does at its end is not asked for here


if __name__ == "__main__":
    main()
