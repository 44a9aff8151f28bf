"""Small models, checkpoints written byte by byte, pools in this process and in their own."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import os
import secrets
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from engram_pool.adapters.grown_folder import open_grown
from engram_pool.adapters.metrics import PrometheusMeters
from engram_pool.adapters.mooncake_rows import open_store
from engram_pool.adapters.native_doors import NativeDoors
from engram_pool.adapters.peer_pools import open_peer_version
from engram_pool.adapters.safetensors_checkpoint import open_checkpoint
from engram_pool.adapters.segment_folder import SegmentFolder
from engram_pool.adapters.tenant_metrics import TenantMetrics
from engram_pool.domain.compute import Compute
from engram_pool.domain.directory import Directory
from engram_pool.domain.fusion_reading import FusionReading
from engram_pool.domain.gathering import Gathering
from engram_pool.domain.hinting import Hinting
from engram_pool.domain.loading import Loader
from engram_pool.domain.pool import Pool
from engram_pool.domain.ports import Doors, Nearness, NoDoors
from engram_pool.domain.repairing import Repairs
from engram_pool.domain.reserving import Reserving
from engram_pool.domain.room import LIST_BYTES_MAX
from engram_pool.domain.scrubbing import Scrubber
from engram_pool.domain.table_reading import TableReading
from engram_pool.domain.tenancy import Bandwidth, NoReserve
from engram_pool.server import STATUS, EngramPoolServer, register
from treadle.chassis.interceptors import CallGuard, RpcMetrics
from treadle.client import Fabric
from treadle.contract import EngramModel, Fusion, RowLayout, Table
from treadle.contract.families import deepseek_v41_model, demo_model, qwen_ple_model
from treadle.contract.row_layout import row_layout
from treadle.contract.table_manifest import CHUNK_BYTES, table_version
from treadle.dataplane import Tenants
from treadle.dataplane.warming import PageWarmer
from treadle.engram.v1 import engram_pool_pb2 as pb
from treadle.engram.v1 import engram_pool_pb2_grpc as pb_grpc
from treadle.kernels import quantise

sys.path.append(str(Path(__file__).parent))  # flipping.py, freezing.py
PATIENCE_SECONDS = 20.0  # for what takes milliseconds on a quiet machine


@pytest.fixture
def until() -> Callable[[Callable[[], bool], str], None]:
    """`until(condition, what)`: poll until it holds, within PATIENCE_SECONDS."""

    def wait(condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"still not: {what}"
            time.sleep(0.01)

    return wait


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool], str], Awaitable[None]]:
    """`await eventually(condition, what)`: the same on the event loop."""

    async def wait(condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"still not: {what}"
            await asyncio.sleep(0.01)

    return wait


@pytest.fixture
def free_port() -> Callable[[], int]:
    """`free_port()`: one that nobody listens on now, nor is given for the asking: each one once."""

    return lambda: next(filter(_is_free, _PORTS))


# Below those that the system hands out: between the look and its use no other door or connection gets it.
_PORTS = itertools.islice(itertools.cycle(range(23_000, 32_000)), os.getpid() % 9_000, None)


def _is_free(port: int) -> bool:
    with socket.socket() as probe, suppress(OSError):
        probe.bind(("127.0.0.1", port))
        return True
    return False


# -- models -----------------------------------------------------------------------------------------------------------------


def digest_of(token_map: NDArray[np.int32]) -> str:
    return hashlib.sha256(token_map.astype("<i4").tobytes()).hexdigest()


@pytest.fixture(scope="session")
def token_map() -> NDArray[np.int32]:
    return (np.arange(500) % 400).astype(np.int32)


@pytest.fixture(scope="session")
def demo(token_map: NDArray[np.int32]) -> EngramModel:
    """Two layers of about 5,000 rows of 64 bytes."""
    row = RowLayout(64, 32, "bf16")
    return demo_model(
        "demo", layers=(1, 4), token_map=digest_of(token_map), compressed_vocab_size=400, pad_id=2, prime_base=300, row=row
    )


@pytest.fixture(scope="session")
def v41(token_map: NDArray[np.int32]) -> EngramModel:
    """Two layers of about 3,000 rows of 264 bytes."""
    return deepseek_v41_model(
        "v41", token_map=digest_of(token_map), compressed_vocab_size=400, pad_id=2, layers=(1, 3), prime_base=100
    )


@pytest.fixture(scope="session")
def ple() -> EngramModel:
    """One layer of about 13,000 rows of 320 bytes, no token map."""
    return qwen_ple_model("ple", prime_base=800, row=RowLayout(320, 160, "bf16"))


# -- checkpoints --------------------------------------------------------------------------------------------------------------

TensorData = tuple[str, Sequence[int], bytes]
WriteSafetensors = Callable[[Path, Mapping[str, TensorData]], None]


@pytest.fixture
def write_tensors() -> WriteSafetensors:
    """`write_tensors(path, {name: (dtype, shape, bytes)})`."""
    return write_safetensors


def write_safetensors(path: Path, tensors: Mapping[str, TensorData]) -> None:
    """A safetensors file from (dtype, shape, bytes): dtypes that numpy does not know included."""
    header, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(data for _, _, data in tensors.values()))


@dataclass(frozen=True)
class V41Checkpoint:
    folder: Path
    config: dict[str, Any]
    packed: dict[int, NDArray[np.uint8]]


@pytest.fixture
def v41_checkpoint(tmp_path: Path, v41: EngramModel) -> V41Checkpoint:
    """A folder with one file for each layer; each table has 5 rows of padding behind the hashed ones."""
    folder = tmp_path / "DeepSeek V4.1 small"
    folder.mkdir()
    chance, packed = np.random.default_rng(3), {}
    for layer in v41.layers:
        rows = v41.rows_hashed(layer) + 5
        values = chance.integers(0, 255, (rows, 256), dtype=np.uint8)
        scales = chance.integers(100, 140, (rows, 8), dtype=np.uint8)
        packed[layer] = np.hstack([values, scales])
        prefix = f"model.layers.{layer}.engram"
        write_safetensors(folder / f"model-{layer:05}.safetensors", {
            f"{prefix}.embed.weight": ("F8_E4M3", values.shape, values.tobytes()),
            f"{prefix}.embed.weight_scale_inv": ("F8_E8M0", scales.shape, scales.tobytes()),
            f"{prefix}.q_weight": ("BF16", (4, 8), bytes(64)),
        })  # fmt: skip
    config = {
        "engram_layer_ids": list(v41.layers), "engram_num_embeddings": [v41.rows_hashed(layer) for layer in v41.layers],
        "engram_max_ngram_size": 4, "engram_n_heads": 8, "engram_head_dim": 256, "engram_compressed_vocab_size": 400,
        "engram_pad_token_id": 2, "engram_vocab_size": 100,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return V41Checkpoint(folder, config, packed)


# -- grown folders ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Grown:
    """A folder as growing writes it, and what is in it."""

    path: Path
    model: EngramModel
    tables: dict[int, NDArray[np.uint8]]
    fusion: bytes
    card: dict[str, Any]


Grow = Callable[..., Grown]


@pytest.fixture
def grow(tmp_path: Path, token_map: NDArray[np.int32]) -> Grow:
    """`grow(seed)`: a small memory named kjv; the rows, weights and card depend on the seed."""

    def make(seed: int = 0, *, name: str = "kjv", fusion_bytes: int = 3_000, precision: str = "int4") -> Grown:
        chance, layout = np.random.default_rng(seed), row_layout(precision, 32)
        template = deepseek_v41_model(
            name, token_map=digest_of(token_map), compressed_vocab_size=400, pad_id=2, layers=(1, 3), prime_base=100, orders=(2, 3),
            row=layout, fusion=Fusion("v4.1"),
        )  # fmt: skip
        tables = {
            layer: quantise(chance.standard_normal((template.rows_hashed(layer), 32), dtype=np.float32), layout)
            for layer in template.layers
        }
        fusion, card = chance.bytes(fusion_bytes), {"schema": "treadle.engram-card/1", "seed": seed, "perplexity": 14.01}
        model = replace(template, fusion=Fusion("v4.1", hashlib.sha256(fusion).hexdigest())).with_tables(
            {layer: Table(len(rows), table_version(len(rows), layout.bytes, chunk_digests(rows))) for layer, rows in tables.items()}
        )
        path = tmp_path / "grown" / f"{name}-{seed}"
        path.mkdir(parents=True, exist_ok=True)
        (path / "manifest.json").write_bytes(model.to_json())
        (path / "fusion.safetensors").write_bytes(fusion)
        (path / "card.json").write_text(json.dumps(card))
        write_safetensors(path / "rows.safetensors", grown_tensors(tables, token_map))
        return Grown(path, model, tables, fusion, card)

    return make


def grown_tensors(tables: Mapping[int, NDArray[np.uint8]], token_map: NDArray[np.int32]) -> dict[str, TensorData]:
    rows: dict[str, TensorData] = {f"{layer}.rows": ("U8", rows.shape, rows.tobytes()) for layer, rows in tables.items()}
    return rows | {"token_map": ("I32", token_map.shape, token_map.tobytes())}


def chunk_digests(rows: NDArray[np.uint8]) -> list[bytes]:
    data = rows.tobytes()
    return [hashlib.sha256(data[first : first + CHUNK_BYTES]).digest() for first in range(0, len(data), CHUNK_BYTES)]


# -- pools ----------------------------------------------------------------------------------------------------------------------


@dataclass
class Meters:
    """Remembers what the domain reports."""

    loads: list[str] = field(default_factory=list)
    gathers: list[tuple[str, int]] = field(default_factory=list)
    loaded_bytes: int = 0
    corrupt_segments: int = 0
    left_versions: int = 0
    promotes: int = 0
    fusion_bytes: int = 0
    hints: dict[str, int] = field(default_factory=dict)

    def load_ended(self, outcome: str) -> None:
        self.loads.append(outcome)

    def rows_loaded(self, byte_count: int) -> None:
        self.loaded_bytes += byte_count

    def gather_ended(self, outcome: str, rows: int, seconds: float) -> None:
        self.gathers.append((outcome, rows))

    def corrupt(self, segments: int) -> None:
        self.corrupt_segments += segments

    def left(self, versions: int) -> None:
        self.left_versions += versions

    def promoted(self) -> None:
        self.promotes += 1

    def fusion_read(self, byte_count: int) -> None:
        self.fusion_bytes += byte_count

    def hinted(self, outcome: str, tokens: int) -> None:
        self.hints[outcome] = self.hints.get(outcome, 0) + tokens


@dataclass
class Served:
    """A pool behind a real server in this process."""

    address: str
    pool: Pool
    stub: Any
    fabric: Fabric
    registry: CollectorRegistry
    scrubber: Scrubber
    hinting: Hinting

    async def load(self, model: EngramModel, token_map: NDArray[np.int32] | None, *, seed: int = 0, keep: bool = False) -> pb.Model:
        request = pb.LoadTableRequest(manifest_json=model.to_json(), keep_previous=keep, random=pb.RandomSource(seed=seed))
        request.token_map = b"" if token_map is None else token_map.tobytes()
        events = [event async for event in self.stub.LoadTable(request)]
        assert [event.WhichOneof("event") for event in events[:-1]] == ["progress"] * (len(events) - 1)
        loaded: pb.Model = events[-1].loaded
        return loaded

    async def failure(self, call: Any) -> tuple[grpc.StatusCode, str, dict[str, str]]:
        """Code, text and trailing details with which a unary or streamed call fails."""
        try:
            if hasattr(call, "read"):
                await self.rest(call)
            else:
                await call
        except grpc.aio.AioRpcError as error:
            details = {str(name): str(value) for name, value in error.trailing_metadata() or ()}
            return error.code(), str(error.details()), details
        raise AssertionError("the call did not fail")

    async def rest(self, call: Any) -> list[Any]:
        """What a streamed call has not handed out yet."""
        messages = []
        while (message := await call.read()) is not grpc.aio.EOF:
            messages.append(message)
        return messages

    def metric(self, name: str, **labels: str) -> float:
        value = self.registry.get_sample_value(f"treadle_engram_{name}", labels)
        return 0.0 if value is None else value


Serve = Callable[..., AbstractAsyncContextManager[Served]]


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    """`async with serve() as served:` a pool over `tmp_path/segments`, settings by keyword."""
    return partial(_serve, tmp_path / "segments")


@asynccontextmanager
async def _serve(
    default_folder: Path, *, folder: Path | None = None, table_bytes_max: int = 0, watchers_max: int = 4, gathers_max: int = 8,
    list_bytes_max: int = LIST_BYTES_MAX, keep_segments: bool = True, checksums: bool = True, checkpoint_dir: Path | None = None,
    holds_max: int = 8, reap_grace_seconds: float = 0.0, gather_seconds_max: float = 30.0, versions_kept_max: int = 2,
    repairs: bool = False, peers: Sequence[str] = (), scrub_bytes_per_second: int = 0,
    doors: Doors | None = None, tenants: Tenants | None = None, bandwidth: Bandwidth | None = None, key: str | None = None,
    nearness: Nearness | None = None, hint_tokens_max: int = 1 << 18,
) -> AsyncIterator[Served]:  # fmt: skip
    registry, compute = CollectorRegistry(), Compute(3)
    meters, store = PrometheusMeters(registry), SegmentFolder(folder or default_folder)
    pool = Pool(
        store, compute, meters, table_bytes_max=table_bytes_max, watchers_max=watchers_max, list_bytes_max=list_bytes_max,
        holds_max=holds_max, reap_grace_seconds=reap_grace_seconds, versions_kept_max=versions_kept_max, warmer=PageWarmer(), doors=doors,
    )  # fmt: skip
    loader = Loader(
        pool, store, compute, meters, partial(open_checkpoint, allowed_folder=checkpoint_dir),
        partial(open_grown, allowed_folder=checkpoint_dir), open_peer_version, open_store,
    )  # fmt: skip
    if repairs:
        pool.repair_with(Repairs(store, meters, loader.open_source, open_peer_version, peers=peers).mend)
    tenants = tenants or Tenants()
    gathering = Gathering(pool, compute, meters, calls_max=gathers_max, tenants=tenants, bandwidth=bandwidth or NoReserve())
    scrubber = Scrubber(pool, compute, meters, bytes_per_second=scrub_bytes_per_second, busy=lambda: gathering.busy)
    directory = Directory("pool")
    meters.observe(pool)
    meters.observe_scrubber(scrubber)
    await pool.start(checksums=checksums)
    TenantMetrics(registry, tenants, None)
    nearness = nearness or (doors if isinstance(doors, NativeDoors) else NoDoors())
    hinting = Hinting(pool, compute, nearness, meters, tokens_max=hint_tokens_max, tenants=len(tenants.limits))
    hints = asyncio.create_task(hinting.run_forever())
    digests = frozenset(tenants.tokens)
    guard = CallGuard(status=STATUS, keys=frozenset(), calls_max=64, metrics=RpcMetrics(registry, "engram"), key_digests=digests)
    server = grpc.aio.server(interceptors=[guard])
    rpcs = EngramPoolServer(
        pool, loader, gathering, FusionReading(pool, compute, meters), TableReading(pool, compute), scrubber, directory,
        reserving=Reserving(bandwidth or NoReserve(), compute), tenants=tenants, hinting=hinting, segment_dir=store.folder,
        gather_seconds_max=gather_seconds_max, build_version="test",
    )  # fmt: skip
    register(server, rpcs)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            with Fabric(engram=address, key=key) as fabric:
                yield Served(address, pool, pb_grpc.EngramPoolServiceStub(channel), fabric, registry, scrubber, hinting)
    finally:
        hints.cancel()
        await asyncio.wait([hints])
        await directory.close()
        await pool.drain()
        await server.stop(5)
        await pool.stop(keep_segments=keep_segments)
        compute.close()


@dataclass
class Process:
    """A pool in a process of its own."""

    child: subprocess.Popen[str]
    address: str
    metrics: str
    fabric: Fabric
    log: Path

    def kill(self) -> None:
        self.child.kill()
        self.child.wait()

    def stop(self) -> int:
        self.child.send_signal(signal.SIGTERM)
        return self.child.wait(PATIENCE_SECONDS)


@contextmanager
def pool_process(folder: Path, log: Path, *flags: str) -> Iterator[Process]:
    """Start one over `folder`; killed at the end if it still runs."""
    command = [sys.executable, "-m", "engram_pool", "--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"]
    with log.open("a") as stderr:
        child = subprocess.Popen(
            [*command, "--segment-dir", str(folder), *flags], stdout=subprocess.PIPE, stderr=stderr, text=True,
        )  # fmt: skip
    assert child.stdout is not None
    try:
        line = child.stdout.readline()
        assert line, log.read_text()
        ready = json.loads(line)
        with Fabric(engram=ready["listen"]) as fabric:
            yield Process(child, ready["listen"], ready["metrics"], fabric, log)
    finally:
        if child.poll() is None:
            child.kill()
        child.wait()
        child.stdout.close()


StartPool = Callable[..., AbstractContextManager[Process]]


@pytest.fixture
def start_pool(tmp_path: Path) -> StartPool:
    """`with start_pool(folder, *flags) as process:` a pool in its own process; its log is `process.log`."""
    return lambda folder, *flags: pool_process(folder, tmp_path / "pool.log", *flags)


@pytest.fixture
def shm_folder() -> Iterator[Path]:
    """A folder name in shared memory, removed at the end whatever is in it."""
    folder = Path(f"/dev/shm/treadle-test-{os.getpid()}-{secrets.token_hex(4)}")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)
