"""Small dictionaries with every kind of tensor, stores in this process and in their own."""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest
from numpy.typing import NDArray
from prometheus_client import CollectorRegistry

from asm_store.adapters.tenants_file import read_tenants
from asm_store.assembly import Parts, put_together
from asm_store.domain.compute import Compute
from asm_store.domain.merging import at_rest
from asm_store.server import STATUS, register
from asm_store.settings import Settings
from treadle.asm.v1 import asm_store_pb2 as pb
from treadle.asm.v1 import asm_store_pb2_grpc as pb_grpc
from treadle.chassis.interceptors import CallGuard, RpcMetrics
from treadle.chassis.server import MESSAGE_BYTES_MAX
from treadle.client import Fabric
from treadle.contract.dictionary import (
    QUANTILES,
    Calibration,
    ChunkMerge,
    Dictionary,
    DictionaryModel,
    DictionarySettings,
    Grouping,
    Prefix,
    RowDtype,
    TensorInfo,
    tensor_name,
)
from treadle.contract.dictionary_file import PREFIX_KV_FILE, TENSORS_FILE, tensor_info, write_folder, write_tensors
from treadle.kernels import crc32c

PATIENCE_SECONDS = 30.0  # for what takes milliseconds on a quiet machine
PIECE_BYTES = 4 << 10
REDIS_SERVER = "redis-server"
Tensors = dict[str, NDArray[Any]]


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool], str], Awaitable[None]]:
    """`await eventually(condition, what)`: poll until it holds, within PATIENCE_SECONDS."""

    async def wait(condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"still not: {what}"
            await asyncio.sleep(0.01)

    return wait


@pytest.fixture
def until() -> Callable[[Callable[[], bool], str], None]:
    """`until(condition, what)`: the same without a loop."""

    def wait(condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"still not: {what}"
            time.sleep(0.01)

    return wait


# -- dictionaries -------------------------------------------------------------------------------------------------------------


@dataclass
class Made:
    """A dictionary as a folder, with its numbers."""

    folder: Path
    dictionary: Dictionary
    tensors: Tensors

    @property
    def name(self) -> str:
        return self.dictionary.name

    @property
    def version(self) -> str:
        return self.dictionary.version

    @property
    def ref(self) -> pb.DictionaryRef:
        """It, and no other version of its name."""
        return pb.DictionaryRef(name=self.name, version=self.version)

    def files(self) -> list[pb.FileInfo]:
        names = [TENSORS_FILE] + ([PREFIX_KV_FILE] if self.dictionary.prefix_kv else [])
        return [_described(self.folder / name) for name in names]

    def begin(self, **changes: Any) -> pb.PublishRequest:
        fields = {"manifest_json": self.dictionary.to_json(), "files": self.files()} | changes
        return pb.PublishRequest(begin=pb.PublishBegin(**fields))

    def pieces(self) -> Iterator[pb.PublishRequest]:
        for info in self.files():
            data = (self.folder / info.name).read_bytes()
            for at in range(0, len(data), PIECE_BYTES):
                part = data[at : at + PIECE_BYTES]
                yield pb.PublishRequest(piece=pb.FilePiece(name=info.name, offset_bytes=at, data=part, crc32c=crc32c(part)))

    def messages(self, **changes: Any) -> list[pb.PublishRequest]:
        return [self.begin(**changes), *self.pieces(), pb.PublishRequest(end=pb.PublishEnd())]


Make = Callable[..., Made]


def _described(path: Path) -> pb.FileInfo:
    data = path.read_bytes()
    return pb.FileInfo(name=path.name, bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def unit_rows(chance: np.random.Generator, *shape: int) -> NDArray[np.float32]:
    rows = chance.standard_normal(shape, dtype=np.float32)
    unit: NDArray[np.float32] = rows / np.linalg.norm(rows, axis=-1, keepdims=True)
    return unit


def layer_tensors(dictionary: Dictionary, layer: int, chance: np.random.Generator, keys_chance: np.random.Generator) -> Tensors:
    """Numbers of one layer, all within what a manifest allows; entry 0 has no samples."""
    settings, model = dictionary.settings, dictionary.model
    books, entries, heads, width = dictionary.codebooks, settings.entries, dictionary.entry_heads, dictionary.key_dim
    found: Tensors = {}
    for part, rows in (
        ("key", unit_rows(keys_chance, books, entries, width)),
        ("state", chance.standard_normal((books, entries, heads, model.head_dim), dtype=np.float32)),
    ):
        resting, scales = at_rest(rows, settings.dtype)
        found[f"{part}s"] = resting
        if scales is not None:
            found[f"{part}_scales"] = scales
    log_z = chance.uniform(-5, 20, (books, entries, heads)).astype(np.float32)
    counts = chance.integers(1, 50, (books, entries), dtype=np.int32)
    log_z[:, 0], counts[:, 0] = -np.inf, 0
    found |= {"log_z": log_z, "counts": counts}
    found["cosine_quantiles"] = np.sort(chance.uniform(0, 1, (books, QUANTILES)).astype(np.float32), axis=1)
    if settings.lists:
        found["list_keys"] = unit_rows(keys_chance, books, settings.lists, width)
        starts = np.linspace(0, entries, settings.lists + 1).astype(np.int32)
        found["list_starts"] = np.tile(starts, (books, 1))
    if settings.whitened:
        found["whitening"] = np.tile(np.eye(model.head_dim, dtype=np.float32) * 2, (model.heads, 1, 1))
    if settings.matched_keys:
        shape = (model.kv_heads, settings.matched_keys, model.head_dim)
        dtype = RowDtype.F32 if settings.dtype is RowDtype.F32 else RowDtype.BF16
        for part in ("matched_keys", "matched_values"):
            found[part], _ = at_rest(chance.standard_normal(shape, dtype=np.float32), dtype)
        found["matched_biases"] = chance.uniform(-3, 3, shape[:2]).astype(np.float32)
    return {tensor_name(layer, part): value for part, value in found.items()}


def make_dictionary(
    folder: Path, *, name: str = "rules", seed: int = 0, keys_seed: int = 7, layers: tuple[int, ...] = (0, 2), settings: Any = None,
    prefix_text: str = "prefix", tokens: int = 40, first: int = 0, calibration: str = "traces", prefix_kv: bool = False,
    change: Callable[[Tensors], None] | None = None, model: DictionaryModel | None = None, lying: Mapping[str, str] | None = None,
) -> Made:  # fmt: skip
    """Write one. change: done to the numbers before they are digested; lying: tensor -> sha256 that the manifest says instead."""
    model = model or DictionaryModel(digest("model"), digest("tokenizer"), digest("rope"), 4, 6, 2, 8)
    settings = settings or DictionarySettings(
        heads_joined=3, grouping=Grouping.INDIVIDUAL, dtype=RowDtype.I8, entries=32, lists=4, ridge_ppm=1000
    )
    blank = Dictionary.__new__(Dictionary)
    for part, value in (("name", name), ("model", model), ("layers", layers), ("settings", settings)):
        object.__setattr__(blank, part, value)
    chance, keys_chance = np.random.default_rng(seed), np.random.default_rng(keys_seed)
    tensors = {key: value for layer in layers for key, value in layer_tensors(blank, layer, chance, keys_chance).items()}
    if change is not None:
        change(tensors)
    dtypes = {key: dtype for key, (dtype, _) in blank.tensor_shapes()}
    infos = {key: tensor_info(tensors[key], dtypes[key]) for key in dtypes}
    infos |= {key: TensorInfo(infos[key].dtype, infos[key].shape, sha) for key, sha in (lying or {}).items()}
    folder.mkdir(parents=True)
    kv_digest = None
    if prefix_kv:
        kv = chance.standard_normal((model.layers, 2, model.kv_heads, tokens, model.head_dim)).astype(np.float32)
        write_tensors(folder / PREFIX_KV_FILE, {"kv": ("F32", kv)})
        kv_digest = hashlib.sha256((folder / PREFIX_KV_FILE).read_bytes()).hexdigest()
    dictionary = Dictionary(
        name, model, layers, Prefix(digest(prefix_text), tokens, (tokens,), first=first), Calibration(digest(calibration), 3, 60), settings,
        tuple(sorted(infos.items())), kv_digest,
    )  # fmt: skip
    write_folder(folder, dictionary, tensors, json.dumps({"seed": seed}).encode())
    return Made(folder, dictionary, tensors)


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """`make(name=..., seed=...)`: a folder of its own for each call."""
    numbers = iter(range(1000))
    return lambda **options: make_dictionary(tmp_path / f"made-{next(numbers)}", **options)


@pytest.fixture
def plain() -> DictionarySettings:
    """Settings of a dictionary in fp32 without lists or whitening, one codebook."""
    return DictionarySettings(heads_joined=1, grouping=Grouping.SHARED, dtype=RowDtype.F32, entries=16, chunk_merge=ChunkMerge.SUM)


# -- stores -------------------------------------------------------------------------------------------------------------------


@dataclass
class Served:
    """A store behind a real server in this process."""

    address: str
    parts: Parts
    stub: Any
    fabric: Fabric
    registry: CollectorRegistry
    key: str | None = None
    metadata: tuple[tuple[str, str], ...] = field(default=())

    async def publish(self, messages: list[pb.PublishRequest], **options: Any) -> pb.PublishResponse:
        answer: pb.PublishResponse = await self.stub.Publish(iter(messages), metadata=self.metadata, **options)
        return answer

    def metric(self, name: str, **labels: str) -> float:
        value = self.registry.get_sample_value(f"treadle_asm_{name}", labels)
        return 0.0 if value is None else value


async def failure(call: Any) -> tuple[grpc.StatusCode, str, dict[str, str]]:
    """Code, text and trailing details with which a unary or streamed call fails."""
    try:
        if hasattr(call, "read"):
            while await call.read() is not grpc.aio.EOF:
                pass
        else:
            await call
    except grpc.aio.AioRpcError as error:
        details = {str(name): str(value) for name, value in error.trailing_metadata() or ()}
        return error.code(), str(error.details()), details
    raise AssertionError("the call did not fail")


@pytest.fixture
def fails() -> Callable[[Any], Awaitable[tuple[grpc.StatusCode, str, dict[str, str]]]]:
    """`await fails(call)`: code, text and details."""
    return failure


Serve = Callable[..., AbstractAsyncContextManager[Served]]


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    """`async with serve(file_bytes_max=...) as served:` a store over `tmp_path/data`, settings by keyword; key: what its callers show."""
    return partial(_serve, tmp_path / "data")


@asynccontextmanager
async def _serve(folder: Path, *, key: str | None = None, digests: bool = False, **settings: Any) -> AsyncIterator[Served]:
    settings = dict[str, Any]({"data_dir": folder, "compute_threads": 2, "verify_bytes_per_second": 0} | settings)
    options, registry, compute = Settings(**settings), CollectorRegistry(), Compute(2)
    tenants = read_tenants(
        options.tenants_file, nobody=options.tenant, bytes_max=options.tenant_bytes_max or options.file_bytes_max
    )
    parts = put_together(options, registry, compute, tenants)
    await parts.store.start(digests=digests)
    guard = CallGuard(
        status=STATUS, keys=frozenset(), calls_max=64, metrics=RpcMetrics(registry, "asm"), key_digests=frozenset(tenants.callers)
    )
    server = grpc.aio.server(interceptors=[guard], options=[("grpc.max_send_message_length", MESSAGE_BYTES_MAX)])
    register(server, parts.server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    await parts.begin(address)
    metadata = (("authorization", f"Bearer {key}"),) if key else ()
    try:
        async with grpc.aio.insecure_channel(address) as channel:
            with Fabric(asm=address, key=key) as fabric:
                yield Served(address, parts, pb_grpc.AsmStoreServiceStub(channel), fabric, registry, key, metadata)
    finally:
        await parts.drain()
        await server.stop(5)
        await parts.end()
        compute.close()


@dataclass
class Process:
    """A store in a process of its own."""

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
def store_process(folder: Path, log: Path, *flags: str, cwd: Path | None = None) -> Iterator[Process]:
    """Start one over `folder`, in `cwd`; killed at the end if it still runs."""
    command = [sys.executable, "-m", "asm_store", "--listen", "127.0.0.1:0", "--metrics-listen", "127.0.0.1:0"]
    with log.open("a") as stderr:
        argv = [*command, "--data-dir", str(folder), *flags]
        child = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=stderr, text=True, cwd=cwd)
    assert child.stdout is not None
    try:
        line = child.stdout.readline()
        assert line, log.read_text()
        ready = json.loads(line)
        with Fabric(asm=ready["listen"]) as fabric:
            yield Process(child, ready["listen"], ready["metrics"], fabric, log)
    finally:
        if child.poll() is None:
            child.kill()
        child.wait()
        child.stdout.close()


StartStore = Callable[..., AbstractContextManager[Process]]


@pytest.fixture
def start_store(tmp_path: Path) -> StartStore:
    """`with start_store(folder, *flags) as process:` a store in its own process; its log is `process.log`."""
    return lambda folder, *flags, **more: store_process(folder, tmp_path / "store.log", *flags, **more)


# -- replicas -----------------------------------------------------------------------------------------------------------------


class Redis:
    """A redis-server that is killed and started again, on one port, and keeps nothing."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        flags = [REDIS_SERVER, "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
        self._child = subprocess.Popen(flags, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 20
        while True:
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1):
                return
            assert time.monotonic() < deadline, "redis-server does not listen"
            time.sleep(0.02)

    def kill(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait()
            self._child = None


@pytest.fixture
def redis() -> Iterator[Redis]:
    if shutil.which(REDIS_SERVER) is None:
        pytest.skip("no redis-server here: apt-get install redis-server")
    server = Redis()
    server.start()
    yield server
    server.kill()


@pytest.fixture
def replica(start_store: StartStore, redis: Redis, tmp_path: Path) -> Callable[..., AbstractContextManager[Process]]:
    """`with replica("a") as process:` one of that name, with a folder of its own."""
    return lambda name, *flags: start_store(tmp_path / name, "--replica", name, "--redis-url", redis.url, *flags)
