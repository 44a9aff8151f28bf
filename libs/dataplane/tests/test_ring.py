"""The ring: the rows that a gather gives, whatever a client does to the memory that both sides see."""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from treadle.contract import (
    AccessDenied,
    Deadline,
    EngramModel,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    RowLayout,
    RowOutOfRange,
    Unavailable,
    Windows,
)
from treadle.contract.families import qwen_ple_model
from treadle.dataplane import IMPLEMENTATION, DeadlineQueue, ServedLayer, Tenants, Versions
from treadle.dataplane.faults import Fault
from treadle.dataplane.ring import SLOTS, RingClient, RingServer
from treadle.kernels import HashPlan, gather_rows, lookup

pytestmark = pytest.mark.skipif(IMPLEMENTATION != "native", reason="the native extension was not built: a C++20 compiler makes it")

ROWS, ROW_BYTES, LAYER, VERSION = 20_000, 64, 3, "ab" * 32
PATIENCE_SECONDS = 20.0
HELLO, WELCOME = struct.Struct("<II32sQq"), struct.Struct("<IIiIQ")
REQUEST = struct.Struct("<Q32sqqqQQqqQQQQ")
SLOT_BYTES, SLOTS_AT, REQUEST_AT, ANSWER_AT = 192, 128, 8, 136  # as ring.hpp lays them out


@dataclass
class Host:
    """A server over one table, and what is needed to compare with."""

    path: str
    table: NDArray[np.uint8]
    model: EngramModel
    plan: HashPlan
    versions: Versions
    queue: DeadlineQueue
    server: RingServer

    def client(self, **options: object) -> RingClient:
        return RingClient(self.path, **options)  # type: ignore[arg-type]


