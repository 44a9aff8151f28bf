"""A worker follows a store of hundreds of versions: what it hears, how soon, and what it is told where the store is slow."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from inference_worker.adapters import asm_store
from inference_worker.adapters.asm_store import ListedDictionary, StoreConnection, StoreOfPrefixes
from inference_worker.adapters.source_watch import WATCH_SECONDS, SourceWatch
from treadle.asm.v1 import asm_store_pb2 as pb
from treadle.asm.v1 import asm_store_pb2_grpc as pb_grpc
from treadle.client.asm import AsmStore, DictionaryCache, MappedDictionary, ReadManifests
from treadle.client.asm.records import StoredDictionary
from treadle.client.endpoint import Endpoint
from treadle.contract import PROTO_VERSION
from treadle.contract.dictionary import Calibration, Dictionary, DictionaryModel, DictionarySettings, Prefix
from treadle.contract.dictionary_file import DTYPES, MANIFEST_FILE, TENSORS_FILE, tensor_info, write_folder
from treadle.contract.errors import DeadlineExceeded

pytest.importorskip("asm_store.server", reason="the package treadle-asm-store is not installed: pip install -e services/asm-store")
VERSIONS = 300
PATIENCE_SECONDS = 60.0  # for what takes seconds on a quiet machine
MODEL = DictionaryModel("1" * 64, "2" * 64, "3" * 64, 30, 9, 3, 64)  # layers as of a small model: a manifest of 40 KB


class Hears:
    """A Listener that keeps what it is told."""

    def __init__(self) -> None:
        self.versions: dict[str, bool] = {}  # name -> whether its version is the current one
        self.updates, self.lost_for = 0, list[str]()

    def update(self, resident: Sequence[ListedDictionary]) -> None:
        self.versions = {each.model.name: each.current for each in resident}
        self.updates += 1

    def lost(self, reason: str) -> None:
        self.lost_for.append(reason)


def until(holds: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE_SECONDS
    while not holds():
        assert time.monotonic() < end, f"still not: {what}"
        time.sleep(0.01)


def write_one(folder: Path) -> Dictionary:
    """A dictionary without samples for each of 30 layers: nobody looks up in it."""
    settings = DictionarySettings(entries=2, matched_keys=2)
    blank = Dictionary.__new__(Dictionary)
    for part, value in (("model", MODEL), ("layers", tuple(range(MODEL.layers))), ("settings", settings)):
        object.__setattr__(blank, part, value)
    shapes = dict(blank.tensor_shapes())
    tensors = {
        name: np.full(shape, -np.inf if name.endswith("log_z") else 0, DTYPES[dtype]) for name, (dtype, shape) in shapes.items()
    }
    infos = tuple((name, tensor_info(tensors[name], shapes[name][0])) for name in sorted(tensors))
    dictionary = Dictionary(
        "one", MODEL, tuple(range(MODEL.layers)), Prefix("4" * 64, 8, (8,)), Calibration("5" * 64, 1, 8), settings, infos
    )
    folder.mkdir()
    write_folder(folder, dictionary, tensors)
    return dictionary


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
    """The address of a store that keeps VERSIONS dictionaries, and the folder of one that it does not keep."""
    made, data = tmp_path_factory.mktemp("made") / "one", tmp_path_factory.mktemp("store")
    dictionary = write_one(made)
    manifest, nbytes = dictionary.to_json(), (made / TENSORS_FILE).stat().st_size
    sha256 = hashlib.sha256((made / TENSORS_FILE).read_bytes()).hexdigest()
    for number in range(VERSIONS):
        name = f"name-{number:03}"
        text = manifest.replace(b'"name":"one"', f'"name":"{name}"'.encode())
        version = hashlib.sha256(text).hexdigest()
        folder = data / name / version
        folder.mkdir(parents=True)
        os.link(made / TENSORS_FILE, folder / TENSORS_FILE)
        files = [{"name": TENSORS_FILE, "nbytes": nbytes, "sha256": sha256}]
        record = {"name": name, "version": version, "tenant": "default", "published_at_seconds": 1e9, "files": files}
        (folder / "record.json").write_text(json.dumps(record))
        (folder / MANIFEST_FILE).write_bytes(text)
    (made / MANIFEST_FILE).write_bytes(replace(dictionary, name="new").to_json())
    data.chmod(0o700)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [
        sys.executable,
        "-m",
        "asm_store",
        "--listen",
        "127.0.0.1:0",
        "--metrics-listen",
        "127.0.0.1:0",
        "--data-dir",
        str(data),
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as child:
        assert child.stdout is not None
        try:
            yield json.loads(child.stdout.readline())["listen"], made
        finally:
            child.kill()


def test_a_flip_in_a_store_of_hundreds_of_versions_is_heard(store: tuple[str, Path]) -> None:
    address, made = store
    endpoint, hears, manifests = Endpoint(address), Hears(), ReadManifests()
    with (
        AsmStore(endpoint) as asm,
        SourceWatch(lambda: StoreConnection(endpoint, None, manifests), hears, name="asm store", address=address),
    ):
        until(lambda: len(hears.versions) == VERSIONS, "all are heard")
        updates = hears.updates
        published = asm.publish(made).stored
        until(lambda: hears.versions.get("new") is True, "the new one is heard")
        assert (hears.updates, len(hears.versions), manifests.count) == (updates + 1, VERSIONS + 1, VERSIONS + 1)
        asm.delete(published.ref)
        until(lambda: "new" not in hears.versions, "it is heard that it has gone")
        assert len(hears.versions) == VERSIONS
        assert hears.lost_for == []
        with closing(StoreOfPrefixes(endpoint, None, manifests)) as prefixes:
            assert len(prefixes.resident()) == VERSIONS


def told(dictionary: Dictionary, *, current: bool = False) -> pb.Dictionary:
    ref = pb.DictionaryRef(name=dictionary.name, version=dictionary.version)
    return pb.Dictionary(ref=ref, manifest_json=dictionary.to_json(), current=current, file_bytes=1000)


class Slow(pb_grpc.AsmStoreServiceServicer):
    """A store whose lists are late while it is told so, and whose pointer moves when it is told so. It keeps one version first."""

    def __init__(self, dictionary: Dictionary) -> None:
        self.kept = [told(dictionary, current=True)]
        self.late, self.moved, self.watches = threading.Event(), threading.Event(), 0

    def Status(self, request: pb.StatusRequest, context: Any) -> pb.StatusResponse:  # noqa: N802
        return pb.StatusResponse(proto_version=PROTO_VERSION)

    def List(self, request: pb.ListRequest, context: Any) -> pb.ListResponse:  # noqa: N802
        if self.late.is_set():
            time.sleep(1.0)
        return pb.ListResponse(dictionaries=self.kept)

    def Watch(self, request: pb.WatchRequest, context: Any) -> Iterator[pb.WatchResponse]:  # noqa: N802
        self.watches += 1
        pointer = pb.Pointer(name=self.kept[0].ref.name, version=self.kept[0].ref.version, revision=1)
        yield pb.WatchResponse(pointers=[pointer], snapshot_complete=True)
        while context.is_active():
            if self.moved.wait(0.1):
                self.moved.clear()
                pointer.revision += 1
                yield pb.WatchResponse(pointers=[pointer])
            yield pb.WatchResponse()


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[tuple[Slow, Endpoint]]:
    servicer, server = Slow(write_one(tmp_path / "one")), grpc.server(ThreadPoolExecutor(8))  # type: ignore[abstract]  # nothing else is called
    pb_grpc.add_AsmStoreServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield servicer, Endpoint(f"127.0.0.1:{port}")
    server.stop(None).wait(20)


def test_a_list_that_is_late_is_told_and_asked_for_again(slow: tuple[Slow, Endpoint], monkeypatch: pytest.MonkeyPatch) -> None:
    store, endpoint = slow
    hears = Hears()
    with SourceWatch(lambda: StoreConnection(endpoint), hears, name="asm store", address=endpoint.address):
        until(lambda: hears.updates == 1, "it is heard")
        monkeypatch.setattr(asm_store, "ANSWER_SECONDS_MAX", 0.3)
        store.late.set()
        store.moved.set()
        until(lambda: bool(hears.lost_for), "the trouble is told")
        assert "does not list what it keeps in time" in hears.lost_for[0]
        monkeypatch.undo()
        store.late.clear()
        until(lambda: hears.updates == 2, "it is heard again")


class Clock:
    """Stands for the module `time`; it goes on as that does, and is put forward."""

    ahead = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead


def test_a_watch_is_renewed_after_its_time_and_all_is_listed_again(
    slow: tuple[Slow, Endpoint], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(asm_store, "LOOK_SECONDS", 0.02)
    monkeypatch.setattr(asm_store, "time", clock)
    store, endpoint = slow
    with closing(StoreConnection(endpoint)) as connection:
        heard = connection.watch(WATCH_SECONDS)
        assert len(next(heard)) == 1
        clock.ahead += WATCH_SECONDS
        with pytest.raises(DeadlineExceeded, match="is to be renewed"):
            next(heard)

    class HearsForLong(Hears):
        def update(self, resident: Sequence[ListedDictionary]) -> None:
            super().update(resident)
            clock.ahead += WATCH_SECONDS

    hears = HearsForLong()
    with SourceWatch(lambda: StoreConnection(endpoint), hears, name="asm store", address=endpoint.address):
        until(lambda: hears.updates >= 3, "it is listed again and again")
    assert (hears.lost_for, store.watches >= 4) == ([], True)


class Tidied(DictionaryCache):
    """A cache that knows how often it was asked to tidy up, and whether nothing was left to do the last time."""

    asked, tidy = 0, False

    def keep_listed(self, store: str, versions: Set[str]) -> bool:
        self.asked += 1
        self.tidy = super().keep_listed(store, versions)
        return self.tidy


def test_what_was_published_since_stays_in_the_cache_while_what_has_gone_is_in_use(
    slow: tuple[Slow, Endpoint], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asm_store, "LOOK_SECONDS", 0.02)
    store, endpoint = slow
    cache, one = Tidied(tmp_path / "cache", 1 << 30), StoredDictionary.of(store.kept[0]).dictionary
    gone, new = (replace(one, calibration=Calibration(digit * 64, 1, 8)) for digit in "67")

    def opened(dictionary: Dictionary) -> MappedDictionary:
        return cache.open(StoredDictionary.of(told(dictionary)), endpoint.address, lambda to: shutil.copytree(tmp_path / "one", to))

    with closing(StoreConnection(endpoint, cache)) as connection, opened(gone) as used:
        heard = connection.watch(WATCH_SECONDS)
        assert [each.version for each in next(heard)] == [one.version]
        until(lambda: cache.asked > 0, "it is to be tidied")
        store.kept.append(told(new))
        store.moved.set()
        assert [each.version for each in next(heard)] == [one.version, new.version]
        asked = cache.asked
        until(lambda: cache.asked > asked + 1, "what was heard is known")
        opened(new).close()
        assert not cache.tidy
        used.close()
        until(lambda: cache.tidy, "what has gone is removed")
    assert {path.name for path in (tmp_path / "cache").iterdir() if path.is_dir()} == {new.version}
