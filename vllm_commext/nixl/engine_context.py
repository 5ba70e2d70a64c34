"""What the parts of one engine's scheduler side have in common."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from vllm_commext.nixl.config import ConnectorConfig
from vllm_commext.nixl.features import Reusing, Streaming
from vllm_commext.nixl.first_token import Sampler
from vllm_commext.nixl.metadata import StepMetadata
from vllm_commext.nixl.metrics.recorder import TransferRecorder
from vllm_commext.nixl.prefill.fence import new_key
from vllm_commext.nixl.wakeup import WakeupSocket
from vllm_commext.nixl.wire.client import ClientThread
from vllm_commext.nixl.wire.seal import read_secret

if TYPE_CHECKING:
    from vllm_commext.nixl.geometry.layout import Group


@dataclass
class EngineContext:
    """One engine.

    Attributes:
        engine_id: its id.
        config: the connector's settings.
        groups: the cache's groups, in the order of a request's lists of blocks.
        tp_size: its tensor-parallel ranks.
        port: its side-channel port.
        pp_size: its pipeline stages.
        produces: its role lets it prefill for others.
        consumes: its role lets it decode for others.
        saves: peers read from a copy of the cache on the host, which must be kept up to date.
        sampler: what first tokens follow from beside requests; by default, none is handed over.
        streaming: what it does of chunk streaming; by default, nothing.
        reusing: what it does of reuse across engines; by default, nothing.
        incarnation: differs at every start of it.
        fence_key: what the fences' nonces follow from.
        step: what its workers are told with the next step, so far.
        recorder: where counts and timings of its scheduler side go.
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
    incarnation: str = field(default_factory=lambda: uuid.uuid4().hex)
    fence_key: bytes = field(default_factory=new_key)
    step: StepMetadata = field(default_factory=StepMetadata)
    recorder: TransferRecorder = field(default_factory=TransferRecorder)

    @cached_property
    def secret(self) -> bytes | None:
        """What parameters are sealed and side channels proven with, None where there is none.

        Raises:
            ConfigError: it cannot be read.
        """
        return read_secret(self.config.side_channel_secret_file)

    @cached_property
    def wakeup(self) -> WakeupSocket:
        return WakeupSocket(self.tp_size * self.pp_size)

    @cached_property
    def client(self) -> ClientThread:
        return ClientThread(self.secret)
