"""A process with a socket door over one small table, for `refusals`; ends when its input does."""

from __future__ import annotations

import hashlib
import sys

import numpy as np

from treadle.contract import RowLayout, Table
from treadle.contract.families import demo_model
from treadle.dataplane import DeadlineQueue, ServedLayer, SocketServer, Versions
from treadle.kernels import HashPlan

ROWS, ROW_BYTES = 200_000, 320
TOKEN_MAP = np.zeros(1, dtype=np.int32)


def main(path: str) -> None:
    """Serve until standard input ends."""
    template = demo_model(
        "loadtest", layers=(0,), token_map=hashlib.sha256(TOKEN_MAP.tobytes()).hexdigest(), compressed_vocab_size=1, pad_id=0,
        prime_base=5000, orders=(2, 3), row=RowLayout(ROW_BYTES, ROW_BYTES // 2, "bf16"),
    )  # fmt: skip
    model = template.with_tables({0: Table(ROWS, "0" * 64)})
    table = np.ones((ROWS, ROW_BYTES), dtype=np.uint8)
    versions = Versions()
    with DeadlineQueue(admission=True, implementation="native") as queue, SocketServer(queue, versions, [f"unix:{path}"]):
        versions.publish(model.version, model.fingerprint.digest, [ServedLayer(0, HashPlan.from_model(model, 0, TOKEN_MAP), table)])
        print(model.version, model.fingerprint.digest.hex(), flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1])
