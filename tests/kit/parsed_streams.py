"""Streams of chats as vLLM's API server writes them, without a model or a server.

Tokens go through vLLM's own output processor, collector, parsers and writer of events."""

import asyncio
import functools
import json
import queue as queues
import re
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

from packaging.version import Version
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.parser import ParserManager
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.request import Request

from tests.kit.installed import VLLM
from vllm_commext.compat import first_token
from vllm_commext.nixl.wire.params import COMPUTED_BY, TELLS

END = "<end of answer>"
_MARK = re.compile(r"</?\|?[^<>\s=]{2,40}>|\[[A-Z_]{4,}\]|\]<\]minimax\[>\[")
_PROMPT = "hello"


@functools.cache
def tokenizer_of(texts: tuple[str, ...], marks: tuple[str, ...] = ()) -> Any:
    """A tokenizer trained on these texts, with these marks, or all in the texts, as tokens."""
    found = set(marks) or {mark for text in texts for mark in _MARK.findall(text)}
    core = Tokenizer(models.BPE())
    lines = pre_tokenizers.Split(Regex("\n"), "isolated")
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.pre_tokenizer = pre_tokenizers.Sequence([lines, bytes_of])
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    plain = [_MARK.sub("\0", text).split("\0") for text in texts]
    trainer = trainers.BpeTrainer(
        vocab_size=400, min_frequency=2, max_token_length=6, initial_alphabet=sorted(alphabet)
    )
    core.train_from_iterator([part for parts in plain for part in parts], trainer)
    core.add_special_tokens([END])
    # Some parsers of vLLM 0.32 do not ask for special tokens, with which a text is written out.
    add = core.add_special_tokens if Version("0.33") <= VLLM else core.add_tokens
    add(sorted(found))
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=END)


@dataclass
class Api:
    """The API server of one engine: each stream of it has parsers of its own.

    body: of the request; prompt: its text, in which reasoning may have begun. mark: what computes
    answers, by an engine core's word."""

    tokenizer: Any
    tool_parser: str | None
    reasoning_parser: str | None
    body: dict[str, Any] = field(default_factory=dict)
    prompt: str = _PROMPT
    mark: int = 0

    def __post_init__(self) -> None:
        model = MagicMock(model="tiny", hf_config=MagicMock(model_type=""))
        serving: Any = OpenAIServingChat.__new__(OpenAIServingChat)
        serving.model_config = model
        serving.models = MagicMock()
        serving.response_role = "assistant"
        serving.enable_auto_tools = self.tool_parser is not None
        serving._include_reasoning_tokens_details = bool(self.reasoning_parser)
        serving.enable_prompt_tokens_details = serving.enable_force_include_usage = True
        serving.enable_log_outputs = serving.enable_per_request_metrics = False
        serving.request_logger = serving.system_fingerprint = None
        serving.return_tokens_as_token_ids = serving.exclude_tools_when_tool_choice_none = False
        serving.parser_cls = ParserManager.get_parser(
            tool_parser_name=self.tool_parser,
            reasoning_parser_name=self.reasoning_parser,
            enable_auto_tools=serving.enable_auto_tools,
            model_name="tiny",
            tokenizer=self.tokenizer,
        )
        self._make_parser, serving._make_parser = serving._make_parser, self._parser
        self._serving = serving
        self._prompt_ids = self.tokenizer.encode(self.prompt, add_special_tokens=False)

    def tokens_of(self, text: str) -> list[int]:
        ids = self.tokenizer.encode(text, add_special_tokens=False)
        return [*ids, self.tokenizer.convert_tokens_to_ids(END)]

    async def stream(
        self, pieces: Sequence[Sequence[int]], params: dict[str, Any] | None = None, given: int = 0
    ) -> AsyncIterator[bytes]:
        """Events of an answer whose tokens come in these pieces, the first *given* of them at once
        as `first_token` sends those of an answer that *params* have."""
        chat = ChatCompletionRequest.model_validate(
            {"messages": [{"role": "user", "content": "x"}], "stream": True, "model": "tiny"}
            | {"return_token_ids": True, "stream_options": {"include_usage": True}, **self.body}
        )
        serving = self._serving
        kwargs = chat.chat_template_kwargs or {}
        chat = self._parser(chat, self.tokenizer, kwargs).adjust_request(chat)
        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=1000,
            stop_token_ids=[self.tokenizer.convert_tokens_to_ids(END)],
            skip_special_tokens=chat.skip_special_tokens,
            spaces_between_special_tokens=chat.spaces_between_special_tokens,
            output_kind=RequestOutputKind.DELTA,
            extra_args={"kv_transfer_params": {**(params or {}), TELLS: bool(self.mark)}},
        )
        request = EngineCoreRequest(
            "one", self._prompt_ids, None, sampling, None, 0.0, None, None, None
        )
        request.external_req_id = "one"
        queue = RequestOutputCollector(RequestOutputKind.DELTA, "chatcmpl-one")
        processor = OutputProcessor(self.tokenizer, log_stats=False)
        processor.add_request(request, self.prompt, None, 0, queue)
        mark = EngineCoreOutput("one", [], kv_transfer_params={COMPUTED_BY: self.mark})
        batches = [[mark]] if self.mark else []
        batches += [*_resumed(request, pieces[:given]), *map(self._step, pieces[given:])]
        results = _results(processor, queue, batches)
        events = serving.chat_completion_stream_generator(
            chat, results, "chat", "tiny", [], self.tokenizer, MagicMock(), kwargs
        )
        async for event in events:
            yield event.encode()

    def _parser(self, *args: Any) -> Any:
        """A stream's parser; one that expects ids of its model's own tokenizer gets ours."""
        parser = self._make_parser(*args)
        marks = {"response_start_ids": "\n</think>\n<answer>\n", "response_end_ids": "\n</answer>"}
        marks |= {"think_start_ids": "<think>\n", "expected_sequence": "<think>\n"}
        for name, text in marks.items():
            if hasattr(parser.reasoning_parser, "think_start_ids_fast"):
                ids = self.tokenizer.encode(text, add_special_tokens=False)
                setattr(parser.reasoning_parser, name, ids)
        return parser

    def _step(self, piece: Sequence[int]) -> list[EngineCoreOutput]:
        """Outputs of vLLM's steps that its API server has found at once."""
        outputs = [EngineCoreOutput("one", [token]) for token in piece]
        if piece[-1] == self.tokenizer.convert_tokens_to_ids(END):
            outputs[-1].finish_reason, outputs[-1].stop_reason = FinishReason.STOP, piece[-1]
        return outputs

    def events(self, *args: Any) -> list[bytes]:
        async def told() -> list[bytes]:
            return [event async for event in self.stream(*args)]

        return asyncio.run(told())


