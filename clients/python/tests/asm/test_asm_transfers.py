"""The SDK publishes and gets: pieces that fit a message, and damage that leaves nothing behind."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import numpy as np
import pytest

from treadle.asm.v1 import asm_store_pb2 as pb
from treadle.client.asm import AsmStore, Progress, Ref, map_folder
from treadle.client.asm import store as store_module
from treadle.contract import AccessDenied, DataLoss, InvalidArgument, NotFound, ResourceExhausted, Unavailable
from treadle.contract.dictionary_file import PREFIX_KV_FILE, TENSORS_FILE, map_tensors, read_manifest
from treadle.kernels import crc32c

if TYPE_CHECKING:
    from tests.asm.conftest import Mend, ScriptedStore


def test_a_folder_goes_up_in_pieces_that_fit_a_message(asm: AsmStore, scripted: ScriptedStore) -> None:
    told: list[Progress] = []
    published = asm.publish(scripted.folder, promote=False, progress=told.append)
    begin, *pieces, end = scripted.published
    assert [info.name for info in begin.begin.files] == [TENSORS_FILE, PREFIX_KV_FILE]
    assert not begin.begin.promote
    assert end.WhichOneof("event") == "end"
    for info in begin.begin.files:
        of_file = [piece.piece for piece in pieces if piece.piece.name == info.name]
        data = b"".join(piece.data for piece in of_file)
        assert data == (scripted.folder / info.name).read_bytes()
        assert hashlib.sha256(data).hexdigest() == info.sha256
        assert all(piece.crc32c == crc32c(piece.data) for piece in of_file)
    assert max(message.ByteSize() for message in scripted.published) <= 1 << 20
    assert (told[-1].bytes_done, told[-1].step) == (told[-1].bytes_total, f"sending {PREFIX_KV_FILE}")
    assert published.stored.card == {"made": "here"}
    assert published.stored.ref == Ref("rules", read_manifest(scripted.folder).version)


def test_a_file_that_becomes_shorter_while_it_is_sent_is_data_loss_not_a_cancelled_call(
    asm: AsmStore, scripted: ScriptedStore
) -> None:
    def cut(progress: Progress) -> None:
        if progress.step.startswith("sending"):
            os.truncate(scripted.folder / PREFIX_KV_FILE, 100)

    with pytest.raises(DataLoss, match="became shorter"):
        asm.publish(scripted.folder, progress=cut)
    assert "end" not in [message.WhichOneof("event") for message in scripted.published]  # how many pieces came first is chance


@pytest.mark.parametrize(
    ("code", "details", "error"),
    [
        (grpc.StatusCode.RESOURCE_EXHAUSTED, (), ResourceExhausted),
        (grpc.StatusCode.INVALID_ARGUMENT, (), InvalidArgument),
        (grpc.StatusCode.DATA_LOSS, (), DataLoss),
        (grpc.StatusCode.UNAUTHENTICATED, (), AccessDenied),
    ],
)
def test_a_refused_publish_is_the_error_that_the_store_meant(
    code: grpc.StatusCode, details: tuple[tuple[str, str], ...], error: type[Exception], asm: AsmStore, scripted: ScriptedStore
) -> None:
    scripted.refusal = (code, details)
    with pytest.raises(error, match="said so"):
        asm.publish(scripted.folder)


def test_folders_that_are_not_whole_are_refused_before_a_byte_travels(
    asm: AsmStore, scripted: ScriptedStore, tmp_path: Path
) -> None:
    with pytest.raises(NotFound, match=r"treadle asm build"):
        asm.publish(tmp_path)
    (scripted.folder / "card.json").write_bytes(b" " * (256 * 1024 + 1))
    with pytest.raises(InvalidArgument, match=r"card\.json"):
        asm.publish(scripted.folder)
    (scripted.folder / "card.json").unlink()
    (scripted.folder / PREFIX_KV_FILE).unlink()
    with pytest.raises(NotFound, match=PREFIX_KV_FILE):
        asm.publish(scripted.folder)
    os.truncate(scripted.folder / TENSORS_FILE, 200)
    with pytest.raises(DataLoss, match=TENSORS_FILE):
        asm.publish(scripted.folder)
    assert scripted.published == []


def test_a_version_comes_down_whole_and_is_mapped_there(asm: AsmStore, scripted: ScriptedStore, tmp_path: Path) -> None:
    stored = asm.get("rules", tmp_path / "there" / "rules")
    with map_folder(tmp_path / "there" / "rules", verify=True) as mapped:
        assert mapped.version == stored.version
        assert mapped.prefix_kv_path is not None
        assert mapped.prefix_kv_path.read_bytes() == (scripted.folder / PREFIX_KV_FILE).read_bytes()
        kept = map_tensors(scripted.folder / TENSORS_FILE, stored.dictionary)
        assert all(np.array_equal(kept[name], tensor) for name, tensor in mapped.tensors.items())
    assert (tmp_path / "there" / "rules" / "card.json").read_bytes() == b'{"made": "here"}'
    with pytest.raises(InvalidArgument, match="new or empty"):
        asm.get("rules", tmp_path / "there" / "rules")


def test_a_transfer_has_one_alarm_however_many_messages_come(
    asm: AsmStore, scripted: ScriptedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alarms, start = list[threading.Thread](), threading.Thread.start

    def counted(thread: threading.Thread) -> None:
        if isinstance(thread, threading.Timer) or thread.name.startswith("treadle-"):
            alarms.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", counted)
    asm.get("rules", tmp_path / "there")
    assert len(alarms) == 1
    assert not alarms[0].is_alive()


def test_a_store_that_falls_silent_while_it_sends_is_not_waited_for(
    asm: AsmStore, scripted: ScriptedStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    going_on = threading.Event()

    def stalling(messages: list[pb.GetResponse]) -> Iterator[pb.GetResponse]:
        yield messages[0]
        going_on.wait(20)

    monkeypatch.setattr(store_module, "SILENCE_SECONDS_MAX", 0.2)
    monkeypatch.setattr(scripted, "mend", stalling)
    with pytest.raises(Unavailable, match=r"said nothing for 0\.2 s"):
        asm.get("rules", tmp_path / "there")
    going_on.set()
    assert {path.name for path in tmp_path.iterdir()} == {"kept"}


def flipped(messages: list[pb.GetResponse]) -> list[pb.GetResponse]:
    messages[2].piece.data = b"x" + messages[2].piece.data[1:]
    return messages


def forged(messages: list[pb.GetResponse]) -> list[pb.GetResponse]:
    """Wrong bytes under a right checksum of their own."""
    piece = flipped(messages)[2].piece
    piece.crc32c = crc32c(piece.data)
    return messages


def another_file(messages: list[pb.GetResponse]) -> list[pb.GetResponse]:
    messages[0].begin.files[0].name = "../../escaped"
    return messages


@pytest.mark.parametrize(
    ("mend", "words"),
    [
        (flipped, "checksum"),
        (forged, "sha256"),
        (another_file, "escaped"),
        (lambda messages: messages[:-1], "ended at byte"),
        (lambda messages: messages[1:], "out of order"),
        (lambda messages: [*messages, messages[-1]], "out of order"),
        (lambda messages: [messages[0], *messages[2:]], "out of order"),
        (lambda messages: [], "before it said what comes"),
    ],
)
def test_a_damaged_download_is_data_loss_and_leaves_nothing(
    mend: Mend, words: str, asm: AsmStore, scripted: ScriptedStore, tmp_path: Path
) -> None:
    scripted.mend = mend
    with pytest.raises(DataLoss, match=words):
        asm.get("rules", tmp_path / "there" / "rules")
    assert list((tmp_path / "there").iterdir()) == []
