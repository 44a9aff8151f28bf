"""Lookups over owners: all rows and the right ones, or an error in time, whatever becomes of the owners."""

from __future__ import annotations

import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray

from treadle.contract import Deadline, DeadlineExceeded, InvalidArgument, RowOutOfRange, Unavailable, Windows
from treadle.dataplane import (
    IMPLEMENTATION,
    DeadlineQueue,
    RemoteLayer,
    RemoteRows,
    RemoteTicket,
    Route,
    ServedLayer,
    SocketServer,
    Tenants,
    Versions,
    remote_stats,
)
from treadle.dataplane.admission import Verdict
from treadle.dataplane.socket import fetch_token_map, ping, token_digest
from treadle.kernels import row_ids

if TYPE_CHECKING:
    from tests.conftest import Hosts, StartOwner
    from tests.owner_process import HOSTS_TOKEN, ROW_BYTES, layers_of, model_of, plans_of, rows_of
else:
    from owner_process import HOSTS_TOKEN, ROW_BYTES, layers_of, model_of, plans_of, rows_of

pytestmark = pytest.mark.skipif(IMPLEMENTATION != "native", reason="the native extension was not built: install a C++20 compiler")
MODEL, PLANS = model_of(), plans_of(model_of())
SECONDS = 10.0
Outs = dict[int, NDArray[np.uint8]]


def windows_of(tokens: int, seed: int = 0) -> Windows:
    chance = np.random.default_rng(seed)
    return Windows.of_sequences([(chance.integers(0, 600, tokens).tolist(), 0)], MODEL.order_max - 1)


def outs_of(windows: Windows) -> Outs:
    return {layer: np.zeros((windows.token_count, MODEL.columns, ROW_BYTES), np.uint8) for layer in MODEL.layers}


def assert_right(outs: Outs, windows: Windows) -> None:
    for layer, out in outs.items():
        assert np.array_equal(out, rows_of(row_ids(PLANS[layer], windows), layer))


@contextmanager
def rows_at(*addresses: str, token: str | None = None, spread: bool = False) -> Iterator[RemoteRows]:
    layers = [RemoteLayer(n, MODEL.table(n).rows, ROW_BYTES, MODEL.columns, PLANS[n]) for n in MODEL.layers]
    rows = RemoteRows(MODEL.version, MODEL.fingerprint.digest, layers, token=token)
    try:
        for address in addresses:
            rows.add_owner(address)
        if spread:
            rows.set_routes(routes_over(len(addresses)))
        yield rows
    finally:
        rows.close()


def routes_over(owners: int, stretches: int = 7) -> dict[int, Route]:
    """Stretch s: first owner s, then s + 1."""
    bounds = {n: np.linspace(0, MODEL.table(n).rows, stretches + 1).astype(np.int64) for n in MODEL.layers}
    held = np.array([[s % owners, (s + 1) % owners] for s in range(stretches)], dtype=np.int32)
    return {n: Route(bounds[n], held) for n in MODEL.layers}


def look_up(
    rows: RemoteRows, tokens: int, *, deadline_seconds: float = SECONDS, give_up_seconds: float = SECONDS, seed: int = 0,
    hurried: bool = True,
) -> Outs:  # fmt: skip
    windows = windows_of(tokens, seed)
    outs = outs_of(windows)
    deadline = Deadline.after(deadline_seconds) if hurried else Deadline.never()
    tickets = rows.submit_lookup(windows, outs, dict.fromkeys(MODEL.layers, deadline), Deadline.after(give_up_seconds))
    for ticket in tickets.values():
        assert ticket.wait(SECONDS)
    assert_right(outs, windows)
    return outs


@contextmanager
def server_here(
    *listen: str,
    layers: Sequence[ServedLayer] | None = None,
    tenants: Tenants | None = None,
    admission: bool = False,
    **limits: Any,
) -> Iterator[tuple[SocketServer, DeadlineQueue, Versions]]:
    versions = Versions()
    versions.publish(MODEL.version, MODEL.fingerprint.digest, layers or layers_of(MODEL))
    with (
        DeadlineQueue(workers=1, tenants=tenants, admission=admission) as queue,
        SocketServer(queue, versions, listen or ["127.0.0.1:0"], **limits) as server,
    ):
        yield server, queue, versions


@pytest.mark.parametrize("kind", ["unix", "tcp"])
@pytest.mark.parametrize("tokens", [0, 1, 37, 700])
def test_an_owner_hashes_and_its_rows_are_those_of_the_table(kind: str, tokens: int, tmp_path: Any) -> None:
    listen = "127.0.0.1:0" if kind == "tcp" else f"unix:{tmp_path}/door"
    with server_here(listen) as (server, _, _), rows_at(server.addresses[0]) as rows:
        look_up(rows, tokens)


