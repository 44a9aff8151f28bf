"""The words of treadle as types: pure Python and numpy, without I/O, known to every part."""

from treadle.contract.deadline import Deadline
from treadle.contract.engram_model import EngramModel, Family, Fusion, Table
from treadle.contract.errors import (
    AccessDenied,
    DataLoss,
    DeadlineExceeded,
    FingerprintMismatch,
    InvalidArgument,
    NotFound,
    Overtaken,
    ProtocolMismatch,
    ResourceExhausted,
    RowOutOfRange,
    TreadleError,
    Unavailable,
)
from treadle.contract.fingerprint import Fingerprint
from treadle.contract.policy import Late, Transport, TransportChoice, WaitPolicy
from treadle.contract.row_layout import RowLayout, Scale
from treadle.contract.version import canonical_json, version_of
from treadle.contract.windows import Windows

PROTO_VERSION = "v1.0"  # additive changes raise the second number; an SDK and a service fit if the first is equal

__all__ = [
    "PROTO_VERSION", "AccessDenied", "DataLoss", "Deadline", "DeadlineExceeded", "EngramModel", "Family", "Fingerprint",
    "FingerprintMismatch", "Fusion", "InvalidArgument", "Late", "NotFound", "Overtaken", "ProtocolMismatch", "ResourceExhausted", "RowLayout",
    "RowOutOfRange", "Scale", "Table", "Transport", "TransportChoice", "TreadleError", "Unavailable", "WaitPolicy", "Windows", "canonical_json", "version_of",
]  # fmt: skip
