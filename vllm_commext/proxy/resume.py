"""Which streams go on at another decode engine when theirs is lost, and what that may take."""

from collections.abc import Mapping
from typing import Any

from vllm_commext.proxy.two_step import ENDPOINTS, LocalPrefill, local_prefill_reason
from vllm_commext.reasons import Reason

MAX_RESUMES = 4
"""Times that one stream goes on at another engine."""
MIN_LEFT = 16
"""Tokens that an answer may still have, or it ends where it is."""


class Resume(Reason):
    """What becomes of a stream whose decode engine is lost, gives it up, or drains."""

    RESUMED = "resumed", "it went on at another decode engine"
    OFF = "off", "it is off"
    ENDPOINT = "endpoint", "it is neither a completion nor a chat"
    SAMPLES = "samples", "it holds more than one answer"
    ECHO = "echo", "it begins with the prompt's text"
    NO_ROOM = "no_room", "what is kept for all streams has reached 256 MiB"
    NOT_TOLD = "not_told", "its engine does not tell every token's id, or tells what is not known"
    DIFFERS = "differs", "what the other engine answered is not what the client had"
    FAILED = "failed", "no other engine could go on with it"
    ENDING = "ending", "it is about to end where it is"
    ANEW = "anew", "another engine would begin it anew, for longer than it may pause"


class Room:
    """The bytes that are kept for all streams at a time."""

    def __init__(self, max_bytes: int) -> None:
        self._left = max_bytes

    def take(self, num_bytes: int) -> bool:
        """Take so many bytes, if there are."""
        if num_bytes > self._left:
            return False
        self._left -= num_bytes
        return True

    def give_back(self, num_bytes: int) -> None:
        self._left += num_bytes


def refusal(path: str, body: Mapping[str, Any]) -> Resume | None:
    """Reason why a stream is not resumed, whatever becomes of it; None if it may be."""
    if path not in ENDPOINTS or body.get("stream") is not True:
        return Resume.ENDPOINT
    reason = local_prefill_reason(ENDPOINTS[path], body)
    several = (LocalPrefill.SEVERAL_SAMPLES, LocalPrefill.BEAM_SEARCH, LocalPrefill.NOT_ONE_PROMPT)
    if reason in several:
        return Resume.SAMPLES
    if body.get("echo"):
        return Resume.ECHO
    is_known = body.get("return_token_ids") in (None, False, True)
    return None if is_known else Resume.NOT_TOLD
