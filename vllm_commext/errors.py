"""The exception tree: every error that this package raises on purpose is a `CommextError`.

Each one is also the built-in exception that fits, so a caller need not know this package to
handle it.
"""

from enum import StrEnum


class CommextError(Exception):
    """Root of the tree."""


class ConfigError(CommextError, ValueError):
    """A setting, option or request parameter is not one of those that are allowed."""


class UnsupportedError(CommextError, RuntimeError):
    """What was asked for cannot run here: vLLM's version, a missing library, the hardware."""


class UnprovenHereError(UnsupportedError):
    """`auto` leaves this alone: it is not proven on such a machine or with such a vLLM."""


class OtherPlatformError(UnprovenHereError):
    """It is for another kind of device than this vLLM is for."""


class UntestedError(UnsupportedError):
    """A part stays out of an untested vLLM: the user wants it so, or it does not fit."""


class ProtocolError(CommextError, RuntimeError):
    """Two processes that must agree do not, or a message is not what it should be."""


class CommextTimeoutError(CommextError, TimeoutError):
    """A wait reached its bound."""


class Reason(StrEnum):
    """A closed list of reasons: values of a metric's label, with their meanings for people."""

    meaning: str

    def __new__(cls, value: str, meaning: str) -> "Reason":
        member = str.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member
