"""Quotas, and what goes so that something new fits."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import pytest

from treadle.asm.v1 import asm_store_pb2 as pb
from treadle.chassis.settings import WrongSetting
from treadle.client import Fabric
from treadle.contract.dictionary import DictionarySettings, RowDtype
from treadle.contract.errors import ResourceExhausted

if TYPE_CHECKING:
    from tests.conftest import Made, Make, Serve, Served, StartStore

Fails = Callable[[Any], Awaitable[tuple[grpc.StatusCode, str, dict[str, str]]]]
Eventually = Callable[[Callable[[], bool], str], Awaitable[None]]
FULL = grpc.StatusCode.RESOURCE_EXHAUSTED
LARGE = DictionarySettings(heads_joined=3, dtype=RowDtype.F32, entries=1024)  # about 800 KB


@pytest.fixture
def large(make: Make) -> Callable[[int], Made]:
    """`large(seed)`: three of them do not fit 2 MiB."""
    return lambda seed: make(seed=seed, settings=LARGE)


def versions(served: Served) -> set[str]:
    return {kept.key[1] for kept in served.parts.store.catalogue.all()}


def ref(made: Made) -> pb.DictionaryRef:
    return pb.DictionaryRef(name=made.name, version=made.version)


async def test_the_least_recently_used_that_nobody_needs_goes(serve: Serve, large: Any) -> None:
    one, two, three = large(1), large(2), large(3)
    async with serve(file_bytes_max=2 << 20) as served:
        await served.publish(one.messages())
        await served.publish(two.messages())
        await served.stub.Open(pb.OpenRequest(ref=ref(one)))
        await served.publish(three.messages())
        assert versions(served) == {one.version, three.version}
        assert not (served.parts.folder.path / "rules" / two.version).exists()
        assert served.metric("evictions_total", outcome="ok") == 1
        status = await served.stub.Status(pb.StatusRequest())
        assert (status.evictions, status.file_bytes <= status.file_bytes_max) == (1, True)


@pytest.mark.parametrize("why", ["pointer", "pin", "hold"])
async def test_what_somebody_needs_stays_and_what_does_not_fit_is_refused_before_its_bytes(
    serve: Serve, large: Any, fails: Fails, eventually: Eventually, why: str
) -> None:
    one, two, three = large(1), large(2), large(3)
    async with serve(file_bytes_max=2 << 20) as served:
        await served.publish(one.messages(promote=why == "pointer"))
        await served.publish(two.messages())
        if why == "pin":
            await served.stub.Pin(pb.PinRequest(ref=ref(one), ttl_seconds=60))
        hold = served.stub.Hold(pb.HoldRequest(ref=ref(one if why == "hold" else two)))
        assert (await hold.read()).ref.name == "rules"
        if why == "hold":
            await served.stub.Pin(pb.PinRequest(ref=ref(two), ttl_seconds=60))
        code, text, _ = await fails(served.publish([three.begin()]))  # no byte is needed for that answer
        assert (code, "file_bytes_max" in text) == (FULL, True)
        assert versions(served) == {one.version, two.version}
        hold.cancel()
        await served.stub.Unpin(pb.UnpinRequest(ref=ref(two)))
        await eventually(lambda: not served.parts.store.holds, "the hold has ended")
        await served.publish(three.messages())
        assert three.version in versions(served)


async def test_nothing_is_evicted_for_what_does_not_fit_in_the_end(serve: Serve, make: Make) -> None:
    async with serve(versions_max=2, file_bytes_max=1 << 20) as served:
        one, two = make(seed=1), make(seed=2)
        for made in (one, two):
            await served.publish(made.messages())
        await served.stub.Pin(pb.PinRequest(ref=ref(two), ttl_seconds=60))
        with pytest.raises(ResourceExhausted):
            await served.parts.store.bringing._publishing._room.make("default", (1 << 20) - 1)
        assert versions(served) == {one.version, two.version}


async def test_of_two_pins_at_once_the_longer_holds(serve: Serve, make: Make) -> None:
    made = make()
    async with serve() as served:
        await served.publish(made.messages())
        pins = [served.stub.Pin(pb.PinRequest(ref=ref(made), ttl_seconds=seconds)) for seconds in (600, 60, 30)]
        until = [(await pin).pinned_until_seconds for pin in pins]
        (kept,) = served.parts.store.catalogue.all()
        assert kept.pin.until_seconds == max(until)


async def test_a_mapped_version_is_passed_over(start_store: StartStore, large: Any, tmp_path: Path) -> None:
    one, two, three = large(1), large(2), large(3)
    with start_store(tmp_path / "data", "--file-bytes-max", str(2 << 20)) as process:
        asm = process.fabric.asm
        asm.publish(one.folder, promote=False)
        with asm.open("rules", one.version):
            asm.publish(two.folder, promote=False)
            asm.publish(three.folder, promote=False)
            assert {stored.version for stored in asm.list()} == {one.version, three.version}


async def test_a_version_that_is_larger_than_all_room_is_refused(serve: Serve, large: Any, fails: Fails) -> None:
    made = large(1)
    async with serve(file_bytes_max=1 << 20, tenant_bytes_max=100_000) as served:
        code, text, details = await fails(served.publish([made.begin()]))
        assert (code, "at all" in text, "quota" in text) == (FULL, True, True)
        assert "treadle-retry-after-seconds" not in details


async def test_the_number_of_versions_is_bounded_too(serve: Serve, make: Make, fails: Fails) -> None:
    async with serve(versions_max=2) as served:
        for seed in range(4):
            await served.publish(make(seed=seed).messages())
        assert len(versions(served)) == 2
        for version in versions(served):
            pin = pb.PinRequest(ref=pb.DictionaryRef(name="rules", version=version), ttl_seconds=60)
            await served.stub.Pin(pin)
        code, text, _ = await fails(served.publish(make(seed=9).messages()))
        assert (code, "versions_max" in text) == (FULL, True)


@pytest.fixture
def tenants(tmp_path: Path) -> Path:
    """a: 1 MB; b: as the setting says; root: may change all."""
    path = tmp_path / "tenants.yaml"
    for name in ("a", "b", "root"):
        (tmp_path / name).write_text(f"key-{name}")
    path.write_text(
        f"tenants:\n  - {{name: a, token_file: {tmp_path}/a, file_bytes_max: 1000000}}\n  - {{name: b, token_file: {tmp_path}/b}}\n"
        f"  - {{name: root, token_file: {tmp_path}/root, admin: true}}\n"
    )
    return path


async def test_a_tenant_has_its_own_quota_and_its_own_names(
    serve: Serve, large: Any, make: Make, tenants: Path, fails: Fails
) -> None:
    async with serve(tenants_file=tenants, key="key-a") as served:
        first, second = large(1), large(2)
        stored = (await served.publish(first.messages(promote=True))).dictionary
        assert (stored.tenant, served.metric("file_bytes", tenant="a")) == ("a", stored.file_bytes)
        code, text, _ = await fails(served.publish([second.begin()]))
        assert (code, "tenant a" in text) == (FULL, True)
        as_b, as_root = ((("authorization", f"Bearer key-{name}"),) for name in ("b", "root"))
        for call in (
            served.stub.Publish(iter([second.begin()]), metadata=as_b),
            served.stub.Promote(pb.PromoteRequest(ref=ref(first)), metadata=as_b),
            served.stub.Pin(pb.PinRequest(ref=ref(first), ttl_seconds=1), metadata=as_b),
            served.stub.Unpin(pb.UnpinRequest(ref=ref(first)), metadata=as_b),
            served.stub.Delete(pb.DeleteRequest(ref=ref(first)), metadata=as_b),
            served.stub.Extend(pb.ExtendRequest(ref=ref(first), chunk=ref(first)), metadata=as_b),
        ):
            code, text, _ = await fails(call)
            assert (code, "tenant b" in text) == (grpc.StatusCode.UNAUTHENTICATED, True)
        assert (await served.stub.Open(pb.OpenRequest(ref=ref(first)), metadata=as_b)).path  # reading is everybody's
        other = make(name="other")
        with Fabric(asm=served.address, key="key-b") as fabric:
            published = await asyncio.to_thread(fabric.asm.publish, other.folder)
        assert published.stored.tenant == "b"
        await served.stub.Delete(pb.DeleteRequest(ref=ref(first)), metadata=as_root)
        assert (await fails(served.stub.List(pb.ListRequest())))[0] is grpc.StatusCode.UNAUTHENTICATED


async def test_a_name_whose_only_version_is_torn_stays_its_tenants_until_it_means_nothing(
    serve: Serve, make: Make, tenants: Path, fails: Fails
) -> None:
    first, other, again = (make(seed=seed) for seed in range(3))
    as_b = (("authorization", "Bearer key-b"),)
    async with serve(tenants_file=tenants, key="key-a") as served:
        await served.publish(first.messages(promote=True))
        torn = served.parts.folder.path / "rules" / first.version / "dictionary.safetensors"
    torn.write_bytes(torn.read_bytes()[:-1])
    async with serve(tenants_file=tenants, key="key-a") as served:
        assert not served.parts.store.catalogue.all()
        for call in (
            served.stub.Publish(iter(other.messages(promote=True)), metadata=as_b),
            served.stub.Delete(pb.DeleteRequest(ref=pb.DictionaryRef(name="rules")), metadata=as_b),
        ):
            code, text, _ = await fails(call)
            assert (code, "tenant b" in text) == (grpc.StatusCode.UNAUTHENTICATED, True)
        assert served.parts.store.pointers.of("rules").version == first.version
        assert (await served.publish(again.messages(promote=True))).dictionary.current
        await served.stub.Delete(pb.DeleteRequest(ref=pb.DictionaryRef(name="rules")), metadata=served.metadata)
        answer = await served.stub.Publish(iter(other.messages(promote=True)), metadata=as_b)  # now it is anybody's
        assert (answer.dictionary.tenant, answer.dictionary.current) == ("b", True)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tenants: []", "1 to"), ("- a", "tenants"), ("tenants: [{name: a}]", "token_file or token_sha256"),
        ("tenants: [{name: A b, token_sha256: x}]", "name"), ("tenants: [{name: a, token_sha256: xyz}]", "64"),
        ("tenants: [{name: a, token_sha256: x, other: 1}]", "unknown"), ("tenants: [{name: a, token_file: /nowhere}]", "cannot read"),
        ("tenants: [{name: a, token_sha256: x, file_bytes_max: -1}]", "file_bytes_max"),
        ("tenants: [{name: a, token_sha256: x, admin: 'no'}]", "admin"),
    ],
)  # fmt: skip
async def test_a_tenants_file_that_makes_no_sense_stops_the_start(serve: Serve, tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text(text)
    with pytest.raises(WrongSetting, match=words):
        async with serve(tenants_file=path):
            pass
