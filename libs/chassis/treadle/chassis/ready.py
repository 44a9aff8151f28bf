"""The one JSON line that a process prints when it serves."""

from __future__ import annotations

import json
import os
import sys


def print_ready(service: str, listen: str, metrics: str, version: str, **more: str) -> None:
    """Print the ready line to standard output: what serves, where it listens (the real port), and its pid.

    more: further doors by name, e.g. `grpc`
    """
    line: dict[str, object] = {
        "ready": True,
        "service": service,
        "listen": listen,
        "metrics": metrics,
        "pid": os.getpid(),
        "version": version,
    } | more
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()
