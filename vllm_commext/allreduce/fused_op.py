"""``torch.ops.vllm_commext.all_reduce_add_rms_norm``: sum over ranks, residual and RMSNorm.

    all_reduce_add_rms_norm(x, residual, weight, eps, group, epilogue, scale, weight_bias)
        -> (out, residual_out, scales)

A group's kernels serve it where there are some and they are ready, else the same steps one after
the other. Both round at the same places. All ranks make the same calls in the same order.
"""

import logging
from collections.abc import Callable

import torch

from vllm_commext.allreduce import fused_layout
from vllm_commext.allreduce.fused import FusedKernels, Outputs, make_outputs
from vllm_commext.allreduce.fused_layout import (
    EPILOGUES,
    GROUP,
    GROUP_FP8,
    NORM,
    ROW_FP8,
    STATIC_FP8,
    FusedShape,
)
from vllm_commext.allreduce.message import PACK_BYTES
from vllm_commext.errors import ConfigError, UnsupportedError

logger = logging.getLogger("vllm.commext.allreduce")

NAMESPACE = "vllm_commext"
MAX_FP8 = 448.0
MIN_ROW_SCALE, MIN_GROUP_LARGEST = 1.0 / (MAX_FP8 * 512.0), 1e-10
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_groups: "dict[str, FusedNorm]" = {}


def steps(
    shape: FusedShape,
    summed: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    scale: torch.Tensor | None,
) -> Outputs:
    """What the kernels make of the sum over ranks, one step after the other."""
    z = summed if residual is None else (summed.float() + residual.float()).to(summed.dtype)
    wide = z.float()
    factor = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    out = (wide * factor * (weight.float() + shape.weight_bias)).to(z.dtype)
    if shape.epilogue == NORM:
        return Outputs(out, z, make_outputs(shape, z, scale).scales)
    return _quantised(shape, out.float(), z, scale)


def _quantised(
    shape: FusedShape, wide: torch.Tensor, z: torch.Tensor, scale: torch.Tensor | None
) -> Outputs:
    if shape.epilogue == STATIC_FP8:
        assert scale is not None
        return Outputs(_fp8(wide * (1.0 / scale)), z, torch.empty_like(scale))
    if shape.epilogue == ROW_FP8:
        scales = (wide.abs().amax(1, keepdim=True) / MAX_FP8).clamp(min=MIN_ROW_SCALE)
        return Outputs(_fp8(wide / scales), z, scales)
    groups = wide.unflatten(1, (-1, GROUP))
    scales = groups.abs().amax(2).clamp(min=MIN_GROUP_LARGEST) / MAX_FP8
    return Outputs(_fp8(groups / scales[:, :, None]).view(z.shape), z, scales)


def _fp8(wide: torch.Tensor) -> torch.Tensor:
    return wide.clamp(-MAX_FP8, MAX_FP8).to(torch.float8_e4m3fn)


