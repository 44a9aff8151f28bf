"""Calls an asm-store from plain code: publish, list, get, open, promote, follow, pin, delete, extend, look up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from treadle.asm.v1 import asm_store_pb2 as pb
from treadle.asm.v1 import asm_store_pb2_grpc as pb_grpc
from treadle.client.asm.cache import FETCH_SECONDS_MAX, DictionaryCache
from treadle.client.asm.held import HeldVersion
from treadle.client.asm.manifests import ReadManifests
from treadle.client.asm.mapped import Elsewhere, Leaving, MappedDictionary, map_opened
from treadle.client.asm.pieces import AnswersInTime, Download, PublishMessages
from treadle.client.asm.records import (
    Deleted,
    FoundStates,
    Pointer,
    ProgressCallback,
    Published,
    Ref,
    StoredDictionary,
    StoreStatus,
)
from treadle.client.asm.watching import PointerWatch
from treadle.client.endpoint import Endpoint, check_protocol
from treadle.contract.deadline import Deadline
from treadle.contract.dictionary import DICTIONARY_BYTES_MAX, KeyMode
from treadle.contract.errors import InvalidArgument, NotFound, ResourceExhausted, TreadleError

LIST_SECONDS_MAX = 60.0  # of a whole list, where nothing else is said: thousands of manifests are read
TRANSFER_SECONDS_MAX = 6 * 3600.0  # a terabyte over a slow line; a transfer that hangs ends some day
EXTEND_SECONDS_MAX = 3600.0  # the store reads, merges and writes all entries
DELETE_SECONDS_MAX = 60.0  # it waits for its replicas
BRING_SECONDS_MAX = 600.0  # a store may have to copy the version from another replica before it answers
SILENCE_SECONDS_MAX = 30.0  # between two pieces of a version
OPEN_ATTEMPTS = 8  # of versions that leave while they are opened: each time another one is the current one
VERSIONS_MAX = 1 << 16  # in one list
QUERY_BYTES_MAX = 448 << 10  # of one Lookup message: its answer has to fit one too


class AsmStore:
    """A store, called from plain code. Owns its channel; `close()` or use as a context manager.

    Every call raises Unavailable if the store does not answer, and the errors listed at the service in asm_store.proto.
    """

    def __init__(self, endpoint: Endpoint, manifests: ReadManifests | None = None) -> None:
        """manifests: for who lists again and again; None: each list is read anew."""
        self._endpoint, self._channel, self._manifests = endpoint, endpoint.channel(), manifests
        self._stub = pb_grpc.AsmStoreServiceStub(self._channel)

    def publish(
        self, folder: Path, *, promote: bool = True, progress: ProgressCallback | None = None,
        timeout_seconds: float = TRANSFER_SECONDS_MAX,
    ) -> Published:  # fmt: skip
        """Bring a folder that `treadle asm build` wrote; once it returns, every checksum was compared.

        promote: make it what its name means at once; not of a further chunk. The same content twice is one version, with the card
            that came first.
        Raises NotFound and InvalidArgument naming the file, field or tensor, DataLoss, ResourceExhausted.
        """
        messages = PublishMessages(folder, promote, progress)
        if promote:
            messages.dictionary.require_whole()  # before its bytes travel
        try:
            answer = self._endpoint.call(self._stub.Publish, iter(messages), timeout_seconds)
        except TreadleError as error:
            raise messages.failure or error from error
        card_taken = messages.card_json in (b"", answer.dictionary.card_json)
        return Published(StoredDictionary.of(answer.dictionary), answer.existed, card_taken)

    def list(
        self, name: str = "", timeout_seconds: float | None = None, part_seconds: float | None = None
    ) -> tuple[StoredDictionary, ...]:
        """The versions that are kept, by name, the current one first, then the last published.

        name:            only of this one
        timeout_seconds: of the whole list; None: LIST_SECONDS_MAX
        part_seconds:    of each message that it comes in; None: what `timeout_seconds` says, else the endpoint's
        """
        part_seconds = part_seconds or timeout_seconds or self._endpoint.timeout_seconds
        parts = ListParts(name, timeout_seconds or LIST_SECONDS_MAX, part_seconds, self._manifests)
        while not parts.whole:
            parts.add(self._endpoint.call(self._stub.List, parts.request, parts.seconds_left))
        return parts.kept

    def find(self, ref: Ref | str) -> StoredDictionary:
        """The one version that `ref` means. Raises NotFound, listing what there is, InvalidArgument where several begin so."""
        ref = Ref.of(ref)
        kept = self.list(ref.name)
        found = [stored for stored in kept if stored.version.startswith(ref.version) and (ref.version or stored.current)]
        if len(found) == 1:
            return found[0]
        if found:
            raise InvalidArgument(f"{ref}: {len(found)} versions begin so; give more digits")
        there = ", ".join(stored.version[:12] for stored in kept)
        raise NotFound(f"{ref}: the store keeps no such version; of {ref.name} there is {there or 'none'}")

    def get(
        self, ref: Ref | str, folder: Path, *, progress: ProgressCallback | None = None, timeout_seconds: float = TRANSFER_SECONDS_MAX,
        bytes_max: int = DICTIONARY_BYTES_MAX,
    ) -> StoredDictionary:  # fmt: skip
        """Bring a version into `folder`, new or empty; `map_folder` opens it there. It comes whole, every digest compared, or not at all.

        bytes_max: of its files
        Raises NotFound, InvalidArgument for a folder that holds something, DataLoss naming the file or tensor, ResourceExhausted,
        Unavailable for a store that falls silent for SILENCE_SECONDS_MAX.
        """
        with Download(folder, progress, bytes_max) as download:
            for message in self._pieces(pb.GetRequest(ref=Ref.of(ref).message), timeout_seconds):
                download.add(message)
            return download.whole()

    def open(
        self, name: str, version: str | None = None, expected: Mapping[str, str] | None = None, *, verify: bool = False,
        timeout_seconds: float = BRING_SECONDS_MAX, cache: DictionaryCache | None = None,
    ) -> MappedDictionary:  # fmt: skip
        """Map a version of a store on this host: milliseconds, as nothing is read; longer where the store has to copy it first.

        version:  None: the one that the pointer means
        expected: fingerprint fields that must be so, e.g. `dict(model.fingerprint)` of a DictionaryModel
        verify:   read and compare every digest
        cache:    where the store's files cannot be opened here, it is brought there first, and mapped there
        Raises NotFound, FingerprintMismatch naming the field, DataLoss, and with a cache what `DictionaryCache.open` raises.
        """
        request = pb.OpenRequest(ref=Ref(name, version or "").message, expected_fingerprint=dict(expected or {}))

        def ask() -> pb.OpenResponse:
            return self._endpoint.call(self._stub.Open, request, timeout_seconds)

        try:
            return opened_in_attempts(ask, verify)
        except (Elsewhere, Leaving):
            if cache is None:
                raise  # leaving, again and again: it lies at that path of another host, where folders have the same names
        stored = StoredDictionary.of(ask().dictionary)

        def bring(folder: Path) -> None:
            self.get(stored.ref, folder, timeout_seconds=FETCH_SECONDS_MAX, bytes_max=stored.file_bytes)

        return cache.open(stored, self._endpoint.address, bring)

    def promote(self, ref: Ref | str, expected_version: str | None = None, timeout_seconds: float = BRING_SECONDS_MAX) -> Pointer:
        """Make a version what its name means: new requests get it, those in progress keep theirs.

        expected_version: what the name must mean now, "": nothing yet; None: whatever it means
        Raises Overtaken, naming both, if it means another one.
        """
        request = pb.PromoteRequest(ref=Ref.of(ref).message, expected_version=expected_version)
        return Pointer.of(self._endpoint.call(self._stub.Promote, request, timeout_seconds).pointer)

    def watch(self, names: Sequence[str] = ()) -> PointerWatch:
        """Follow what names mean; empty: all. See PointerWatch."""
        return PointerWatch(self._endpoint, self._stub.Watch, names)

    def pin(self, ref: Ref | str, ttl_seconds: float, timeout_seconds: float = BRING_SECONDS_MAX) -> float:
        """Keep a version from eviction for so long; until when, seconds since the epoch. A later end counts, an earlier one does not."""
        request = pb.PinRequest(ref=Ref.of(ref).message, ttl_seconds=ttl_seconds)
        return self._endpoint.call(self._stub.Pin, request, timeout_seconds).pinned_until_seconds

    def unpin(self, ref: Ref | str) -> None:
        """End a pin."""
        self._endpoint.call(self._stub.Unpin, pb.UnpinRequest(ref=Ref.of(ref).message))

    def hold(self, ref: Ref | str, timeout_seconds: float = BRING_SECONDS_MAX) -> HeldVersion:
        """Keep a version from being freed while the answer is open, as a mapping does: for those who look up by RPC."""
        return HeldVersion(self._endpoint, self._stub.Hold, Ref.of(ref), timeout_seconds)

    def delete(self, ref: Ref | str, timeout_seconds: float = DELETE_SECONDS_MAX) -> Deleted:
        """Delete a version, every copy; without a version all of the name, and its pointer. What is gone, file by file."""
        return Deleted.of(self._endpoint.call(self._stub.Delete, pb.DeleteRequest(ref=Ref.of(ref).message), timeout_seconds))

    def extend(
        self, ref: Ref | str, chunk: Ref | str, *, promote: bool = False, timeout_seconds: float = EXTEND_SECONDS_MAX
    ) -> StoredDictionary:
        """Merge the dictionary of a further chunk, published before and built for this version, into it: a new version.

        promote: make it what the name means, if that still is the one that was extended
        Raises FingerprintMismatch naming what differs between the two, Overtaken.
        """
        request = pb.ExtendRequest(ref=Ref.of(ref).message, chunk=Ref.of(chunk).message, promote=promote)
        return StoredDictionary.of(self._endpoint.call(self._stub.Extend, request, timeout_seconds).dictionary)

    def lookup(
        self, stored: StoredDictionary, layer: int, queries: NDArray[np.float32], rotated: NDArray[np.float32] | None = None
    ) -> FoundStates:
        """States of queries, for those who cannot map: a round trip for each layer of each token.

        stored:  of `list` or `find`: its version is asked, whatever the pointer means by now
        queries: f32 [T, heads, head_dim], before or after RoPE as its key mode wants them
        rotated: the same after RoPE: what a dictionary with matched keys (`stored.dictionary.settings`) needs beside queries before it
        """
        parts = [
            FoundStates.of(self._endpoint.call(self._stub.Lookup, request), tokens, stored.dictionary)
            for tokens, request in lookup_requests(stored, layer, queries, rotated)
        ]
        return FoundStates.joined(parts)

    def status(self, timeout_seconds: float | None = None) -> StoreStatus:
        """How the store is. Raises ProtocolMismatch if SDK and store do not fit."""
        status = StoreStatus.of(self._endpoint.call(self._stub.Status, pb.StatusRequest(), timeout_seconds))
        check_protocol(f"asm-store {self._endpoint.address}", status.proto_version)
        return status

    def close(self) -> None:
        """Close the channel. Mapped dictionaries go on working."""
        self._channel.close()

    def __enter__(self) -> AsmStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _pieces(self, request: pb.GetRequest, timeout_seconds: float) -> Iterator[pb.GetResponse]:
        """What Get streams. The first message may wait for a copy from another replica, the others come at once."""
        call = self._stub.Get(request, timeout=timeout_seconds, metadata=self._endpoint.metadata)
        with AnswersInTime(call, self._endpoint.answers_of(call)) as answers:
            message = answers.next(BRING_SECONDS_MAX)
            while message is not None:
                yield message
                message = answers.next(SILENCE_SECONDS_MAX)


def opened_in_attempts(ask: Callable[[], pb.OpenResponse], verify: bool) -> MappedDictionary:
    """Ask and map, again where the version left in between. Raises NotFound, DataLoss, and what `ask` raises."""
    for _ in range(OPEN_ATTEMPTS - 1):
        try:
            return map_opened(ask(), verify=verify)
        except Leaving:
            continue  # what a name means has moved on; a version that was asked for by itself is NotFound now
    return map_opened(ask(), verify=verify)


class ListParts:
    """A list as it comes, part by part, within a time for each and one for all. whole: nothing more comes."""

    def __init__(self, name: str, seconds_max: float, part_seconds: float, manifests: ReadManifests | None = None) -> None:
        self._name, self._deadline, self._part_seconds, self._manifests = name, Deadline.after(seconds_max), part_seconds, manifests
        self._came: list[StoredDictionary] = []
        self.whole = False

    @property
    def kept(self) -> tuple[StoredDictionary, ...]:
        """So far, by name, the current one first, then the last published."""
        return tuple(sorted(self._came, key=lambda one: (one.name, not one.current, -one.published_at_seconds, one.version)))

    @property
    def request(self) -> pb.ListRequest:
        """Asks for the next part. Raises ResourceExhausted beyond VERSIONS_MAX, DeadlineExceeded."""
        if len(self._came) > VERSIONS_MAX:
            raise ResourceExhausted(f"the store lists more than {VERSIONS_MAX} versions; list one name")
        self._deadline.check(before="all versions were listed")
        return pb.ListRequest(name=self._name, after=self._came[-1].ref.message if self._came else None)

    @property
    def seconds_left(self) -> float:
        """For the next part."""
        return max(min(self._deadline.remaining_seconds(), self._part_seconds), 0.001)

    def add(self, answer: pb.ListResponse) -> None:
        """A part has come."""
        self._came += [StoredDictionary.of(message, self._manifests) for message in answer.dictionaries]
        self.whole = not answer.more or not answer.dictionaries


def lookup_requests(
    stored: StoredDictionary, layer: int, queries: NDArray[np.float32], rotated: NDArray[np.float32] | None = None
) -> Iterable[tuple[int, pb.LookupRequest]]:
    """(tokens, message), each within QUERY_BYTES_MAX. Raises InvalidArgument for another shape or dtype, or no query."""
    settings = stored.dictionary.settings
    given = [_checked("queries", queries, stored)]
    if settings.matched_keys and settings.key is not KeyMode.OWN_POSITION:
        if rotated is None or rotated.shape != queries.shape:
            raise InvalidArgument(f"rotated: {stored.ref} has matched keys, so that it needs the queries after RoPE too")
        given.append(_checked("rotated", rotated, stored))
    step = max(1, QUERY_BYTES_MAX // (len(given) * queries[:1].nbytes))
    for first in range(0, len(queries), step):
        data = [np.ascontiguousarray(part[first : first + step], "<f4").tobytes() for part in given]
        message = pb.LookupRequest(ref=stored.ref.message, layer=layer, queries=data[0], rotated=data[1] if len(data) > 1 else b"")
        yield len(queries[first : first + step]), message


def _checked(name: str, queries: NDArray[np.float32], stored: StoredDictionary) -> NDArray[np.float32]:
    model = stored.dictionary.model
    if queries.dtype != np.float32 or queries.ndim != 3 or queries.shape[1:] != (model.heads, model.head_dim) or not len(queries):
        raise InvalidArgument(
            f"{name}: f32 [T >= 1, {model.heads}, {model.head_dim}] expected, got {queries.dtype} {list(queries.shape)}"
        )
    if not np.isfinite(queries).all():
        raise InvalidArgument(f"{name}: NaN or inf")
    return queries
