"""Tests of parts on a vLLM whose source differs from all that was tested.

Each takes a moment and needs no model, no GPU and no other process. It raises where anything is not
as expected: the part is then left out."""

import ast
import dataclasses
import importlib
import inspect
import pickle
import queue as queues
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import vllm_commext
from vllm_commext.compat.fits import definition
from vllm_commext.compat.monkey_patch import accepts, original_of
from vllm_commext.errors import UnsupportedError

SECONDS = 5.0
NUM_BLOCKS, BLOCK_TOKENS, HEADS, HEAD_SIZE = 3, 4, 2, 8
PROMPT = (1, 2, 3, 4, 5)
QUEUE_INTERNALS = ("acquire_read", "acquire_write", "recv")  # called by vLLM's queue alone


def _expect(what: str, expected: Any, found: Any) -> None:
    if found != expected:
        raise UnsupportedError(f"{what}: expected {expected!r}, got {found!r}")


def queue() -> None:
    """A call and an answer of vLLM's classes go through a queue, and ours takes each call that
    vLLM's takes or its executor makes."""
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

    from vllm_commext.compat.shm_queue import GroupMessageQueue

    stock = original_of("vllm.distributed.device_communicators.shm_broadcast:MessageQueue")
    for name, kind in vars(stock).items():
        if name[0] != "_" and not isinstance(kind, type) and name not in QUEUE_INTERNALS:
            ours = getattr(GroupMessageQueue, name, None)
            is_taken = ours is not None and accepts(ours, getattr(stock, name))
            _expect(f"whether {name} of queues takes what vLLM passes", True, is_taken)
    executor = importlib.import_module("vllm.v1.executor.multiproc_executor")
    used = set(re.findall(r"\b\w*mq\.(\w+)", inspect.getsource(executor)))
    writer: Any = GroupMessageQueue(1, 1)
    reader = GroupMessageQueue.create_from_handle(writer.export_handle(), 0)
    _expect("names of queues", [], sorted(name for name in used if not hasattr(writer, name)))
    answer = dataclasses.replace(
        EMPTY_MODEL_RUNNER_OUTPUT, req_ids=["a"], req_id_to_index={"a": 0}, sampled_token_ids=[[7]]
    )
    status = executor.WorkerProc.ResponseStatus
    for message in (
        ("execute_model", (SchedulerOutput.make_empty(),), {}, None),
        *((each, answer) for each in status),
    ):
        writer.enqueue(message, timeout=SECONDS)
        expected = repr(pickle.loads(pickle.dumps(message)))
        _expect("a message", expected, repr(reader.dequeue(timeout=SECONDS)))
    writer.shutdown()
    reader.shutdown()


def engine_step() -> None:
    """An engine takes one step, whose output comes out, and one in which nothing is computed."""
    from vllm_commext.compat.engine_wait import stock_step

    for is_computed in (True, False):
        steps: list[bool] = []

        def step(is_computed: bool = is_computed, steps: list[bool] = steps) -> Any:
            steps.append(is_computed)
            return ({0: "output"} if is_computed else {}), is_computed

        core = MagicMock(step_fn=step, output_queue=queues.Queue(), input_queue=queues.Queue())
        core.scheduler.has_requests.return_value = core.scheduler.has_unfinished_requests = True
        _expect("whether the model ran", is_computed, bool(stock_step()(core)))
        _expect("steps", [is_computed], steps)
        _expect("outputs", int(is_computed), core.output_queue.qsize())


def pauses() -> None:
    """Caches are dropped, workers called, adapters loaded by the methods that are listened to."""
    from vllm_commext.compat.resets import ADAPTER, CACHE, CALL

    scheduler, core = MagicMock(), MagicMock()
    original_of(CACHE)(scheduler, False, False)
    _expect("caches that are dropped", 1, scheduler.kv_cache_manager.reset_prefix_cache.call_count)
    original_of(CALL)(core, "a method", None, (), {})
    _expect("calls of workers", 1, core.model_executor.collective_rpc.call_count)
    original_of(ADAPTER)(core, "an adapter")
    _expect("adapters that are loaded", 1, core.model_executor.add_lora.call_count)