def publish(versions: Versions, table: NDArray[np.uint8]) -> tuple[EngramModel, HashPlan]:
    model = qwen_ple_model("ple", prime_base=ROWS // 32, row=RowLayout(ROW_BYTES, ROW_BYTES // 2, "bf16"))
    plan = HashPlan.from_model(model, model.layers[0], None)
    versions.publish(VERSION, bytes(32), [ServedLayer(LAYER, plan, table)])
    return model, plan


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with DeadlineQueue(workers=1, implementation="native") as queue:
        table = np.random.default_rng(0).integers(0, 256, (ROWS, ROW_BYTES), dtype=np.uint8)
        versions = Versions()
        model, plan = publish(versions, table)
        path = str(tmp_path / "ring")
        server = RingServer(path, queue, versions, clients_max=4, arena_bytes_max=4 << 20)
        yield Host(path, table, model, plan, versions, queue, server)
        server.close()


def soon() -> Deadline:
    return Deadline.after(1.0)


def until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"still not: {what}"
        time.sleep(0.005)


def gather(client: RingClient, ids: NDArray[np.int64], out: NDArray[np.uint8], layer: int = LAYER, version: str = VERSION) -> None:
    assert client.submit_gather(bytes.fromhex(version), layer, ids, out, soon()).wait(PATIENCE_SECONDS / 2)


def some_windows(model: EngramModel, tokens: int, seed: int) -> Windows:
    chance = np.random.default_rng(seed)
    starts = np.array([0, tokens // 3, tokens // 3, tokens], np.int32)
    return Windows(
        tokens=chance.integers(0, 1000, tokens), starts=starts,
        lookback=chance.integers(-1, 1000, (3, model.order_max - 1)), dead=chance.random(tokens) < 0.1,
        lookback_dead=chance.random((3, model.order_max - 1)) < 0.1,
    )  # fmt: skip


# -- rows ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fabric", [True, False])
@pytest.mark.parametrize("count", [0, 1, 77, 5_000])
def test_a_gather_gives_the_rows_of_the_table(host: Host, count: int, fabric: bool) -> None:
    ids = np.random.default_rng(count).integers(0, ROWS, count)
    with host.client() as client:
        out = client.buffer((count, ROW_BYTES)) if fabric else np.empty((count, ROW_BYTES), np.uint8)
        gather(client, ids, out)
        np.testing.assert_array_equal(out, host.table[ids])


@pytest.mark.parametrize("fabric", [True, False])
@pytest.mark.parametrize("tokens", [0, 1, 50, 700])
def test_a_lookup_gives_what_hash_and_gather_give(host: Host, tokens: int, fabric: bool) -> None:
    windows = some_windows(host.model, tokens, seed=tokens)
    shape = (tokens, host.plan.columns, ROW_BYTES)
    expected = np.empty(shape, np.uint8)
    lookup(host.plan, host.table, windows, expected)
    with host.client() as client:
        out = client.buffer(shape) if fabric else np.empty(shape, np.uint8)
        calls = client.submit_lookup(bytes.fromhex(VERSION), windows, {LAYER: out}, {LAYER: soon()})
        assert calls[LAYER].wait(PATIENCE_SECONDS / 2)
        np.testing.assert_array_equal(out, expected)
        assert calls[LAYER].done
        assert calls[LAYER].finished_ns >= calls[LAYER].submitted_ns


def test_a_view_of_a_buffer_is_a_buffer(host: Host) -> None:
    ids = np.arange(100)
    with host.client() as client:
        whole = client.buffer((300, ROW_BYTES))
        whole[:] = 7
        gather(client, ids, whole[100:200])
        np.testing.assert_array_equal(whole[100:200], host.table[:100])
        assert (whole[:100] == 7).all()
        assert (whole[200:] == 7).all()


def test_buffers_are_given_back_with_their_last_array(host: Host) -> None:
    with host.client(arena_bytes=1 << 20) as client:
        for _ in range(100):
            view = client.buffer((300, 1024))[10:20]
        assert client.arena_taken_bytes == 300 * 1024
        del view
        assert client.arena_taken_bytes == 0
        with pytest.raises(ResourceExhausted, match="arena of 1048576"):
            client.buffer((2 << 20,))


def test_a_ticket_is_readable_for_an_event_loop_once_it_has_ended(host: Host) -> None:
    out = np.empty((4, ROW_BYTES), np.uint8)
    with host.client() as client:
        for _ in range(20):
            call = client.submit_gather(bytes.fromhex(VERSION), LAYER, np.arange(4), out, soon())
            readable, _, _ = select.select([call.fileno()], [], [], PATIENCE_SECONDS)
            assert readable
            assert call.done
            call.close()


CLIENT_THAT_USES_A_SLOT_AGAIN_AND_AGAIN = """
import select, sys, time
import numpy as np
from treadle.contract import Deadline
from treadle.dataplane.ring import RingClient
with RingClient(sys.argv[1]) as client:
    few, many, version = client.buffer((64, 64)), client.buffer((4_096, 64)), bytes.fromhex("ab" * 32)
    until = time.monotonic() + 4
    while time.monotonic() < until:
        assert client.submit_gather(version, 3, np.arange(64), few, Deadline.after(5)).wait(5)
        call = client.submit_gather(version, 3, np.arange(4_096), many, Deadline.after(5))
        assert select.select([call.fileno()], [], [], 5)[0], "nobody said that it has ended"
        assert call.done
        call.close()
        stopped = client.submit_gather(version, 3, np.arange(4_096), many, Deadline.after(5))
        stopped.cancel()
        assert client.submit_gather(version, 3, np.arange(64), few, Deadline.after(5)).wait(5), "stopped with the one before it"
"""


def test_what_was_wished_of_a_request_is_not_taken_for_the_next_of_its_slot(host: Host) -> None:
    done = subprocess.run(
        [sys.executable, "-c", CLIENT_THAT_USES_A_SLOT_AGAIN_AND_AGAIN, host.path], capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr.decode()


def test_many_threads_share_a_client(host: Host) -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        chance = np.random.default_rng(seed)
        try:
            for _ in range(100):
                ids = chance.integers(0, ROWS, int(chance.integers(1, 300)))
                out = client.buffer((len(ids), ROW_BYTES)) if seed % 2 else np.empty((len(ids), ROW_BYTES), np.uint8)
                gather(client, ids, out)
                np.testing.assert_array_equal(out, host.table[ids])
        except BaseException as error:
            failures.append(error)

    with host.client() as client:
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures


# -- refusals -----------------------------------------------------------------------------------------------------------------


def test_a_wrong_id_version_or_layer_is_refused_by_name(host: Host) -> None:
    out = np.empty((2, ROW_BYTES), np.uint8)
    with host.client() as client:
        for bad in (-1, ROWS, 1 << 62):
            with pytest.raises(RowOutOfRange):
                gather(client, np.array([0, bad]), out)
        with pytest.raises(NotFound):
            gather(client, np.arange(2), out, layer=LAYER + 1)
        with pytest.raises(NotFound):
            gather(client, np.arange(2), out, version="cd" * 32)
        host.versions.withdraw(VERSION)
        with pytest.raises(NotFound):
            gather(client, np.arange(2), out)
        assert not host.versions.read(VERSION)


def test_limits_are_named(host: Host) -> None:
    with pytest.raises(InvalidArgument, match="the pool gives 4194304"):
        host.client(arena_bytes=8 << 20)
    clients = [host.client() for _ in range(4)]
    with pytest.raises(ResourceExhausted, match="as many clients"):
        host.client()
    clients.pop().close()
    until(lambda: host.server.stats()["clients"] == 3, "a place is free")
    host.client().close()
    for client in clients:
        client.close()


def test_a_client_has_so_many_requests_in_flight(host: Host) -> None:
    out = np.empty((1, ROW_BYTES), np.uint8)
    with host.client() as client:
        calls = [client.submit_gather(bytes.fromhex(VERSION), LAYER, np.arange(1), out, soon()) for _ in range(SLOTS)]
        with pytest.raises(ResourceExhausted, match=f"{SLOTS} requests"):
            client.submit_gather(bytes.fromhex(VERSION), LAYER, np.arange(1), out, soon())
        assert all(call.wait(PATIENCE_SECONDS / 2) for call in calls)
        gather(client, np.arange(1), out)


def test_a_forgotten_call_frees_its_slot_and_memory(host: Host) -> None:
    out = np.empty((1_000, ROW_BYTES), np.uint8)

    def forget_one() -> bool:
        try:
            client.submit_gather(bytes.fromhex(VERSION), LAYER, np.arange(1_000), client.buffer((1_000, ROW_BYTES)), soon())
        except ResourceExhausted:  # those before it have not ended yet
            return False
        return True

    with host.client() as client:
        for _ in range(4 * SLOTS):
            until(forget_one, "room for another")
        until(lambda: host.server.stats()["requests_total"] >= 4 * SLOTS, "all were taken")
        gather(client, np.arange(1_000), out)
        np.testing.assert_array_equal(out, host.table[:1_000])


def test_a_cancelled_call_says_which_rows_are_there(host: Host) -> None:
    count = 30_000
    with host.client() as client:
        ids = np.arange(count) % ROWS
        for _ in range(10):
            out = client.buffer((count, ROW_BYTES))
            out[:] = 0
            call = client.submit_gather(bytes.fromhex(VERSION), LAYER, ids, out, soon())
            came = call.cancel()
            np.testing.assert_array_equal(out[came], host.table[ids[came]])
            assert not out[~came].any()
            assert call.done
            assert came.all() or not call.wait(0)
            del out


def test_a_token_is_asked_for_where_there_are_tokens(host: Host, tmp_path: Path) -> None:
    path, token = str(tmp_path / "with-token"), b"t" * 32
    with DeadlineQueue(tenants=Tenants(tokens={token: 0, b"u" * 32: 0}), implementation="native") as queue:
        server = RingServer(path, queue, host.versions)
        for wrong in (bytes(32), b"v" * 32):
            with pytest.raises(AccessDenied):
                RingClient(path, token=wrong)
        out = np.empty((1, ROW_BYTES), np.uint8)
        with RingClient(path, token=token) as client:
            gather(client, np.arange(1), out)
        server.close()


CLIENT_OF_ANOTHER_USER = """
import os, sys
import numpy as np
from treadle.contract import AccessDenied, Deadline
from treadle.dataplane.ring import RingClient
os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    client = RingClient(sys.argv[1])
except AccessDenied:
    sys.exit(3)
out = client.buffer((50, 64))
call = client.submit_gather(bytes.fromhex("ab" * 32), 3, np.arange(50), out, Deadline.after(1))
assert call.wait(10)
sys.stdout.buffer.write(out.tobytes())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user: run the tests as root, or in a container")
def test_another_user_comes_in_only_where_told(host: Host, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = Path(f"/dev/shm/treadle-test-ring-{os.getpid()}")
    folder.mkdir(0o755)
    script = folder / "client.py"
    script.write_text(CLIENT_OF_ANOTHER_USER)
    try:
        for users, code in (((), 3), ((65534,), 0)):
            path = str(folder / f"ring-{code}")
            server = RingServer(path, host.queue, host.versions, users=users)
            os.chmod(path, 0o666)  # who may come is asked of the kernel, not of the path
            done = subprocess.run([sys.executable, str(script), path], capture_output=True, timeout=60, check=False)
            server.close()
            assert done.returncode == code, done.stderr.decode()
        assert done.stdout == host.table[:50].tobytes()
    finally:
        for path_left in folder.iterdir():
            path_left.unlink()
        folder.rmdir()


# -- ends ---------------------------------------------------------------------------------------------------------------------

A_CLIENT_THAT_STAYS = """
import sys
import numpy as np
from treadle.dataplane.ring import RingClient
client = RingClient(sys.argv[1])
kept = client.buffer((1 << 20,))
kept[:] = 1
print("in", flush=True)
sys.stdin.read()
"""


def test_a_killed_client_leaves_nothing_behind(host: Host) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", A_CLIENT_THAT_STAYS, host.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdin is not None
    assert process.stdout.readline() == "in\n"
    assert host.server.stats()["clients"] == 1
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    process.stdout.close()
    process.stdin.close()
    until(lambda: host.server.stats()["clients"] == 0, "the client is gone")
    until(lambda: "memfd:treadle-" not in Path("/proc/self/maps").read_text(), "its memory is free")


A_SERVER = """
import sys
import numpy as np
from treadle.contract import RowLayout
from treadle.contract.families import qwen_ple_model
from treadle.dataplane import DeadlineQueue, ServedLayer, Versions
from treadle.dataplane.ring import RingServer
from treadle.kernels import HashPlan
model = qwen_ple_model("ple", prime_base=625, row=RowLayout(64, 32, "bf16"))
versions, queue = Versions(), DeadlineQueue(workers=1)
table = np.random.default_rng(0).integers(0, 256, (20_000, 64), dtype=np.uint8)
versions.publish("ab" * 32, bytes(32), [ServedLayer(3, HashPlan.from_model(model, model.layers[0], None), table)])
server = RingServer(sys.argv[1], queue, versions)
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_killed_server_ends_every_wait_as_unavailable_and_another_takes_its_place(tmp_path: Path) -> None:
    path = str(tmp_path / "ring")
    table = np.random.default_rng(0).integers(0, 256, (ROWS, ROW_BYTES), dtype=np.uint8)
    for _ in range(2):
        process = subprocess.Popen([sys.executable, "-c", A_SERVER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdin is not None
        assert process.stdout.readline() == "ready\n"
        with RingClient(path) as client:
            out = client.buffer((10, ROW_BYTES))
            gather(client, np.arange(10), out)
            os.kill(process.pid, signal.SIGSTOP)  # it takes the request no more
            stat = Path(f"/proc/{process.pid}/stat")
            until(lambda s=stat: s.read_text().rpartition(")")[2].split()[0] == "T", "the server stands")  # type: ignore[misc]
            call = client.submit_gather(bytes.fromhex(VERSION), LAYER, np.arange(10, 20), out, soon())
            assert not call.wait(0.05)
            assert not call.done
            waits = [call.fileno()]
            os.kill(process.pid, signal.SIGKILL)
            with pytest.raises(Unavailable):
                call.wait(PATIENCE_SECONDS / 2)
            assert select.select(waits, [], [], PATIENCE_SECONDS)[0]
            assert not call.cancel().any()
            until(lambda c=client: c.lost, "the client knows")  # type: ignore[misc]
            np.testing.assert_array_equal(out, table[:10])  # the buffer outlives the pool
            with pytest.raises(Unavailable, match="connect again"):
                gather(client, np.arange(10), out)
        process.wait()
        process.stdout.close()
        process.stdin.close()


def test_a_server_that_closes_ends_what_is_in_flight(host: Host) -> None:
    with host.client() as client:
        out = np.empty((ROWS, ROW_BYTES), np.uint8)
        calls = [client.submit_gather(bytes.fromhex(VERSION), LAYER, np.arange(ROWS), out, soon()) for _ in range(2)]
        host.server.close()
        for call in calls:
            with contextlib.suppress(Unavailable):
                assert call.wait(PATIENCE_SECONDS / 2)
            assert call.done
        assert not Path(host.path).exists()
        with pytest.raises(Unavailable):
            host.client()


def test_a_path_in_use_is_not_taken(host: Host) -> None:
    with pytest.raises(Unavailable, match="no other pool"):
        RingServer(host.path, host.queue, host.versions)
    host.client().close()


# -- strangers ------------------------------------------------------------------------------------------------------------------


class Stranger:
    """A client that speaks the protocol by hand and keeps to nothing."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.socket.connect(path)
        self.socket.send(HELLO.pack(0x676E7274, 2, bytes(32), 0, time.monotonic_ns()))
        data, self.descriptors, _, _ = socket.recv_fds(self.socket, 64, 4)
        _, _, fault, _, arena_bytes = WELCOME.unpack(data)
        assert fault == Fault.NONE
        self.ring = mmap.mmap(self.descriptors[0], os.fstat(self.descriptors[0]).st_size)
        self.arena = mmap.mmap(self.descriptors[1], arena_bytes)

    def ask(self, slot: int = 0, **fields: int) -> int:
        """Fault of a request that is right but for `fields`."""
        self.write(slot, **fields)
        self.submit(1 << slot)
        return self.answer(slot)

    def write(self, slot: int = 0, **fields: int) -> None:
        right = {
            "kind": 1, "layer": LAYER, "deadline": 0, "count": 8, "in_at": 0, "out_at": 4096, "requests": 0, "columns": 0,
            "starts_at": 0, "lookback_at": 0, "dead_at": 0, "lookback_dead_at": 0,
        }  # fmt: skip
        kind, *rest = (right | fields).values()
        at = SLOTS_AT + slot * SLOT_BYTES
        struct.pack_into("<II", self.ring, at, 1, 0)
        REQUEST.pack_into(self.ring, at + REQUEST_AT, kind, bytes.fromhex(VERSION), *rest)

    def submit(self, bits: int) -> None:
        struct.pack_into("<Q", self.ring, 0, bits)
        os.eventfd_write(self.descriptors[2], 1)

    def answer(self, slot: int) -> int:
        at = SLOTS_AT + slot * SLOT_BYTES
        until(lambda: struct.unpack_from("<I", self.ring, at)[0] == 3, "an answer")
        fault: int = struct.unpack_from("<q", self.ring, at + ANSWER_AT)[0]
        return fault

    def close(self) -> None:
        self.socket.close()
        self.ring.close()
        self.arena.close()
        for descriptor in self.descriptors:
            os.close(descriptor)


@pytest.fixture
def stranger(host: Host) -> Iterator[Stranger]:
    stranger = Stranger(host.path)
    yield stranger
    stranger.close()


def test_a_right_request_by_hand_is_answered(host: Host, stranger: Stranger) -> None:
    stranger.arena[: 8 * 8] = np.arange(8).tobytes()
    assert stranger.ask() == Fault.NONE
    assert stranger.arena[4096 : 4096 + 8 * ROW_BYTES] == host.table[:8].tobytes()


@pytest.mark.parametrize(
    "fields",
    [
        {"kind": 0}, {"kind": 3}, {"count": -1}, {"count": (1 << 22) + 1}, {"count": 1 << 62}, {"deadline": -1},
        {"in_at": 4}, {"in_at": 4 << 20}, {"in_at": (1 << 64) - 8}, {"out_at": 4095}, {"out_at": (4 << 20) - 64},
        {"out_at": (1 << 64) - 64}, {"kind": 2, "count": 1 << 17}, {"kind": 2, "requests": -1}, {"kind": 2, "requests": 1 << 40},
        {"kind": 2, "columns": -1}, {"kind": 2, "columns": 1 << 40}, {"kind": 2, "requests": 1, "columns": 0},
        {"kind": 2, "requests": 1, "columns": 2, "starts_at": 1 << 50}, {"kind": 2, "requests": 1, "columns": 2, "dead_at": 4 << 20},
    ],
)  # fmt: skip
def test_a_request_that_reaches_outside_is_invalid_and_harms_nobody(host: Host, stranger: Stranger, fields: dict[str, int]) -> None:
    assert stranger.ask(**fields) == Fault.INVALID
    out = np.empty((5, ROW_BYTES), np.uint8)
    with host.client() as other:
        gather(other, np.arange(5), out)
    np.testing.assert_array_equal(out, host.table[:5])


def test_wrong_windows_are_invalid(stranger: Stranger) -> None:
    tokens, starts, lookback = np.zeros(8, np.int64), np.array([0, 8], np.int32), np.full(2, -1, np.int64)
    windows = {
        "kind": 2,
        "requests": 1,
        "columns": 2,
        "starts_at": 1024,
        "lookback_at": 2048,
        "dead_at": 2**64 - 1,
        "lookback_dead_at": 2**64 - 1,
    }

    def ask() -> int:
        stranger.arena[:64] = tokens.tobytes()
        stranger.arena[1024:1032] = starts.tobytes()
        stranger.arena[2048:2064] = lookback.tobytes()
        return stranger.ask(**windows)

    assert ask() == Fault.NONE
    for array, wrong in ((tokens, -1), (tokens, 1 << 40), (lookback, -2), (lookback, 1 << 40), (starts, 1), (starts, 9)):
        right, array[-1] = int(array[-1]), wrong
        assert ask() == Fault.INVALID, (array, wrong)
        array[-1] = right


def test_ids_that_change_while_they_are_read_are_rows_or_out_of_range(host: Host, stranger: Stranger) -> None:
    count, stop = 20_000, threading.Event()
    wrong = np.full(count, 1 << 60, np.int64).tobytes()
    right = np.zeros(count, np.int64).tobytes()

    def scribble() -> None:
        while not stop.is_set():
            stranger.arena[: 8 * count] = wrong
            stranger.arena[: 8 * count] = right

    thread = threading.Thread(target=scribble)
    thread.start()
    try:
        faults = {stranger.ask(count=count, out_at=1 << 20) for _ in range(200)}
    finally:
        stop.set()
        thread.join()
    assert faults <= {Fault.NONE, Fault.OUT_OF_RANGE}
    assert host.server.stats()["clients"] == 1


def test_a_slot_that_is_in_flight_cannot_be_used_twice(host: Host, stranger: Stranger) -> None:
    stranger.write(count=60_000)
    for _ in range(200):
        stranger.submit(1)
    until(lambda: host.server.stats()["clients"] == 0 or struct.unpack_from("<I", stranger.ring, SLOTS_AT)[0] == 3, "an end of it")
    with host.client() as other:
        gather(other, np.arange(5), np.empty((5, ROW_BYTES), np.uint8))


def test_the_memory_cannot_be_resized(stranger: Stranger) -> None:
    for descriptor in stranger.descriptors[:2]:
        for size in (0, 64 << 20):
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, size)


@pytest.mark.parametrize(
    "words", [b"", b"x", b"x" * 64, HELLO.pack(0x676E7274, 1, bytes(32), 0, 0), HELLO.pack(1, 2, bytes(32), 0, 0)]
)
def test_who_greets_otherwise_is_let_go(host: Host, words: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as caller:
        caller.settimeout(PATIENCE_SECONDS)
        caller.connect(host.path)
        caller.send(words)
        answer = caller.recv(64)
        assert not answer or WELCOME.unpack(answer)[2] == Fault.MISMATCH
    host.client().close()


def test_who_says_nothing_does_not_keep_a_place(host: Host) -> None:
    silent = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(30)]
    for caller in silent:
        caller.connect(host.path)

    def comes_in() -> bool:
        try:
            host.client().close()
        except Unavailable:
            return False
        return True

    until(comes_in, "a place for one who speaks")
    for caller in silent:
        caller.close()


def test_gather_through_the_ring_is_the_gather_of_the_kernels(host: Host) -> None:
    chance = np.random.default_rng(5)
    with host.client() as client:
        for _ in range(30):
            ids = chance.integers(0, ROWS, (int(chance.integers(1, 40)), 16))
            expected, out = np.empty((*ids.shape, ROW_BYTES), np.uint8), np.empty((*ids.shape, ROW_BYTES), np.uint8)
            gather_rows(host.table, ids, expected)
            gather(client, ids, out)
            np.testing.assert_array_equal(out, expected)