@pytest.mark.parametrize("tokens", [1, 300])
def test_a_spread_table_is_asked_for_in_parts_and_put_together(tokens: int) -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(server_here())[0] for _ in range(3)]
        rows = stack.enter_context(rows_at(*(server.addresses[0] for server in servers), spread=True))
        look_up(rows, tokens, hurried=False)  # so that no replica is asked, too, where a reply is late
        if tokens > 1:
            assert all(server.stats()["requests_total"] == 1 for server in servers)  # one request each, for both layers


def test_an_owner_that_does_not_hold_a_row_is_passed_by() -> None:
    held = np.array([[0, 5]], np.int64)
    with server_here(layers=layers_of(MODEL, held)) as (part, _, _), server_here() as (whole, _, _):
        with rows_at(part.addresses[0], whole.addresses[0]) as rows:
            look_up(rows, 20)
        with rows_at(part.addresses[0]) as rows, pytest.raises(RowOutOfRange):
            look_up(rows, 20)


@contextmanager
def silent_owner() -> Iterator[str]:
    """Its connections are taken and nothing is ever said."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@contextmanager
def served_from(rows: RemoteRows, *, give_up_seconds: float, patience_seconds: float = 0.0) -> Iterator[RemoteRows]:
    """Rows of a host that has none of its own: it asks the owners of `rows`."""
    layers = [
        ServedLayer(layer.number, layer.plan, rows.store(layer.number, give_up_seconds, patience_seconds=patience_seconds))
        for layer in layers_of(MODEL)
    ]
    with server_here(layers=layers) as (agent, _, _), rows_at(agent.addresses[0]) as here:
        yield here


def ask(rows: RemoteRows, deadline_seconds: float) -> RemoteTicket:
    out = np.zeros((4, ROW_BYTES), np.uint8)
    return rows.submit_gather(4, np.arange(4), out, Deadline.after(deadline_seconds), Deadline.after(SECONDS))


def test_a_host_asks_owners_no_longer_than_its_caller_wants_the_rows() -> None:
    with silent_owner() as address, rows_at(address) as rows, served_from(rows, give_up_seconds=SECONDS / 2) as here:
        begun = time.monotonic()
        with pytest.raises(DeadlineExceeded):
            ask(here, 0.05).wait(SECONDS)
        assert time.monotonic() - begun < SECONDS / 4


def test_a_stopped_request_frees_the_thread_that_asks_owners() -> None:
    with silent_owner() as address, rows_at(address) as rows, DeadlineQueue(workers=1, implementation="native") as queue:
        store = rows.store(4, SECONDS / 2, patience_seconds=SECONDS / 2)
        out, begun = np.zeros((4, ROW_BYTES), np.uint8), time.monotonic()
        ticket = queue._engine.submit_gather(store, np.arange(4), out, Deadline.after(SECONDS).at_ns, 0)
        assert not isinstance(ticket, Verdict)
        while not ticket.started_ns:
            assert time.monotonic() - begun < SECONDS / 4
        assert ticket.cancel() == 0
        assert ticket.fault == 0
        assert time.monotonic() - begun < SECONDS / 4


def test_a_store_of_a_process_whose_thread_has_gone_ends_its_gathers() -> None:
    """In a process of its own: the thread is shared by all of it."""
    program = """
import numpy as np, socket, sys, time
from treadle.contract import Deadline
from treadle.dataplane import DeadlineQueue, RemoteLayer, RemoteRows
from treadle.dataplane.remote import _hub
with socket.create_server(("127.0.0.1", 0)) as silent, DeadlineQueue(workers=1, implementation="native") as queue:
    rows = RemoteRows("0" * 64, bytes(32), [RemoteLayer(0, 100, 64, 1)])
    rows.add_owner(f"127.0.0.1:{silent.getsockname()[1]}")
    out = np.zeros((4, 64), np.uint8)
    ticket = queue._engine.submit_gather(rows.store(0, 0.3), np.arange(4), out, Deadline.after(9).at_ns, 0)
    while not ticket.started_ns:
        pass
    _hub().close()
    assert not ticket.wait(9.0)
    assert ticket.ended and ticket.fault == 2, ticket.fault
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_rows_come_by_id_and_a_bad_id_is_refused_before_anything_is_sent() -> None:
    with server_here() as (server, _, _), rows_at(server.addresses[0]) as rows:
        ids = np.arange(60, dtype=np.int64).reshape(4, 15) * 11
        out = np.zeros((4, 15, ROW_BYTES), np.uint8)
        soon = Deadline.after(SECONDS)
        assert rows.submit_gather(4, ids, out, soon, soon).wait(SECONDS)
        assert np.array_equal(out, rows_of(ids, 4))
        requests = server.stats()["requests_total"]
        ids[2, 3] = MODEL.table(4).rows
        with pytest.raises(RowOutOfRange, match=r"rows\[33\]"):
            rows.submit_gather(4, ids, out, soon, soon)
        assert server.stats()["requests_total"] == requests


