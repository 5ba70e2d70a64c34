"""One of two ranks that take part by themselves, or do not; test_by_itself.py starts it.

    python tests/contract/by_itself_rank.py RANK STORE_FILE

As vLLM has it on two H200s, save that the kernels are stand-ins over gloo: the toggles are at their
defaults, and what the driver would say is said here. Prints as JSON what became of a communicator
and of a norm in each case."""

import dataclasses
import json
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
from torch import distributed

TOKENS, HIDDEN = 2048, 4096
ENDPOINTS = [512, TOKENS]
Change = Callable[[Any], None]


class Seen(logging.Handler):
    """What was logged."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")


def make_config() -> Any:
    """An engine of vLLM's for two ranks of one host, as far as anybody looks at it."""
    from vllm.config import VllmConfig

    config = VllmConfig()
    config.model_config = SimpleNamespace(
        dtype=torch.bfloat16, enforce_eager=False, get_hidden_size=lambda: HIDDEN
    )
    config.scheduler_config.max_num_batched_tokens = TOKENS
    config.parallel_config.tensor_parallel_size = 2
    config.parallel_config.distributed_executor_backend = "mp"
    config.parallel_config.disable_custom_all_reduce = False  # as vLLM for CPUs has it not
    config.compilation_config.compile_ranges_endpoints = list(ENDPOINTS)
    config.compilation_config.cudagraph_mode = SimpleNamespace(name="FULL_AND_PIECEWISE")
    return config


def setting(**fields: Any) -> Change:
    """A change of the engine's parallel configuration."""

    def change(config: Any) -> None:
        for name, value in fields.items():
            assert hasattr(config.parallel_config, name), name
            setattr(config.parallel_config, name, value)

    return change


def without_model(config: Any) -> None:
    config.model_config = None


def eager(config: Any) -> None:
    config.model_config.enforce_eager = True


def without_graphs(config: Any) -> None:
    config.compilation_config.cudagraph_mode = SimpleNamespace(name="NONE")


def with_lora_and_sleep(config: Any) -> None:
    config.lora_config = SimpleNamespace(max_loras=2)
    config.model_config.enable_sleep_mode = True


def unchanged(_: Any) -> None:
    """The engine as it is."""


ENGINES: dict[str, Change] = {
    "proven": unchanged,
    "two nodes": setting(nnodes=2),
    "ray": setting(distributed_executor_backend="ray"),
    "external launcher": setting(distributed_executor_backend="external_launcher"),
    "no model": without_model,
    "eager": eager,
    "no graphs": without_graphs,
    "dbo": setting(enable_dbo=True),
    "microbatches": setting(ubatch_size=2),
    "elastic": setting(enable_elastic_ep=True),
    "no custom all-reduce": setting(disable_custom_all_reduce=True),
    "expert parallel": setting(enable_expert_parallel=True),
    "lora and sleep": with_lora_and_sleep,
}
OTHERS = (*("unknown machine", "multicast", "invariant", "unlike", "crossing table"), "no kernel")


class Stage:
    """Stand-ins for GPUs, and what was done with them."""

    def __init__(self) -> None:
        self.gpu, self.multicast, self.unlike, self.kernel = "NVIDIA H200", False, False, True
        self.bytes: list[int] = []
        self.exchanges = 0

    def install(self) -> None:
        from vllm_commext.allreduce import creation, machine, push
        from vllm_commext.allreduce.fused import kernels
        from vllm_commext.allreduce.machine import Machine
        from vllm_commext.compat import reduce_rms, tp_group
        from vllm_commext.errors import UnsupportedError
        from vllm_commext.reduce_rms.workspace import GroupWorkspace

        stage, read = self, tp_group.read
        gather = distributed.all_gather_object

        def counted(*args: Any, **kwargs: Any) -> None:
            stage.exchanges += 1
            gather(*args, **kwargs)

        distributed.all_gather_object = counted

        def facts(config: Any, device: torch.device) -> Any:
            found = dataclasses.replace(
                read(config, device), gpu=stage.gpu, multicast=stage.multicast
            )
            unlike = stage.unlike and distributed.get_rank() == 1
            return dataclasses.replace(found, hidden=1) if unlike else found

        class Push(push.PushBackend):
            def __init__(self, num_bytes: int, collective: Any) -> None:
                if not stage.kernel:
                    raise UnsupportedError("no peer access")
                stage.bytes.append(num_bytes)
                self._layout = push.PushLayout(2, num_bytes)
                self.memory = SimpleNamespace(destroy=lambda: None)
                self._collective = collective

            def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
                return torch.stack(self._collective.run(lambda: tensor)).sum(dim=0)

        tp_group.read = facts
        creation.push.PushBackend = Push
        kernels.FusedKernels = lambda *_: SimpleNamespace()  # pyright: ignore
        machine.read_machine = lambda _: Machine(stage.gpu, "", "", "", "", "", "")
        reduce_rms._make = lambda _, __, group: GroupWorkspace(group)


