"""Damage to a file, as a disk or a stray write does it."""

from __future__ import annotations

from pathlib import Path


def flip_byte(path: Path, at: int) -> None:
    """Change one bit of the byte at `at`."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
