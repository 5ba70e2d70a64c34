"""``torch.ops.vllm_commext.qk_rms_norm``: a functional op, on GPUs and on CPUs.

    qk_rms_norm(qkv, q_weight, k_weight, workspace, eps) -> (q, k)     Q and K of a packed row

It takes a rank's shard of the rows and of the weights and returns the shard of the RMSNorm of the
whole rows, new and contiguous. `workspace` is the handle of a `LamportWorkspace`, or of a
`GroupWorkspace`, which adds the sums by an all-reduce. All ranks make the same calls, with
the same number of tokens, in the same order.
"""

import ctypes
from dataclasses import replace

import torch

from vllm_commext.errors import ConfigError
from vllm_commext.reduce_rms.kernel import PACK_BYTES, Kernels, Shape, make_arguments
from vllm_commext.reduce_rms.workspace import GroupWorkspace, LamportWorkspace, find

NAMESPACE = "vllm_commext"
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_kernels = Kernels()
Parts = tuple[torch.Tensor, ...]


def _check(rows: torch.Tensor, columns: int, weights: Parts) -> None:
    if rows.dim() != 2 or rows.shape[1] < columns:
        raise ConfigError(
            f"expected rows [tokens, at least {columns}], got shape {tuple(rows.shape)}"
        )
    for weight in weights:
        if weight.dim() != 1:
            raise ConfigError(f"expected weights [size], got shape {tuple(weight.shape)}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _aligned(parts: Parts, weights: Parts) -> bool:
    starts = all(tensor.data_ptr() % PACK_BYTES == 0 for tensor in (*parts, *weights))
    strides = all(part.stride(0) * part.element_size() % PACK_BYTES == 0 for part in parts)
    return starts and strides


def _shape(workspace: LamportWorkspace, parts: Parts, weights: Parts) -> Shape:
    if len({weight.dtype for weight in weights}) > 1:
        raise ConfigError(f"expected weights of one type, got {[w.dtype for w in weights]}")
    return Shape(
        dtype=_name(parts[0].dtype),
        weight_dtype=_name(weights[0].dtype),
        world_size=workspace.world_size,
        q_size=weights[0].numel(),
        k_size=weights[1].numel(),
        aligned=_aligned(parts, weights),
    )


def _arguments(
    workspace: LamportWorkspace, parts: Parts, weights: Parts, outs: Parts, eps: float
) -> ctypes.Structure:
    ranks = workspace.world_size
    q, k = parts
    return make_arguments(
        q=q.data_ptr(),
        k=k.data_ptr(),
        q_weight=weights[0].data_ptr(),
        k_weight=weights[1].data_ptr(),
        q_out=outs[0].data_ptr(),
        k_out=outs[1].data_ptr(),
        workspace=workspace.words_ptr,
        states=workspace.states_ptr,
        rank=workspace.rank,
        q_stride=q.stride(0),
        k_stride=k.stride(0),
        timeout_ns=workspace.timeout_ns,
        num_tokens=q.shape[0],
        q_scale=1.0 / (weights[0].numel() * ranks),
        k_scale=1.0 / (weights[1].numel() * ranks),
        eps=eps,
    )


def _advance(arguments: ctypes.Structure, parts: Parts, outs: Parts, num_tokens: int) -> None:
    row_bytes = [part.stride(0) * part.element_size() for part in parts]
    out_bytes = [out.stride(0) * out.element_size() for out in outs]
    arguments.q += num_tokens * row_bytes[0]
    arguments.k += num_tokens * row_bytes[1]
    arguments.q_out += num_tokens * out_bytes[0]
    arguments.k_out += num_tokens * out_bytes[1]


def _prepare(workspace: LamportWorkspace, shape: Shape) -> None:
    """Load a shape on all ranks, aligned and not, in which ranks may differ."""
    both = [replace(shape, aligned=aligned) for aligned in (True, False)]
    workspace.prepare(both, lambda: [_kernels.load(each, workspace.device) for each in both])


def _launch(workspace: LamportWorkspace, parts: Parts, weights: Parts, eps: float) -> Parts:
    workspace.raise_if_failed()
    parts = tuple(part if part.stride(-1) == 1 else part.contiguous() for part in parts)
    weights = tuple(weight.contiguous() for weight in weights)
    outs = tuple(
        torch.empty((part.shape[0], part.shape[1]), dtype=part.dtype, device=part.device)
        for part in parts
    )
    left = parts[0].shape[0]
    if left == 0:
        return outs
    shape = _shape(workspace, parts, weights)
    arguments = _arguments(workspace, parts, weights, outs, eps)
    with torch.cuda.device(workspace.device.ordinal):
        if shape not in workspace.ready:
            _prepare(workspace, shape)
        kernel = _kernels.get(shape, left, workspace.device, workspace.batch_invariant)
        stream = torch.cuda.current_stream().cuda_stream
        while True:
            arguments.num_tokens = min(left, workspace.max_tokens_per_launch)
            kernel.launch(arguments, stream)
            left -= arguments.num_tokens
            if left == 0:
                return outs
            _advance(arguments, parts, outs, arguments.num_tokens)


def _normalize(parts: Parts, weights: Parts, handle: int, eps: float) -> Parts:
    """Heads that several ranks replicate count as often as they stand there, which leaves the mean
    as it is."""
    workspace = find(handle)
    if isinstance(workspace, LamportWorkspace):
        return _launch(workspace, parts, weights, eps)
    if not isinstance(workspace, GroupWorkspace):
        raise ConfigError(f"expected a workspace that adds sums, got {type(workspace).__name__}")
    sums = [part.float().square().sum(-1) for part in parts]
    totals = workspace.sum_over_ranks(torch.stack(sums))  # [parts, tokens], float32
    found: list[torch.Tensor] = []
    for part, weight, total in zip(parts, weights, totals, strict=True):
        count = weight.numel() * workspace.world_size
        factor = torch.rsqrt(total / count + eps).unsqueeze(-1)
        found.append((part.float() * factor * weight.float()).to(part.dtype).contiguous())
    return tuple(found)


def qk_rms_norm(
    qkv: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, workspace: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """As ``torch.ops.vllm_commext.qk_rms_norm``, for callers that no compiler traces: without what
    torch's dispatcher costs.

    Takes [tokens, Q + K or more], rows with any stride, and this rank's shards of the weights, [Q]
    and [K]; returns [tokens, Q] and [tokens, K], new and contiguous. Raises ConfigError, and the
    error of an earlier call, as `LamportWorkspace.raise_if_failed`."""
    q_size, k_size = q_weight.shape[0], k_weight.shape[0]
    _check(qkv, q_size + k_size, (q_weight, k_weight))
    parts = (qkv[:, :q_size], qkv[:, q_size : q_size + k_size])
    q, k = _normalize(parts, (q_weight, k_weight), workspace, eps)
    return q, k


def _fake(
    qkv: torch.Tensor, q_weight: torch.Tensor, k_weight: torch.Tensor, workspace: int, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    del workspace, eps
    q, k = (qkv.new_empty((qkv.shape[0], weight.shape[0])) for weight in (q_weight, k_weight))
    return q, k


_library.define(
    "qk_rms_norm(Tensor qkv, Tensor q_weight, Tensor k_weight, int workspace, float eps)"
    " -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
for _key in ("CPU", "CUDA"):
    _library.impl("qk_rms_norm", qk_rms_norm, _key)
torch.library.register_fake(f"{NAMESPACE}::qk_rms_norm", _fake, lib=_library)
