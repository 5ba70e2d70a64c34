"""The prefill engine's scheduler side: prompts that are computed for other engines, what of them is
handed over, and what workers must know of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from vllm.v1.request import RequestStatus

from vllm_commext.compat.kv_connector import drop_last_prompt_token, end_after_one_token
from vllm_commext.nixl.first_token import Sampler, offer
from vllm_commext.nixl.geometry.request_blocks import (
    blocks_to_offer,
    is_complete,
    keeps_every_token,
)
from vllm_commext.nixl.log import RateLimitedLog
from vllm_commext.nixl.metadata import StepMetadata
from vllm_commext.nixl.prefill.fence import FenceSlots
from vllm_commext.nixl.prefill.keys import PrefillKeys, prefill_key_of
from vllm_commext.nixl.prefill.prompt_tracker import PromptTracker
from vllm_commext.nixl.requests import Hold, RemoteRequest, Restart
from vllm_commext.nixl.stream.directory import StreamDirectory
from vllm_commext.nixl.stream.producer import StreamProducer
from vllm_commext.nixl.stream.streaming import Streaming
from vllm_commext.nixl.wire.params import TransferParams, write_params
from vllm_commext.nixl.wire.prompt import digests, prompt_of

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

    from vllm_commext.nixl.geometry.layout import Group

FINISHED = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


@dataclass(frozen=True)
class EngineAddress:
    """What parameters say of this engine; the names are those of ``RemoteRequest``."""

    engine_id: str
    incarnation: str
    host: str
    port: int
    tp_size: int
    pp_size: int


class Prefills:
    """Prompts of one engine that others read.

    Attributes:
        fences: the generation checks of the blocks that are kept.
        directory: what the side channel answers about prompts that are read meanwhile.
        held: when the leases of finished prefills began, in monotonic seconds, by request.

    Args:
        address: this engine's.
        groups: the cache's groups, in the order of a request's lists of blocks.
        lease_seconds: how long blocks are kept without a sign of a reader.
        secret: what parameters are sealed with, None where there is none.
        fence_key: what the fences' nonces follow from.
        saves: peers read from a copy of the cache on the host, which must be kept up to date.
        sampler: what first tokens follow from beside requests.
        streaming: what this engine does of chunk streaming.
    """

    def __init__(
        self,
        address: EngineAddress,
        groups: Sequence[Group],
        *,
        lease_seconds: float,
        secret: bytes | None,
        fence_key: bytes,
        saves: bool,
        sampler: Sampler,
        streaming: Streaming,
    ) -> None:
        self.fences = FenceSlots(fence_key)
        self.directory = StreamDirectory()
        self.held: dict[str, float] = {}
        self._address = address
        self._groups = groups
        self._leaves_last_token = not keeps_every_token(groups)
        self._lease_seconds = lease_seconds
        self._secret = secret
        self._sampler = sampler
        self._streaming = streaming
        self._producer = StreamProducer(self.fences, self.directory, streaming)
        self._cut: set[str] = set()
        self._prompts = PromptTracker() if saves else None
        self._keys = PrefillKeys()
        self._holds: list[Hold] = []
        self._releases: list[str] = []
        self._log = RateLimitedLog()

    def add(self, request: Request) -> str:
        """A prompt is to be computed for another engine: cut it where a state or a window is to be
        handed over.  Returns how its KV cache is handed over, a ``Handover``.

        The decode engine has to compute the last token for its logits.  A state cannot be taken
        back by a token, and after the last token a window no longer holds all that this one attends
        to: the prefill engine must stop one token early.
        """
        key = prefill_key_of(request.kv_transfer_params)
        if key:
            end_after_one_token(request)
            self._keys.add(key, request.request_id)
        if self._can_be_cut(request):
            drop_last_prompt_token(request)
            self._cut.add(request.request_id)
        if self._prompts is not None:
            self._prompts.add(request.request_id, request.num_prompt_tokens)
        ends_well = not self._leaves_last_token or request.request_id in self._cut
        return self._producer.add(request, ends_well=ends_well)

    def _can_be_cut(self, request: Request) -> bool:
        sampling = request.sampling_params
        wants_all_logprobs = sampling is not None and sampling.prompt_logprobs is not None
        return self._leaves_last_token and request.num_prompt_tokens > 1 and not wants_all_logprobs

    def release(self, keys: Sequence[str]) -> int:
        """A router says that nobody will read the prefills with these keys; how many there are."""
        found = [request_id for key in keys if (request_id := self._keys.release(key))]
        self._releases += [request_id for request_id in found if request_id in self.held]
        return len(found)

    def forget(self, request_id: str) -> bool:
        """A request has ended; whether its prompt was cut."""
        self._producer.note_finish(request_id)
        if self._prompts is not None:
            self._prompts.forget(request_id)
        was_cut = request_id in self._cut
        self._cut.discard(request_id)
        return was_cut

    def finish(
        self, request: Request, block_ids: tuple[list[int], ...], *, was_cut: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended that was computed for another engine: whether its blocks must be
        kept, and what that engine must know."""
        kept = self._offer(request, block_ids, was_cut=was_cut)
        if not kept[0]:
            self._keys.forget(request.request_id)
        row = self._producer.row_of(request.request_id)
        if row < 0 or kept[0]:
            return kept
        # Its blocks may be under reads: they are free when all workers have replaced the nonce.
        fence = self.fences.held_by(request.request_id)
        assert fence is not None  # it has come with the row
        self._holds.append(Hold(request.request_id, 0.0, *fence, row))
        return True, None

    def _offer(
        self, request: Request, block_ids: tuple[list[int], ...], *, was_cut: bool
    ) -> tuple[bool, dict[str, Any] | None]:
        """What a prefill that has ended hands over."""
        if request.status not in FINISHED or request.request_id in self._keys.unwanted:
            return False, None
        if self._leaves_last_token and not was_cut:
            return False, None
        # What was generated after the prompt is in no prompt that the offer could be compared with.
        num_tokens = min(request.num_computed_tokens, request.num_prompt_tokens)
        offered = blocks_to_offer(self._groups, block_ids, num_tokens)
        if not is_complete(self._groups, offered):
            return False, None
        return self._hold(request, offered, num_tokens)

    def _hold(
        self, request: Request, offered: tuple[tuple[int, ...], ...], num_tokens: int
    ) -> tuple[bool, dict[str, Any] | None]:
        """Keep a finished prefill's blocks for its readers."""
        request_id = request.request_id
        fence = self.fences.held_by(request_id) or self.fences.take(request_id)
        if fence is None:
            self._log.warning(
                "fences",
                f"request {request_id}: its blocks are not kept, as many prefills as this "
                "engine can keep wait for their readers; the decode engine computes it itself",
            )
            return False, None
        self.held[request_id] = time.monotonic()
        row = self._producer.row_of(request_id)
        rest = self._producer.rest_of(request_id, offered)
        self._holds.append(Hold(request_id, self._lease_seconds, *fence, row, rest))
        remote = RemoteRequest(
            engine_id=self._address.engine_id,
            incarnation=self._address.incarnation,
            host=self._address.host,
            port=self._address.port,
            tp_size=self._address.tp_size,
            pp_size=self._address.pp_size,
            request_id=request_id,
            block_ids=offered,
            num_tokens=num_tokens,
            fence_slot=fence[0],
            fence_nonce=fence[1],
        )
        token, sampling = (-1, "")
        if num_tokens == request.num_prompt_tokens and not self._leaves_last_token:
            token, sampling = offer(self._sampler, request)
        if token >= 0:
            self._producer.tell_token(request_id, token, sampling)
        prompt, now = digests(prompt_of(request), num_tokens), int(1000 * time.time())
        transfer_params = TransferParams(remote, prompt, token, sampling, now)
        return True, write_params(
            transfer_params, self._secret, chunk_tokens=self._streaming.chunk_tokens
        )

    @property
    def has_news(self) -> bool:
        """Whether there is something that the workers have not been told."""
        return bool(self._holds or self._releases)

    def fill_step(self, taken: StepMetadata, scheduled: SchedulerOutput, *, produces: bool) -> None:
        """Add what the workers must know of this step."""
        holds, self._holds = self._holds, []
        if not self._streaming.refusal and produces:
            taken.chunks, taken.restarts = self._producer.take_step(scheduled)
            holds = [self._renewed(one, taken.restarts) for one in holds]
        taken.holds = holds
        taken.releases, self._releases = self._releases, []
        if self._prompts is not None:
            taken.saves = [
                blocks_to_offer(self._groups, block_ids, num_tokens)
                for num_tokens, block_ids in self._prompts.completed(scheduled)
            ]

    def _renewed(self, hold: Hold, restarts: Sequence[Restart]) -> Hold:
        """The same, of a request that was preempted and ended between two steps: its nonce has been
        renewed since."""
        if all(one.slot != hold.fence_slot for one in restarts):
            return hold
        _, nonce = self.fences.held_by(hold.request_id) or (-1, hold.fence_nonce)
        return replace(hold, fence_nonce=nonce)

    def release_all(self) -> None:
        """Nobody is to read what is kept."""
        for request_id in self.held:
            self._producer.withdraw(request_id)
        self._releases += self.held

    def note_sent(self, request_id: str) -> float | None:
        """A prefill is kept no more: how many seconds it was, None where it was kept only until its
        readers were told that it was aborted."""
        self.fences.give_back(request_id)
        self._producer.give_back(request_id)
        self._keys.forget(request_id)
        begun = self.held.pop(request_id, None)
        return None if begun is None else time.monotonic() - begun
