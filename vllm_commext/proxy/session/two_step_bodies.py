"""A client's request, and the bodies of its two steps.

An engine's answer carries one `kv_transfer_params`, which names the blocks of one sequence. With
several prompts vLLM would load the first one's blocks for all. With ``n`` above 1 the sample that
first finishes its read frees blocks that others still read. So a request of several sequences goes
to a decode engine as it is.
"""

from collections.abc import Mapping
from typing import Any

from aiohttp import web

from vllm_commext.proxy.engines import affinity
from vllm_commext.proxy.engines.affinity import NO_PREFIX, Prefix
from vllm_commext.proxy.errors_phases import AtOnce, LocalPrefill, Resume
from vllm_commext.proxy.http import endpoint_prompts
from vllm_commext.proxy.http.endpoint_prompts import COMPLETIONS, ENDPOINTS, Endpoint
from vllm_commext.proxy.http.json_members import LENGTHS, RawJson, compacted, encode, in_steps
from vllm_commext.proxy.http.request_body import checked_body
from vllm_commext.proxy.session.resumable_stream import Room, Transcript, refusal

KEEP_FOR_DECODE: Mapping[str, Any] = {
    **{"do_remote_decode": True, "do_remote_prefill": False},
    **dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")),
}
# A stop token would end the prefill as "stopped", for which a connector need not hand over blocks;
# the token itself is thrown away.
_NOT_FOR_PREFILL = ("stop_token_ids",)
SMALL_BYTES = 4 << 10  # of a body that is kept as it came


def reason_against_both(body: Mapping[str, Any]) -> AtOnce | None:
    """Reason why a request does not go to both engines at once, or None."""
    return AtOnce.ONE_TOKEN if 1 in map(body.get, LENGTHS) else None


def local_prefill_reason(
    endpoint: Endpoint, body: Mapping[str, Any], min_prompt_tokens: int = 0
) -> LocalPrefill | None:
    """Reason why *body* cannot take two steps, or None. Values of an unexpected type count as one:
    the decode engine judges them."""
    if body.get("n") not in (None, 1) or body.get("best_of") not in (None, 1):
        return LocalPrefill.SEVERAL_SAMPLES
    if body.get("use_beam_search"):
        return LocalPrefill.BEAM_SEARCH
    if endpoint is COMPLETIONS and not _is_one_prompt(body):
        return LocalPrefill.NOT_ONE_PROMPT
    if _wants_prompt_logprobs(endpoint, body):
        return LocalPrefill.PROMPT_LOGPROBS
    kept = body.get("truncate_prompt_tokens")
    if kept is not None and not (isinstance(kept, int) and kept >= 0):
        return LocalPrefill.TRUNCATION
    if 0 in map(body.get, LENGTHS):
        return LocalPrefill.NO_GENERATION
    if min_prompt_tokens and endpoint_prompts.prompt_tokens(body) < min_prompt_tokens:
        return LocalPrefill.SHORT_PROMPT
    return None


def _is_one_prompt(body: Mapping[str, Any]) -> bool:
    prompt = body.get("prompt")
    if body.get("prompt_embeds") is not None or not isinstance(prompt, RawJson):
        return False
    is_one_item = prompt.num_items == 1 or prompt.item_kind.isdigit()
    return prompt.kind == '"' or (prompt.kind == "[" and is_one_item)


def _wants_prompt_logprobs(endpoint: Endpoint, body: Mapping[str, Any]) -> bool:
    if body.get("prompt_logprobs") is not None:
        return True
    echoes = endpoint is COMPLETIONS and bool(body.get("echo"))
    return echoes and body.get("logprobs") is not None


def prefill_body(body: Mapping[str, Any], key: str = "", stream_key: str = "") -> dict[str, Any]:
    """Body for one token of the same prompt. All else stays, so that what an engine refuses is
    refused here: with a *key* the client's own limits, too. *stream_key*: D's, which reads at
    once."""
    step = dict(body) if key else _of_one_token(body)
    if body.get("stream"):
        step.pop("stream_options", None)  # an error without streaming
    step["stream"] = False
    step["kv_transfer_params"] = {**own_params(body), **KEEP_FOR_DECODE}
    if key:
        step["kv_transfer_params"]["prefill_key"] = key
    if stream_key:
        step["kv_transfer_params"]["stream_key"] = stream_key
    return step


def _of_one_token(body: Mapping[str, Any]) -> dict[str, Any]:
    step = {name: value for name, value in body.items() if name not in _NOT_FOR_PREFILL}
    step.update(max_tokens=1, ignore_eos=True)
    if "max_completion_tokens" in step:
        step["max_completion_tokens"] = 1
    min_tokens = step.get("min_tokens")
    if isinstance(min_tokens, int | float) and min_tokens > 1:
        step["min_tokens"] = 1
    return step


def decode_body(body: Mapping[str, Any], kv_transfer_params: Mapping[str, Any]) -> dict[str, Any]:
    return {**body, "kv_transfer_params": {**own_params(body), **kv_transfer_params}}


def own_params(body: Mapping[str, Any]) -> Mapping[str, Any]:
    return body.get("kv_transfer_params") or {}


def prefix_of(
    body: Mapping[str, Any], endpoint: Endpoint, session: str | None, tokens: int
) -> Prefix:
    text, num_bytes = endpoint_prompts.prompt_text(
        endpoint, body, affinity.MAX_BLOCKS * affinity.BLOCK_BYTES
    )
    return Prefix.of(endpoint_prompts.names_of(body), text, num_bytes, session, tokens)


class Asked:
    """A client's request. most: bound on the answer's tokens. local_reason: why one engine has to
    take both steps. transcript: of a stream that can go on elsewhere; refusal: why it cannot."""

    transcript: Transcript | None = None
    refusal: Resume | None = Resume.OFF

    def __init__(
        self,
        request: web.Request,
        body: Any,
        headers: Mapping[str, str],
        min_prompt_tokens: int,
        has_affinity: bool,
    ) -> None:
        self.path, self.headers = request.path, headers
        self._body = body = checked_body(body)
        endpoint = self.endpoint
        tokens = endpoint_prompts.prompt_tokens(body)
        self.tokens = tokens * endpoint_prompts.num_samples(body)
        self.most = endpoint_prompts.most_tokens(endpoint, body)
        self.prefix = NO_PREFIX
        self.local_reason = local_prefill_reason(endpoint, body, min_prompt_tokens)
        if has_affinity and endpoint.computes:
            named = request.headers.get(affinity.SESSION_HEADER)
            session = affinity.session_of(body, named)
            self.prefix = prefix_of(body, endpoint, session, tokens)

    def follow(self, room: Room | None) -> None:
        """Begin a transcript in *room*, if the stream can go on elsewhere."""
        if room is None:
            return
        self.refusal = refusal(self.endpoint.is_split, self._body, self.local_reason)
        if self.refusal is None:
            transcript = Transcript(room, self._body, 0)
            self.refusal = transcript.refusal
            self.transcript = transcript if self.refusal is None else None

    @property
    def endpoint(self) -> Endpoint:
        return ENDPOINTS[self.path]

    @property
    def body(self) -> Mapping[str, Any]:
        return self._body if self._body or self.transcript is None else self.transcript.body

    async def forget(self, num_bytes: int) -> None:
        """Have the transcript keep the body, of *num_bytes*, as far as it may be sent again."""
        if self.transcript is not None and num_bytes <= SMALL_BYTES:
            self.transcript.keep(self._body, num_bytes)
        elif self.transcript is not None:
            body = await in_steps(compacted(self._body))
            self.transcript.keep(body, sum(map(len, encode(body))))
        self._body = {}