def _request(**params: Any) -> Any:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request

    sampling = SamplingParams(temperature=0.0, max_tokens=3, **params)
    return Request("commext-self-test", list(PROMPT), sampling, None)


def first_token() -> None:
    """Tokens become the last ones of a prompt, go to the client, and the last may end an answer."""
    from vllm_commext.compat import first_token

    request = _request()
    core = SimpleNamespace(
        scheduler=MagicMock(log_stats=False, max_model_len=100),
        output_queue=queues.Queue(),
        _attach_weight_version=lambda outputs: None,
    )
    first_token.send(core, request, [8, 9])
    client, outputs = core.output_queue.get_nowait()
    _expect("the client", request.client_index, client)
    _expect("what it gets", [[8], [9]], [one.new_token_ids for one in outputs.outputs])
    _hand_out(outputs.outputs)
    _expect("the prompt", [*PROMPT, 8, 9], request.prompt_token_ids)
    _expect("its tokens", len(PROMPT) + 2, request.num_prompt_tokens)
    _expect("all tokens", [*PROMPT, 8, 9], list(request.all_token_ids))
    _expect("tokens to generate", (1, 0), (request.max_tokens, request.num_output_tokens))
    request = _request(stop_token_ids=[9])
    first_token.send(core, request, [9])
    _expect("requests that end", 1, core.scheduler.finish_requests.call_count)


def _hand_out(outputs: list[Any]) -> None:
    """Two tokens of an answer are handed out one by one, and none counts as generated."""
    import msgspec
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
    from vllm.v1.metrics.stats import IterationStats

    from vllm_commext.compat import resumed_answers

    sampling = _request(
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
        extra_args={"kv_transfer_params": {"answer_token_ids": [8, 9]}},
    ).sampling_params
    known = {"request_id": "commext-self-test", "prompt_token_ids": list(PROMPT)}
    known |= {"sampling_params": sampling, "external_req_id": "one", "arrival_time": 0.0}
    made: Any = EngineCoreRequest
    needed = {field.name: None for field in msgspec.structs.fields(made) if field.required}
    request = made(**{**needed, **known})
    queue: Any = RequestOutputCollector(RequestOutputKind.DELTA, request.request_id)
    processor, stats = OutputProcessor(None, log_stats=True), IterationStats()
    resumed_answers.expect(request, queue)
    original_of(resumed_answers.ADD)(processor, request, None, None, 0, queue)
    process = original_of(resumed_answers.PROCESS)
    resumed_answers.processed(process, processor, outputs, 0.0, stats, None)
    waiting = queue.get()
    waiting.send(None)
    try:
        waiting.send(None)
    except StopIteration as taken:
        _expect("what is handed out", [8], list(taken.value.outputs[0].token_ids))
    _expect("tokens that count as generated", 0, stats.num_generation_tokens)
    _expect("times between tokens", [], stats.inter_token_latencies_iter)


def _described(spec: Any, cache: Any) -> None:
    """A cache's description is read by peers as it was written."""
    import msgspec
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec

    from vllm_commext.nixl.geometry.layout import CacheLayout, check_layout
    from vllm_commext.nixl.geometry.topology import Rank
    from vllm_commext.nixl.vllm_cache import ModelFacts, cache_layout

    config = KVCacheConfig(NUM_BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)])
    model = ModelFacts(Rank(1, 0), HEADS, 1, True, {"layer": "FLASH_ATTN"})
    layout = cache_layout({"layer": cache}, config, model)
    check_layout(layout)
    read = msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=CacheLayout)
    _expect("a cache's layout", layout, read)
    _expect("its address", [cache.data_ptr()], layout.families[0].base_addresses)


