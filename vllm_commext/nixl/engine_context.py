"""State that the parts of one engine's scheduler side share."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from vllm_commext.nixl.config import ConnectorConfig
from vllm_commext.nixl.first_token import Sampler
from vllm_commext.nixl.geometry.layout import FULL, Group
from vllm_commext.nixl.geometry.plan import keeps_every_token
from vllm_commext.nixl.identity import Identity
from vllm_commext.nixl.metadata import StepMetadata
from vllm_commext.nixl.prefill.fence import new_key
from vllm_commext.nixl.recorder import TransferRecorder
from vllm_commext.nixl.reuse import NoReuse
from vllm_commext.nixl.stream.producer import Handover
from vllm_commext.nixl.stream.progress import Region, regions_of
from vllm_commext.nixl.wakeup import WakeupSocket
from vllm_commext.nixl.wire.client import ClientThread
from vllm_commext.nixl.wire.seal import read_secret


@dataclass(frozen=True)
class Streaming:
    """An engine's chunk streaming.

    Attributes:
        chunk_tokens: tokens that a step computes at most.
    """

    refusal: Handover | None = Handover.OFF
    groups: tuple[Group, ...] = ()
    max_tokens: int = 0
    chunk_tokens: int = 0

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        return regions_of(self.groups, self.max_tokens)

    @property
    def pieces_per_row(self) -> int:
        """Block-id pages per row; 0 if streaming is off."""
        return sum(one.num_pieces for one in self.regions)


def streaming_refusal(
    groups: Sequence[Group], *, is_on: bool, keeps_host_copy: bool, zeroes_blocks: bool
) -> Handover | None:
    if not is_on:
        return Handover.OFF
    if all(group.kind != FULL for group in groups):
        return Handover.LAYERS
    if keeps_host_copy:
        return Handover.HOST_COPY
    # Zeroing comes before the fence is replaced: only a read that follows the prompt's end, as that
    # of a state does, proves that none of the blocks was taken away before.
    return Handover.ZEROED if zeroes_blocks and keeps_every_token(groups) else None


@dataclass(frozen=True)
class Reusing:
    """An engine's reuse of blocks across engines.

    Attributes:
        configuration: gives the digest of the facts on which engines must agree.
    """

    refusal: NoReuse | None = NoReuse.OFF
    block_size: int = 0
    max_blocks: int = 0
    configuration: Callable[[], str] = field(default=str, compare=False)


def reuse_refusal(
    groups: Sequence[Group], *, is_on: bool, keeps_host_copy: bool, zeroes_blocks: bool
) -> NoReuse | None:
    if not is_on:
        return NoReuse.OFF
    if len(groups) != 1 or groups[0].kind != FULL:
        return NoReuse.LAYERS
    if keeps_host_copy:
        return NoReuse.HOST_COPY
    return NoReuse.ZEROED if zeroes_blocks else None


@dataclass
class EngineContext:
    """One engine; by default nothing is handed over, streamed or reused.

    Attributes:
        groups: the cache's groups, in the order of a request's lists of blocks.
        saves: peers read from a copy of the cache on the host, which must be kept up to date.
    """

    engine_id: str
    config: ConnectorConfig
    groups: Sequence[Group]
    tp_size: int
    port: int
    pp_size: int = 1
    produces: bool = False
    consumes: bool = False
    saves: bool = False
    sampler: Sampler = Sampler()
    streaming: Streaming = Streaming()
    reusing: Reusing = Reusing()
    identity: Identity = field(default_factory=Identity)
    incarnation: str = field(default_factory=lambda: uuid.uuid4().hex)
    fence_key: bytes = field(default_factory=new_key)
    step: StepMetadata = field(default_factory=StepMetadata)
    recorder: TransferRecorder = field(default_factory=TransferRecorder)

    @cached_property
    def secret(self) -> bytes | None:
        """Seals parameters and proves side channels; None without a secret file; raises
        ConfigError."""
        return read_secret(self.config.side_channel_secret_file)

    @cached_property
    def wakeup(self) -> WakeupSocket:
        return WakeupSocket(self.tp_size * self.pp_size)

    @cached_property
    def client(self) -> ClientThread:
        return ClientThread(self.secret)
