"""Our wrapper of FlashInfer, against a module that stands in for it: no GPU is here to run it."""

import random
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed

from vllm_commext.allreduce import flashinfer as backend_module
from vllm_commext.allreduce import machine
from vllm_commext.allreduce.flashinfer import FlashInferBackend, Workspaces, check_flashinfer
from vllm_commext.allreduce.limits import Message
from vllm_commext.errors import UnsupportedError

GROUP: Any = SimpleNamespace(group_name="tp")


class Stub:
    def __init__(self, version: str = "0.7.0.post1") -> None:
        self.created: list[dict[str, Any]] = []
        self.calls: list[dict[str, Any]] = []
        self.forgotten: list[Any] = []
        self.destroyed = 0
        self.package, self.comm, self.trtllm = (
            ModuleType(name)
            for name in ("flashinfer", "flashinfer.comm", "flashinfer.comm.trtllm_ar")
        )
        vars(self.package)["__version__"] = version
        vars(self.comm).update(
            AllReduceFusionPattern=SimpleNamespace(kAllReduce=0, kARResidualRMSNorm=1),
            create_allreduce_fusion_workspace=self.create,
            allreduce_fusion=self.reduce,
        )
        vars(self.trtllm).update(
            get_trtllm_comm_module=lambda: None,
            trtllm_destroy_ipc_workspace_for_all_reduce_fusion=self.forgotten.append,
        )

    def create(self, **options: Any) -> Any:
        random.random()
        self.created.append(options)
        return SimpleNamespace(ipc_handles=[len(self.created)], destroy=self.destroy)

    def destroy(self) -> None:
        self.destroyed += 1

    def reduce(self, **options: Any) -> torch.Tensor:
        self.calls.append(options)
        return options["input"].clone()


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> Stub:
    made = Stub()
    for module in (made.package, made.comm, made.trtllm):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(distributed, "get_world_size", lambda _=None: 2)
    monkeypatch.setattr(distributed, "get_rank", lambda _=None: 0)
    monkeypatch.setattr(backend_module, "_check_memory", lambda _: None)
    monkeypatch.setattr(
        distributed,
        "all_gather_object",
        lambda everybody, mine, group: everybody.__setitem__(slice(None), [mine] * 2),
    )
    return made


def backend() -> FlashInferBackend:
    return FlashInferBackend(GROUP, workspaces=Workspaces())


def test_a_flashinfer_that_is_missing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(UnsupportedError, match="cannot be imported"):
        check_flashinfer()
    assert not backend_module.is_compiled()


@pytest.mark.parametrize("version", ["0.6.15.post1", "0.6.14", "0.0.0+unknown"])
def test_one_that_would_need_multicast_is_refused(stub: Stub, version: str) -> None:
    vars(stub.package)["__version__"] = version
    with pytest.raises(UnsupportedError, match=r"0\.6\.16 or newer"):
        check_flashinfer()


def test_one_without_a_compiler_is_refused(stub: Stub) -> None:
    def compile_() -> None:
        raise RuntimeError("nvcc not found\nmany more lines")

    vars(stub.trtllm)["get_trtllm_comm_module"] = compile_
    with pytest.raises(UnsupportedError, match="nvcc not found$"):
        check_flashinfer()


def test_the_workspace_is_trtllms_by_name_and_leaves_random_numbers_alone(stub: Stub) -> None:
    ours = backend()
    state = random.getstate()
    ours.prepare(Message((3, 4096), "bfloat16"))
    assert random.getstate() == state
    (options,) = stub.created
    assert options["backend"] == "trtllm"
    assert options["hidden_dim"] == 4096
    assert options["dtype"] is torch.bfloat16
    assert (options["world_size"], options["rank"]) == (2, 0)
    assert options["max_token_num"] * 4096 * 2 == backend_module.MAX_MESSAGE_BYTES


def test_there_is_one_for_each_dtype_class_and_hidden_size(stub: Stub) -> None:
    ours = backend()
    for dtype in ("bfloat16", "float16", "float32", "bfloat16"):
        for hidden in (4096, 8192):
            ours.prepare(Message((1, hidden), dtype))
            assert ours.is_ready(Message((1, hidden), dtype))
    assert len(stub.created) == 4
    ours.destroy()
    assert (stub.destroyed, len(stub.forgotten)) == (4, 4)
    assert not ours.is_ready(Message((1, 4096), "bfloat16"))


def test_what_it_cannot_take_creates_nothing(stub: Stub) -> None:
    ours = backend()
    for message in (
        *(Message((4096,), "bfloat16"), Message((1, 1, 4096), "bfloat16"), Message((), "float32")),
        *(Message((3, 7), "bfloat16"), Message((3, 0), "bfloat16"), Message((3, 8), "int8")),
    ):
        ours.prepare(message)
        assert not ours.takes(message)
    assert not stub.created


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_calls_end_before_the_next_begins_and_add_in_float32(
    stub: Stub, dtype: torch.dtype
) -> None:
    ours = backend()
    ours.prepare(Message((1, 64), str(dtype).removeprefix("torch.")))
    ours.all_reduce(torch.zeros(5, 64, dtype=dtype))
    (call,) = stub.calls
    assert (call["use_oneshot"], call["trigger_completion_at_end"]) == (True, True)
    assert call["fp32_acc"] == (dtype is not torch.float32)


def test_the_norm_comes_by_the_one_shot_kernel_into_new_tensors(stub: Stub) -> None:
    ours = backend()
    tensor, residual = torch.zeros(5, 64), torch.ones(5, 64)
    ours.prepare(Message((1, 64), "float32"))
    out, new = ours.add_norm(tensor, residual, torch.ones(64), 1e-5)
    (call,) = stub.calls
    assert call["norm_out"] is out
    assert call["residual_out"] is new
    assert call["residual_in"] is residual
    assert (call["use_oneshot"], call["trigger_completion_at_end"]) == (True, True)


def test_keeping_multicast_off_leaves_what_is_set() -> None:
    environ = {"NCCL_NVLS_ENABLE": "1"}
    machine.keep_off_multicast(environ)
    assert environ == {**machine.NO_MULTICAST, "NCCL_NVLS_ENABLE": "1"}
    assert environ["VLLM_FLASHINFER_ALLREDUCE_BACKEND"] == "trtllm"
