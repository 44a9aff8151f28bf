"""What the gateway refuses by itself; everything else it meets is an error of `treadle.contract`.

InvalidArgument
└── RequestRefused         a field of the request is wrong; names it            400
NotFound
├── ModelNotFound          no such model here                                   404
├── RequestNotFound        no request of that name is in progress               404
└── MemoryRefused          the worker cannot use the memory that was chosen     404, or 400 if not by the model's name
Unavailable
└── WorkerLost             what the worker runs must be asked again             503
    └── CallNotBegun       it says that it has not looked at the call           503
ResourceExhausted
└── RateLimited            a key has used what it may in this minute            429
TreadleError
├── MemoryDamaged          the memory that was chosen is there and cannot be read    502
├── PrefixDamaged          the prefix that was chosen is there and cannot be read    502
├── WorkerStalled          the worker sent nothing for too long             504
├── PageRefused            a web page called a gateway without keys             403
├── BodyTooLarge           more bytes than body_bytes_max                       413
├── HeadTooLarge           more header lines or bytes than the limits           431
├── BodyTooSlow            it did not arrive within body_seconds_max            408
├── RequestCancelled       its caller ended it before its answer began          499
└── ClientLeft             nobody is there to answer
"""

from __future__ import annotations

from treadle.contract.errors import InvalidArgument, NotFound, ResourceExhausted, TreadleError, Unavailable


class RequestRefused(InvalidArgument):
    """A request cannot be served as it is. `param` names the field, `code` is for programs; the message is for people."""

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ModelNotFound(NotFound):
    """The request names a model that is not served here."""


class MemoryRefused(NotFound):
    """The worker does not have the memory that a request chose, or it does not fit the model; the message is the worker's."""


class MemoryDamaged(TreadleError):
    """The memory that a request chose is there, and its bytes are not what they should be. `param` names what chose it."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PrefixDamaged(TreadleError):
    """The prefix that a request chose is there, and its bytes are not what they should be."""


class WorkerLost(Unavailable):
    """The worker did not answer, stops, or refuses the gateway as such: this is not about one request."""


class CallNotBegun(WorkerLost):
    """The worker says that it has not looked at the call, nor will: it may be made again, whatever it asks for (RFC 9113, 8.7)."""


class WorkerStalled(TreadleError):
    """The worker is there and sent nothing for longer than it may; what it was asked for is cancelled."""


class PageRefused(TreadleError):
    """A request came by way of a web page of another host, and there is no key to tell who sent it."""


class BodyTooLarge(TreadleError):
    """The body has more bytes than the gateway reads; `limit_bytes` says how many that is."""

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"the body may have up to {limit_bytes} bytes")
        self.limit_bytes = limit_bytes


class HeadTooLarge(TreadleError):
    """A request has more header lines, or more bytes in them, than the gateway takes."""


class RateLimited(ResourceExhausted):
    """The holder of a key asks for more than it may. `limit`: requests, tokens or calls."""

    def __init__(self, message: str, limit: str, retry_after_seconds: float) -> None:
        super().__init__(message, retry_after_seconds)
        self.limit = limit


class BodyTooSlow(TreadleError):
    """The body did not arrive in time."""


class ClientLeft(TreadleError):
    """The connection closed before the answer was complete; the generation stops."""


class RequestNotFound(NotFound):
    """The caller has no request of that name in progress."""


class RequestCancelled(TreadleError):
    """The caller ended the request by its name; what there is of an answer says so itself."""
