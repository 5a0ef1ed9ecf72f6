"""The errors of Ballast: one class for each code, all under `BallastError` (RFC, Concurrency, Consistency, and Error Handling)."""

import enum
import json


class WeightErrorCode(enum.IntEnum):
    """What went wrong, in one word. 1 to 10 are shared with other implementations."""

    INVALID_ARGUMENT = 1
    NOT_FOUND = 2
    CONFLICT = 3
    STALE_GENERATION = 4
    NOT_READY = 5
    BUSY = 6
    LEASE_EXPIRED = 7
    GENERATION_EXHAUSTED = 8
    DURABILITY_FAILED = 9
    POLICY_UNSATISFIABLE = 10
    UNAVAILABLE = 11
    UNAUTHORIZED = 12
    CHECKSUM_MISMATCH = 13
    CAPACITY_EXHAUSTED = 14


class BallastError(Exception):
    """Any error of Ballast. `code` and `number` say which, `message` what to do, `details` the facts by name."""

    code = ""

    def __init__(self, message, details=None):
        super().__init__(message)
        self.message = message
        self.details = {} if details is None else details

    @property
    def number(self):
        """The code's number on the wire."""
        return WeightErrorCode[self.code].value if self.code in WeightErrorCode.__members__ else 0

    @property
    def is_retryable(self):
        """Whether the same call may succeed later without any change."""
        return self.code in ("UNAVAILABLE", "BUSY", "NOT_READY")

    def __str__(self):
        return f"{self.code}: {self.message}" if self.code else self.message

    def __reduce__(self):
        return (type(self), (self.message, self.details))


class InvalidArgumentError(BallastError, ValueError):
    """What was given can never be accepted."""

    code = "INVALID_ARGUMENT"


class NotFoundError(BallastError, LookupError):
    """There is no such thing."""

    code = "NOT_FOUND"


class ConflictError(BallastError):
    """Something else already stands there."""

    code = "CONFLICT"


class StaleGenerationError(BallastError):
    """The metadata generation given, or the generation that a delta was made on, is not the current one: look again."""

    code = "STALE_GENERATION"


class NotReadyError(BallastError):
    """Not in a state that allows it, yet."""

    code = "NOT_READY"


class BusyError(BallastError):
    """In use; try again when it is free."""

    code = "BUSY"


class LeaseExpiredError(BallastError):
    """The lease ended before the work did: what was read does not count."""

    code = "LEASE_EXPIRED"


class GenerationExhaustedError(BallastError):
    """No further generation fits."""

    code = "GENERATION_EXHAUSTED"


class DurabilityFailedError(BallastError):
    """Could not be made durable."""

    code = "DURABILITY_FAILED"


class PolicyUnsatisfiableError(BallastError):
    """The policy does not allow it, or nothing could satisfy it."""

    code = "POLICY_UNSATISFIABLE"


class UnavailableError(BallastError, ConnectionError):
    """Nothing reachable that could answer; safe to retry."""

    code = "UNAVAILABLE"


class UnauthorizedError(BallastError, PermissionError):
    """The caller may not."""

    code = "UNAUTHORIZED"


class ChecksumMismatchError(BallastError):
    """Bytes are not what their checksum says."""

    code = "CHECKSUM_MISMATCH"


class CapacityExhaustedError(BallastError):
    """No room."""

    code = "CAPACITY_EXHAUSTED"


# OSError would take the place of our message and arguments.
for _class in (UnavailableError, UnauthorizedError):
    _class.__str__ = BallastError.__str__

ERRORS = {
    error.code: error
    for error in (
        InvalidArgumentError, NotFoundError, ConflictError, StaleGenerationError, NotReadyError, BusyError, LeaseExpiredError,
        GenerationExhaustedError, DurabilityFailedError, PolicyUnsatisfiableError, UnavailableError, UnauthorizedError,
        ChecksumMismatchError, CapacityExhaustedError,
    )
}


def make(code, number, message, details):
    """The exception for an error of the Rust side, whose details are JSON."""
    error = ERRORS.get(code)
    details = {} if details is None else json.loads(details)
    if error is not None:
        return error(message, details)
    unknown = BallastError(message, details)
    unknown.code = code
    return unknown


def invalid(message, **details):
    """INVALID_ARGUMENT with the facts behind it."""
    return InvalidArgumentError(message, details)
