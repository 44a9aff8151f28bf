"""A process with a socket door over one small table and requests that stand in its queue, for `refusals`; ends when its input does.

A reserve paces the queue, so that what stands there stands long and takes next to nothing of the core that is measured on.
"""

from __future__ import annotations

import hashlib
import select
import sys

import numpy as np

from treadle.contract import Deadline, RowLayout, Table
from treadle.contract.families import demo_model
from treadle.dataplane import DeadlineQueue, ServedLayer, SocketServer, Ticket, Versions
from treadle.kernels import HashPlan

ROWS, ROW_BYTES = 200_000, 320
STANDING_SECONDS, LOOK_SECONDS = 600.0, 0.05
RESERVED_PART = 0.89  # of the memory's bandwidth: rows get the rest, a standing request lasts some 50 ms
TOKEN_MAP = np.zeros(1, dtype=np.int32)


def main(path: str, count: int) -> None:
    """Serve until standard input ends, with `count` requests in the queue."""
    template = demo_model(
        "loadtest", layers=(0,), token_map=hashlib.sha256(TOKEN_MAP.tobytes()).hexdigest(), compressed_vocab_size=1, pad_id=0,
        prime_base=5000, orders=(2, 3), row=RowLayout(ROW_BYTES, ROW_BYTES // 2, "bf16"),
    )  # fmt: skip
    model = template.with_tables({0: Table(ROWS, "0" * 64)})
    table = np.ones((ROWS, ROW_BYTES), dtype=np.uint8)
    versions = Versions()
    with DeadlineQueue(admission=True, implementation="native") as queue, SocketServer(queue, versions, [f"unix:{path}"]):
        versions.publish(model.version, model.fingerprint.digest, [ServedLayer(0, HashPlan.from_model(model, 0, TOKEN_MAP), table)])
        queue.reserve("refusals", int(queue.reserve("refusals", 0, 1.0).left_bytes_per_second * RESERVED_PART), STANDING_SECONDS)
        ids, out = np.arange(ROWS), np.empty_like(table)  # shared by all: nobody reads them
        standing: list[Ticket] = []
        told = False
        while not select.select([sys.stdin], [], [], LOOK_SECONDS if told else 0.0)[0]:
            standing = [ticket for ticket in standing if not ticket.done]
            standing += [
                queue.submit_gather(table, ids, out, Deadline.after(STANDING_SECONDS)) for _ in range(count - len(standing))
            ]
            if not told:
                print(model.version, model.fingerprint.digest.hex(), flush=True)
                told = True
        for ticket in standing:
            ticket.cancel()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
