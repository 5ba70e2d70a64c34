"""Closed lists of reasons: values of metrics' labels, each with what it means."""

from enum import StrEnum
from typing import Self


class Reason(StrEnum):
    """A label's value; ``meaning`` is for people."""

    meaning: str

    def __new__(cls, value: str, meaning: str) -> Self:
        member = str.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member
