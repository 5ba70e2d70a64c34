"""One request's first token on its way to the client, before a decode engine has answered."""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from vllm_commext.proxy.deadline import Deadline
from vllm_commext.proxy.early import rule
from vllm_commext.proxy.early.form import Form, learn, write_event
from vllm_commext.proxy.early.splice import Splice
from vllm_commext.proxy.engines import Engine
from vllm_commext.proxy.failures import ClientGoneError, ProxyError
from vllm_commext.proxy.opening import Opened
from vllm_commext.proxy.outcome import Outcome

FIRST_TOKEN = "X-Commext-First-Token"


class Lead:
    """What a client gets ahead of the decode engine's answer, if anything.

    response: what has begun with the first token; None while nothing has been sent. splice: takes
    that token off the decode engine's stream. engine: whose stream was sent ahead of, None once the
    request is served anew, from what may be another token. is_due: the engine that is asked now
    shall answer with the prefill engine's token or fail. A greedy token is the same wherever it
    comes from; of a drawn one only the engine knows, and fails rather than go on from another.
    """

    def __init__(
        self, request: web.Request, outcome: Outcome, *, is_on: bool, client_seconds: float
    ) -> None:
        self._request = request
        self._outcome = outcome
        self._is_on = is_on
        self._client_seconds = client_seconds
        self._first: rule.FirstToken | None = None
        self._kind = ""
        self._is_greedy = False
        self._asked: Engine | None = None
        self._has_failed = False
        self.response: web.StreamResponse | None = None
        self.splice: Splice | None = None
        self.engine: Engine | None = None

    def offer(self, endpoint: str, body: Mapping[str, Any], answer: Any) -> None:
        """Take a prefill engine's *answer* to *body*, None where there is none."""
        if self.response is not None:
            self.engine = None
            return
        self._first = None
        found = rule.OFF if not self._is_on else rule.refusal(body)
        if not found:
            found = rule.NO_PREFILL if answer is None else None
        if found is None:
            found = rule.first_token_of(endpoint, body, answer)
        if isinstance(found, str):
            self._outcome.first_token = found
            return
        if self._has_failed:
            self._outcome.first_token = rule.UNPROVEN
            return
        self._first, self._kind = found, rule.form_of(endpoint, body, found.drawn_by)
        self._is_greedy = rule.is_greedy(body)

    def keep_to_greedy(self) -> None:
        """The decode engine draws a first token of its own, without knowing the prefill engine's:
        only a greedy one is the same."""
        if self._first is not None and not self._is_greedy:
            self._first, self._outcome.first_token = None, rule.STREAMED

    async def begin(self, engine: Engine) -> None:
        """*engine* is about to be asked: send the token if its streams are known to begin with
        such tokens. Raises `ClientGoneError`."""
        self._outcome.decode, self._asked = engine.name, engine
        if self._first is None or self.response is not None:
            return
        form = engine.forms.get(self._kind)
        created = int(time.time())
        events = form and form.fill(self._outcome.request_id, created, self._first)
        if form is None or events is None:
            is_refused = engine.forms.is_refused(self._kind)
            self._outcome.first_token = rule.REFUTED if is_refused else rule.UNPROVEN
            return
        self.splice, self.engine = Splice(events), engine
        await self._send(form, b"".join(map(write_event, events)))

    @property
    def is_due(self) -> bool:
        if self._first is None or self._is_greedy or self._asked is None:
            return False
        return self.response is not None or not self._asked.forms.is_refused(self._kind)

    def note_failed(self, error: BaseException) -> None:
        """The engine that was asked has failed the request; nothing is tried with it once more."""
        if not isinstance(error, ProxyError) or error.kind != "engine_error" or error.status < 500:
            return
        if self.is_due and self._asked is not None:
            self._has_failed = True
            self._asked.forms.refuse(self._kind)

    def learn(self, opened: Opened) -> None:
        """A decode engine's stream has begun: if that is how it would have been begun here, the
        next one of its kind will be."""
        if self._first is None or self.response is not None or opened.cutter is None:
            return
        content_type = opened.response.headers.get("Content-Type", "")
        form = learn(opened.first, content_type, self._outcome.request_id, self._first)
        if form is not None:
            opened.engine.forms.note(self._kind, form)

    async def _send(self, form: Form, events: bytes) -> None:
        outcome = self._outcome
        outcome.first_token, outcome.status = rule.EARLY, 200
        self.response = response = web.StreamResponse(headers={"Content-Type": form.content_type})
        response.headers.update({**outcome.headers(), FIRST_TOKEN: rule.EARLY})
        try:
            with Deadline(self._client_seconds):
                await response.prepare(self._request)
                await response.write(events)
        except (ConnectionError, asyncio.TimeoutError) as error:
            raise ClientGoneError("the client closed its connection") from error
        outcome.first_token_seconds = outcome.seconds
