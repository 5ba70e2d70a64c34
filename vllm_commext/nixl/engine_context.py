"""State that the parts of one engine's scheduler side share."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from vllm_commext.nixl.config import ConnectorConfig
from vllm_commext.nixl.first_token import Sampler
from vllm_commext.nixl.geometry.layout import Group
from vllm_commext.nixl.identity import Identity
from vllm_commext.nixl.metadata import StepMetadata
from vllm_commext.nixl.prefill.fence import new_key
from vllm_commext.nixl.recorder import TransferRecorder
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


@dataclass(frozen=True)
class Reusing:
    """An engine's reuse of blocks across engines.

    Attributes:
        refusal: why there is none, "" where it was not asked for; None where there is.
        configuration: gives the digest of the facts on which engines must agree.
    """

    refusal: str | None = ""
    block_size: int = 0
    max_blocks: int = 0
    configuration: Callable[[], str] = field(default=str, compare=False)


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
        """Seals parameters and side channels; None without a secret file; raises ConfigError."""
        return read_secret(self.config.side_channel_secret_file)

    @cached_property
    def wakeup(self) -> WakeupSocket:
        return WakeupSocket(self.tp_size * self.pp_size)

    @cached_property
    def client(self) -> ClientThread:
        return ClientThread(self.secret)
