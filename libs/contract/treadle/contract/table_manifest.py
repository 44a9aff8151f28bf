"""What a table is: its rows, hashed by chunk, so that the version can be computed while streaming."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from treadle.contract.errors import InvalidArgument
from treadle.contract.version import version_of

CHUNK_BYTES = 4 << 20  # 4 MiB: one CRC32C and one sha256 for each; two huge pages, small beside any table


def table_version(rows: int, row_bytes: int, chunk_digests: Sequence[bytes]) -> str:
    """Version of a table: sha256 of its canonical manifest, which holds the sha256 over its chunks' sha256 digests.

    chunk_digests: sha256 (32 bytes) of each CHUNK_BYTES of the rows, in order; the last chunk may be shorter
    Raises InvalidArgument if their number does not fit the size.
    """
    needed = -(-rows * row_bytes // CHUNK_BYTES)
    if len(chunk_digests) != needed:
        raise InvalidArgument(f"chunk_digests: {needed} expected for {rows} rows of {row_bytes} bytes, got {len(chunk_digests)}")
    content = hashlib.sha256(b"".join(chunk_digests)).hexdigest()
    return version_of({
        "schema": "treadle.engram-table/1", "rows": rows, "row_bytes": row_bytes, "chunk_bytes": CHUNK_BYTES, "content": content,
    })  # fmt: skip


def version_of_rows(rows: NDArray[np.uint8]) -> str:
    """Version of a table that is all in memory, uint8 [N, row_bytes]."""
    flat = memoryview(np.ascontiguousarray(rows).reshape(-1).data)
    digests = [hashlib.sha256(flat[at : at + CHUNK_BYTES]).digest() for at in range(0, len(flat), CHUNK_BYTES)]
    return table_version(len(rows), rows.shape[1], digests)
