"""Starts a program that the kernel kills when its parent dies. Run as a script, by path, with the parent's pid and the program.

A step of its own between spawn and exec, because the alternative (a function called after fork) runs Python in the copy of
a process that may hold locks of threads which the copy does not have.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(argv: list[str]) -> None:
    """argv: parent's pid, absolute path of the program, its arguments. Becomes the program; the pid stays."""
    parent, program = int(argv[0]), argv[1:]
    libc = ctypes.CDLL(None, use_errno=True)
    # SIGKILL, not SIGTERM: whoever would have escalated is dead, so nobody would notice a child that ignores the request.
    if libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0):
        sys.exit(f"prctl(PR_SET_PDEATHSIG): {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:  # it died before prctl, so no signal will come
        sys.exit("the process that started this one is gone")
    os.execv(program[0], program)


if __name__ == "__main__":
    main(sys.argv[1:])
