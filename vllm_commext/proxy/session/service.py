"""State that all requests share, and a client's request."""

import asyncio
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from vllm_commext.proxy.engines.affinity import NO_PREFIX, SESSION_HEADER, Latest, prefix_of
from vllm_commext.proxy.engines.choice import Chooser
from vllm_commext.proxy.engines.pool import Engine
from vllm_commext.proxy.http.body import compacted, encode, in_steps
from vllm_commext.proxy.http.endpoints import (
    ENDPOINTS,
    Endpoint,
    most_tokens,
    num_samples,
    prompt_tokens,
    session_of,
)
from vllm_commext.proxy.outcome import no_answer
from vllm_commext.proxy.policy.placement import Planner
from vllm_commext.proxy.session.reasons import LocalPrefill, Resume
from vllm_commext.proxy.session.transcript import Room, Transcript
from vllm_commext.proxy.session.two_step import checked_body, local_prefill_reason
from vllm_commext.proxy.session.upstream import Upstream

MAX_MOVES = 3
"""Streams that move at a time: the more read at once, the longer each pauses."""
SMALL_BYTES = 4 << 10  # of a body that is kept as it came


class Service:
    """Engines' access, placement and room, shared by all requests."""

    def __init__(self, upstream: Upstream, planner: Planner) -> None:
        self.upstream, self.planner = upstream, planner
        self.config, self.metrics = upstream.config, upstream.metrics
        pools = {pool.role: pool for pool in (upstream.prefill_pool, upstream.decode_pool)}
        self.chooser = Chooser(self.config.placement, planner, pools)
        self.keepers = Latest[str, Engine]()
        self.room = Room(self.config.resume_bytes)
        self.turns, self.bulk = asyncio.Semaphore(MAX_MOVES), asyncio.Lock()

    def keeper(self, body: Mapping[str, Any]) -> Engine | None:
        """Engine that keeps the answer which *body* goes on from; None: any. Raises
        `ProxyError`."""
        name, pool = body.get("previous_response_id"), self.upstream.decode_pool
        engine = self.keepers.get(name) if isinstance(name, str) else None
        if name is None or (engine is None and len(pool.engines) == 1):
            return None
        if engine is None:
            raise no_answer(name, "this proxy knows no engine that has given it")
        if not engine.usable or engine not in pool.members:
            raise no_answer(name, f"{engine.name}, which has given it, is gone or drains")
        return engine


_SEVERAL = (LocalPrefill.SEVERAL_SAMPLES, LocalPrefill.BEAM_SEARCH, LocalPrefill.NOT_ONE_PROMPT)


def refusal(
    endpoint: Endpoint, body: Mapping[str, Any], local_reason: LocalPrefill | None
) -> Resume | None:
    """Reason why a stream is never resumed, or None. *local_reason*: against two steps."""
    if not endpoint.is_split or body.get("stream") is not True:
        return Resume.ENDPOINT
    if local_reason in _SEVERAL:
        return Resume.SAMPLES
    if body.get("echo"):
        return Resume.ECHO
    is_known = body.get("return_token_ids") in (None, False, True)
    return None if is_known else Resume.NOT_TOLD


class Asked:
    """A client's request. most: bound on the answer's tokens. local_reason: why one engine has to
    take both steps. only: the engine that has what the request goes on from."""

    def __init__(
        self, service: Service, request: web.Request, body: Any, headers: Mapping[str, str]
    ) -> None:
        config = service.config
        self.path, self.headers = request.path, headers
        self._body = body = checked_body(body)
        self._transcript: Transcript | None = None
        self.endpoint = endpoint = ENDPOINTS[request.path]
        tokens = prompt_tokens(body)
        self.tokens, self.most = tokens * num_samples(body), most_tokens(endpoint, body)
        self.prefix, self.only = NO_PREFIX, None if endpoint.is_split else service.keeper(body)
        self.local_reason = local_prefill_reason(endpoint, body, config.min_prompt_tokens)
        if config.affinity and endpoint.computes:
            session = session_of(body, request.headers.get(SESSION_HEADER))
            self.prefix = prefix_of(body, endpoint, session, tokens)

    def kept(self, service: Service) -> Transcript | Resume:
        """A transcript for a stream that can go on elsewhere, or why it cannot."""
        if not service.config.resume:
            return Resume.OFF
        if (reason := refusal(self.endpoint, self._body, self.local_reason)) is not None:
            return reason
        transcript = Transcript(service.room, self._body, 0)
        return transcript.refusal or transcript

    @property
    def body(self) -> Mapping[str, Any]:
        return self._body if self._transcript is None else self._transcript.body

    async def forget(self, transcript: Transcript | None, num_bytes: int) -> None:
        """Have *transcript* keep the body, of *num_bytes*, as far as it may be sent again."""
        if transcript is not None and num_bytes <= SMALL_BYTES:
            transcript.keep(self._body, num_bytes)
        elif transcript is not None:
            body = await in_steps(compacted(self._body))
            transcript.keep(body, sum(map(len, encode(body))))
        self._body, self._transcript = {}, transcript
