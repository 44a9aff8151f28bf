"""A scripted store on a real socket, and the SDK that calls it."""

from __future__ import annotations

import fcntl
import hashlib
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from treadle.asm.v1 import asm_store_pb2 as pb
from treadle.asm.v1 import asm_store_pb2_grpc as pb_grpc
from treadle.client import Fabric
from treadle.client.asm import AsmStore
from treadle.client.asm.pieces import PIECE_BYTES
from treadle.contract import PROTO_VERSION
from treadle.contract.dictionary_file import PREFIX_KV_FILE, TENSORS_FILE, read_manifest, tensor_offsets
from treadle.kernels import crc32c

KV = bytes(range(256)) * 9000  # three pieces
Mend = Callable[[list[pb.GetResponse]], list[pb.GetResponse]]


class ScriptedStore(pb_grpc.AsmStoreServiceServicer):
    """Says what it is told to. It keeps one folder, and the messages that were published."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lock_path = folder, folder / "lock"
        self.published: list[pb.PublishRequest] = []
        self.refusal: tuple[grpc.StatusCode, tuple[tuple[str, str], ...]] | None = None
        self.mend: Mend = lambda messages: messages
        self.opens = 0
        self.rotated_bytes: list[int] = []  # of each Lookup
        self.opening: Callable[[int], None] = lambda number: None
        self.holding: Callable[[], object] = lambda: None
        self.watches: list[Iterator[pb.WatchResponse]] = []
        self.watching = 0
        self.lists: list[bool] = []  # whether each part that was asked for came after another one
        self.parts = 2  # of a list
        self.listing: Callable[[Any, int], None] = lambda context, number: None

    def Publish(self, requests: Iterator[pb.PublishRequest], context: Any) -> pb.PublishResponse:  # noqa: N802
        for request in requests:
            self.published.append(request)
            self._refuse(context)
        return pb.PublishResponse(dictionary=self._dictionary())

    def Get(self, request: pb.GetRequest, context: Any) -> Iterator[pb.GetResponse]:  # noqa: N802
        yield from self.mend(list(self._pieces()))

    def Open(self, request: pb.OpenRequest, context: Any) -> pb.OpenResponse:  # noqa: N802
        self._refuse(context)
        self.opens += 1
        dictionary = read_manifest(self.folder)
        answer = pb.OpenResponse(
            dictionary=self._dictionary(), path=str(self.folder / TENSORS_FILE), lock_path=str(self.lock_path),
            tensor_offsets=tensor_offsets(self.folder / TENSORS_FILE, dictionary),
        )  # fmt: skip
        self.opening(self.opens)
        return answer

    def Hold(self, request: pb.HoldRequest, context: Any) -> Iterator[pb.HoldResponse]:  # noqa: N802
        self._refuse(context)
        over = threading.Event()
        context.add_callback(over.set)
        self.holding()
        yield pb.HoldResponse(ref=self._dictionary().ref)
        over.wait(60)

    def Lookup(self, request: pb.LookupRequest, context: Any) -> pb.LookupResponse:  # noqa: N802
        queries = np.frombuffer(request.queries, "<f4").reshape(-1, 2, 8)
        self.rotated_bytes.append(len(request.rotated))
        return pb.LookupResponse(
            states=(queries + request.layer).tobytes(), log_z=queries[:, :, 0].tobytes(), cosines=queries[:, :1, :2].tobytes(), log_base="e"
        )  # fmt: skip

    def Promote(self, request: pb.PromoteRequest, context: Any) -> pb.PromoteResponse:  # noqa: N802
        self._refuse(context)
        expected = request.expected_version if request.HasField("expected_version") else "any"
        return pb.PromoteResponse(
            pointer=pb.Pointer(name=request.ref.name, version=f"{request.ref.version} over {expected}", revision=2)
        )

    def Watch(self, request: pb.WatchRequest, context: Any) -> Iterator[pb.WatchResponse]:  # noqa: N802
        self._refuse(context)
        self.watching += 1
        if not self.watches:
            context.abort(grpc.StatusCode.UNAVAILABLE, "restarting")
        yield from self.watches.pop(0)

    def List(self, request: pb.ListRequest, context: Any) -> pb.ListResponse:  # noqa: N802
        self.lists.append(request.HasField("after"))
        self.listing(context, len(self.lists))
        part = 1 if not request.HasField("after") else 1 + self.lists[::-1].index(False)  # since the last that began
        return pb.ListResponse(dictionaries=[self._dictionary()], more=part < self.parts)

    def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusResponse:  # noqa: N802
        return pb.StatusResponse(proto_version=PROTO_VERSION if self.refusal is None else "v9.0", tenant_bytes={"a": 3})

    @property
    def held(self) -> bool:
        """Whether somebody holds the lock."""
        with self.lock_path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
            return False

    def _refuse(self, context: Any) -> None:
        if self.refusal is not None:
            context.set_trailing_metadata(self.refusal[1])
            context.abort(self.refusal[0], "said so")

    def _dictionary(self) -> pb.Dictionary:
        dictionary = read_manifest(self.folder)
        ref = pb.DictionaryRef(name=dictionary.name, version=dictionary.version)
        return pb.Dictionary(ref=ref, manifest_json=dictionary.to_json(), card_json=b'{"made": "here"}', current=True)

    def _pieces(self) -> Iterator[pb.GetResponse]:
        files = [self.folder / name for name in (TENSORS_FILE, PREFIX_KV_FILE) if (self.folder / name).is_file()]
        infos = [
            pb.FileInfo(name=path.name, bytes=path.stat().st_size, sha256=hashlib.sha256(path.read_bytes()).hexdigest())
            for path in files
        ]
        yield pb.GetResponse(begin=pb.GetBegin(dictionary=self._dictionary(), files=infos))
        for path in files:
            data = path.read_bytes()
            for offset in range(0, len(data), PIECE_BYTES):
                part = data[offset : offset + PIECE_BYTES]
                yield pb.GetResponse(piece=pb.FilePiece(name=path.name, offset_bytes=offset, data=part, crc32c=crc32c(part)))


@pytest.fixture
def scripted(tmp_path: Path, write_dictionary: Any) -> ScriptedStore:
    write_dictionary(tmp_path / "kept", prefix_kv=KV)
    store = ScriptedStore(tmp_path / "kept")  # type: ignore[abstract]  # the other calls answer UNIMPLEMENTED
    store.lock_path.touch()
    return store


@pytest.fixture
def asm(scripted: ScriptedStore) -> Iterator[AsmStore]:
    server = grpc.server(ThreadPoolExecutor(8))
    pb_grpc.add_AsmStoreServiceServicer_to_server(scripted, server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    with Fabric(asm=address) as fabric:
        yield fabric.asm
    server.stop(None).wait(10)
