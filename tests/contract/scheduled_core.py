"""An engine of vLLM's without its model: vLLM's own scheduler, its step and our connector, over a
worker that knows what it was told and computes each next token from all tokens before it.

The worker keeps, as vLLM's does, only what scheduler outputs tell it: prompts, the tokens that it
has sampled itself, and for how many positions there is a KV cache. It refuses to go on from a
position that nobody computed or loaded."""

import queue
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from vllm.config import KVTransferConfig, LoadConfig, ModelConfig, SchedulerConfig, VllmConfig
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from vllm_commext.nixl.metadata import WorkerMetadata
from vllm_commext.nixl.requests import Chunk, FailedLoad, Hold, Restart

BLOCK = 4
NUM_BLOCKS = 64
MAX_TOKENS = 128
NUM_TOKENS = 200
MAX_STEPS = 400
BOUND_SECONDS = 60.0
_number = count()
TO_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}


def next_token(tokens: Sequence[int]) -> int:
    """What the model generates after these tokens."""
    return zlib.crc32(repr(list(tokens)).encode()) % NUM_TOKENS


def answer_to(tokens: Sequence[int], count: int) -> list[int]:
    """What the model generates after these tokens, one token after the other."""
    said = list(tokens)
    for _ in range(count):
        said.append(next_token(said))
    return said[len(tokens) :]


class Worker:
    """What it computes and moves at once; ``computed`` are positions, in order, ``told`` all loads,
    ``chunks`` those of prompts since one was begun again. Loads whose requests ``fails`` names
    fail, with ``num_read`` tokens here all the same; none ends while it ``holds_loads``. Where it
    ``keeps`` prefills, they are ``kept`` until they are released."""

    def __init__(self) -> None:
        self.computed: dict[str, list[int]] = {}
        self.fails: Callable[[str], bool] = lambda request_id: False
        self.num_read = 0
        self.holds_loads = False
        self.keeps = False
        self.kept: set[str] = set()
        self.renews = True
        self.told: list[Any] = []
        self.chunks: list[Chunk] = []
        self.restarts: list[Restart] = []
        self.holds: list[Hold] = []
        self.loads: list[Any] = []
        self.released: list[str] = []
        self._tokens: dict[str, list[int]] = {}

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        """Run the model and move what is to be moved."""
        self._take_in(step)
        cached = step.scheduled_cached_reqs
        starts = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
        starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        sampled = [
            self._compute(name, starts[name], num)
            for name, num in step.num_scheduled_tokens.items()
        ]
        names = list(step.num_scheduled_tokens)
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: index for index, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=self._transfers(step.kv_connector_metadata),
        )

    def _take_in(self, step: SchedulerOutput) -> None:
        for new in step.scheduled_new_reqs:
            assert new.prompt_token_ids is not None
            self._tokens[new.req_id] = list(new.prompt_token_ids)
        for name in step.scheduled_cached_reqs.resumed_req_ids:
            self._tokens[name] = list(step.scheduled_cached_reqs.all_token_ids[name])

    def _compute(self, name: str, start: int, count: int) -> list[int]:
        tokens, computed = self._tokens[name], self.computed.setdefault(name, [])
        assert start + count <= len(tokens), "asked for a token that the worker does not know"
        computed += range(start, start + count)
        if start + count < len(tokens):
            return []
        tokens.append(next_token(tokens))
        return tokens[-1:]

    def _transfers(self, told: Any) -> KVConnectorOutput | None:
        if told is None:
            return None
        self.told += told.loads
        self.chunks = [*([] if told.restarts else self.chunks), *told.chunks]
        self.restarts += told.restarts
        self.holds += told.holds
        self.loads += [load for load in told.loads if load.awaited]
        self.released += [load.request_id for load in told.loads if not load.awaited]
        self.kept |= {hold.request_id for hold in told.holds}
        self.renews = self.renews if told.renews is None else told.renews
        sent = self.kept & set(told.releases) if self.keeps else self.kept
        self.kept = self.kept - sent
        if self.holds_loads:
            return KVConnectorOutput(finished_sending=sent)
        ended, self.loads = self.loads, []
        failed = {load.request_id for load in ended if self.fails(load.request_id)}
        unread = {load.request_id for load in ended if load.recomputes} & failed
        ends = {name: FailedLoad("transfer", self.num_read) for name in failed}
        return KVConnectorOutput(
            finished_sending=sent,
            finished_recving={load.request_id for load in ended},
            kv_connector_worker_meta=WorkerMetadata(unread=unread, failed=ends) if failed else None,
            failed_recving=failed - unread,
        )


