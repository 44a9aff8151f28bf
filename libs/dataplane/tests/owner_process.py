"""An owner in a process of its own: `python owner_process.py ADDRESS [HELD]`; prints its address, serves until standard input ends.

Row r of layer n is made of (r, n) alone, so that whoever gets it can tell whether it is the right one.
"""

from __future__ import annotations

import hashlib
import sys

import numpy as np
from numpy.typing import NDArray

from treadle.contract import EngramModel, RowLayout, Table
from treadle.contract.families import demo_model
from treadle.dataplane import DeadlineQueue, ServedLayer, SocketServer, Tenants, Versions
from treadle.dataplane.socket import token_digest
from treadle.kernels import HashPlan

TOKEN_MAP = (np.arange(600) * 7 % 500).astype(np.int32)
ROW_BYTES = 64
HOSTS_TOKEN = "between hosts"  # beyond loopback a door asks for one


def model_of() -> EngramModel:
    """Two layers of about 11,000 rows."""
    digest = hashlib.sha256(TOKEN_MAP.astype("<i4").tobytes()).hexdigest()
    template = demo_model(
        "owned", layers=(1, 4), token_map=digest, compressed_vocab_size=500, pad_id=2, prime_base=700, row=RowLayout(ROW_BYTES, 32, "bf16"),
    )  # fmt: skip
    return template.with_tables({layer: Table(template.rows_hashed(layer), "0" * 64) for layer in template.layers})


def plans_of(model: EngramModel) -> dict[int, HashPlan]:
    return {layer: HashPlan.from_model(model, layer, TOKEN_MAP) for layer in model.layers}


def rows_of(ids: NDArray[np.int64], layer: int) -> NDArray[np.uint8]:
    """u8 [..., ROW_BYTES]: what these rows are."""
    mixed = (ids[..., None] * 2654435761 + layer * 40503 + np.arange(ROW_BYTES) * 97) >> 3
    return (mixed & 0xFF).astype(np.uint8)


def layers_of(model: EngramModel, held: NDArray[np.int64] | None = None) -> list[ServedLayer]:
    plans = plans_of(model)
    return [
        ServedLayer(layer, plans[layer], rows_of(np.arange(model.table(layer).rows, dtype=np.int64), layer), held)
        for layer in model.layers
    ]


def main() -> None:
    model = model_of()
    held = None
    if len(sys.argv) > 2:
        held = np.array([[int(part) for part in pair.split("-")] for pair in sys.argv[2].split(",")], dtype=np.int64)
    versions = Versions()
    versions.publish(model.version, model.fingerprint.digest, layers_of(model, held))
    tenants = None if sys.argv[1].startswith(("127.", "unix:")) else Tenants(tokens={token_digest(HOSTS_TOKEN): 0})
    with (
        DeadlineQueue(workers=1, tenants=tenants, implementation="native") as queue,
        SocketServer(queue, versions, [sys.argv[1]]) as server,
    ):
        print(server.addresses[0], flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main()
