"""The commands of ``vllm-commext``."""

import argparse
import math
from collections.abc import Callable


def above_zero(kind: Callable[[str], float], what: str) -> Callable[[str], float]:
    """Parser of a finite option above 0 for argparse, which says that it expected *what*."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = 0
        if not 0 < value < math.inf:
            raise argparse.ArgumentTypeError(f"expected {what}, got {text!r}")
        return value

    return parse
