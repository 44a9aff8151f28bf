"""Rows by Redis: one MGET over a Unix socket, parsed by hiredis, from a server of our own that keeps nothing on disk."""

from __future__ import annotations

import struct
from pathlib import Path

import redis
from answering import answer, ended, rows_of, started, task, wait_for  # type: ignore[import-not-found,unused-ignore]

LOAD_ROWS = 1000  # of one MSET


def main() -> None:
    """Answer until standard input ends."""
    asked = task()
    folder = Path(asked["folder"])
    address, log = folder / "redis.sock", folder / "redis.log"
    server = started(
        [asked["server"], "--port", "0", "--unixsocket", str(address), "--save", "", "--appendonly", "no", "--dir", str(folder)],
        log,
    )
    try:
        wait_for(address.exists, server, log)
        with redis.Redis(unix_socket_path=str(address)) as client:
            key = struct.Struct(">Q").pack
            batch: dict[bytes, bytes] = {}
            for number, row in enumerate(rows_of(asked)):
                batch[key(number)] = row
                if len(batch) == LOAD_ROWS:
                    client.mset(batch)  # type: ignore[arg-type,unused-ignore]
                    batch.clear()
            if batch:
                client.mset(batch)  # type: ignore[arg-type,unused-ignore]
            answer(asked, lambda ids: [key(number) for number in ids], lambda keys: b"".join(client.mget(keys)))
    finally:
        ended(server)


if __name__ == "__main__":
    main()
