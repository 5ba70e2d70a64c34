"""A request on its way: its body, and the engines that have failed it so far."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from vllm_commext.proxy.engines.affinity import NO_PREFIX, prefix_of
from vllm_commext.proxy.engines.choice import Plan
from vllm_commext.proxy.engines.pool import Engine, EnginePool, SideChannelFields
from vllm_commext.proxy.http.endpoints import ENDPOINTS, most_tokens, price, session_of
from vllm_commext.proxy.outcome import Losses, ProxyError
from vllm_commext.proxy.session import resume, two_step
from vllm_commext.proxy.session.response import Opened
from vllm_commext.proxy.session.resume import Resume, Room
from vllm_commext.proxy.session.transcript import Transcript, without_prompt
from vllm_commext.proxy.session.upstream import Payload, Prefilled


class Attempts:
    """One request's body and attempts. local_reason: why one engine has to take both steps. only:
    the engine that has what the request goes on from."""

    def __init__(
        self,
        path: str,
        body: Any,
        headers: Mapping[str, str],
        decode: EnginePool,
        min_prompt_tokens: int,
    ) -> None:
        self._decode = decode
        self.path = path
        self.body = two_step.checked_body(body)
        self.num_failed = 0
        self.failed_prefill: list[Engine] = []
        self.failed_decode: list[Engine] = []
        self.num_resumed = 0
        self.cached_tokens: int | None = None
        self.opened: Opened | None = None
        self.refusal: Resume | None = None
        self.transcript: Transcript | None = None
        self.prefilled_by: Engine | None = None
        self.prefilled: Prefilled | None = None
        self.plan: Plan | None = None
        self.prefilled_at = 0.0
        self.prefix = NO_PREFIX
        self._headers = headers
        self.endpoint = ENDPOINTS[path]
        self.only: Engine | None = None
        self.tokens = price(self.body)
        self.most = most_tokens(self.endpoint, self.body)
        self.local_reason = two_step.local_prefill_reason(
            self.endpoint, self.body, min_prompt_tokens
        )
        self.losses = Losses()

    def remember(self, session: str | None) -> None:
        if self.endpoint.computes:
            self.prefix = prefix_of(self.body, self.endpoint, session_of(self.body, session))

    def payload(self, body: Mapping[str, Any], is_stream: bool | None = None) -> Payload:
        streams = bool(body.get("stream")) if is_stream is None else is_stream
        return Payload(
            *(self.path, self._headers, body, self.tokens, streams, self.prefix, self.losses),
            *(self.plan, self.most, self.only),
        )

    def has_reader(self, source: Engine) -> bool:
        urls = {one.url for one in self._decode.engines if one.usable}
        return urls != {source.url}

    def keep(self, refusal: Resume | None, room: Room, num_bytes: int) -> None:
        """Keep a stream's transcript if it can be resumed. *num_bytes*: of the request."""
        self.refusal = refusal or resume.refusal(self.path, self.body)
        if self.refusal is None:
            self.transcript = Transcript(room, self.body, num_bytes)
            self.refusal = self.transcript.refusal
        if self.refusal is not None:
            self.transcript = None

    def asking(self, payload: Payload, transcript: Transcript) -> Payload:
        edit = without_prompt if transcript.hides_ids else payload.edit
        return replace(payload, body=transcript.asking(payload.body), edit=edit)

    def begun(self) -> None:
        """The client is going to get the answer: forget the request, unless it may be resumed."""
        if self.transcript is None:
            self.body = {}

    def hand_over_to(self, opened: Opened) -> bool:
        """Give the prefill's KV cache to the engine that answers; False if there is none."""
        prefilled, self.prefilled = self.prefilled, None
        job = prefilled.job if prefilled is not None else None
        if opened.answer is not None and job is not None:
            opened.answer.source = job
        elif job is not None:
            job.read()
        return prefilled is not None

    def begin_again(self, failure: ProxyError) -> bool:
        """Prepare to go on at another engine after *failure*; False where the answer may not."""
        if self.num_resumed >= resume.MAX_RESUMES or self.transcript is None:
            return False
        self.num_resumed, self.num_failed, self.prefilled_by = self.num_resumed + 1, 0, None
        self.note(failure)
        if self.opened is not None:
            self.opened.close()
        return True

    def staying(self) -> Resume | None:
        """Reason to stay at an engine that drains, or None."""
        transcript = self.transcript
        reason = self.refusal if transcript is None else transcript.settle()
        if transcript is None or reason is not None:
            return reason
        num_left = self.most - transcript.num_tokens
        is_ending = transcript.has_finished or num_left < resume.MIN_LEFT
        return Resume.ENDING if is_ending else None

    def has_other(self) -> bool:
        engine = self.opened and self.opened.engine
        return any(one.usable and one is not engine for one in self._decode.engines)

    def places_at(self, engine: Engine) -> list[SideChannelFields]:
        """Side channels of *engine*, if every usable decode engine can read the answer there."""
        others = [one.capabilities for one in self._decode.engines if one.usable]
        can_read = engine.capabilities.caches and all(one.caches and one.offers for one in others)
        return list(engine.capabilities.offers) if can_read else []

    def close(self) -> None:
        if self.opened is not None:
            self.opened.close()
        if self.transcript is not None:
            self.transcript.close()

    def avoided(self) -> list[Engine]:
        """Decode engines to ask last: those that failed, and the prefill engine itself, which
        cannot read from itself while it changes its role."""
        source = self.prefilled_by.url if self.prefilled_by else None
        itself = [one for one in self._decode.engines if one.url == source]
        left = [self.opened.engine] if self.opened is not None else []
        return self.failed_decode + itself + left

    def note(self, error: ProxyError) -> None:
        """Leave the next attempt to others: a load fails because of either side."""
        self.failed_decode += [one for one in self._decode.engines if one.name == error.engine]
        if self.prefilled_by is not None:
            self.failed_prefill.append(self.prefilled_by)
            self.prefilled_by = None