class FusedNorm:
    """What serves the op for one group.

    Args:
        world_size: ranks of the group.
        all_reduce: the sum over ranks in a fresh tensor.
        kernels: the group's, or None where it can have none.
    """

    def __init__(
        self,
        world_size: int,
        all_reduce: Callable[[torch.Tensor], torch.Tensor],
        kernels: FusedKernels | None,
    ) -> None:
        self.world_size, self._all_reduce, self._kernels = world_size, all_reduce, kernels
        self._usable: dict[FusedShape, bool] = {}

    def run(
        self,
        shape: FusedShape,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        scale: torch.Tensor | None,
    ) -> Outputs:
        """One launch, or one step after the other."""
        form = fused_layout.choose(shape, len(x), self.world_size)
        kernels = self._kernels if len(x) and self._is_ready(shape, x) else None
        if kernels is not None and kernels.fits(shape, form, len(x)):
            x, weight = plain(x), plain(weight)
            residual = None if residual is None else plain(residual)
            return kernels.run(shape, form, x, residual, weight, eps, scale)
        return steps(shape, self._all_reduce(x), residual, weight, eps, scale)

    def _is_ready(self, shape: FusedShape, x: torch.Tensor) -> bool:
        """Whether the kernels of a shape are loaded on all ranks; loads them if it may."""
        if shape in self._usable or self._kernels is None:
            return self._usable.get(shape, False)
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            return False
        try:
            self._kernels.prepare(shape, fused_layout.forms(shape, self.world_size))
        except UnsupportedError as error:
            logger.warning("commext: allreduce: no fused norm for %s: %s", shape, error)
            self._usable[shape] = False
        else:
            self._usable[shape] = True
        return self._usable[shape]


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where a kernel can take it, else a copy."""
    if tensor.is_contiguous() and tensor.data_ptr() % PACK_BYTES == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def register_group(name: str, norm: FusedNorm) -> None:
    """Serve the op's calls for a group's name from now on."""
    _groups[name] = norm


def forget_group(name: str) -> None:
    """Serve them no longer; a second call changes nothing."""
    _groups.pop(name, None)


def _shape(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    epilogue: str,
    scale: torch.Tensor | None,
    weight_bias: int,
) -> FusedShape:
    hidden = x.shape[-1]
    if x.dim() != 2 or weight.shape != (hidden,):
        raise ConfigError(
            f"expected [rows, hidden] and [hidden], got {list(x.shape)} and {list(weight.shape)}"
        )
    if residual is not None and (residual.shape, residual.dtype) != (x.shape, x.dtype):
        raise ConfigError(
            f"expected a residual as the input, {list(x.shape)} of {x.dtype}, got "
            f"{list(residual.shape)} of {residual.dtype}"
        )
    if epilogue not in EPILOGUES:
        raise ConfigError(f"expected one of {', '.join(EPILOGUES)}, got {epilogue!r}")
    code = EPILOGUES.index(epilogue)
    if code == STATIC_FP8 and (scale is None or scale.numel() != 1):
        raise ConfigError("expected one float32 as the scale of fp8_static, got none or several")
    if code == GROUP_FP8 and hidden % GROUP:
        raise ConfigError(f"expected whole groups of {GROUP} elements, got rows of {hidden}")
    dtype, weight_dtype = (str(each.dtype).removeprefix("torch.") for each in (x, weight))
    return FusedShape(dtype, weight_dtype, hidden, residual is not None, weight_bias, code)


def all_reduce_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    group: str,
    epilogue: str = "norm",
    scale: torch.Tensor | None = None,
    weight_bias: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What the op does, without what torch's dispatcher costs; for callers that no compiler traces.

    Args:
        x: [rows, hidden], this rank's part of the sum: bfloat16, float16 or float32.
        residual: as `x`, the same on all ranks, or None.
        weight: [hidden] of any of the three types.
        eps: added to the mean square.
        group: whose kernels and sum serve it, as `register_group` was told.
        epilogue: of `EPILOGUES`: what `out` is.
        scale: float32, one number, for ``fp8_static``.
        weight_bias: added to each weight, 1 for Gemma's norm.

    Returns:
        [rows, hidden] in x's dtype or float8_e4m3fn; the sum plus the residual in x's dtype; and
        float32 scales, [rows, 1] for ``fp8_row``, [rows, hidden / 128] for ``fp8_group``, else
        without elements. All are new.

    Raises:
        ConfigError: a shape is wrong, or the group is not known.
    """
    shape = _shape(x, residual, weight, epilogue, scale, weight_bias)
    norm = _groups.get(group)
    if norm is None:
        raise ConfigError(f"expected one of the groups {sorted(_groups)}, got {group!r}")
    out, z, scales = norm.run(shape, x, residual, weight, eps, scale)
    # An op must return no input: with a given scale there is none to return.
    return out, z, scales if shape.epilogue != STATIC_FP8 else scales.new_empty(0)


def _fake(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    group: str,
    epilogue: str = "norm",
    scale: torch.Tensor | None = None,
    weight_bias: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    del eps, group
    shape = _shape(x, residual, weight, epilogue, scale, weight_bias)
    out, z, scales = make_outputs(shape, x, scale)
    return out, z, scales if shape.epilogue != STATIC_FP8 else scales.new_empty(0)


_library.define(
    "all_reduce_add_rms_norm(Tensor x, Tensor? residual, Tensor weight, float eps, str group,"
    ' str epilogue="norm", Tensor? scale=None, int weight_bias=0) -> (Tensor, Tensor, Tensor)',
    tags=(torch.Tag.pt2_compliant_tag,),
)
for _key in ("CPU", "CUDA"):
    _library.impl("all_reduce_add_rms_norm", all_reduce_add_rms_norm, _key)
torch.library.register_fake(f"{NAMESPACE}::all_reduce_add_rms_norm", _fake, lib=_library)
