"""Tenants at the gRPC door: tokens, quotas, counters; a reserve of bandwidth, by RPC, SDK and command."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
import urllib.request
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray
from typer.testing import CliRunner

from engram_pool.adapters.native_doors import NativeDoors
from engram_pool.adapters.tenants_file import read_tenants
from engram_pool.commands import app
from engram_pool.settings import Settings
from engram_pool.terminal import bytes_of
from treadle.chassis.settings import WrongSetting
from treadle.client import Fabric
from treadle.contract import AccessDenied, EngramModel, InvalidArgument, ResourceExhausted, Unavailable
from treadle.dataplane import IMPLEMENTATION, TenantLimits, Tenants

if TYPE_CHECKING:
    from tests.conftest import StartPool

ZEROS, ONES = "0" * 64, "1" * 64
Serve = Callable[..., AbstractAsyncContextManager[Any]]
needs_native = pytest.mark.skipif(
    IMPLEMENTATION != "native", reason="the native extension was not built: pip install needs a C++20 compiler"
)


def two_tenants() -> Tenants:
    limits = (TenantLimits("slow", rows_per_second_max=10), TenantLimits("free"))
    tokens = {hashlib.sha256(token).digest(): index for index, token in enumerate((b"key", b"of slow", b"of free"))}
    return Tenants(limits, tokens)


def gather(address: str, key: str, model: EngramModel, rows: int) -> None:
    with Fabric(engram=address, key=key) as fabric, fabric.engram.open(model.name, transport="rpc") as handle:
        handle.gather(model.layers[0], np.zeros((rows, 1), dtype=np.int64))


async def test_rows_are_taken_off_the_quota_of_whose_token_comes(
    serve: Serve, demo: EngramModel, token_map: NDArray[np.int32]
) -> None:
    async with serve(tenants=two_tenants(), key="key") as served:
        await asyncio.to_thread(served.fabric.engram.load_random, demo, token_map)
        await asyncio.to_thread(gather, served.address, "of slow", demo, 500)
        with pytest.raises(ResourceExhausted, match="quota") as refused:
            await asyncio.to_thread(gather, served.address, "of slow", demo, 1)
        assert refused.value.retry_after_seconds == pytest.approx(49.75, abs=20)
        await asyncio.to_thread(gather, served.address, "of free", demo, 700)
        await asyncio.to_thread(gather, served.address, "key", demo, 3)
        with pytest.raises(AccessDenied):
            await asyncio.to_thread(gather, served.address, "a stranger's", demo, 1)
        tenants = {tenant.name: tenant for tenant in (await asyncio.to_thread(served.fabric.engram.status)).tenants}
        assert {name: tenant.rows_total for name, tenant in tenants.items()} == {"nobody": 3, "slow": 500, "free": 700}
        assert (tenants["slow"].refused_total, tenants["slow"].rows_per_second_max, tenants["slow"].late_total) == (1, 10, 0)
        assert served.metric("refused_total", tenant="slow", reason="quota") == 1
        assert served.metric("tenant_rows_total", tenant="free", tier="memory") == 700
        assert served.metric("row_bytes_total", tenant="free", tier="memory") == 700 * demo.row.bytes
        assert served.metric("slack_seconds_bucket", tenant="free", le="+Inf") == 1


def test_tenants_change_nothing_for_others_unless_they_are_admins(
    start_pool: StartPool, shm_folder: Path, ple: EngramModel, tmp_path: Path
) -> None:
    tenants, keys = tmp_path / "tenants.yaml", tmp_path / "keys"
    keys.write_text("of the pool\n")
    user, admin = (hashlib.sha256(token).hexdigest() for token in (b"of user", b"of admin"))
    tenants.write_text(
        f"tenants:\n  - {{name: user, token_sha256: '{user}'}}\n  - {{name: boss, token_sha256: '{admin}', admin: true}}\n"
    )
    with start_pool(shm_folder, "--tenants-file", str(tenants), "--api-key-file", str(keys)) as process:
        version = ""
        asks: dict[str, Callable[[Fabric], object]] = {
            "load": lambda sdk: sdk.engram.load_random(ple, None, seed=2),
            "promote": lambda sdk: sdk.engram.promote(ple.name, version),
            "verify": lambda sdk: sdk.engram.verify(ple.name),
            "reserve": lambda sdk: sdk.engram.reserve_bandwidth("kv", 0, 1.0),
            "remove": lambda sdk: sdk.engram.remove(ple.name),
        }
        for key in ("of the pool", "of admin"):
            with Fabric(engram=process.address, key=key) as fabric, Fabric(engram=process.address, key="of user") as other:
                version = fabric.engram.load_random(ple, None).version
                for ask in asks.values():
                    with pytest.raises(AccessDenied, match=r"tenant user may not.*api_key_file.*admin: true"):
                        ask(other)
                assert [model.version for model in other.engram.list_models()] == [version]
                with other.engram.open(ple.name, transport="rpc") as handle:
                    assert handle.gather(ple.layers[0], np.zeros((2, 1), dtype=np.int64)).shape[0] == 2
                for name in ("promote", "verify", "remove"):
                    asks[name](fabric)
                assert fabric.engram.list_models() == []


def test_tenants_alone_are_keys_enough_beyond_loopback(tmp_path: Path) -> None:
    assert Settings(listen="0.0.0.0:0", tenants_file=tmp_path / "tenants").tenants_file
    with pytest.raises(WrongSetting, match="give api_key_file or tenants_file or tls_client_root_file"):
        Settings(listen="0.0.0.0:0")
    with pytest.raises(WrongSetting, match=r"socket_listen.*give api_key_file or tenants_file, or"):
        Settings(socket_listen="0.0.0.0:0")


def test_the_file_of_the_tenants_gives_names_tokens_and_limits(tmp_path: Path) -> None:
    secret, path = tmp_path / "decode.token", tmp_path / "tenants.yaml"
    secret.write_text("of decode\n")
    digest = hashlib.sha256(b"of batch").hexdigest()
    path.write_text(
        f"tenants:\n  - {{name: decode, token_file: {secret}, share: 3, priority: 1}}\n"
        f"  - {{name: batch, token_sha256: '{digest}', rows_per_second_max: 1000}}\n"
    )
    tenants = read_tenants(path, ["pool key"])
    assert [(limits.name, limits.share, limits.priority, limits.rows_per_second_max) for limits in tenants.limits[1:]] == [
        ("decode", 3.0, 1, 0), ("batch", 1.0, 0, 1000),
    ]  # fmt: skip
    assert [tenants.find(token) for token in ("pool key", "of decode", "of batch")] == [0, 1, 2]
    assert read_tenants(None, []).find(None) == 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("tenants: [{name: a, token_file: /nowhere}]", "cannot read"),
        (f"tenants: [{{name: a, token_sha256: '{ONES}', admin: 'false'}}]", "admin: true or false"),
        ("tenants: [{name: a}]", "token_file or token_sha256"),
        ("tenants: [{name: a, token_sha256: abc}]", "64 hexadecimal"),
        (f"tenants: [{{name: a, share: 0, token_sha256: '{ZEROS}'}}]", "share"),
        ("tenants: [{name: a, colour: red}]", "colour"),
        ("tenants: []", "1 to 4096"),
        ("- a", "one key"),
        (f"tenants: [{{name: a, token_sha256: '{ZEROS}'}}, {{name: b, token_sha256: '{ZEROS}'}}]", "another's"),
        (f"tenants: [{{name: a, token_sha256: '{ZEROS}'}}, {{name: a, token_sha256: '{ONES}'}}]", "different names"),
    ],
)  # fmt: skip
def test_a_file_that_makes_no_sense_stops_the_start(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "tenants.yaml"
    path.write_text(text)
    with pytest.raises(WrongSetting, match=says):
        read_tenants(path, [])
    with pytest.raises(WrongSetting, match="cannot read"):
        read_tenants(tmp_path / "missing.yaml", [])


@needs_native
async def test_a_reserve_slows_gathers_and_is_given_back(serve: Serve, demo: EngramModel, token_map: NDArray[np.int32]) -> None:
    doors = NativeDoors(workers=1, tickets_max=4)
    async with serve(doors=doors, bandwidth=doors.queue) as served:
        await asyncio.to_thread(served.fabric.engram.load_random, demo, token_map)
        pool = served.fabric.engram
        total = (await asyncio.to_thread(pool.reserve_bandwidth, "kv", 0, 1.0)).left_bytes_per_second
        with pytest.raises(ResourceExhausted, match="too little"):
            await asyncio.to_thread(pool.reserve_bandwidth, "kv", total, 1.0)
        with pytest.raises(InvalidArgument, match="reserve"):
            await asyncio.to_thread(pool.reserve_bandwidth, "kv", 1, 0.0)
        reserved = await asyncio.to_thread(pool.reserve_bandwidth, "kv", int(total * 0.89), 30.0)
        assert reserved.left_bytes_per_second == pytest.approx(total * 0.11, rel=0.01)
        row_bytes = demo.row.bytes
        begun = time.monotonic()
        ahead = doors.queue.pace_seconds(int(reserved.left_bytes_per_second * 0.3))  # somebody has just gathered so much
        assert ahead == 0
        await asyncio.to_thread(gather, served.address, "", demo, 8)
        assert time.monotonic() - begun >= 0.25, f"8 rows of {row_bytes} B waited for their turn"
        assert (await asyncio.to_thread(pool.reserve_bandwidth, "kv", 0, 1.0)).reserved_bytes_per_second == 0


async def test_a_pool_without_native_doors_refuses_a_reserve(serve: Serve) -> None:
    async with serve() as served:
        with pytest.raises(Unavailable, match="native data plane"):
            await asyncio.to_thread(served.fabric.engram.reserve_bandwidth, "kv", 1, 1.0)


@needs_native
def test_the_command_reserves_and_the_status_shows_tenants(start_pool: Any, tmp_path: Path) -> None:

    def run(*arguments: str) -> Any:
        done = CliRunner().invoke(app, [*arguments, "--pool", process.address, "--json"])
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    with start_pool(tmp_path / "segments") as process:
        given = run("reserve", "kv", "10MB", "--seconds", "30")
        assert given["reserved_bytes_per_second"] == 10_000_000
        assert given["left_bytes_per_second"] > 0
        with urllib.request.urlopen(f"http://{process.metrics}/metrics", timeout=10) as answer:
            shown = answer.read().decode()
        assert "treadle_engram_reserved_bytes_per_second 1e+07" in shown
        assert "treadle_engram_prediction_error_ratio_bucket" in shown
        assert run("reserve", "kv", "0")["reserved_bytes_per_second"] == 0
        assert [tenant["name"] for tenant in run("status")["tenants"]] == ["nobody"]


@pytest.mark.parametrize(("text", "count"), [("2G", 2 * 10**9), ("500 MB", 5 * 10**8), ("0", 0), ("1e9", 10**9), ("1.5k", 1500)])
def test_rates_are_read_as_people_write_them(text: str, count: int) -> None:
    assert bytes_of(text) == count
    with pytest.raises(InvalidArgument):
        bytes_of(text + " bananas")