@contextmanager
def current(config: Any) -> Iterator[None]:
    import vllm.config

    kept = vllm.config.get_current_vllm_config_or_none
    vllm.config.get_current_vllm_config_or_none = lambda: config
    try:
        yield
    finally:
        vllm.config.get_current_vllm_config_or_none = kept


def crossing_table() -> Any:
    """The fused op comes first above 2 MiB alone, and the all-reduce by itself never."""
    from vllm_commext.allreduce import limits
    from vllm_commext.allreduce.table import Row, Table

    rows = (Row(2 << 20, (limits.UNFUSED, limits.FUSED_PUSH)), Row(1 << 26, (limits.FUSED_PUSH,)))
    return Table(2, {}, "of the test", {"bfloat16": rows})


def patched(communicator: type) -> list[str]:
    """Methods of vLLM's class that are not its own, and what a patch leaves there."""
    from vllm_commext.compat import allreduce
    from vllm_commext.compat.monkey_patch import SENTINEL, original_of

    own = {each.rpartition(".")[2]: original_of(each) for each in allreduce.METHODS}
    left = [SENTINEL] if SENTINEL in vars(communicator) else []
    return [name for name, of in own.items() if getattr(communicator, name) is not of] + left


def run(name: str, stage: Stage, seen: Seen) -> dict[str, Any]:
    """What becomes of a tensor-parallel communicator and of a norm in that case."""
    from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator

    from vllm_commext.allreduce import creation
    from vllm_commext.allreduce.fused import op as fused_op
    from vllm_commext.compat import allreduce, fused_pass, reduce_rms, tp_group
    from vllm_commext.compat.monkey_patch import is_patched, restore, wrap

    stage.__init__()
    stage.gpu = "another GPU" if name == "unknown machine" else stage.gpu
    stage.multicast, stage.unlike = name == "multicast", name == "unlike"
    stage.kernel = name != "no kernel"
    wrap(allreduce.METHODS)  # as where vLLM imports the class
    assert is_patched(f"{allreduce.COMMUNICATOR}.all_reduce")
    config, find_table = make_config(), creation.find_table
    ENGINES.get(name, unchanged)(config)
    if name == "crossing table":
        creation.find_table = lambda *_, **__: crossing_table()
    os.environ["VLLM_BATCH_INVARIANT"] = "1" if name == "invariant" else "0"
    before = dict(os.environ)
    seen.lines.clear()
    group = distributed.new_group(backend="gloo")
    with current(config):
        made = CudaCommunicator(group, torch.device("cpu"), group, "tp:0")
        found: dict[str, Any] = {"exchanges": stage.exchanges}
        norm = reduce_rms.take_part(distributed.get_rank(), 2, group)
    dispatcher = allreduce.dispatcher_of(made)
    rows = [torch.ones(count, HIDDEN, dtype=torch.bfloat16) for count in (1, 2048)]
    served = fused_op.find_group("tp:0")
    found |= {
        "backends": sorted(dispatcher.backends) if dispatcher else None,
        "choices": [dispatcher.choice(each) for each in rows] if dispatcher else None,
        "sum": made.all_reduce(rows[1])[0, 0].item(),
        "bytes": list(stage.bytes),
        "fused": served is not None,
        "patched": patched(CudaCommunicator),
        "pass": is_patched(fused_pass.CONFIGURE),
        "endpoints": config.compilation_config.compile_ranges_endpoints,
        "norm": norm is not None,
        "environ": sorted(key for key in os.environ if os.environ[key] != before.get(key)),
        "log": [line for line in seen.lines if "commext" in line],
    }
    made.destroy()
    reduce_rms._served.clear()
    reduce_rms._told.clear()
    tp_group.forget(group)
    creation.find_table = find_table
    if found["pass"]:
        restore(fused_pass.CONFIGURE)
    return found


def main() -> None:
    from vllm_commext.allreduce import cache
    from vllm_commext.compat import fits

    fits.require_proven_gpus = lambda: None
    cache.IN_ENGINES = frozenset({("NVIDIA H200", 2)})  # whose table has ours first for some
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    seen = Seen()
    logger = logging.getLogger("vllm.commext")
    logger.addHandler(seen)
    logger.setLevel(logging.INFO)
    distributed.init_process_group(
        "gloo", f"file://{sys.argv[2]}", timedelta(seconds=120), world_size=2, rank=int(sys.argv[1])
    )
    stage = Stage()
    stage.install()
    found = {name: run(name, stage, seen) for name in (*ENGINES, *OTHERS)}
    sys.stdout.write("\n" + json.dumps(found) + "\n")
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
