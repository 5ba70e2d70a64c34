"""Greedy completions with their logprobs, and the comparison of two of them, position by
position."""

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import httpx

from vllm_commext.errors import CommextError, ProtocolError

TOKEN_PREFIX = "token_id:"
TOP_LOGPROBS = 5
TIMEOUT_SECONDS = 300.0
# httpx reads all certificates for each request, which takes longer than a tiny model's answer.
tls = functools.cache(httpx.create_ssl_context)
PREFILL_PARAMS: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class CompletionError(CommextError, RuntimeError):
    """A server answered a completion with an error; ``status`` is the HTTP status, ``body`` its
    text."""

    def __init__(self, url: str, status: int, body: str) -> None:
        super().__init__(f"expected a completion from {url}, got HTTP {status}: {body}")
        self.status = status
        self.body = body


@dataclass(frozen=True)
class Completion:
    """What one greedy request gave.

    ``prompt``: token ids. ``token_ids``: one a position. ``logprobs``: one mapping a position,
    token id -> natural logarithm of its probability, for the chosen token and the most likely ones.
    """

    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[Mapping[int, float], ...]
    finish_reason: str | None


@dataclass(frozen=True)
class Difference:
    """How far one completion is from another.

    ``position``: the first where the token differs or a logprob differs by more than the tolerance,
    else None. ``max_logprob``: the largest difference of a logprob in nats, over all positions with
    an equal history."""

    position: int | None
    tokens_equal: bool
    max_logprob: float

    @property
    def equal(self) -> bool:
        return self.position is None


def complete(
    url: str,
    model: str,
    prompt: Sequence[int],
    *,
    max_tokens: int = 16,
    stream: bool = False,
    extra: Mapping[str, Any] | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    on_begin: Callable[[Mapping[str, str]], object] | None = None,
) -> Completion:
    """Ask ``url``/v1/completions for exactly ``max_tokens`` greedy tokens after a prompt's token
    ids.

    ``extra`` is laid over the request; ``on_begin`` gets the headers of a stream that has begun.
    Raises ``CompletionError`` for an error answer, ``ProtocolError`` for what is no completion."""
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "logprobs": TOP_LOGPROBS,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "stream": stream,
        **(extra or {}),
    }
    address = f"{url}/v1/completions"
    if stream:
        return _completion(tuple(prompt), _ask_stream(address, body, timeout_seconds, on_begin))
    return _completion(tuple(prompt), [post(address, body, timeout_seconds).json()["choices"][0]])


