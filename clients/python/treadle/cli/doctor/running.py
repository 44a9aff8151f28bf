"""The fabric that runs here: by which doors its pool gives rows, and what its store keeps."""

from __future__ import annotations

from treadle.cli.doctor.finding import Finding, Host, Level
from treadle.cli.fabric import POOL, STORE
from treadle.cli.run_folder import RunFolder, home
from treadle.cli.terminal import size_text
from treadle.contract import TreadleError

ASK_SECONDS = 2.0  # a busy machine answers in milliseconds
STORE_FULL_SHARE = 0.9


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


def dictionary_cache(host: Host) -> Finding:
    """What workers of this user have brought here from stores whose files they cannot open."""
    from treadle.client.asm.cache import CACHE_FOLDER
    from treadle.client.asm.cache_files import CacheFiles

    folder = home() / CACHE_FOLDER
    entries = CacheFiles(folder).entries()
    if not entries:
        means = "Workers map dictionaries where their store has them; of a store on another host they would bring them here."
        return Finding("Dictionary cache", f"{folder}: empty", means, level=Level.INFO)
    whole = sum(entry.whole for entry in entries)
    coming = f", {len(entries) - whole} on their way in, or left by a worker that was killed" if whole < len(entries) else ""
    found = f"{folder}: {whole} versions, {size_text(sum(entry.nbytes for entry in entries))}{coming}"
    return Finding(
        "Dictionary cache", found, "Brought from stores on other hosts; the least recently used go at asm_cache_bytes_max."
    )


def dictionaries(host: Host) -> Finding:
    """What the store of `treadle up` keeps, and how much more it may."""
    state = RunFolder(home()).read()
    record = state.service(STORE) if state is not None else None
    if record is None or not record.listen:
        means = "Of another store, `treadle asm ls --store HOST:PORT` lists them."
        return Finding("Dictionaries", "no store of `treadle up` runs", means, level=Level.INFO)
    from treadle.client import Fabric

    try:
        with Fabric(asm=record.listen, timeout_seconds=ASK_SECONDS) as fabric:
            store = fabric.asm.status()
    except TreadleError as error:
        means = "The store does not answer; what workers have mapped they go on with."
        return Finding("Dictionaries", f"{record.listen}: {error}", means, "See `treadle logs`.", Level.WARN)
    found = f"{store.versions} versions, {size_text(store.file_bytes)} of {size_text(store.file_bytes_max)}"
    if store.file_bytes > STORE_FULL_SHARE * store.file_bytes_max:
        means = "The next one evicts versions that no name, pin or reader holds, or is refused."
        return Finding("Dictionaries", found, means, "`treadle asm rm` makes room; file_bytes_max allows more.", Level.WARN)
    return Finding("Dictionaries", found, "Long prefixes that requests can choose; workers map them where they lie.")
