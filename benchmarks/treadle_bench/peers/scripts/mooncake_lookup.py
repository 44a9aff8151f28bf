"""Rows by Mooncake's EngramStore: a head of the table in each object, on a store node in a process of its own, over TCP.

Its processes listen on all addresses without a key, so this script runs in a network of its own. It knows rows of float32 alone:
what a row holds does not matter to it.
"""

from __future__ import annotations

import sys
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from answering import answer, ended, started, task, wait_for  # type: ignore[import-not-found,unused-ignore]
from mooncake import store  # type: ignore[import-not-found,import-untyped,unused-ignore]

MASTER_PORT, METRICS_PORT, NODE_PORT = 21751, 21752, 21753  # below the ephemeral range
MASTER = f"127.0.0.1:{MASTER_PORT}"
LEASE_MS = 600_000
BUFFER_BYTES = 64 << 20  # of the client, for a reply


def main() -> None:
    """Answer until standard input ends."""
    asked = task()
    programs, folder = Path(sys.executable).parent, Path(asked["folder"])
    columns, width = asked["columns"], asked["row_bytes"]
    head_rows = asked["rows"] // columns
    with ExitStack() as stack:
        master = started(
            [str(programs / "mooncake_master"), "--rpc_address=127.0.0.1", f"--rpc_port={MASTER_PORT}", "--metrics_host=127.0.0.1",
             f"--metrics_port={METRICS_PORT}", f"--default_kv_lease_ttl={LEASE_MS}"],
            folder / "master.log",
        )  # fmt: skip
        stack.callback(ended, master)
        wait_for(lambda: _metric("/health") is not None, master, folder / "master.log")
        segment_bytes = asked["rows"] * width * 2 + (256 << 20)
        node = started(
            [str(programs / "mooncake_client"), "--host=127.0.0.1", f"--port={NODE_PORT}", "--protocol=tcp",
             f"--master_server_address={MASTER}", "--metadata_server=P2PHANDSHAKE", f"--global_segment_size={segment_bytes >> 20}MB"],
            folder / "node.log",
        )  # fmt: skip
        stack.callback(ended, node)
        wait_for(lambda: "master_active_clients 1" in (_metric("/metrics") or ""), node, folder / "node.log")
        engram = _store(asked, head_rows)
        heads = np.arange(columns, dtype=np.int64) * head_rows
        answer(
            asked,
            lambda ids: (np.asarray(ids, dtype=np.int64).reshape(-1, columns) - heads)[np.newaxis],
            lambda ids: engram.lookup(ids).data,
        )


def _store(asked: dict[str, Any], head_rows: int) -> Any:
    client = store.MooncakeDistributedStore()
    code = client.setup("127.0.0.1", "P2PHANDSHAKE", 0, BUFFER_BYTES, "tcp", "", MASTER)
    if code:
        sys.exit(f"mooncake: the store's client does not start: {code}")
    config = store.EngramStoreConfig()
    config.table_vocab_sizes = [head_rows] * asked["columns"]
    config.embedding_dim = asked["row_bytes"] // 4
    engram = store.EngramStore(0, config, client)
    bytes_of_head = head_rows * asked["row_bytes"]
    whole = np.memmap(
        asked["table"], dtype=np.uint8, mode="r", offset=asked["offset_bytes"], shape=(asked["columns"] * bytes_of_head,)
    )
    engram.populate([np.array(head).view(np.float32).reshape(head_rows, -1) for head in whole.reshape(asked["columns"], -1)])
    return engram


def _metric(path: str) -> str | None:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{METRICS_PORT}{path}", timeout=2) as said:
            return str(said.read().decode())
    except OSError:
        return None


if __name__ == "__main__":
    main()
