"""Every peer on every table: opened, compared with the right bytes, then timed beside `np.take` over the same rows.

Calls in this process take turns round by round, all of them; a peer in a process of its own takes turns with `np.take` alone. Each
number of tokens has a share of the time and gets as many rounds as fit, so that a slow peer makes a run no longer.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import psutil

from treadle.client import Endpoint
from treadle.client.engram import EngramPool
from treadle.contract import DataLoss, InvalidArgument, NotFound, ResourceExhausted, Unavailable
from treadle.kernels.segment import Segment
from treadle_bench.peers import engramdb, listing1, lmdb, mooncake_store, numpy_rows, redis, service_ple, torch_rows, treadle_rows
from treadle_bench.peers.id_sets import IdSets
from treadle_bench.peers.layouts import LAYOUTS, QUICK_LAYOUTS, TOKEN_MAP, Layout
from treadle_bench.peers.peer import Fetcher, Held, Peer
from treadle_bench.pool_process import pool_process
from treadle_bench.report import Row, interleave, rows_of
from treadle_bench.timing import Timed, on_fresh_sets

PEERS: tuple[Peer, ...] = (
    *treadle_rows.PEERS, listing1.PEER, numpy_rows.PEER, torch_rows.PEER,
    engramdb.PEER, service_ple.PEER, redis.PEER, lmdb.PEER, mooncake_store.PEER,
)  # fmt: skip
OURS = tuple(peer.name for peer in treadle_rows.PEERS)
RUN_SECONDS_MAX = 480.0
ROUNDS_MIN, ROUNDS_MAX = 3, 400
WARM_ROUNDS = 2
SETTLE_TOKENS = 64
FETCH_SECONDS_MAX = 2.5  # a peer that takes longer is not asked for more tokens: it would take the others' time
BYTES_BESIDE = 2 << 30  # of memory, for peers that copy rows, and for processes


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is measured.

    seconds:        of each number of tokens, for the calls here and for each peer in a process of its own
    settle_seconds: of each fetcher before its first figure: a virtual machine's host gives new memory its final pages only after use
    """

    layouts: tuple[Layout, ...] = LAYOUTS
    tokens: tuple[int, ...] = (1, 16, 64, 256, 1024, 4096)
    seconds_here: float = 3.0
    seconds_apart: float = 1.0
    settle_seconds: float = 0.3
    copied_rows: int = 1_000_000
    table_bytes_max: int | None = None


QUICK = Extent(QUICK_LAYOUTS, (1, 256), 0.5, 0.25, 0.1, copied_rows=50_000, table_bytes_max=128_000_000)


@dataclass(slots=True)
class Findings:
    """What came out: rows, and notes on what did not. `until`: monotonic seconds, when no new figure is begun."""

    until: float
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def note(self, text: str) -> None:
        """Keep a note once."""
        if text not in self.notes:
            self.notes.append(text)


def chosen_peers(only: Sequence[str]) -> tuple[Peer, ...]:
    """The peers by name, all for none. Raises InvalidArgument listing the names."""
    unknown = set(only) - {peer.name for peer in PEERS}
    if unknown:
        raise InvalidArgument(f"no peer {sorted(unknown)}; there are {', '.join(peer.name for peer in PEERS)}")
    return tuple(peer for peer in PEERS if not only or peer.name in only)


def measure(extent: Extent, peers: Sequence[Peer] = PEERS) -> Findings:
    """Measure. Raises DataLoss if rows of our own are wrong."""
    findings = Findings(time.monotonic() + RUN_SECONDS_MAX)
    for layout in extent.layouts:
        try:
            with _held(layout, extent) as held:
                _measure_here(held, extent, [peer for peer in peers if peer.in_process], findings)
                for peer in peers:
                    if not peer.in_process:
                        _measure_apart(held, extent, peer, findings)
        except ResourceExhausted as error:
            findings.note(f"skipped: {layout.model}: {error}")
    return findings


@contextmanager
def _held(layout: Layout, extent: Extent) -> Iterator[Held]:
    """A pool that holds the table, and the table mapped here."""
    template = layout.template(extent.table_bytes_max)
    table_bytes = template.rows_hashed(0) * layout.row.bytes
    needed = 2 * table_bytes + BYTES_BESIDE  # the pool's copy and the private one of `local`
    free = min(psutil.virtual_memory().available, shutil.disk_usage("/dev/shm").free)
    if free < needed:
        raise ResourceExhausted(f"its table needs {needed / 1e9:.1f} GB of memory and /dev/shm, {free / 1e9:.1f} are free")
    with pool_process() as process, EngramPool(Endpoint(process.address, timeout_seconds=60.0)) as pool:
        pool.load_random(template, TOKEN_MAP, seed=1)
        place = pool.describe(template.name).segments[0]
        with Segment(place.path) as segment:
            segment.populate()
            copied = min(extent.copied_rows, len(segment.rows))
            yield Held(layout, segment.rows, place.path, place.rows_offset_bytes, process.address, template.name, copied)


