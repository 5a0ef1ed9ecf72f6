"""What callers give, looked at before anything is sent: each error names the argument, the value and what is allowed. What
the values mean is not decided here, nor what only the cluster can know."""

import numbers
import operator
import os

from ._errors import invalid

# Of seconds: some thirty years. Clocks can not count much further.
_SECONDS_MAX = 1_000_000_000
_SHOWN_CHARS_MAX = 200


def shown(value):
    """A value as an error repeats it: its beginning where it is long."""
    try:
        said = repr(value)
    except Exception:  # A number of too many digits, or anything that can not describe itself.
        return f"a {type(value).__name__} that can not be shown"
    return said if len(said) <= _SHOWN_CHARS_MAX else f"{said[:_SHOWN_CHARS_MAX]}… ({len(said)} characters)"


def text(value, what, **details):
    """A string that can be written as UTF-8, as everything on the wire and in the log is."""
    if not isinstance(value, str):
        raise invalid(f"{what} is {shown(value)}; give a string", **details)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        message = f"{what} is {shown(value)}, and character {error.start} is half of a surrogate pair; give text that is Unicode"
        raise invalid(message, **details) from None
    return value


def optional_text(value, what, **details):
    """As `text`, or `None`."""
    return None if value is None else text(value, what, **details)


def names(values, what):
    """Several names: a single string is none of them."""
    try:
        each = None if isinstance(values, str) else iter(values)
    except TypeError:
        each = None
    if each is None:
        raise invalid(f"{what} is {shown(values)}; give a list of names")
    return tuple(text(name, f"{what}[{at}]") for at, name in enumerate(each))


def choice(value, what, choices):
    """One of a few words."""
    if not isinstance(value, str) or value not in choices:
        raise invalid(f"{what} is {shown(value)}; it must be one of {', '.join(choices)}")
    return value


def whole(value, what, least, most, **details):
    """A whole number of a range; of numpy's types too."""
    try:
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or not least <= number <= most:
        raise invalid(f"{what} is {shown(value)}; give a whole number from {least} to {most}", **details)
    return number


def _is_number(value):
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def seconds(value, what, *, zero=True):
    """A duration in seconds. Comparisons refuse what is not a number."""
    if not _is_number(value) or not 0 <= value <= _SECONDS_MAX or (value == 0 and not zero):
        least = "from 0" if zero else "above 0 and up"
        raise invalid(f"{what} is {shown(value)}; give seconds, a number {least} to {_SECONDS_MAX}")
    return float(value)


def ratio(value, what):
    """A share: a number above 0 and below 1."""
    if not _is_number(value) or not 0 < value < 1:
        raise invalid(f"{what} is {shown(value)}; it must be a number above 0 and below 1 (0.5 is half)")
    return float(value)


def path(value, what):
    """A path of the file system as text."""
    try:
        given = os.fsdecode(value)
        os.fsencode(given)
    except (TypeError, UnicodeError):
        raise invalid(f"{what} is {shown(value)}; give a path") from None
    if "\0" in given:
        raise invalid(f"{what} is {shown(value)}; a path holds no NUL")
    return given
