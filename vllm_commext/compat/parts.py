"""The parts of this package that depend on vLLM's own code.

``known_sources.json`` has for each part the names of vLLM's that it replaces, calls, reads or is
called by, and for each of them the digest of its source in the tested releases (`fits.digest`).
They are named finely, a method and not its class, so that other changes there do not count."""

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

KNOWN_SOURCES = Path(__file__).with_name("known_sources.json")
Known = Mapping[str, Mapping[str, Mapping[str, str]]]
"""Part to symbol to digest to the minor releases, with blanks between, whose definition has it."""
IN_USE = "in use"


@functools.cache
def known_sources() -> Known:
    return json.loads(KNOWN_SOURCES.read_text())


@dataclass(frozen=True)
class Part:
    """One part.

    Attributes:
        of: the capability of `plugin` that it belongs to.
        self_test: function of `self_tests`, which raises where the part does not work here.
            `IN_USE`: it needs the ranks of a group, and the part runs it when these are there.
            Empty: there is none.
    """

    name: str
    of: str
    self_test: str = ""

    @property
    def sources(self) -> Mapping[str, Mapping[str, str]]:
        """Digests by ``module:name`` or ``module:Class.name`` where vLLM defines it, or, for what
        methods set on instances, ``module:Class@name``; none where its own parts say it all."""
        return known_sources()[self.name]


PARTS: tuple[Part, ...] = (
    Part("nixl", "nixl", "hand_over"),
    Part("nixl states", "nixl", "states"),
    Part("nixl reuse", "nixl", "reuse"),
    Part("nixl first token", "nixl", "first_token"),
    Part("engine step", "nixl", "engine_step"),
    Part("pauses", "nixl", "pauses"),
    Part("shm_queue", "shm_queue", "queue"),
    Part("cpu_collectives", "cpu_collectives", IN_USE),
    Part("allreduce", "allreduce", IN_USE),
    Part("fused_norm", "allreduce", IN_USE),
    Part("reduce_rms", "reduce_rms"),
)
BY_NAME = {part.name: part for part in PARTS}
