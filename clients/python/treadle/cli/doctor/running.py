"""The fabric that runs here: by which doors its pool gives rows."""

from __future__ import annotations

from treadle.cli.doctor.finding import Finding, Host, Level
from treadle.cli.fabric import POOL
from treadle.cli.run_folder import RunFolder, home
from treadle.contract import TreadleError

ASK_SECONDS = 2.0  # a busy machine answers in milliseconds


def doors(host: Host) -> Finding:
    """Ring, socket and mooncake door of the pool of `treadle up`."""
    state = RunFolder(home()).read()
    record = state.service(POOL) if state is not None else None
    if record is None or not record.listen:
        return Finding(
            "Doors", "no pool of `treadle up` runs", "Of another pool, `treadle pool owners` lists them.", level=Level.INFO
        )
    from treadle.client import Fabric  # gRPC takes 100 ms to import

    try:
        with Fabric(engram=record.listen, timeout_seconds=ASK_SECONDS) as fabric:
            found = fabric.engram.status().doors
    except TreadleError as error:
        return Finding("Doors", f"{record.listen}: {error}", "The pool does not answer.", "See `treadle logs`.", Level.WARN)
    if not found:
        means = "Who cannot map the tables gets rows by gRPC, the slowest way."
        return Finding(
            "Doors", "gRPC alone", means, "Install the native data plane; see ring_listen and socket_listen.", Level.INFO
        )
    listed = ", ".join(f"{door.transport} {door.address}" for door in found)
    return Finding("Doors", listed, "Who cannot map the tables gets rows there, without gRPC.")
