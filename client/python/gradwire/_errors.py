"""Exceptions: one class per status code that callers tell apart."""

from __future__ import annotations


class GradwireError(Exception):
    """An operation failed. `code` is the name of the status code, for example "UNAVAILABLE"."""

    code = "UNKNOWN"

    def __init__(self, message: str, code: str | None = None):
        super().__init__(message)
        if code is not None:
            self.code = code


class Cancelled(GradwireError):
    code = "CANCELLED"


class InvalidArgument(GradwireError, ValueError):
    code = "INVALID_ARGUMENT"


class DeadlineExceeded(GradwireError, TimeoutError):
    code = "DEADLINE_EXCEEDED"


class NotFound(GradwireError):
    code = "NOT_FOUND"


class AlreadyExists(GradwireError):
    code = "ALREADY_EXISTS"


class ResourceExhausted(GradwireError):
    code = "RESOURCE_EXHAUSTED"


class FailedPrecondition(GradwireError):
    code = "FAILED_PRECONDITION"


class Aborted(GradwireError):
    code = "ABORTED"


class Unavailable(GradwireError, ConnectionError):
    code = "UNAVAILABLE"


class DataLoss(GradwireError):
    code = "DATA_LOSS"


_CLASSES = {1: Cancelled, 3: InvalidArgument, 4: DeadlineExceeded, 5: NotFound, 6: AlreadyExists,
            8: ResourceExhausted, 9: FailedPrecondition, 10: Aborted, 14: Unavailable, 15: DataLoss}
_OTHERS = {2: "UNKNOWN", 7: "PERMISSION_DENIED", 11: "OUT_OF_RANGE", 12: "UNIMPLEMENTED", 13: "INTERNAL",
           16: "UNAUTHENTICATED"}


def from_code(code: int, message: str) -> GradwireError:
    """The exception for a numeric status code."""
    cls = _CLASSES.get(code)
    if cls is not None:
        return cls(message)
    return GradwireError(message, _OTHERS.get(code, str(code)))
