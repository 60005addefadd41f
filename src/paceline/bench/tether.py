"""Runs a command that ends when its parent does, be it by SIGKILL, which nobody can handle.

    python -I -S tether.py PARENT_PID COMMAND ARGUMENT...

A process of its own sets this up, not a `preexec_fn`: that would run our code between fork and
exec, where a lock that another thread held stays locked for ever.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1  # kept across exec


def main() -> None:
    parent, command = int(sys.argv[1]), sys.argv[2:]
    if ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0):
        sys.exit("the kernel does not end servers with their parent (prctl failed)")
    if os.getppid() != parent:
        sys.exit("the parent ended before its server began")
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"{command[0]} cannot be run: {error.strerror}")


if __name__ == "__main__":
    main()
