"""The op on a CPU: the reference, and what the compiler sees; ranks: tests/contract."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from vllm_commext.errors import ConfigError
from vllm_commext.reduce_rms import ops as _ops  # noqa: F401 - registers the op
from vllm_commext.reduce_rms.workspace import GroupWorkspace, find

EPS, Q, KV = 1e-6, 48, 16
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
OPS = torch.ops.vllm_commext


@pytest.fixture
def workspace() -> Iterator[GroupWorkspace]:
    made = GroupWorkspace()
    yield made
    made.cleanup()


def rows_and_weights(
    tokens: int, dtype: torch.dtype = torch.float32, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    sizes = ((tokens, Q + 2 * KV), (Q,), (KV,))
    qkv, q_weight, k_weight = (torch.randn(*size, generator=random).to(dtype) for size in sizes)
    return qkv, q_weight, k_weight


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x.double(), (x.shape[-1],), weight.double(), EPS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("tokens", [0, 1, 7])
def test_one_rank_is_torchs_own_norm(
    workspace: GroupWorkspace, tokens: int, dtype: torch.dtype
) -> None:
    qkv, q_weight, k_weight = rows_and_weights(tokens, dtype)
    q, k = OPS.qk_rms_norm(qkv, q_weight, k_weight, workspace.handle, EPS)
    for out, part, weight in ((q, qkv[:, :Q], q_weight), (k, qkv[:, Q : Q + KV], k_weight)):
        assert (out.dtype, out.is_contiguous()) == (dtype, True)
        expected = norm(part, weight).to(dtype)
        torch.testing.assert_close(out, expected, rtol=torch.finfo(dtype).eps * 2, atol=1e-6)


def test_torchs_own_check_of_an_op(workspace: GroupWorkspace) -> None:
    torch.library.opcheck(OPS.qk_rms_norm, (*rows_and_weights(5), workspace.handle, EPS))


def test_the_compiler_takes_it_whole_with_any_number_of_tokens(workspace: GroupWorkspace) -> None:
    _, q_weight, k_weight = rows_and_weights(1)
    graphs: list[Any] = []

    def layer(x: torch.Tensor) -> torch.Tensor:
        q, k = OPS.qk_rms_norm(x * 2, q_weight, k_weight, workspace.handle, EPS)
        return q.sum() + k.sum()

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    for tokens in (9, 3, 27):
        qkv, _, _ = rows_and_weights(tokens)
        torch.testing.assert_close(compiled(qkv), layer(qkv))
    assert len(graphs) == 1


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"qkv": torch.zeros(3)}, "expected rows"),
        ({"qkv": torch.zeros(3, Q)}, "at least 64"),
        ({"k_weight": torch.zeros(KV, 1)}, "expected weights"),
        ({"workspace": 987654}, "live workspace"),
    ],
)
def test_wrong_arguments(workspace: GroupWorkspace, change: dict[str, Any], expected: str) -> None:
    qkv, q_weight, k_weight = rows_and_weights(3)
    given = {"qkv": qkv, "q_weight": q_weight, "k_weight": k_weight}
    with pytest.raises(ConfigError, match=expected):
        OPS.qk_rms_norm(**{**given, "workspace": workspace.handle, "eps": EPS, **change})


def test_workspaces_are_numbered_as_they_are_made() -> None:
    first, second = GroupWorkspace(), GroupWorkspace()
    assert second.handle == first.handle + 1
    handle = second.handle
    del second
    with pytest.raises(ConfigError, match="live workspace"):
        find(handle)
