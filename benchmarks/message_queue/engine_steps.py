"""What vLLM's engine sends in a step and what its worker answers: steps of vLLM's own scheduler,
with requests that come, take blocks and end."""

import itertools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.executor.multiproc_executor import WorkerProc
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK_TOKENS = 16
PROMPT_TOKENS = 64
MIN_OUTPUT_TOKENS, OUTPUT_SPREAD = 192, 128
MAX_TOKENS = PROMPT_TOKENS + MIN_OUTPUT_TOKENS + OUTPUT_SPREAD
VOCABULARY = 128_000
FEW_LAYERS = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": MAX_TOKENS,
}


class Step(NamedTuple):
    """Messages in the order of the engine, and the answer of the worker to each."""

    calls: tuple[Any, ...]
    answers: tuple[Any, ...]


class StepMaker:
    """An engine's scheduler that always has `n_requests` to run."""

    def __init__(self, n_requests: int) -> None:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(FEW_LAYERS))
            model = ModelConfig(folder, skip_tokenizer_init=True, max_model_len=MAX_TOKENS)
        config = VllmConfig(
            model_config=model,
            cache_config=CacheConfig(block_size=BLOCK_TOKENS, enable_prefix_caching=False),
            scheduler_config=SchedulerConfig(
                max_model_len=MAX_TOKENS,
                max_num_batched_tokens=8192,
                max_num_seqs=n_requests,
                is_encoder_decoder=False,
                async_scheduling=False,
            ),
        )
        spec = FullAttentionSpec(BLOCK_TOKENS, num_kv_heads=1, head_size=8, dtype=torch.float32)
        num_blocks = 2 + n_requests * -(-MAX_TOKENS // BLOCK_TOKENS)
        config.cache_config.num_gpu_blocks = num_blocks
        cache = KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)])
        self._scheduler = Scheduler(
            config, cache, StructuredOutputManager(config), block_size=BLOCK_TOKENS
        )
        self._n_requests, self._numbers = n_requests, itertools.count()
        self._batch: list[str] = []  # in the worker's order
        self._places: dict[str, int] = {}
        for _ in self.steps(MIN_OUTPUT_TOKENS):  # until they begin and end at different times
            pass

    def steps(self, count: int, *, in_one_call: bool = False) -> Iterator[Step]:
        """The next ones. `in_one_call`: the SchedulerOutput is answered with the ModelRunnerOutput,
        without the call for sampling in between."""
        done = WorkerProc.ResponseStatus.SUCCESS
        for _ in range(count):
            self._fill()
            scheduled = self._scheduler.schedule()
            output = self._answer(scheduled)
            self._scheduler.update_from_output(scheduled, output)
            execute = ("execute_model", (scheduled,), {}, 0)
            if in_one_call:
                yield Step((execute,), ((done, output),))
            else:
                sample = ("sample_tokens", (None,), {}, 0)
                yield Step((execute, sample), ((done, None), (done, output)))

    def _fill(self) -> None:
        """New requests for those that have ended."""
        while self._scheduler.get_num_unfinished_requests() < self._n_requests:
            number = next(self._numbers)
            length = MIN_OUTPUT_TOKENS + number * 37 % OUTPUT_SPREAD
            if number < self._n_requests:  # of the first ones, some are half done
                length = 1 + number * length // self._n_requests
            params = SamplingParams(max_tokens=length, ignore_eos=True)
            prompt = [(number * 31 + at * 17) % VOCABULARY for at in range(PROMPT_TOKENS)]
            self._scheduler.add_request(Request(f"cmpl-{number:032x}-0", prompt, params, None))

    def _answer(self, scheduled: Any) -> ModelRunnerOutput:
        """As of vLLM's worker: who comes takes the place of who has ended, and what is then left
        empty is taken by the last ones."""
        ended = scheduled.finished_req_ids
        free = [place for place, name in enumerate(self._batch) if name in ended]
        for name in ended:
            del self._places[name]
        for new in scheduled.scheduled_new_reqs:
            self._put(new.req_id, free.pop(0) if free else len(self._batch))
        while free:
            last = self._batch.pop()
            if last in ended:
                free.remove(len(self._batch))
            else:
                self._put(last, free.pop(0))
        return ModelRunnerOutput(
            req_ids=list(self._batch),
            req_id_to_index=dict(self._places),
            sampled_token_ids=[
                [(place * 7919 + scheduled.total_num_scheduled_tokens) % VOCABULARY]
                for place in range(len(self._batch))
            ],
        )

    def _put(self, name: str, place: int) -> None:
        self._batch[place : place + 1] = [name]
        self._places[name] = place
