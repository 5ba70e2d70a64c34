"""Engines that read one another's answers, in this process: vLLM's core, and a worker that knows
what it computed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vllm.lora.request import LoRARequest
from vllm.v1.engine import FinishReason
from vllm.v1.request import Request

from tests.contract.scheduled_core import Core, has_ended, request_of, turn_until, written
from tests.kit.descriptions import description
from tests.kit.ports import free_port
from tests.kit.tiny_lora import write_named
from vllm_commext.nixl.metadata import HandshakeMetadata
from vllm_commext.nixl.prefill.fence import GenerationTable
from vllm_commext.nixl.reuse import Run
from vllm_commext.nixl.wire.params import write_place

HOST = "127.0.0.1"
BOUND_SECONDS = 60.0
MOST = 40
"""Tokens of an answer."""


@dataclass
class Engine:
    """An engine with ``reuse_blocks``, and its one worker's table."""

    core: Core
    table: GenerationTable
    port: int
    folder: Path
    counted: Counter[str] = field(default_factory=Counter[str])

    @property
    def place(self) -> dict[str, Any]:
        return write_place(HOST, self.port)

    @property
    def loads(self) -> list[Any]:
        """All that its worker was told to load."""
        return self.core.worker.told

    @property
    def side(self) -> Any:
        return self.core.scheduler.get_kv_connector().scheduler_side  # pyright: ignore

    def ask(self, name: str, tokens: Sequence[int], *others: Engine, **params: Any) -> list[int]:
        """What a request answers beyond these tokens; see ``add``."""
        self.add(name, tokens, *others, **params)
        turn_until(self.core, lambda: has_ended(self.core, name))
        assert self.core.answer(name).finish_reason is not FinishReason.ERROR
        return self.core.answer(name).tokens

    def add(self, name: str, tokens: Sequence[int], *others: Engine, **params: Any) -> None:
        """A request; the last ``answered`` of its tokens are an answer that another engine has
        begun, and that goes on here."""
        kv_params: dict[str, Any] = {"reuse_from": [one.place for one in others]}
        count = len(tokens) - params.get("answered", 0)
        if count < len(tokens):
            kv_params["answer_token_ids"] = list(tokens[count:])
        prompt, sampling = tokens[:count], {"max_tokens": params.get("max_tokens", MOST)}
        self.core.add(changed(request_of(name, prompt, kv_params, **sampling), params, self))


def changed(request: Request, params: dict[str, Any], engine: Engine) -> Request:
    """With the salt or the adapter that the parameters name, which the engine loads from a place
    of its own."""
    request.cache_salt = params.get("salt")
    if "lora" in params:
        path = write_named(engine.folder / f"{engine.port}", params.get("content", "content"))
        lora = LoRARequest(params["lora"], 1, str(path), load_inplace=True)
        engine.side.begin_adapter(lora)()
        request.lora_request, lora.load_inplace = lora, False
    return request


class Writes:
    """What an engine's steps write to. Before each, every block that it writes to has another
    generation than any that was told of with a name before, and is on offer no more."""

    def __init__(self, engine: Engine) -> None:
        self.each: list[set[int]] = []
        self.num_reused = 0
        self._engine = engine
        self._told: dict[int, int] = {}
        self._execute = engine.core.worker.execute
        engine.core.worker.execute = self._check

    def tell(self, run: Run) -> None:
        """These blocks were told of."""
        self._told |= dict(zip(run.block_ids, run.generations, strict=True))

    def _check(self, step: Any) -> Any:
        blocks = written(self._engine.core, step)
        for block in blocks:
            if block in self._told:
                self.num_reused += 1
                assert int(self._engine.table.generations[block]) != self._told.pop(block)
            assert block not in self._engine.side._reuse._offers._table._hash_of
        self.each.append(blocks)
        return self._execute(step)


def start(folder: Path, role: str, **settings: Any) -> Engine:
    """An engine of the model, with what its worker loads and its scheduler side counts noted."""
    port = free_port(HOST)
    values: dict[str, Any] = {
        "reuse_blocks": True,
        "reuse_lookup_timeout": BOUND_SECONDS,
        **settings,
    }
    core = Core(folder, role, side_channel_port=port, **values)
    num_blocks = core.scheduler.kv_cache_manager.block_pool.num_gpu_blocks
    one = Engine(core, GenerationTable(num_blocks, 4), port, folder)
    metadata = HandshakeMetadata(description("o"), one.table.offer)
    one.side.serve({(0, 0): metadata})
    take_stats = one.side.take_stats

    def count() -> Any:
        stats = take_stats()
        for name, value in (stats or {}).items():
            if name.startswith("reuse_") and value:
                one.counted[name] += value
        return stats

    one.side.take_stats = count
    return one
