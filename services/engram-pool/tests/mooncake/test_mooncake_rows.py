"""Rows by the real Mooncake: the same bytes as mapped rows, through restarts, kills, full slots and failed reads."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from numpy.typing import NDArray

import treadle.client.engram
from treadle.client import Fabric
from treadle.client.engram.handle import EngramHandle
from treadle.client.engram.mooncake_control import SocketControl
from treadle.client.engram.mooncake_engine import Span
from treadle.client.engram.mooncake_landing import SLOT_BYTES, SLOTS, Landing, landing, landing_figures
from treadle.client.engram.pool_types import OwnerShare
from treadle.contract import (
    AccessDenied,
    DataLoss,
    Deadline,
    DeadlineExceeded,
    EngramModel,
    FingerprintMismatch,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
    RowOutOfRange,
    Unavailable,
    Windows,
)
from treadle.contract.placement import Spread
from treadle.kernels.segment import Segment

if TYPE_CHECKING:
    from tests.conftest import Process, StartPool
    from tests.freezing import freeze
else:
    from freezing import freeze

Until = Callable[[Callable[[], bool], str], None]
DOOR = ("--mooncake-listen", "127.0.0.1:0")


@pytest.fixture
def process(start_pool: StartPool, tmp_path: Path, demo: EngramModel, token_map: NDArray[np.int32]) -> Iterator[Process]:
    with start_pool(tmp_path / "s", *DOOR) as process:
        process.fabric.engram.load_random(demo, token_map)
        yield process


def windows_of(model: EngramModel, tokens: int, seed: int = 0) -> Windows:
    ids = np.random.default_rng(seed).integers(0, 500, tokens).tolist()
    half = tokens // 2
    return Windows.of_sequences([(ids[:half], 0), (ids[half:], min(3, tokens - half))], model.order_max - 1)


@contextmanager
def both(fabric: Fabric, model: EngramModel) -> Iterator[tuple[EngramHandle, EngramHandle]]:
    """A handle by Mooncake, and a mapped one to compare with."""
    with fabric.engram.open(model.name, transport="mooncake") as by_mooncake, fabric.engram.open(model.name) as mapped:
        assert (by_mooncake.transport, mapped.transport) == ("mooncake", "mapped")
        yield by_mooncake, mapped


def assert_same_rows(by_mooncake: EngramHandle, mapped: EngramHandle, windows: Windows) -> None:
    came, expected = by_mooncake.lookup(windows), mapped.lookup(windows)
    for layer in mapped.layers:
        assert np.array_equal(came[layer], expected[layer])


def control_of(process: Process, model: EngramModel, key: str | None = None, fabric: Fabric | None = None) -> SocketControl:
    status = (fabric or process.fabric).engram
    (version,) = [each.version for each in status.list_models() if each.model.name == model.name]
    return SocketControl(door_of(process, fabric), model.name, version, key, Deadline.after(5))


def door_of(process: Process, fabric: Fabric | None = None) -> str:
    from treadle.engram.v1 import engram_pool_pb2 as pb

    endpoint = (fabric or process.fabric).engram._endpoint
    with closing(endpoint.channel()) as channel:
        from treadle.engram.v1 import engram_pool_pb2_grpc as pb_grpc

        status = endpoint.call(pb_grpc.EngramPoolServiceStub(channel).Status, pb.StatusRequest())
    (door,) = (door for door in status.doors if door.transport == "mooncake")
    assert door.transport == "mooncake"
    return str(door.address)


def our_landing() -> Landing:
    return landing("127.0.0.1", "tcp")


# -- the same bytes ---------------------------------------------------------------------------------------------------------


def test_lookups_of_all_layers_are_the_mapped_bytes_whatever_their_size(process: Process, demo: EngramModel) -> None:
    with both(process.fabric, demo) as (by_mooncake, mapped):
        for tokens in (1, 2, 7, 256, 3_000):  # one slot takes 4,096 tokens of one layer; 3,000 of two layers go one by one
            assert_same_rows(by_mooncake, mapped, windows_of(demo, tokens, seed=tokens))


def test_a_lookup_larger_than_a_slot_comes_in_pieces(process: Process, demo: EngramModel) -> None:
    assert 9_000 * demo.columns * demo.row.bytes > 2 * SLOT_BYTES
    with both(process.fabric, demo) as (by_mooncake, mapped):
        assert_same_rows(by_mooncake, mapped, windows_of(demo, 9_000))


def test_a_gather_of_more_than_two_thousand_rows_is_one_read_and_right(process: Process, demo: EngramModel) -> None:
    ids = np.random.default_rng(1).integers(0, demo.rows_hashed(4), (5_000, 2))
    with both(process.fabric, demo) as (by_mooncake, mapped):
        before = our_landing().figures().reads
        assert np.array_equal(by_mooncake.gather(4, ids), mapped.gather(4, ids))
        assert our_landing().figures().reads == before + 1


def test_a_few_rows_are_read_from_the_table_itself(process: Process, demo: EngramModel, until: Until) -> None:
    with both(process.fabric, demo) as (by_mooncake, mapped):
        for count in (1, 2, 3, 4):
            ids = np.random.default_rng(count).integers(0, demo.rows_hashed(1), (count, 1))
            assert np.array_equal(by_mooncake.gather(1, ids), mapped.gather(1, ids))
    assert staged_requests(process) == 0  # nobody asked the owner to gather
    with both(process.fabric, demo) as (by_mooncake, _):
        by_mooncake.gather(1, np.zeros((5, 1), dtype=np.int64))
    until(lambda: staged_requests(process) == 1, "the request is counted, once it is answered")


def staged_requests(process: Process) -> int:
    import urllib.request

    with urllib.request.urlopen(f"http://{process.metrics}/metrics", timeout=5) as answer:
        text = answer.read().decode()
    return sum(int(float(value)) for value in re.findall(r"^treadle_engram_mooncake_requests_total{.*} (\S+)$", text, re.MULTILINE))


def test_prefetched_layers_arrive_by_ticket_and_can_be_cancelled(process: Process, demo: EngramModel) -> None:
    windows = windows_of(demo, 300)
    with both(process.fabric, demo) as (by_mooncake, mapped):
        ticket = by_mooncake.prefetch(windows, {layer: Deadline.after(1) for layer in demo.layers})
        rows = ticket.wait()
        for layer, expected in mapped.lookup(windows).items():
            assert rows[layer].missing is None
            assert np.array_equal(rows[layer].rows, expected)
        by_mooncake.prefetch(windows, {1: Deadline.after(1)}).cancel()
        assert_same_rows(by_mooncake, mapped, windows)


def test_nothing_is_looked_up_for_no_tokens(process: Process, demo: EngramModel) -> None:
    windows = windows_of(demo, 0)
    with both(process.fabric, demo) as (by_mooncake, _):
        assert by_mooncake.lookup(windows)[1].shape[0] == 0
        assert by_mooncake.prefetch(windows, {1: Deadline.after(1)}).wait()[1].missing is None


def test_a_row_outside_its_table_is_refused_with_out_untouched(process: Process, demo: EngramModel) -> None:
    rows = demo.rows_hashed(1)
    with both(process.fabric, demo) as (by_mooncake, _):
        for ids in ([[0], [rows]], [[-1], [0]], [[1]] * 20 + [[rows + 5]]):
            asked = np.array(ids)
            out = np.full((len(asked), 1, demo.row.bytes), 7, dtype=np.uint8)
            with pytest.raises(RowOutOfRange):
                by_mooncake.gather(1, asked, out)
            assert (out == 7).all()
    with closing(control_of(process, demo)) as control, pytest.raises(RowOutOfRange, match=str(rows)):
        control.gather(1, np.array([0, rows]), Deadline.after(20))  # the owner checks too


# -- who may, and which version -----------------------------------------------------------------------------------------------


def test_the_door_lets_in_only_who_knows_a_key(
    start_pool: StartPool, tmp_path: Path, demo: EngramModel, token_map: NDArray[np.int32]
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("first-key\nsecond-key\n")
    with (
        start_pool(tmp_path / "s", *DOOR, "--api-key-file", str(keys)) as process,
        Fabric(engram=process.address, key="second-key") as fabric,
    ):
        fabric.engram.load_random(demo, token_map)
        with both(fabric, demo) as (by_mooncake, mapped):
            assert_same_rows(by_mooncake, mapped, windows_of(demo, 5))
        for key in (None, "third-key"):
            with pytest.raises(AccessDenied):
                control_of(process, demo, key, fabric)


def test_a_tenant_is_held_to_its_quota_there_too(
    start_pool: StartPool, tmp_path: Path, demo: EngramModel, token_map: NDArray[np.int32]
) -> None:
    keys, token, tenants = tmp_path / "keys", tmp_path / "token", tmp_path / "tenants.yaml"
    keys.write_text("pool-key")
    token.write_text("tenant-key")
    tenants.write_text(f"tenants:\n  - {{name: few, token_file: {token}, rows_per_second_max: 1}}\n")
    flags = (*DOOR, "--api-key-file", str(keys), "--tenants-file", str(tenants))
    with start_pool(tmp_path / "s", *flags) as process, Fabric(engram=process.address, key="pool-key") as fabric:
        fabric.engram.load_random(demo, token_map)
        with closing(control_of(process, demo, "tenant-key", fabric)) as control:
            control.release(control.gather(1, np.arange(100), Deadline.after(20)))
            with pytest.raises(ResourceExhausted, match="few") as refused:
                control.gather(1, np.arange(100), Deadline.after(20))
        assert refused.value.retry_after_seconds is not None
        with closing(control_of(process, demo, "pool-key", fabric)) as control:
            control.gather(1, np.arange(4_000), Deadline.after(20))


def test_a_pool_that_holds_a_part_answers_only_for_its_rows(
    start_pool: StartPool, tmp_path: Path, demo: EngramModel, token_map: NDArray[np.int32]
) -> None:
    share = OwnerShare("a", Spread(("a", "b"), 1))
    with start_pool(tmp_path / "whole") as whole, start_pool(tmp_path / "s", *DOOR) as process:
        whole.fabric.engram.load_random(demo, token_map)
        process.fabric.engram.load_peers([whole.address], demo.name, placement=share)
        with whole.fabric.engram.open(demo.name) as mapped, closing(control_of(process, demo)) as control:
            assert not control.owner.tables, "rows that are not here read as zeros, so that no table is read directly"
            segments = process.fabric.engram.describe(demo.name).segments
            (held,) = [segment.held for segment in segments if segment.layer == 1]
            here = np.concatenate([np.arange(first, last) for first, last in held])
            elsewhere = np.setdiff1d(np.arange(demo.rows_hashed(1)), here)
            assert here.size
            assert elsewhere.size
            with process.fabric.engram.open(demo.name, transport="mooncake") as by_mooncake:
                assert np.array_equal(by_mooncake.gather(1, here.reshape(-1, 1)), mapped.gather(1, here.reshape(-1, 1)))
                with pytest.raises(RowOutOfRange, match="a part of layer 1 only"):
                    by_mooncake.gather(1, elsewhere[:3].reshape(-1, 1))
                with pytest.raises(RowOutOfRange, match="a part of layer"):
                    by_mooncake.lookup(windows_of(demo, 200))


def test_a_request_for_another_version_than_was_opened_is_refused(process: Process, demo: EngramModel) -> None:
    with closing(control_of(process, demo)) as control:
        control._ref.version = "0" * 64
        with pytest.raises(FingerprintMismatch, match="version"):
            control.gather(1, np.zeros(3, dtype=np.int64), Deadline.after(20))
    with pytest.raises(NotFound):
        SocketControl(door_of(process), demo.name, "0" * 64, None, Deadline.after(20))


def test_a_removed_version_stays_for_its_readers_and_goes_with_the_last(
    process: Process, demo: EngramModel, until: Until, tmp_path: Path
) -> None:
    windows, folder = windows_of(demo, 50), tmp_path / "s" / demo.name
    with both(process.fabric, demo) as (by_mooncake, mapped):
        expected = mapped.lookup(windows)
        mapped.close()
        assert process.fabric.engram.remove(demo.name)[1] == 1
        assert np.array_equal(by_mooncake.lookup(windows)[1], expected[1])
        assert np.array_equal(by_mooncake.gather(1, np.array([[3]])), row_on_disk(folder, 3))
    until(lambda: not folder.exists(), "the version's folder is gone")


def row_on_disk(folder: Path, row: int) -> NDArray[np.uint8]:
    (path,) = folder.glob("*/layer-1.safetensors")
    with Segment(path) as segment:
        return np.array(segment.rows[row]).reshape(1, 1, -1)


def test_once_damage_is_found_neither_way_serves_it(process: Process, demo: EngramModel, tmp_path: Path) -> None:
    (path,) = (tmp_path / "s" / demo.name).glob("*/layer-1.safetensors")
    row = demo.rows_hashed(1) // 2
    good = row_on_disk(tmp_path / "s" / demo.name, row)
    with Segment(path) as segment:
        place = segment.rows_offset_bytes + row * segment.row_bytes
    with process.fabric.engram.open(demo.name, transport="mooncake") as by_mooncake:
        assert np.array_equal(by_mooncake.gather(1, np.array([[row]])), good)
        with path.open("r+b") as file:
            file.seek(place)
            file.write(b"\xff" * segment.row_bytes)
        assert not np.array_equal(by_mooncake.gather(1, np.array([[row]])), good)  # nobody has looked yet
        with pytest.raises(DataLoss):
            process.fabric.engram.verify(demo.name)
        for ids in ([[row]], [[row]] * 10):  # directly, and gathered: the pool refuses, or has repaired it
            came = rows_or_refusal(by_mooncake, np.array(ids))
            assert came is None or all(np.array_equal(each, good[0]) for each in came)


def rows_or_refusal(handle: EngramHandle, ids: NDArray[np.int64]) -> NDArray[np.uint8] | None:
    try:
        return handle.gather(1, ids)
    except (NotFound, DataLoss):
        return None


# -- slots --------------------------------------------------------------------------------------------------------------------


def test_full_slots_push_back_and_a_client_that_leaves_gives_them_back(
    start_pool: StartPool, tmp_path: Path, demo: EngramModel, token_map: NDArray[np.int32], until: Until
) -> None:
    ids = np.arange(10)
    with start_pool(tmp_path / "s", *DOOR, "--mooncake-slots", "1") as process:
        process.fabric.engram.load_random(demo, token_map)
        first, second = control_of(process, demo), control_of(process, demo)
        with closing(first), closing(second):
            staged = first.gather(1, ids, Deadline.after(20))
            with pytest.raises(ResourceExhausted, match="mooncake_slots") as refused:
                second.gather(1, ids, Deadline.after(20))
            assert refused.value.retry_after_seconds is not None
            first.release(staged)
            until(lambda: gathers(second, ids), "a released slot is lent again")
            second.close()
            until(lambda: gathers(first, ids), "the slot of a client that left is lent again")


def gathers(control: SocketControl, ids: NDArray[np.int64]) -> bool:
    try:
        control.gather(1, ids, Deadline.after(20))
    except ResourceExhausted:
        return False
    return True


def test_with_fewer_slots_than_callers_everyone_is_served_in_time(
    start_pool: StartPool, tmp_path: Path, demo: EngramModel, token_map: NDArray[np.int32]
) -> None:
    windows = windows_of(demo, 200)
    with start_pool(tmp_path / "s", *DOOR, "--mooncake-slots", "2") as process:
        process.fabric.engram.load_random(demo, token_map)
        with both(process.fabric, demo) as (by_mooncake, mapped):
            expected = mapped.lookup(windows)
            tickets = [by_mooncake.prefetch(windows, {1: Deadline.after(1)}) for _ in range(8)]
            for ticket in tickets:
                rows = ticket.wait()[1]
                assert rows.missing is None
                assert np.array_equal(rows.rows, expected[1])


# -- what goes wrong ------------------------------------------------------------------------------------------------------------


def test_an_owner_that_was_killed_is_found_again_on_other_ports(
    start_pool: StartPool, tmp_path: Path, demo: EngramModel, token_map: NDArray[np.int32], free_port: int
) -> None:
    listen, windows = f"127.0.0.1:{free_port}", windows_of(demo, 100)
    with start_pool(tmp_path / "s", *DOOR, "--listen", listen) as process:
        process.fabric.engram.load_random(demo, token_map)
        impatient = Fabric(engram=listen, timeout_seconds=1.0)
        by_mooncake = impatient.engram.open(demo.name, transport="mooncake")
        with process.fabric.engram.open(demo.name) as mapped:
            expected = mapped.lookup(windows)
        several = [by_mooncake.prefetch(windows, {1: Deadline.after(1)}) for _ in range(6)]  # each has a connection that dies
        assert all(ticket.wait()[1].missing is None for ticket in several)
        door = door_of(process)
        process.kill()
        with pytest.raises(Unavailable):
            by_mooncake._source.gather(1, np.array([[0]]), np.empty((1, 1, 64), dtype=np.uint8))
        with start_pool(tmp_path / "s", *DOOR, "--listen", listen) as again, impatient, by_mooncake:
            assert door_of(again) != door
            begun = time.monotonic()
            assert np.array_equal(by_mooncake.lookup(windows)[1], expected[1])
            assert time.monotonic() - begun < 2
            assert np.array_equal(by_mooncake.gather(1, np.array([[0], [9]])).reshape(2, -1), direct_rows(again, demo, [0, 9]))


def direct_rows(process: Process, model: EngramModel, ids: list[int]) -> NDArray[np.uint8]:
    with process.fabric.engram.open(model.name, transport="rpc") as by_rpc:
        rows: NDArray[np.uint8] = by_rpc.gather(1, np.array(ids).reshape(-1, 1)).reshape(len(ids), -1)
        return rows


def test_more_slices_than_the_engine_takes_are_refused_before_it_is_asked(process: Process, demo: EngramModel) -> None:
    with closing(control_of(process, demo)) as control:
        table = control.owner.tables[1]
        reads = our_landing().figures().reads
        with (
            pytest.raises(InvalidArgument, match="slices"),
            our_landing().read(control.owner.engine, [(table.address, 64)] * 1_025, Deadline.after(1)),
        ):
            pass
        assert our_landing().figures().reads == reads


def test_a_read_that_is_late_is_given_up_and_its_slot_comes_back_only_when_it_has_ended(
    process: Process, demo: EngramModel, until: Until
) -> None:
    with closing(control_of(process, demo)) as control:
        staged = control.gather(1, np.arange(100), Deadline.after(20))
        before = landing_figures().quarantined_bytes
        freeze(process.child.pid)
        try:
            begun = time.monotonic()
            with (
                pytest.raises(DeadlineExceeded),
                our_landing().read(control.owner.engine, [(staged.address, staged.length)], Deadline.after(0.2)),
            ):
                pass
            assert time.monotonic() - begun < 4  # Mooncake's own time limit is 5 s or more
            assert landing_figures().quarantined_bytes == before + SLOT_BYTES
        finally:
            os.kill(process.child.pid, signal.SIGCONT)
        until(lambda: landing_figures().quarantined_bytes == before, "the read ended whole, its slot is free again")


def test_the_slot_of_a_failed_read_is_never_used_again(process: Process, demo: EngramModel) -> None:
    with closing(control_of(process, demo)) as control:
        staged = control.gather(1, np.arange(100), Deadline.after(20))
        process.kill()
        land, before = our_landing(), landing_figures()
        spoilt: list[int] = []
        land.engine.read, original = _noting(land, spoilt), land.engine.read  # type: ignore[method-assign]
        try:
            with pytest.raises(Unavailable), land.read(control.owner.engine, [(staged.address, 64)], Deadline.after(20)):
                pass
        finally:
            land.engine.read = original  # type: ignore[method-assign]
        assert landing_figures().quarantined_bytes == before.quarantined_bytes + SLOT_BYTES
        assert landing_figures().reads_failed == before.reads_failed + 1
        taken = [land._take(1, Deadline.after(1)) for _ in range(SLOTS)]  # as many as ever: a new one stands in for it
        assert all(slot.ctypes.data != spoilt[0] for slot in taken)
        for slot in taken:
            land._slices -= 1
            land._give_back(slot)


def _noting(land: Landing, spoilt: list[int]) -> Callable[..., int]:
    read = land.engine.read

    def noted(owner: str, spans: list[Span]) -> int:
        spoilt.append(spans[0].local)
        return read(owner, spans)

    return noted


def test_a_stopped_owner_costs_the_caller_no_more_than_its_time_limit(process: Process, demo: EngramModel) -> None:
    windows = windows_of(demo, 10)
    with Fabric(engram=process.address, timeout_seconds=0.5) as fabric, both(fabric, demo) as (by_mooncake, mapped):
        freeze(process.child.pid)
        try:
            begun = time.monotonic()
            with pytest.raises((DeadlineExceeded, Unavailable)):
                by_mooncake.lookup(windows)
            assert time.monotonic() - begun < 2
        finally:
            os.kill(process.child.pid, signal.SIGCONT)
        assert_same_rows(by_mooncake, mapped, windows)


def test_every_destination_has_to_be_registered(process: Process, demo: EngramModel) -> None:
    with closing(control_of(process, demo)) as control:
        table, engine, out = control.owner.tables[1], our_landing().engine, np.zeros(64, dtype=np.uint8)
        for span in (Span(out.ctypes.data, table.address, 64), Span(12345, table.address, 1)):
            with pytest.raises(InvalidArgument, match="not registered"):
                engine.read(control.owner.engine, [span])
        assert not out.any()


def test_only_one_module_of_the_sdk_asks_mooncake_to_move_bytes() -> None:
    folder = Path(next(iter(treadle.client.engram.__path__)))
    movers = {path.name for path in folder.glob("*.py") if re.search(r"\.(batch_)?transfer_", path.read_text())}
    assert movers == {"mooncake_engine.py"}
