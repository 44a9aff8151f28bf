"""A store that says nothing where it should, seen from the worker: a watch that never begins, a version that never comes whole."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from inference_worker.adapters import asm_store
from inference_worker.adapters.asm_store import StoreOfPrefixes
from treadle.asm.v1 import asm_store_pb2 as pb
from treadle.asm.v1 import asm_store_pb2_grpc as pb_grpc
from treadle.client.asm import DictionaryCache, watching
from treadle.client.endpoint import Endpoint
from treadle.contract.dictionary_file import read_manifest
from treadle.contract.errors import Unavailable


class Refused:
    """A watch that its store never answers."""

    connected = False

    def __init__(self) -> None:
        self.over = threading.Event()

    def cancel(self) -> None:
        self.over.set()


def test_a_watch_that_its_store_never_answers_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asm_store, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(asm_store, "UNHEARD_SECONDS_MAX", 0.05, raising=False)
    watch: Any = Refused()
    with asm_store._ended_with_its_store(watch):
        assert watch.over.wait(watching.SILENCE_SECONDS)


class Stalling(pb_grpc.AsmStoreServiceServicer):
    """A store on another host that begins to send a version, and goes on once it is told to."""

    def __init__(self, folder: Path) -> None:
        dictionary = read_manifest(folder)
        ref = pb.DictionaryRef(name=dictionary.name, version=dictionary.version)
        self.kept = pb.Dictionary(ref=ref, manifest_json=dictionary.to_json(), current=True, file_bytes=1000)
        self.begun, self.go_on = threading.Event(), threading.Event()

    def Open(self, request: pb.OpenRequest, context: Any) -> pb.OpenResponse:  # noqa: N802
        return pb.OpenResponse(dictionary=self.kept, path="/nowhere/here/x", lock_path="/nowhere/here/lock")

    def Get(self, request: pb.GetRequest, context: Any) -> Iterator[pb.GetResponse]:  # noqa: N802
        self.begun.set()
        self.go_on.wait(60)
        yield pb.GetResponse(begin=pb.GetBegin(dictionary=self.kept))


def test_a_worker_that_stops_does_not_wait_for_a_version_that_is_being_brought(
    make_prefix: Callable[..., Path], prompt: Callable[..., tuple[int, ...]], tmp_path: Path
) -> None:
    stalling = Stalling(make_prefix(prompt(10), [prompt(4, seed=1)]))  # type: ignore[abstract]  # nothing else is called
    server = grpc.server(ThreadPoolExecutor(4))
    pb_grpc.add_AsmStoreServiceServicer_to_server(stalling, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    store = StoreOfPrefixes(Endpoint(f"127.0.0.1:{port}"), DictionaryCache(tmp_path / "cache", 1 << 20))
    with ThreadPoolExecutor(2) as opening:
        bringing = opening.submit(store.open, "rules", stalling.kept.ref.version, {})
        assert stalling.begun.wait(20)
        waiting = opening.submit(store.open, "rules", stalling.kept.ref.version, {})  # for who brings it
        store.close()
        for opened in (bringing, waiting):
            with pytest.raises(Unavailable):
                opened.result(20)
    with pytest.raises(Unavailable, match="the worker is stopping"):
        store.open("rules", stalling.kept.ref.version, {})
    assert {path.name for path in (tmp_path / "cache").iterdir()} <= {".lock"}
    stalling.go_on.set()
    server.stop(None).wait(20)
