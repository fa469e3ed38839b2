"""Every error of the project in one tree. A class carries its consequence: wire code, retry hint, exit code.

    PreforkError
    ├── ConfigError              bad option, file or environment               exit 78 (EX_CONFIG)
    ├── ModelError               a model that cannot be read, checked or run   exit 65 (EX_DATAERR)
    ├── SegmentError             shared memory
    │   ├── SegmentFull          no room for the segment                       exit 75 (EX_TEMPFAIL)
    │   ├── SegmentCorrupt       header, bounds or checksum do not hold        exit 74 (EX_IOERR)
    │   └── SegmentMissing       it is gone, or was never published            exit 74
    ├── ProtocolError            bytes after which a connection cannot go on
    └── StatusError              what a request can end with: one class for each canonical code
        ├── InvalidArgument  NotFound  FailedPrecondition  OutOfRange  Unimplemented  Internal
        └── Cancelled  DeadlineExceeded  ResourceExhausted  Unavailable

Messages name the thing, what was expected and what was found. The codes are the gRPC canonical codes
(https://grpc.github.io/grpc/core/md_doc_statuscodes.html). This file imports nothing of ours; any process may use it.
"""

from __future__ import annotations

from enum import IntEnum


class Code(IntEnum):
    """Canonical status codes; the numbers are gRPC's and are what travels on the wire."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14


class PreforkError(Exception):
    """Root of the tree. `code` is the wire code, `retryable` whether the same call may succeed later, `exit_code`
    what a process ends with when it cannot go on."""

    code: Code = Code.UNKNOWN
    retryable: bool = False
    exit_code: int = 70  # EX_SOFTWARE, sysexits.h

    @property
    def message(self) -> str:
        return str(self.args[0]) if self.args else type(self).__name__


class ConfigError(PreforkError):
    code = Code.INVALID_ARGUMENT
    exit_code = 78


class ModelError(PreforkError):
    code = Code.FAILED_PRECONDITION
    exit_code = 65


class SegmentError(PreforkError):
    code = Code.INTERNAL
    exit_code = 74


class SegmentFull(SegmentError):
    code = Code.RESOURCE_EXHAUSTED
    exit_code = 75


class SegmentCorrupt(SegmentError):
    pass


class SegmentMissing(SegmentError):
    pass


class ProtocolError(PreforkError):
    """The byte stream itself is broken: the peer gets one error frame with request id 0, then the connection ends."""

    code = Code.INVALID_ARGUMENT


class StatusError(PreforkError):
    """The outcome of one request other than success; travels in an ERROR frame under the request's id.

    `retry_after_ms` is the server's advice when a retry can help (0: none given)."""

    retry_after_ms: int = 0

    def __init__(self, message: str, *, retry_after_ms: int = 0) -> None:
        super().__init__(message)
        self.retry_after_ms = retry_after_ms


class Unknown(StatusError):
    code = Code.UNKNOWN


class Cancelled(StatusError):
    code = Code.CANCELLED


class InvalidArgument(StatusError):
    code = Code.INVALID_ARGUMENT


class DeadlineExceeded(StatusError):
    code = Code.DEADLINE_EXCEEDED


class NotFound(StatusError):
    code = Code.NOT_FOUND


class ResourceExhausted(StatusError):
    code = Code.RESOURCE_EXHAUSTED
    retryable = True


class FailedPrecondition(StatusError):
    code = Code.FAILED_PRECONDITION


class OutOfRange(StatusError):
    code = Code.OUT_OF_RANGE


class Unimplemented(StatusError):
    code = Code.UNIMPLEMENTED


class Internal(StatusError):
    code = Code.INTERNAL


class Unavailable(StatusError):
    """`maybe_executed`: the request had been sent when its connection was lost, so it may have run all the same."""

    code = Code.UNAVAILABLE
    retryable = True
    maybe_executed: bool = False


STATUS: dict[Code, type[StatusError]] = {
    cls.code: cls
    for cls in (
        Unknown, Cancelled, InvalidArgument, DeadlineExceeded, NotFound, ResourceExhausted,
        FailedPrecondition, OutOfRange, Unimplemented, Internal, Unavailable,
    )
}  # fmt: skip


def from_wire(code: int, message: str, *, retryable: bool = False, retry_after_ms: int = 0) -> StatusError:
    """The typed error for what an ERROR frame said; an unknown code becomes `Unknown`, its number kept in the text."""
    try:
        cls = STATUS[Code(code)]
    except (ValueError, KeyError):
        cls, message = Unknown, f"{message} (status code {code})"
    error = cls(message, retry_after_ms=retry_after_ms)
    error.retryable = retryable
    return error