def test_killed_in_mid_request_an_owner_is_replaced_by_its_replica_within_the_deadline(start_owner: StartOwner) -> None:
    for spread in (False, True):
        first, second = start_owner(), start_owner()
        with rows_at(first.address, second.address, spread=spread) as rows:
            look_up(rows, 50)
            killer = threading.Timer(0.02, first.kill)
            killer.start()
            until, lookups = time.monotonic() + 0.5, 0
            while time.monotonic() < until or lookups < 4 or first.child.poll() is None:
                look_up(rows, 400, seed=lookups)
                lookups += 1
            killer.join()


def test_without_a_replica_a_killed_owner_is_unavailable_in_time_and_found_again_when_it_is_back(start_owner: StartOwner) -> None:
    owner = start_owner()
    with rows_at(owner.address) as rows:
        look_up(rows, 10)
        owner.kill()
        begun = time.monotonic()
        with pytest.raises(Unavailable):
            look_up(rows, 10, deadline_seconds=0.3, give_up_seconds=0.3)
        assert 0.2 < time.monotonic() - begun < SECONDS / 2
        again = start_owner(owner.address)
        assert again.address == owner.address
        look_up(rows, 10)


def test_an_owner_that_drains_or_lost_the_version_passes_its_requests_on() -> None:
    with server_here() as (first, _, versions), server_here() as (second, _, _):
        with rows_at(first.addresses[0], second.addresses[0]) as rows:
            versions.withdraw(MODEL.version)
            look_up(rows, 10)
            versions.publish(MODEL.version, MODEL.fingerprint.digest, layers_of(MODEL))
            first.drain()
            look_up(rows, 10)
        with rows_at(first.addresses[0]) as rows, pytest.raises(Unavailable):
            look_up(rows, 10, give_up_seconds=1.0)  # time for one answer at least: that it drains


def test_another_version_or_fingerprint_is_unavailable_and_never_its_rows() -> None:
    with server_here() as (server, _, _):
        layers = [RemoteLayer(1, MODEL.table(1).rows, ROW_BYTES, MODEL.columns)]
        for version, fingerprint in (("0" * 64, MODEL.fingerprint.digest), (MODEL.version, bytes(32))):
            rows = RemoteRows(version, fingerprint, layers)
            rows.add_owner(server.addresses[0])
            windows = windows_of(3)
            out = np.zeros((3, MODEL.columns, ROW_BYTES), np.uint8)
            soon = Deadline.after(SECONDS)
            with pytest.raises(Unavailable, match="open the model again"):
                rows.submit_lookup(windows, {1: out}, {1: soon}, soon)[1].wait(SECONDS)
            assert not out.any()
            rows.close()


def test_nobody_writes_to_a_buffer_after_cancel(start_owner: StartOwner) -> None:
    owner = start_owner()
    with rows_at(owner.address) as rows:
        windows = windows_of(3000)
        for attempt in range(30):
            outs = outs_of(windows)
            soon = Deadline.after(SECONDS)
            tickets = rows.submit_lookup(windows, outs, dict.fromkeys(MODEL.layers, soon), soon)
            time.sleep(attempt * 1e-4)  # into every phase of the reply
            for layer, ticket in tickets.items():
                there = ticket.cancel().reshape(outs[layer].shape[:2])
                kept = outs[layer][there]
                assert np.array_equal(kept, rows_of(row_ids(PLANS[layer], windows), layer)[there])
                outs[layer][:] = 7
            look_up(rows, 5)  # on the same connection, behind what is left of the reply
            assert all((out == 7).all() for out in outs.values())


def test_an_owner_is_added_and_another_removed_without_losing_a_request() -> None:
    with server_here() as (first, _, _), server_here() as (second, _, _), rows_at(first.addresses[0]) as rows:
        failures: list[BaseException] = []
        over = threading.Event()

        def ask() -> None:
            try:
                while not over.is_set():
                    look_up(rows, 60)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        old = 0
        for turn in range(20):
            new = rows.add_owner((second, first)[turn % 2].addresses[0])
            held = np.array([[new, old]], np.int32)
            rows.set_routes({n: Route(np.array([0, MODEL.table(n).rows], np.int64), held) for n in MODEL.layers})
            look_up(rows, 30)
            rows.remove_owner(old)
            old = new
        over.set()
        for thread in threads:
            thread.join(SECONDS)
        assert not failures
        assert second.stats()["requests_total"] > 0