def _resumed(
    request: EngineCoreRequest, pieces: Sequence[Sequence[int]]
) -> Iterable[list[EngineCoreOutput]]:
    if not pieces:
        return
    inner = Request("one", request.prompt_token_ids, request.sampling_params, None)
    core: Any = SimpleNamespace(
        scheduler=MagicMock(log_stats=False, max_model_len=10_000),
        output_queue=queues.Queue(),
        _attach_weight_version=lambda outputs: None,
    )
    core.scheduler.finish_requests = lambda _, status: setattr(inner, "status", status)
    first_token.send(core, inner, [token for piece in pieces for token in piece])
    _, told = core.output_queue.get_nowait()
    yield told.outputs


async def _results(
    processor: OutputProcessor, queue: RequestOutputCollector, batches: Iterable[Any]
) -> AsyncIterator[Any]:
    """As `AsyncLLM.generate` gives them that takes what there is after each batch."""
    for batch in batches:
        processor.process_outputs(batch)
        while queue.ready.is_set():
            yield queue.get_nowait() or await queue.get()


def told(events: Iterable[bytes]) -> dict[str, Any]:
    """All that a client has of a stream: text, calls, tokens, how it ends."""
    calls: dict[int, dict[str, Any]] = {}
    texts = {"content": "", "reasoning": ""}
    ends: list[Any] = []
    usage = None
    for line in b"".join(events).split(b"\n\n"):
        if not line.startswith(b"data: {"):
            continue
        event = json.loads(line[len(b"data: ") :])
        if "error" in event:
            ends.append("error")
        usage = event.get("usage") or usage
        for choice in event.get("choices", ()):
            delta = choice["delta"]
            for name in texts:
                texts[name] += delta.get(name) or ""
            for call in delta.get("tool_calls") or ():
                known = calls.setdefault(call["index"], {"ids": 0, "name": "", "arguments": ""})
                known["ids"] += bool(call.get("id"))
                for name, text in (call.get("function") or {}).items():
                    known[name] += text or ""
            if choice["finish_reason"]:
                ends.append((choice["finish_reason"], choice.get("stop_reason")))
    return {**texts, "calls": calls, "ends": ends, "usage": usage}
