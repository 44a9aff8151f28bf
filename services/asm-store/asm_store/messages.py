"""Messages of asm_store.proto from what the domain knows, and back. No logic but the limits of a message."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Sequence

from asm_store.domain.ports import Announced, DeletedFile, End, Piece
from asm_store.domain.store import Listed
from asm_store.domain.versions import FileInfo, Kept, Pointer
from treadle.asm.v1 import asm_store_pb2 as pb
from treadle.contract.errors import InvalidArgument

MESSAGE_BYTES_MAX = 1 << 20


def dictionary_message(listed: Listed) -> pb.Dictionary:
    """A version; of one that only other replicas keep, what they tell of it."""
    ref = pb.DictionaryRef(name=listed.key[0], version=listed.key[1])
    if listed.kept is None:
        assert listed.remote is not None
        record = listed.remote.record
        return pb.Dictionary(
            ref=ref, current=listed.current, manifest_json=listed.remote.manifest_json, published_at_seconds=record.published_at_seconds,
            file_bytes=sum(file.nbytes for file in record.files) + len(listed.remote.manifest_json), tenant=record.tenant,
        )  # fmt: skip
    kept, stored = listed.kept, listed.kept.stored
    return pb.Dictionary(
        ref=ref, current=listed.current, manifest_json=stored.manifest_json, file_bytes=stored.file_bytes,
        published_at_seconds=stored.record.published_at_seconds, used_at_seconds=kept.used_at_seconds,
        pinned_until_seconds=kept.pin.until_seconds, readers=listed.readers, tenant=stored.record.tenant, card_json=stored.card_json,
    )  # fmt: skip


def list_message(listing: Sequence[Listed]) -> pb.ListResponse:
    """All versions, in their order, where they fit a message. Else as many as do, at least one, by name and version.

    These do not change: whatever comes, goes, or becomes the current one between two messages, what stays is told once.
    """
    whole = _fitting(listing)
    if len(whole) == len(listing):
        return pb.ListResponse(dictionaries=whole)
    return pb.ListResponse(dictionaries=_fitting(sorted(listing, key=lambda listed: listed.key)), more=True)


def _fitting(listing: Sequence[Listed]) -> list[pb.Dictionary]:
    messages, nbytes = list[pb.Dictionary](), 0
    for listed in listing:
        message = dictionary_message(listed)
        nbytes += message.ByteSize() + 8
        if nbytes > MESSAGE_BYTES_MAX and messages:
            break
        messages.append(message)
    return messages


def watch_messages(pointers: Sequence[Pointer], *, complete: bool) -> list[pb.WatchResponse]:
    """Pointers in as many messages as they need; none: a sign of life, or the end of a first list that is empty."""
    messages, nbytes = [pb.WatchResponse()], 0
    for pointer in pointers:
        message = pointer_message(pointer)
        nbytes += message.ByteSize() + 8
        if nbytes > MESSAGE_BYTES_MAX:
            messages.append(pb.WatchResponse())
            nbytes = message.ByteSize() + 8
        messages[-1].pointers.append(message)
    messages[-1].snapshot_complete = complete
    return messages


def pointer_message(pointer: Pointer) -> pb.Pointer:
    """What a name means."""
    return pb.Pointer(name=pointer.name, version=pointer.version, revision=pointer.revision)


def open_message(listed: Listed, kept: Kept) -> pb.OpenResponse:
    """Where a version lies."""
    stored = kept.stored
    prefix_kv = stored.prefix_kv_path
    return pb.OpenResponse(
        dictionary=dictionary_message(listed), path=str(stored.tensors_path), prefix_kv_path="" if prefix_kv is None else str(prefix_kv),
        tensor_offsets=stored.offsets, lock_path=str(stored.lock_path), fingerprint=stored.fingerprint.as_dict(),
    )  # fmt: skip


def deleted_message(file: DeletedFile) -> pb.DeletedFile:
    """Proof of a file that is gone."""
    ref = pb.DictionaryRef(name=file.name, version=file.version)
    return pb.DeletedFile(ref=ref, path=file.path, bytes=file.nbytes, replica=file.replica, freed=file.freed)


def file_messages(files: Sequence[FileInfo]) -> list[pb.FileInfo]:
    """What files are."""
    return [pb.FileInfo(name=file.name, bytes=file.nbytes, sha256=file.sha256) for file in files]


def file_infos(files: Sequence[pb.FileInfo]) -> tuple[FileInfo, ...]:
    """What files are, as a caller says. Raises InvalidArgument naming the file."""
    return tuple(FileInfo(file.name, file.bytes, file.sha256) for file in files)


def piece_message(piece: Piece) -> pb.FilePiece:
    """Bytes of a file."""
    return pb.FilePiece(name=piece.name, offset_bytes=piece.offset_bytes, data=piece.data, crc32c=piece.crc32c)


def piece_of(sent: pb.FilePiece) -> Piece:
    """Bytes of a file, as they came."""
    return Piece(sent.name, sent.offset_bytes, sent.data, sent.crc32c)


async def publish_events(requests: AsyncIterator[pb.PublishRequest], tenant: str) -> AsyncGenerator[Announced | Piece | End, None]:
    """What a caller sends, one by one. Raises InvalidArgument for a message that says nothing."""
    async for request in requests:
        event = request.WhichOneof("event")
        if event == "begin":
            begin = request.begin
            yield Announced(begin.manifest_json, file_infos(begin.files), begin.card_json, tenant, begin.promote)
        elif event == "piece":
            yield piece_of(request.piece)
        elif event == "end":
            yield End()
        else:
            raise InvalidArgument("publish: a message holds begin, piece or end")