class Core:
    """One engine: ``model`` is a folder with a configuration, ``role`` "" for none of our
    connector, ``extra`` its ``kv_connector_extra_config``; with ``is_async`` a step is scheduled
    while the one before is under way; the null block is among ``num_blocks``."""

    def __init__(
        self,
        model: Path,
        role: Any = "",
        *,
        policy: Any = "fail",
        is_async: bool = False,
        num_blocks: int = NUM_BLOCKS,
        **extra: Any,
    ) -> None:
        init_none_hash(sha256)
        spec = FullAttentionSpec(BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
        cache = KVCacheConfig(num_blocks, [], [KVCacheGroupSpec(["layer"], spec)])
        config = self._config(model, role, policy, is_async, extra)
        config.cache_config.block_size = BLOCK
        config.cache_config.num_gpu_blocks = num_blocks
        config.scheduler_config.async_scheduling = is_async  # else vLLM takes it back on CPUs
        kind = AsyncScheduler if is_async else Scheduler
        self.scheduler = kind(
            config, cache, StructuredOutputManager(config), block_size=BLOCK, log_stats=True
        )
        self.worker = Worker()
        self.input_queue: queue.Queue[Any] = queue.Queue()
        self.output_queue: queue.Queue[Any] = queue.Queue()
        self._attach_weight_version = lambda outputs: None
        self.engines_running, self.batch_queue_size = False, 1
        self.step_fn = self._step
        self.post_step = lambda model_executed: None
        self.outputs: list[EngineCoreOutput] = []
        self.ways: Counter[str] = Counter()
        self.failures: Counter[str] = Counter()
        self._num_steps, self.num_running = 0, 0
        self._under_way: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
        self._depth = 2 if is_async else 1

    @staticmethod
    def _config(
        model: Path, role: Any, policy: Any, is_async: bool, extra: dict[str, Any]
    ) -> VllmConfig:
        return VllmConfig(
            model_config=ModelConfig(str(model), skip_tokenizer_init=True, max_model_len=128),
            scheduler_config=SchedulerConfig(
                max_model_len=MAX_TOKENS,
                max_num_batched_tokens=16,
                max_num_seqs=4,
                is_encoder_decoder=False,
                enable_chunked_prefill=True,
                async_scheduling=is_async,
            ),
            load_config=LoadConfig(load_format="dummy"),  # P's parameters here tell of no files
            kv_transfer_config=_transfer(role, policy, extra) if role else None,
        )

    def close(self) -> None:
        connector = self.scheduler.get_kv_connector()
        if connector is not None:
            connector.shutdown()

    def add(self, request: Request) -> None:
        self.scheduler.add_request(request)

    def _step(self) -> tuple[dict[int, Any], bool]:
        if self.scheduler.has_requests():
            step = self.scheduler.schedule()
            self._under_way.append((step, self.worker.execute(step)))
        if not self._under_way or (len(self._under_way) < self._depth and self._has_more()):
            return {}, True
        outputs = self.scheduler.update_from_output(*self._under_way.popleft())
        return outputs, True

    def _has_more(self) -> bool:
        return self.scheduler.has_requests() and bool(self._under_way[-1][0].num_scheduled_tokens)

    def pause(self, state: PauseState, *, clears: bool = True) -> None:
        """As vLLM pauses: when there is nothing to step for, caches are reset."""
        self.scheduler.set_pause_state(state)
        for _ in range(MAX_STEPS):
            if not self.scheduler.has_requests() and not self._under_way:
                break
            self.turn()
        assert not self.scheduler.has_requests(), "the pause does not end"
        if clears:
            self.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)

    def resume(self) -> None:
        self.scheduler.set_pause_state(PauseState.UNPAUSED)

    def turn(self) -> None:
        self._num_steps += 1
        EngineCoreProc._process_engine_step(self)  # pyright: ignore
        while not self.output_queue.empty():
            _, outputs = self.output_queue.get()
            self.num_running = getattr(outputs.scheduler_stats, "num_running_reqs", -1)
            stats = getattr(outputs.scheduler_stats, "kv_connector_stats", None)
            self.ways.update(stats["first_tokens"] if stats is not None else {})
            self.failures.update(stats["failures"] if stats is not None else {})
            self.outputs += outputs.outputs

    def run(self, *names: str) -> None:
        """Turns until these requests have ended."""
        for _ in range(MAX_STEPS):
            self.turn()
            if all(self.answer(name).finish_reason is not None for name in names):
                return
        raise AssertionError(f"{names} have not ended after {MAX_STEPS} steps")

    def answer(self, name: str) -> SimpleNamespace:
        """All that the client of a request was told: tokens, and how the answer ended."""
        told = [output for output in self.outputs if output.request_id == name]
        last = told[-1] if told else SimpleNamespace(finish_reason=None, stop_reason=None)
        return SimpleNamespace(
            tokens=[token for output in told for token in output.new_token_ids],
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
        )


