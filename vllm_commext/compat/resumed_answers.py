"""Tokens of an answer that began at another engine go through vLLM's parsers as they did there.

vLLM merges outputs of a request that are not taken in time, and all that `first_token` sends at
once would be one piece. Its tool and reasoning parsers may answer otherwise to other pieces. Here,
in the API server's process, such outputs are handed out one by one. They are not merged with those
that follow, and their tokens count as generated where they were."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any
from weakref import WeakValueDictionary

from vllm.v1.engine.output_processor import RequestOutputCollector

from vllm_commext.compat import fits
from vllm_commext.compat.monkey_patch import is_patched, wrap
from vllm_commext.nixl.wire.params import ANSWER, COMPUTED_BY, MARK_BITS, TELLS

PART = "nixl first token"
ADD = "vllm.v1.engine.output_processor:OutputProcessor.add_request"
PROCESS = "vllm.v1.engine.output_processor:OutputProcessor.process_outputs"


class PieceCollector(RequestOutputCollector):
    """Hands out the outputs of a resumed answer one by one, and merges later ones as vLLM does.

    num_left: tokens of the answer still to be repeated. is_repeating: outputs that are put are its.
    mark: what computes it, for the router that asks; 0: nothing to be told."""

    answer: Sequence[int] = ()
    num_left = mark = _num_apart = 0
    is_repeating = False
    _outputs: deque[Any]

    def put(self, output: Any) -> None:
        last = self._outputs[-1] if len(self._outputs) > self._num_apart else None
        if isinstance(output, Exception):
            self._outputs.clear()
            self._num_apart = 0
        elif isinstance(last, Exception):
            return
        elif last is not None:
            last.add(output, aggregate=self.aggregate)
            return
        elif self.mark:
            output = self._marked(output)
        self._outputs.append(output)
        self._num_apart += self.is_repeating
        self.ready.set()

    def _marked(self, output: Any) -> Any:
        """Tell a router what computes the answer with the prompt's first id. A chat's comes by
        itself, as vLLM's parsers read those of others."""
        told, (first, *others) = copy(output), output.prompt_token_ids
        told.prompt_token_ids = [first + (self.mark << MARK_BITS), *others]
        self.mark = 0
        if not self.request_id.startswith("chat"):
            return told
        told.outputs, told.finished = [], False
        self._outputs.append(told)
        self._num_apart += 1
        return output

    async def get(self) -> Any:
        if self._num_apart:
            await asyncio.sleep(0)  # a long answer does not keep others from theirs
        while not self._outputs:
            await self.ready.wait()
        return self._taken()

    def get_nowait(self) -> Any:
        return self._taken() if self._outputs and not self._num_apart else None

    def _taken(self) -> Any:
        output = self._outputs.popleft()
        self._num_apart = max(0, self._num_apart - 1)
        if not self._outputs:
            self.ready.clear()
        if isinstance(output, Exception):
            raise output
        return output


_waiting: WeakValueDictionary[str, PieceCollector] = WeakValueDictionary()
"""Collectors of requests with an answer, by request, until it is repeated or another one begins."""
Process = Callable[..., Any]


def install() -> None:
    """Monkey-patch this process's output processor; a second call changes nothing.

    Raises:
        UnsupportedError: it is not what it was when this was tested, and does not do the same.
    """
    if not is_patched(PROCESS):
        fits.admit(PART)
        wrap({ADD: _add_request, PROCESS: _process_outputs})


def _add_request(add: Callable[..., None]) -> Callable[..., None]:
    def add_request(
        self: Any,
        request: Any,
        prompt: Any,
        parent_req: Any = None,
        request_index: int = 0,
        queue: Any = None,
    ) -> None:
        if parent_req is None:
            expect(request, queue)
        add(self, request, prompt, parent_req, request_index, queue)

    return add_request


def _process_outputs(process: Process) -> Process:
    def process_outputs(
        self: Any,
        engine_core_outputs: list[Any],
        engine_core_timestamp: float | None = None,
        iteration_stats: Any = None,
        weight_version: str | None = None,
    ) -> Any:
        args = engine_core_timestamp, iteration_stats, weight_version
        return processed(process, self, engine_core_outputs, *args)

    return process_outputs


def expect(request: Any, queue: Any) -> None:
    """Let the queue of a request with an answer keep apart what repeats it, and that of one whose
    router asks tell what computes it."""
    params = _params_of(request)
    told: Any = params.get(ANSWER)
    answer = told if isinstance(told, list) else []
    if (answer or params.get(TELLS)) and type(queue) is RequestOutputCollector:
        collector: Any = queue  # which nobody waits at yet
        collector.__class__, collector._outputs = PieceCollector, deque()
        collector.answer, collector.num_left = answer, len(answer)
        if answer:
            _waiting[request.request_id] = collector


def processed(
    process: Process, processor: Any, outputs: list[Any], timestamp: Any, stats: Any, weights: Any
) -> Any:
    if outputs and COMPUTED_BY in (outputs[0].kv_transfer_params or ()):
        told = outputs.pop()
        state = processor.request_states.get(told.request_id)
        if state is not None and isinstance(state.queue, PieceCollector):
            state.queue.mark = told.kv_transfer_params[COMPUTED_BY]
    queue = _repeating(outputs) if _waiting else None
    if queue is None:
        return process(processor, outputs, timestamp, stats, weights)
    with _not_generated(stats):
        queue.is_repeating = True
        result = process(processor, outputs, timestamp, stats, weights)
        queue.is_repeating = False
    return result


def _params_of(request: Any) -> dict[str, Any]:
    params = (getattr(request.sampling_params, "extra_args", None) or {}).get("kv_transfer_params")
    return params if isinstance(params, dict) else {}


def _repeating(outputs: list[Any]) -> PieceCollector | None:
    """The collector of the answer that these outputs of `first_token` repeat, None for others.

    vLLM's own are of a request each, and the first one of a request has not the whole answer."""
    if not outputs or (queue := _waiting.get(outputs[0].request_id)) is None:
        return None
    first, *others = outputs
    has_begun = queue.num_left < len(queue.answer) or first.new_token_ids == queue.answer
    is_repeated = has_begun or any(one.request_id == first.request_id for one in others)
    queue.num_left -= sum(len(one.new_token_ids) for one in outputs)
    if not is_repeated or queue.num_left <= 0:
        del _waiting[first.request_id]
    return queue if is_repeated else None


@contextmanager
def _not_generated(stats: Any) -> Iterator[None]:
    """Leave out tokens, and the times between them, that the outputs processed inside add."""
    if stats is None:
        yield
        return
    num_tokens, num_times = stats.num_generation_tokens, len(stats.inter_token_latencies_iter)
    yield
    stats.num_generation_tokens = num_tokens
    del stats.inter_token_latencies_iter[num_times:]
