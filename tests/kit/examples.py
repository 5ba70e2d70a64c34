"""How many examples a property test takes that are dear."""

import os

from hypothesis import settings

TIMES = 10 if os.environ.get("COMMEXT_TEST_LONG") else 1
"""How many more of them `make long` takes."""


def examples(few: int) -> settings:
    return settings(max_examples=few * TIMES)
