"""A version that other pools hold, read through the SDK.

Owns the order in which pools are asked and what counts as not having the bytes. Nothing that comes is believed here.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from treadle.client import Fabric
from treadle.client.engram.pool_types import OpenedModel
from treadle.contract import DataLoss, EngramModel, InvalidArgument, NotFound, TreadleError, Unavailable

log = logging.getLogger("engram_pool")
PEERS_MAX = 64
KEY_BYTES_MAX = 4096
CALL_SECONDS = 5.0  # to describe a version, or to bring one chunk of 4 MiB
DIGEST_BYTES = 32
Result = TypeVar("Result")


class PeerPools:
    """One version at several pools, asked when something of it is needed; who answered last is asked first."""

    def __init__(
        self, endpoints: Sequence[str], model: str, version: str, keys: Mapping[str, str], call: Callable[..., Fabric]
    ) -> None:
        """keys: by endpoint, what is shown there. call: makes the Fabric of an endpoint."""
        self._endpoints = list(dict.fromkeys(endpoints))
        if not 1 <= len(self._endpoints) <= PEERS_MAX:
            raise InvalidArgument(f"peers: 1 to {PEERS_MAX} endpoints, got {len(self._endpoints)}")
        self._fabrics = {
            endpoint: call(engram=endpoint, key=keys.get(endpoint), timeout_seconds=CALL_SECONDS) for endpoint in self._endpoints
        }
        self._name, self._version = model, version
        self._described: OpenedModel | None = None

    @property
    def model(self) -> EngramModel:
        """Its manifest, tables included. Raises NotFound or Unavailable, naming each endpoint's reason, if no pool has it."""
        return self._opened.resident.model

    @property
    def card_json(self) -> bytes:
        """The card of a grown memory, or empty."""
        return self._opened.card_json

    @property
    def _opened(self) -> OpenedModel:
        if self._described is None:
            self._described = self._first(lambda fabric: fabric.engram.describe(self._name, self._version or None))
            self._version = self._described.resident.version
        return self._described

    def describe(self, layer: int) -> tuple[list[bytes], bytes]:
        """(digests of the chunks, token map). Raises Unavailable, DataLoss."""
        digests, words = self._first(lambda fabric: fabric.engram.describe_table(self._name, layer, self._version))
        if len(digests) % DIGEST_BYTES:
            raise DataLoss(f"layer {layer}: {len(digests)} bytes are no digests")
        return [digests[at : at + DIGEST_BYTES] for at in range(0, len(digests), DIGEST_BYTES)], words

    def read(self, layer: int, first_byte: int, byte_count: int) -> Iterator[bytes]:
        """These bytes from one pool after the other. Raises Unavailable when there is no further one."""
        reasons = []
        for endpoint in list(self._endpoints):
            fabric = self._fabrics[endpoint]
            try:
                data = fabric.engram.read_table(self._name, layer, first_byte, byte_count, self._version)
            except TreadleError as error:  # it does not hold them, has left, or has them damaged
                reasons.append(f"{endpoint}: {error}")
                continue
            self._endpoints.remove(endpoint)
            self._endpoints.insert(0, endpoint)
            yield data
        if reasons:
            raise Unavailable(f"no peer has bytes {first_byte} to {first_byte + byte_count} of layer {layer}: {'; '.join(reasons)}")

    def fusion(self) -> bytes:
        """Its fusion weights, their digest compared by the SDK."""
        return self._first(lambda fabric: fabric.engram.read_fusion(self._name, self._version))

    def close(self) -> None:
        """Close the connections."""
        for fabric in self._fabrics.values():
            fabric.close()

    def _first(self, ask: Callable[[Fabric], Result]) -> Result:
        """The answer of the first pool that has one. Raises NotFound if all say so, else Unavailable with each one's reason."""
        reasons, errors = [], []
        for endpoint in self._endpoints:
            try:
                return ask(self._fabrics[endpoint])
            except TreadleError as error:
                reasons.append(f"{endpoint}: {error}")
                errors.append(error)
        text = "; ".join(reasons)
        raise NotFound(text) if all(isinstance(error, NotFound) for error in errors) else Unavailable(text)


def open_peer_version(
    endpoints: Sequence[str],
    model: str,
    version: str,
    *,
    keys: Mapping[str, str] | None = None,
    call: Callable[..., Fabric] = Fabric,
) -> PeerPools:
    """See OpenPeers. keys: by endpoint, the key that is shown there; callers name endpoints of their own, which must not learn it.

    call: makes the Fabric of an endpoint, with the files of its TLS.
    """
    return PeerPools(endpoints, model, version, keys or {}, call)


def read_key(path: Path | None) -> str | None:
    """The first line of a key file. Raises InvalidArgument if it cannot be read or is empty."""
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            key = file.read(KEY_BYTES_MAX).decode().split("\n", 1)[0].strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"peer_key_file: {path} cannot be read: {error}") from error
    if not key:
        raise InvalidArgument(f"peer_key_file: {path} holds no key in its first line")
    return key
