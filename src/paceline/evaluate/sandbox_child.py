"""The inside of the sandbox: a script that limits itself, runs a program, and says how it was.

stdin holds a line of JSON (the limits), then the program. stdout gets "passed TOKEN" or the name of
the exception; the program knows neither the token nor, by itself, where stdout was.
"""

from __future__ import annotations

import json
import os
import resource
import sys


def main() -> None:
    """Run the program on stdin; anything but its end by itself is a failure."""
    limits = json.loads(sys.stdin.buffer.readline())
    source = sys.stdin.buffer.read()
    report, token = os.dup(1), limits.pop("token")
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    for name, value in limits.items():
        soft, hard = value, value + (name == "RLIMIT_CPU")
        resource.setrlimit(getattr(resource, name), (soft, hard))
    try:
        exec(compile(source, "program.py", "exec"), {"__name__": "__main__"})
        reply = f"passed {token}"
    except BaseException as error:  # SystemExit and KeyboardInterrupt are no success either
        reply = type(error).__name__
    os.write(report, reply.encode()[:200])
    os._exit(0)


if __name__ == "__main__":
    main()