def test_an_owner_that_cannot_be_in_time_refuses_at_once_with_the_predicted_finish() -> None:
    with server_here(admission=True) as (server, _, _), rows_at(server.addresses[0]) as rows:
        windows = windows_of(3000)
        outs = outs_of(windows)
        deadline = Deadline(time.monotonic_ns() + 50_000)
        begun = time.monotonic()
        tickets = rows.submit_lookup(windows, outs, dict.fromkeys(MODEL.layers, deadline), Deadline.after(SECONDS))
        with pytest.raises(DeadlineExceeded) as refused:
            tickets[1].wait(SECONDS)
        assert refused.value.predicted_finish_seconds is not None
        assert 0 < refused.value.predicted_finish_seconds < 1  # at the costs it begins with
        assert time.monotonic() - begun < SECONDS / 2
        patient = rows.submit_lookup(
            windows, outs, dict.fromkeys(MODEL.layers, deadline), Deadline.after(SECONDS), patience_seconds=5.0
        )
        assert all(ticket.wait(SECONDS) for ticket in patient.values())
        assert_right(outs, windows)


def test_a_token_is_asked_for_and_says_whose_quota_it_is() -> None:
    tenants = Tenants(tokens={token_digest("open sesame"): 0})
    with server_here(tenants=tenants) as (server, _, _):
        address = server.addresses[0]
        ping(address, token="open sesame")
        for token in (None, "open barley"):
            with rows_at(address, token=token) as rows, pytest.raises(Exception, match="token"):
                look_up(rows, 3)
        with rows_at(address, token="open sesame") as rows:
            look_up(rows, 3)
    with DeadlineQueue() as queue, pytest.raises(InvalidArgument, match="beyond loopback"):
        SocketServer(queue, Versions(), ["0.0.0.0:0"])


def test_a_token_map_comes_as_its_owner_has_it() -> None:
    with server_here() as (server, _, _):
        got = fetch_token_map(server.addresses[0], MODEL.version, MODEL.fingerprint.digest, 1)
        expected = PLANS[1].token_map
        assert got is not None
        assert expected is not None
        assert np.array_equal(got, expected)


def test_a_ticket_tells_an_event_loop_and_ends_with_its_handle() -> None:
    with server_here() as (server, _, _), rows_at(server.addresses[0]) as rows:
        windows = windows_of(50)
        outs = outs_of(windows)
        soon = Deadline.after(SECONDS)
        tickets: dict[int, RemoteTicket] = rows.submit_lookup(windows, outs, dict.fromkeys(MODEL.layers, soon), soon)
        readable, _, _ = select.select([tickets[4].fileno()], [], [], SECONDS)
        assert readable
        assert tickets[4].done
        assert tickets[4].submitted_ns <= tickets[4].finished_ns
        tickets[4].close()
        late = rows.submit_lookup(windows, outs, dict.fromkeys(MODEL.layers, soon), soon)
        rows.close()
        assert all(ticket.done for ticket in late.values())
        with pytest.raises(Unavailable):
            rows.submit_lookup(windows, outs, dict.fromkeys(MODEL.layers, soon), soon)


def test_rows_of_owners_on_other_hosts_survive_a_black_hole(start_owner: StartOwner, hosts: Hosts) -> None:
    owners = [start_owner(f"{hosts.addresses[i]}:0", before=hosts.inside(i)) for i in range(2)]
    with rows_at(*(owner.address for owner in owners), token=HOSTS_TOKEN) as rows:
        for seed in range(20):
            look_up(rows, 60, seed=seed)
        before = remote_stats()
        port = owners[0].address.rpartition(":")[2]
        hosts.run(0, "iptables", "-A", "INPUT", "-p", "tcp", "--dport", port, "-j", "DROP")
        for seed in range(20):  # each in time: a replica is asked when the reply is later than it should be
            begun = time.monotonic()
            look_up(rows, 60, deadline_seconds=4.0, give_up_seconds=8.0, seed=seed)
            assert time.monotonic() - begun < 4.0
        after = remote_stats()
        assert after["hedges_won_total"] > before["hedges_won_total"]
        assert (
            after["hedges_total"] - before["hedges_total"] <= 18
        )  # the share is bounded: a slow owner is passed by, not asked twice


def test_alone_in_a_black_hole_a_lookup_is_late_in_time(start_owner: StartOwner, hosts: Hosts) -> None:
    owner = start_owner(f"{hosts.addresses[0]}:0", before=hosts.inside(0))
    with rows_at(owner.address, token=HOSTS_TOKEN) as rows:
        look_up(rows, 5)
        hosts.run(0, "iptables", "-A", "INPUT", "-p", "tcp", "-j", "DROP")
        begun = time.monotonic()
        with pytest.raises((DeadlineExceeded, Unavailable)):
            look_up(rows, 5, give_up_seconds=0.3)
        assert time.monotonic() - begun < 4.0  # TCP alone takes longer