def _transfer(role: Any, policy: Any, extra: dict[str, Any]) -> KVTransferConfig:
    return KVTransferConfig(
        kv_connector="CommextNixlConnector",
        kv_connector_module_path="vllm_commext.nixl.connector",
        kv_role=role,
        kv_load_failure_policy=policy,
        engine_id=f"engine-{role}",
        kv_buffer_device=current_platform.device_type,
        kv_connector_extra_config={
            "side_channel_host": "127.0.0.1",
            "side_channel_port": 7000,
            **extra,
        },
    )


def request_of(
    name: str, tokens: Sequence[int], kv_params: Any = None, *, eos: int = -1, **params: Any
) -> Request:
    """A greedy request; ``eos`` is the model's end of sequence, ``params`` go to vLLM's
    ``SamplingParams``."""
    extra = {"kv_transfer_params": dict(kv_params)} if kv_params is not None else None
    sampling = SamplingParams(**{"temperature": 0.0, "extra_args": extra, **params})
    sampling._eos_token_id = eos  # pyright: ignore[reportPrivateUsage]
    hasher = get_request_block_hasher(BLOCK, sha256)
    return Request(name, list(tokens), sampling, None, block_hasher=hasher)


def prefilled(prefill: Core, tokens: Sequence[int], **params: Any) -> dict[str, Any]:
    """What a prefill engine's router passes on for a prompt."""
    name = f"p{next(_number)}"
    prefill.add(request_of(name, tokens, TO_PREFILL, **{**params, "max_tokens": 1}))
    prefill.run(name)
    (output,) = [one for one in prefill.outputs if one.request_id == name]
    assert output.kv_transfer_params is not None
    return output.kv_transfer_params


def turn_until(core: Core, look: Callable[[], bool]) -> None:
    """Turns of an engine, which sleeps while it waits."""
    end = time.monotonic() + BOUND_SECONDS
    while not look():
        assert time.monotonic() < end
        core.turn()


def has_ended(core: Core, name: str) -> bool:
    return core.answer(name).finish_reason is not None


def written(core: Core, step: Any) -> set[int]:
    """Blocks that the step's tokens go to, before it is executed."""
    manager, found = core.scheduler.kv_cache_manager, set[int]()
    cached = step.scheduled_cached_reqs
    starts = {new.req_id: new.num_computed_tokens for new in step.scheduled_new_reqs}
    starts |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    for name, num_tokens in step.num_scheduled_tokens.items():
        (ids,) = manager.get_block_ids(name)
        ends = range(starts[name], starts[name] + num_tokens)
        found |= {ids[one // BLOCK] for one in ends}
    return found


def free(core: Core) -> int:
    """Blocks of its KV cache that nothing holds."""
    return core.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


def assert_nothing_is_held(core: Core, before: int) -> None:
    """As many blocks are free as were before, once all requests have ended."""
    turn_until(core, lambda: not core.scheduler.has_requests())
    assert free(core) == before
