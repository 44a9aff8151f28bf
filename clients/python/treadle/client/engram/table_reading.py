"""Bytes of a table as a pool holds them: for pools that load from each other, not for engines.

Owns the assembly of streamed pieces and its limits. Comparing digests is for whoever knows the version.
"""

from __future__ import annotations

from treadle.client.endpoint import Endpoint
from treadle.contract import DataLoss, ResourceExhausted
from treadle.engram.v1 import engram_pool_pb2 as pb
from treadle.engram.v1 import engram_pool_pb2_grpc as pb_grpc

READ_BYTES_MAX = 64 << 20  # in one call
DESCRIPTION_BYTES_MAX = 256 << 20  # digests of a table of 32 TiB


def read_table(
    endpoint: Endpoint, stub: pb_grpc.EngramPoolServiceStub, request: pb.ReadTableRequest, timeout_seconds: float
) -> bytes:
    """The bytes of a request. Raises DataLoss if their number is another one, ResourceExhausted beyond READ_BYTES_MAX."""
    if request.byte_count > READ_BYTES_MAX:
        raise ResourceExhausted(f"byte_count: {request.byte_count}, the limit of one call is {READ_BYTES_MAX}")
    data = bytearray()
    for answer in endpoint.stream(stub.ReadTable, request, timeout_seconds):
        data += answer.data
        if len(data) > request.byte_count:
            break
    if len(data) != request.byte_count:
        raise DataLoss(f"{endpoint.address} sent {len(data)} bytes of a table, {request.byte_count} were asked for")
    return bytes(data)


def describe_table(
    endpoint: Endpoint, stub: pb_grpc.EngramPoolServiceStub, request: pb.ReadTableRequest, timeout_seconds: float
) -> tuple[bytes, bytes]:
    """(digests of its chunks, joined; token map, int32 little-endian). Raises ResourceExhausted beyond DESCRIPTION_BYTES_MAX."""
    digests, words = bytearray(), bytearray()
    for answer in endpoint.stream(stub.ReadTable, request, timeout_seconds):
        digests += answer.chunk_digests
        words += answer.token_map
        if len(digests) + len(words) > DESCRIPTION_BYTES_MAX:
            raise ResourceExhausted(f"{endpoint.address}: a description beyond {DESCRIPTION_BYTES_MAX} bytes")
    return bytes(digests), bytes(words)