def _plain(function: Any) -> list[str]:
    """Names of the parameters of a method, without ``self`` and ``**kwargs``."""
    given = inspect.signature(function).parameters.values()
    plain = [each.name for each in given if each.kind is not each.VAR_KEYWORD]
    return plain[plain[:1] == ["self"] :]


def _connector() -> None:
    """Our connector has each method that vLLM leaves open, with the parameters that vLLM's has.

    It is read and not imported: an import asks for another layout of states."""
    base = importlib.import_module("vllm.distributed.kv_transfer.kv_connector.v1.base")
    root = Path(vllm_commext.__file__).parent.parent
    ours = definition(root, "vllm_commext.nixl.connector:CommextNixlConnector")
    methods = {
        node.name: [each.arg for each in node.args.args[1:]]
        for node in ours.body
        if isinstance(node, ast.FunctionDef)
    }
    for cls in (base.KVConnectorBase_V1, base.SupportsHMA):
        _expect("methods without ours", [], sorted(cls.__abstractmethods__ - methods.keys()))
        for name in methods.keys() & vars(cls).keys():
            _expect(f"parameters of {name}", methods[name], _plain(getattr(cls, name)))


def hand_over() -> None:
    """A connector's methods, a request's parameters and a cache's description are as expected."""
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from vllm_commext.nixl.identity import Identity
    from vllm_commext.nixl.requests import RemoteRequest
    from vllm_commext.nixl.wire.params import TransferParams, read_params, write_params
    from vllm_commext.nixl.wire.prompt import check_prompt, digests

    spec: Any = FullAttentionSpec(
        block_size=BLOCK_TOKENS, num_kv_heads=HEADS, head_size=HEAD_SIZE, dtype=torch.float32
    )
    _connector()
    _described(spec, torch.zeros(NUM_BLOCKS, HEADS, BLOCK_TOKENS, 2 * HEAD_SIZE))
    identity = Identity()
    prompt = digests(identity.prompt_of(_request()), len(PROMPT))
    remote = RemoteRequest(
        engine_id="engine",
        incarnation="0" * 16,
        host="localhost",
        port=1,
        tp_size=1,
        request_id="remote",
        block_ids=((0, 1),),
        num_tokens=len(PROMPT),
        fence_slot=0,
        fence_nonce=1,
    )
    params = write_params(TransferParams(remote, prompt))
    request = _request(extra_args={"kv_transfer_params": params})
    _expect("a request's parameters", params, request.kv_transfer_params)
    _expect(
        "its parameters", TransferParams(remote, prompt), read_params(request.kv_transfer_params)
    )
    check_prompt(digests(identity.prompt_of(request), len(PROMPT)), prompt, "the self-test")


def states() -> None:
    """The description of a state arrives as it was written."""
    import torch
    from vllm.v1.kv_cache_interface import MambaSpec

    from vllm_commext.compat import kv_connector

    kv_connector.is_dim_first()
    spec: Any = MambaSpec(
        block_size=BLOCK_TOKENS, shapes=((16, 3), (2, 4, 4)), dtypes=(torch.float32, torch.float32)
    )
    _described(spec, torch.zeros(NUM_BLOCKS, 1, 1, spec.page_size_bytes, dtype=torch.uint8))


def reuse() -> None:
    """A held block is not handed out, and the one that gave one up hears when it is."""
    from vllm.v1.core.block_pool import BlockPool

    pool: Any = BlockPool(4, True, BLOCK_TOKENS)
    held, offered = blocks = pool.get_new_blocks(2)
    pool.touch(blocks)
    pool.free_blocks(blocks)
    _expect("references", [1, 1], [block.ref_cnt for block in blocks])
    told: list[Any] = []
    pool.unpin_blocks([offered], told.append)
    handed_out = pool.get_new_blocks(pool.get_num_free_blocks())
    _expect("a block that is given up", (True, [offered]), (offered in handed_out, told))
    _expect("a block that is held", False, held in handed_out)
