"""An engine's pipeline stages: which layers each has, as its workers tell one another when they
register their caches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import torch
import torch.distributed

from vllm_commext.errors import UnsupportedError
from vllm_commext.nixl.geometry.layout import CacheLayout
from vllm_commext.nixl.geometry.topology import Split


class Stage(msgspec.Struct, frozen=True):
    """The message of one stage's worker to those of the others.

    Attributes:
        splits: every way in which something is dealt out to its tensor-parallel ranks.
    """

    names: list[str]
    splits: list[Split]


_STAGE = msgspec.msgpack.Decoder(Stage)


def _alone(own: bytes) -> list[bytes]:
    return [own]


@dataclass(frozen=True)
class Pipeline:
    """A worker's place among the stages of its engine.

    Attributes:
        gather: all-gathers bytes over the same rank of each stage, in their order.
    """

    size: int = 1
    index: int = 0
    gather: Callable[[bytes], list[bytes]] = _alone

    def check_caches(self, num_caches: int) -> None:
        """Refuse a stage that has nothing to be read; raises UnsupportedError."""
        if not num_caches:
            raise UnsupportedError(
                f"expected layers with a KV cache in each of {self.size} pipeline stages, got none "
                f"in stage {self.index}: divide the layers otherwise (VLLM_PP_LAYER_PARTITION), or "
                "start with fewer stages"
            )

    def place(self, layout: CacheLayout) -> tuple[CacheLayout, frozenset[Split]]:
        """A stage's own layout with its place among all stages, and all of their splits."""
        if self.size == 1:
            return layout, layout.splits()
        own = Stage(sorted(layout.own_names()), sorted(layout.splits()))
        stages = [_STAGE.decode(one) for one in self.gather(msgspec.msgpack.encode(own))]
        names = [stage.names for stage in stages]
        splits = frozenset(split for stage in stages for split in stage.splits)
        return msgspec.structs.replace(layout, pp_rank=self.index, stages=names), splits


ONE_STAGE = Pipeline()  # the place of a worker whose engine has no others


def gather_bytes(own: bytes, group: torch.distributed.ProcessGroup) -> list[bytes]:
    """All-gather bytes over a group on CPUs, bounded by the group's time-out, without pickle."""
    counts = _gather(torch.tensor([len(own)], dtype=torch.int64, device="cpu"), group)
    sizes = [int(count) for count in counts]
    padded = torch.zeros(max(sizes), dtype=torch.uint8, device="cpu")
    padded[: len(own)] = torch.tensor(list(own), dtype=torch.uint8, device="cpu")
    said = _gather(padded, group)
    return [one[:size].numpy().tobytes() for one, size in zip(said, sizes, strict=True)]


def _gather(own: torch.Tensor, group: torch.distributed.ProcessGroup) -> Sequence[torch.Tensor]:
    found = [torch.empty_like(own) for _ in range(group.size())]
    group.allgather([found], [own]).wait()
    return found
