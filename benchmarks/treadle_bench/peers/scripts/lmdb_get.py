"""Rows by LMDB: a get for each, in one read transaction, from a database in memory that holds them by their number."""

from __future__ import annotations

import struct
from pathlib import Path

import lmdb  # type: ignore[import-not-found,unused-ignore]
from answering import answer, rows_of, task  # type: ignore[import-not-found,unused-ignore]

SPACE = 2  # times the rows' bytes: keys, page headers, half-filled pages


def main() -> None:
    """Answer until standard input ends."""
    asked = task()
    size = SPACE * asked["rows"] * (asked["row_bytes"] + 64) + (64 << 20)
    with lmdb.open(str(Path(asked["folder"]) / "lmdb"), map_size=size, sync=False, metasync=False, lock=False) as environment:
        key = struct.Struct(">Q").pack
        with environment.begin(write=True) as writing:
            for number, row in enumerate(rows_of(asked)):
                writing.put(key(number), row, append=True)
        with environment.begin(buffers=True) as reading:
            answer(asked, lambda ids: [key(number) for number in ids], lambda keys: b"".join(map(reading.get, keys)))


if __name__ == "__main__":
    main()