def chat_completion(
    url: str, model: str, question: str, *, max_tokens: int
) -> tuple[str, Completion]:
    """The greedy answer to one message of a user: its text, and what it is compared by.

    Raises what ``post`` raises."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "logprobs": True,
        "top_logprobs": TOP_LOGPROBS,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    answer = post(f"{url}/v1/chat/completions", body).json()
    (choice,) = answer["choices"]
    likely = [
        {one["token"]: one["logprob"] for one in [place, *place["top_logprobs"]]}
        for place in choice["logprobs"]["content"]
    ]
    text: str = choice["message"]["content"]
    entry = {**choice, "logprobs": {"top_logprobs": likely}}
    return text, _completion(tuple(answer["prompt_token_ids"]), [entry])


def prefill(
    url: str, model: str, prompt: Sequence[int], timeout_seconds: float = 120.0
) -> dict[str, Any]:
    """Let a prefill server compute a prompt's KV cache; return the parameters that a decode server
    needs for it.

    Raises ``CompletionError`` for an error answer, ``ProtocolError`` when there are no such
    parameters."""
    body = {
        "model": model,
        "prompt": list(prompt),
        "max_tokens": 1,
        "temperature": 0.0,
        "kv_transfer_params": dict(PREFILL_PARAMS),
    }
    address = f"{url}/v1/completions"
    params = post(address, body, timeout_seconds).json().get("kv_transfer_params")
    if not isinstance(params, dict):
        raise ProtocolError(
            f"expected kv_transfer_params from {url}, got {params!r}; has it a KV connector?"
        )
    return params


def post(
    url: str, body: Mapping[str, Any], timeout_seconds: float = TIMEOUT_SECONDS
) -> httpx.Response:
    """The answer to a body of JSON.

    Raises ``CompletionError`` for any but 200, ``httpx.HTTPError`` when the connection fails."""
    response = httpx.post(url, json=body, timeout=timeout_seconds, trust_env=False, verify=tls())
    if response.status_code != 200:
        raise CompletionError(url, response.status_code, response.text)
    return response


def stream(
    url: str, body: Mapping[str, Any], timeout_seconds: float = TIMEOUT_SECONDS, **options: Any
) -> AbstractContextManager[httpx.Response]:
    """The answer as it comes, whatever its status; ``options`` go to ``httpx.stream``."""
    return httpx.stream(
        *("POST", url), json=body, timeout=timeout_seconds, trust_env=False, verify=tls(), **options
    )


def _ask_stream(
    url: str,
    body: Mapping[str, Any],
    timeout_seconds: float,
    on_begin: Callable[[Mapping[str, str]], object] | None,
) -> list[dict[str, Any]]:
    with stream(url, body, timeout_seconds) as response:
        if response.status_code != 200:
            raise CompletionError(
                url, response.status_code, response.read().decode(errors="replace")
            )
        if on_begin is not None:
            on_begin(response.headers)
        return list(_choices_of_stream(url, lines_of(response.iter_text())))


def lines_of(pieces: Iterable[str]) -> Iterator[str]:
    """The lines of a stream of server-sent events, without their ends.

    Only a line feed ends a line here: answers hold other characters at which ``str.splitlines``, as
    httpx uses it, breaks a line in two."""
    rest = ""
    for piece in pieces:
        *lines, rest = (rest + piece).split("\n")
        yield from lines
    yield rest


def _choices_of_stream(url: str, lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    for line in lines:
        if not line.startswith("data:"):
            continue
        payload = line.removeprefix("data:").strip()
        if payload == "[DONE]":
            return
        event = json.loads(payload)
        if "error" in event:
            raise CompletionError(url, int(event["error"].get("code") or 500), payload)
        yield from event["choices"][:1]
    raise ProtocolError(f"expected the stream of {url} to end with [DONE], but it broke off")


def _completion(prompt: tuple[int, ...], choices: Sequence[Mapping[str, Any]]) -> Completion:
    token_ids: list[int] = []
    logprobs: list[Mapping[int, float]] = []
    finish_reason: str | None = None
    for choice in choices:
        token_ids += choice["token_ids"] or []
        if choice["logprobs"] is not None:
            logprobs += map(_by_token_id, choice["logprobs"]["top_logprobs"])
        finish_reason = choice["finish_reason"] or finish_reason
    if logprobs and len(token_ids) != len(logprobs):
        raise ProtocolError(
            f"expected one logprob entry a token, got {len(logprobs)} for {len(token_ids)} tokens"
        )
    return Completion(prompt, tuple(token_ids), tuple(logprobs), finish_reason)


def _by_token_id(top: Mapping[str, float]) -> Mapping[int, float]:
    return {int(token.removeprefix(TOKEN_PREFIX)): value for token, value in top.items()}


def near_enough(expected: Completion, got: Completion, noise: float) -> bool:
    """Equal tokens, or another token where the expected answer holds both for as likely within
    twice ``noise`` nats."""
    for position, (one, two) in enumerate(zip(expected.token_ids, got.token_ids, strict=True)):
        if one != two:
            likely = expected.logprobs[position]
            return two in likely and likely[one] - likely[two] <= 2 * noise
    return True


def logprob_difference(one: Mapping[int, float], other: Mapping[int, float]) -> float:
    """Largest difference in nats between two lists of most likely tokens of one position.

    A token that only one list has is at most as likely in the other as that list's least likely
    one, so it counts with what it exceeds that by."""
    shared = max(
        (abs(one[token] - other[token]) for token in one.keys() & other.keys()), default=0.0
    )
    only_one = max((one[token] for token in one.keys() - other.keys()), default=-float("inf"))
    only_other = max((other[token] for token in other.keys() - one.keys()), default=-float("inf"))
    return max(shared, only_one - min(other.values()), only_other - min(one.values()))


def compare(expected: Completion, got: Completion, atol: float = 0.0) -> Difference:
    """Compare two completions of the same prompt; logprobs may differ by ``atol`` nats.

    Positions after the first different token have different histories and are not compared."""
    first: int | None = None
    largest = 0.0
    for position, (one, other) in enumerate(zip(expected.logprobs, got.logprobs, strict=False)):
        distance = logprob_difference(one, other)
        largest = max(largest, distance)
        same_token = expected.token_ids[position] == got.token_ids[position]
        if first is None and not (same_token and distance <= atol):
            first = position
        if not same_token:
            break
    if first is None and len(expected.token_ids) != len(got.token_ids):
        first = min(len(expected.token_ids), len(got.token_ids))
    return Difference(first, expected.token_ids == got.token_ids, largest)
