"""Frames of HTTP/2 and of gRPC on top of it, as bytes (RFC 9113; gRPC over HTTP/2).

Owns the layouts that a client of streamed answers needs. Sends nothing and remembers nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Mapping

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
HEAD = struct.Struct(">HBBBI")  # length (upper 16 bits, lower 8), kind, flags, stream
HEAD_BYTES = HEAD.size
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED, WITH_PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
ENABLE_PUSH, STREAMS_MAX, INITIAL_WINDOW, FRAME_MAX = 2, 3, 4, 5  # settings
REFUSED, CANCEL = 0x7, 0x8  # errors
PING_BYTES = 8
NO_TABLE = b"\x20"  # of header fields that are remembered, whatever size the other side allows: begins a block (RFC 7541, 6.3)
FRAME_BYTES = 16384  # longest payload until somebody allows more; we never do
WINDOW_BYTES = 65535  # of every stream and connection until somebody says otherwise
ID_MASK = (1 << 31) - 1
LOWEST = {FRAME_MAX: FRAME_BYTES}  # of the values that a setting may have
HIGHEST = {FRAME_MAX: (1 << 24) - 1, INITIAL_WINDOW: ID_MASK}
TIMEOUT_MS_MAX = 99_999_999  # eight digits


def frame(kind: int, flags: int, stream: int, payload: bytes | memoryview = b"") -> bytes:
    """A whole frame."""
    size = len(payload)
    return HEAD.pack(size >> 8, size & 0xFF, kind, flags, stream) + payload


def number(value: int) -> bytes:
    """Four bytes, as windows and errors are written."""
    return value.to_bytes(4, "big")


def settings(values: Mapping[int, int]) -> bytes:
    """The payload of SETTINGS."""
    return b"".join(struct.pack(">HI", name, value) for name, value in values.items())


def read_settings(payload: bytes) -> Iterator[tuple[int, int]]:
    """Names and values; a length that is none of theirs raises struct.error."""
    return struct.iter_unpack(">HI", payload)


def read_increment(payload: bytes) -> int:
    """By how much a window grows. Raises struct.error for another length, ValueError for 0 (RFC 9113, 6.9)."""
    more: int = struct.unpack(">I", payload)[0] & ID_MASK
    if not more:
        raise ValueError("a window that grows by 0")
    return more


def checked_window(window: int) -> int:
    """The same. Raises ValueError for one that is larger than windows may be (RFC 9113, 6.9.1)."""
    if window > ID_MASK:
        raise ValueError(f"a window of {window} bytes")
    return window


def without_padding(flags: int, payload: bytes) -> bytes:
    """What a payload carries, without padding and the priority that nobody heeds. Raises ValueError for more padding than payload."""
    begin, end = 0, len(payload)
    if flags & PADDED:
        begin, end = 1, end - payload[0]
    if flags & WITH_PRIORITY:
        begin += 5
    if begin > end:
        raise ValueError("more padding than payload")
    return payload[begin:end]


def header_block(headers: Iterable[tuple[str, str]]) -> bytes:
    """Headers as HPACK literals that neither side remembers (RFC 7541, 6.2.2): no state that could go wrong, and 200 bytes more."""
    return b"".join(b"\x00" + _text(name) + _text(value) for name, value in headers)


def header_frames(stream: int, block: bytes) -> bytes:
    """A block of request headers; a body follows."""
    parts = [block[at : at + FRAME_BYTES] for at in range(0, len(block), FRAME_BYTES)]
    kinds = [HEADERS] + [CONTINUATION] * (len(parts) - 1)
    flags = [0] * (len(parts) - 1) + [END_HEADERS]
    return b"".join(frame(kind, flag, stream, part) for kind, flag, part in zip(kinds, flags, parts, strict=True))


def message(body: bytes) -> bytes:
    """A gRPC message, not compressed."""
    return b"\x00" + number(len(body)) + body


def timeout_text(seconds: float) -> str:
    """`grpc-timeout`: milliseconds, at least one."""
    return f"{min(max(round(seconds * 1000), 1), TIMEOUT_MS_MAX)}m"


def _text(text: str) -> bytes:
    """A string literal without Huffman's code; its length with a prefix of 7 bits."""
    raw = text.encode()
    size = len(raw)
    if size < 127:
        return bytes((size,)) + raw
    length, rest = bytearray((127,)), size - 127
    while rest >= 128:
        length.append(rest & 0x7F | 0x80)
        rest >>= 7
    length.append(rest)
    return bytes(length) + raw
