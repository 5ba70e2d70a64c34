"""What an engine's metrics page says that it can, and where its side channels are. Pure."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property

from prometheus_client.parser import text_string_to_metric_families

METRIC = "vllm:commext_nixl_info"
_LABELS = frozenset(("engine", "host", "port", "seal", "streams", "reuse", "releases"))


@dataclass(frozen=True)
class SideChannel:
    """Where an engine is asked for prompts and blocks, and what proves to other engines that it is
    there, "" where they share no secret."""

    host: str
    port: int
    seal: str


@dataclass(frozen=True)
class Rank:
    """One data-parallel rank of an engine.

    Attributes:
        number: the rank, as vLLM writes it.
        channel: its side channel.
        streams: its prompts are read, and it reads others', while they are computed.
        reuse: its blocks are on offer.
        releases: it knows prefills by keys, under which they are released.
    """

    number: str
    channel: SideChannel
    streams: bool = False
    reuse: bool = False
    releases: bool = False


@dataclass(frozen=True)
class Capabilities:
    """All ranks of an engine; is_known: it was asked."""

    ranks: tuple[Rank, ...] = ()
    is_known: bool = False

    @cached_property
    def streams(self) -> bool:
        """Whether each rank reads prompts while they are computed."""
        return bool(self.ranks) and all(rank.streams for rank in self.ranks)

    @cached_property
    def key_ranks(self) -> tuple[str, ...]:
        """The ranks at which prefills are known by keys."""
        return tuple(rank.number for rank in self.ranks if rank.releases)

    @cached_property
    def offers(self) -> tuple[Mapping[str, str | int], ...]:
        """The side channels that tell which blocks are on offer."""
        return tuple(asdict(rank.channel) for rank in self.ranks if rank.reuse)


UNKNOWN = Capabilities()


def read(page: str) -> Capabilities:
    """What a metrics page says; raises `ValueError` where it is none."""
    lines = [line for line in page.splitlines() if line.startswith(METRIC + "{")]
    ranks: list[Rank] = []
    for family in text_string_to_metric_families("".join(f"{line}\n" for line in lines)):
        for sample in family.samples:
            labels = sample.labels
            if missing := _LABELS - labels.keys():
                raise ValueError(f"expected {METRIC} with labels {sorted(missing)}, too")
            channel = SideChannel(labels["host"], int(labels["port"]), labels["seal"])
            flags = {name: labels[name] == "1" for name in ("streams", "reuse", "releases")}
            ranks.append(Rank(labels["engine"], channel, **flags))
    return Capabilities(tuple(ranks), is_known=True)
