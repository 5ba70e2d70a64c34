"""One engine's scheduler side, with vLLM's own requests, cache manager and block pool."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.config import KVTransferConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.platforms import current_platform
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheSpec,
    MambaSpec,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

from tests.kit.parity import PREFILL_PARAMS
from vllm_commext.nixl.connector import CommextNixlConnector
from vllm_commext.nixl.identity import Identity
from vllm_commext.nixl.metadata import StepMetadata
from vllm_commext.nixl.requests import RemoteRequest
from vllm_commext.nixl.wire.params import TransferParams, write_params
from vllm_commext.nixl.wire.prompt import digests

BLOCK = 4
NUM_BLOCKS = 60
MAX_TOKENS = 128
TO_PREFILL = dict(PREFILL_PARAMS)
REMOTE_IDS = [[31, 7, 5, 22]]
FULL_SPEC = FullAttentionSpec(BLOCK, num_kv_heads=1, head_size=8, dtype=torch.float32)
# One block a request, as vLLM keeps a state without prefix caching.
STATE_SPEC = MambaSpec(
    block_size=MAX_TOKENS, shapes=((8, 3), (2, 4, 8)), dtypes=(torch.float32,) * 2
)


def cache_of(specs: Sequence[KVCacheSpec], drafts: Sequence[int] = ()) -> KVCacheConfig:
    """A cache of groups of one layer each, of which ``drafts`` hold layers of an EAGLE draft."""
    groups = [KVCacheGroupSpec([f"layer{number}"], spec) for number, spec in enumerate(specs)]
    for number in drafts:
        groups[number].is_eagle_group = True
    return KVCacheConfig(NUM_BLOCKS, kv_cache_tensors=[], kv_cache_groups=groups)


class Engine:
    """One engine's connector and cache, driven in the scheduler's order; ``extra`` is the
    connector's ``kv_connector_extra_config``."""

    def __init__(
        self,
        role: str,
        specs: Sequence[KVCacheSpec] = (FULL_SPEC,),
        drafts: Sequence[int] = (),
        *,
        hybrid: bool = False,
        **extra: Any,
    ) -> None:
        init_none_hash(sha256)
        transfer = KVTransferConfig(
            kv_connector="CommextNixlConnector",
            kv_connector_module_path="vllm_commext.nixl.connector",
            kv_role=role,
            engine_id="e",
            kv_buffer_device=current_platform.device_type,
            kv_connector_extra_config={
                "side_channel_host": "h",
                "side_channel_port": 7000,
                "stream_chunks": False,  # nothing here says how long prompts can be
                **extra,
            },
        )
        cache = cache_of((*specs, STATE_SPEC) if hybrid else specs, drafts)
        caches_prefixes = not hybrid and STATE_SPEC not in specs
        self.connector = CommextNixlConnector(
            VllmConfig(kv_transfer_config=transfer), KVConnectorRole.SCHEDULER, cache
        )
        self.manager = KVCacheManager(
            cache,
            max_model_len=MAX_TOKENS,
            scheduler_block_size=BLOCK if caches_prefixes else MAX_TOKENS,
            hash_block_size=BLOCK,
            enable_caching=caches_prefixes,
            use_eagle=bool(drafts),
        )
        self.connector.bind_gpu_block_pool(self.manager.block_pool)
        self.fence_key = self.step().fence_key

    @property
    def num_free(self) -> int:
        return self.manager.block_pool.get_num_free_blocks()

    def prefill(self, request: Request) -> None:
        """Compute the whole prompt here."""
        self.connector.on_new_request(request)
        hit, num_hit = self.manager.get_computed_blocks(request)[:2]
        self.manager.allocate_slots(request, request.num_prompt_tokens - num_hit, num_hit, hit)
        request.num_computed_tokens = request.num_prompt_tokens

    def schedule(self, request: Request) -> tuple[int, int]:
        """Offer the request to the connector; (local hit, tokens to load)."""
        self.connector.on_new_request(request)
        hit, num_hit = self.manager.get_computed_blocks(request)[:2]
        asked = [self.connector.get_num_new_matched_tokens(request, num_hit) for _ in range(2)]
        assert asked[0] == asked[1]
        num_external, is_async = asked[0]
        assert num_external is not None
        assert is_async == (num_external > 0)
        self.allocate(request, hit, num_hit, num_external)
        for tokens in (num_external, 0):  # vLLM calls again once the load has ended
            blocks = self.manager.get_blocks(request.request_id)
            self.connector.update_state_after_alloc(request, blocks, tokens)
        return num_hit, num_external

    def allocate(self, request: Request, hit: Any, num_hit: int, num_external: int) -> None:
        """Blocks for what is to be loaded, else for all that is to be computed."""
        self.manager.allocate_slots(
            request,
            0 if num_external else request.num_tokens - num_hit,
            num_new_computed_tokens=num_hit,
            new_computed_blocks=hit,
            num_external_computed_tokens=num_external,
            delay_cache_blocks=num_external > 0,
        )

    def finish(self, request: Request, status: RequestStatus) -> tuple[bool, dict[str, Any] | None]:
        request.status = status
        ids = self.manager.get_block_ids(request.request_id)
        return self.connector.request_finished_all_groups(request, ids)

    def step(self) -> StepMetadata:
        meta = self.connector.build_connector_meta(None)  # pyright: ignore[reportArgumentType]
        assert isinstance(meta, StepMetadata)
        return meta

    def report(self, **output: Any) -> None:
        self.connector.update_connector_output(KVConnectorOutput(**output))

    def block_ids(self, request: Request) -> list[int]:
        return list(self.manager.get_block_ids(request.request_id)[0])


def request_of(
    request_id: str,
    params: Mapping[str, Any] | None = None,
    tokens: list[int] | None = None,
    **inputs: Any,
) -> Request:
    """A request for one token after ``tokens``, else after those from 0 to 13; ``inputs`` go to
    vLLM's ``Request``."""
    extra = {"kv_transfer_params": dict(params)} if params is not None else None
    return Request(
        request_id,
        list(range(14)) if tokens is None else list(tokens),
        SamplingParams(max_tokens=1, extra_args=extra),
        None,
        block_hasher=get_request_block_hasher(BLOCK, sha256),
        **inputs,
    )


def to_decode(num_tokens: int = 14, **changes: Any) -> dict[str, Any]:
    """What a prefill engine returns for ``request_of``'s prompt, its first ``num_tokens`` computed;
    ``changes`` are laid over it."""
    remote = RemoteRequest(
        engine_id="p",
        incarnation="",
        host="127.0.0.1",
        port=5600,
        tp_size=1,
        request_id="there",
        block_ids=tuple(map(tuple, REMOTE_IDS)),
        num_tokens=num_tokens,
        fence_slot=7,
        fence_nonce=255,
    )
    prompt = digests(Identity().prompt_of(request_of("there")), num_tokens)
    return {**write_params(TransferParams(remote, prompt)), **changes}
