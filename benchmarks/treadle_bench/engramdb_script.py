"""Fetches rows with engramdb and says how long it took. Runs in an environment of its own, so it imports no treadle and no numpy.

    python engramdb_script.py FOLDER ROWS WIDTH IDS ROWS_A_SET

FOLDER holds shard_000.bin, ROWS rows of WIDTH bytes. IDS: a file of int64 row ids, ROWS_A_SET for each set. Each line on standard
input is the number of a set; the answer is one line: microseconds of the fetch, and the SHA-256 of its bytes where the line ends in "?".
"""

from __future__ import annotations

import array
import hashlib
import sys
import time
from pathlib import Path


def main() -> None:
    """Answer until standard input ends."""
    import engramdb  # type: ignore[import-not-found,unused-ignore]

    folder, rows, width, ids_path, each = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), int(sys.argv[5])
    ids = array.array("q")
    with ids_path.open("rb") as file:
        ids.fromfile(file, ids_path.stat().st_size // 8)
    store = engramdb.Store(folder, shards=1, rows_per_shard=rows, width=width)
    for line in sys.stdin:
        number = int(line.rstrip("?\n"))
        wanted = ids[number * each : (number + 1) * each].tolist()
        begun = time.perf_counter_ns()
        fetched = store.fetch(wanted)
        took = (time.perf_counter_ns() - begun) / 1e3
        digest = hashlib.sha256(fetched).hexdigest() if line.endswith("?\n") else ""
        sys.stdout.write(f"{took} {digest}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