def _measure_here(held: Held, extent: Extent, peers: Sequence[Peer], findings: Findings) -> None:
    with ExitStack() as stack:
        fetchers: list[Fetcher] = [numpy_rows.take(held)]
        for peer in peers:
            fetchers += _opened(stack, peer, held, findings)
        if peers:
            _measure(held, fetchers, extent, extent.seconds_here, findings)


def _measure_apart(held: Held, extent: Extent, peer: Peer, findings: Findings) -> None:
    if time.monotonic() > findings.until:
        findings.note(
            f"skipped: {peer.name}, {held.layout.model}: the run's {RUN_SECONDS_MAX:.0f} s are over; --only {peer.name} measures it"
        )
        return
    with ExitStack() as stack:
        fetchers = _opened(stack, peer, held, findings)
        if fetchers:
            _measure(held, [numpy_rows.take(held), *fetchers], extent, extent.seconds_apart, findings, beside=peer.name)


def _opened(stack: ExitStack, peer: Peer, held: Held, findings: Findings) -> Sequence[Fetcher]:
    try:
        return stack.enter_context(peer.open(held))
    except (InvalidArgument, NotFound, Unavailable) as error:
        findings.note(f"skipped: {peer.name}: {error}. To have it: {peer.get}")
        return ()


def _measure(held: Held, fetchers: Sequence[Fetcher], extent: Extent, seconds: float, findings: Findings, beside: str = "") -> None:
    """One row for each fetcher and number of tokens; the first fetcher is the baseline."""
    table_rows = min(fetcher.table_rows for fetcher in fetchers)
    ids = held.id_sets(table_rows)
    left = list(fetchers)
    params: dict[str, object] = {"model": held.layout.model, "rows": held.layout.name, "table_rows": table_rows, "pages": "4KiB"}
    params |= {"beside": beside} if beside else {}
    for place, fetcher in enumerate(fetchers):
        _settle(fetcher, ids, place, extent.settle_seconds)
    for count in extent.tokens:
        left = [fetcher for fetcher in left if _answers(fetcher, ids, count, findings, held)]
        if len(left) < 2 or time.monotonic() > findings.until:
            return
        variants = {
            fetcher.name: on_fresh_sets(_by_set(fetcher, ids, count), place, len(left), ids.sets(count))
            for place, fetcher in enumerate(left)
        }
        took_us = _warm(variants)
        rounds = max(ROUNDS_MIN, min(ROUNDS_MAX, int(seconds * 1e6 / sum(took_us.values()))))
        samples = interleave(
            variants, rounds, seed=count, what=f"{held.layout.title}, {count} tokens{', ' + beside if beside else ''}"
        )
        findings.rows += rows_of(samples, {**params, "tokens": count}, "us", left[0].name)
        for fetcher in tuple(left):
            if took_us[fetcher.name] > FETCH_SECONDS_MAX * 1e6:
                findings.note(
                    f"{fetcher.name}, {held.layout.model}: takes {took_us[fetcher.name] / 1e6:.1f} s for {count} tokens, no more asked"
                )
                left.remove(fetcher)


def _answers(fetcher: Fetcher, ids: IdSets, tokens: int, findings: Findings, held: Held) -> bool:
    """True if its rows are right. Raises DataLoss where ours are not."""
    try:
        right = fetcher.fetches_rightly(ids, 0, tokens)
    except Unavailable as error:
        findings.note(f"not timed: {fetcher.name}, {held.layout.model}, {tokens} tokens: {error}")
        return False
    if not right:
        if fetcher.name in OURS:
            raise DataLoss(f"{fetcher.name}: wrong rows of {held.layout.model}, {tokens} tokens")
        findings.note(f"not timed: {fetcher.name}, {held.layout.model}, {tokens} tokens: it gives WRONG ROWS")
    return right


def _settle(fetcher: Fetcher, ids: IdSets, place: int, seconds: float) -> None:
    fetch = on_fresh_sets(_by_set(fetcher, ids, SETTLE_TOKENS), place, 1, ids.sets(SETTLE_TOKENS))
    until, number = time.monotonic() + seconds, 0
    while time.monotonic() < until:
        fetch(number)
        number += 1


def _by_set(fetcher: Fetcher, ids: IdSets, tokens: int) -> Timed:
    return lambda number: fetcher.microseconds(ids, number * tokens, tokens)


def _warm(variants: Mapping[str, Timed]) -> dict[str, float]:
    """The last of a few fetches of each, microseconds."""
    return {name: [act(number) for number in range(WARM_ROUNDS)][-1] for name, act in variants.items()}
