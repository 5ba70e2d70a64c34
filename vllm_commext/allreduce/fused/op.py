"""``torch.ops.vllm_commext.all_reduce_add_rms_norm``: sum over ranks, residual and RMSNorm.

    all_reduce_add_rms_norm(x, residual, weight, eps, group, epilogue, scale, weight_bias,
                            next_weight) -> (out, residual_out, scales)

By a table of measurements a call goes to our kernels, where all ranks have them, or to the
all-reduce and the rest, one after the other. All ranks make the same calls in the same order.
"""

import logging
from collections import Counter
from collections.abc import Callable

import torch

from vllm_commext.allreduce import limits
from vllm_commext.allreduce.dispatcher import FusedPolicy
from vllm_commext.allreduce.fused.kernels import Operands, Outputs, PushFused, make_outputs
from vllm_commext.allreduce.fused.layout import (
    EPILOGUES,
    GROUP,
    GROUP_FP8,
    NORM,
    ROW_FP8,
    STATIC_FP8,
    FusedShape,
)
from vllm_commext.errors import ConfigError, UnsupportedError

logger = logging.getLogger("vllm.commext.allreduce")

NAMESPACE = "vllm_commext"
MAX_FP8 = 448.0
MIN_ROW_SCALE, MIN_GROUP_LARGEST = 1.0 / (MAX_FP8 * 512.0), 1e-10
_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_groups: "dict[str, FusedNorm]" = {}
Apart = Callable[[Operands], Outputs]


def steps(given: Operands) -> Outputs:
    """Compute what the kernels make of the sum over ranks, `x`, one step after the other."""
    shape, summed, residual, weight, eps, scale, _ = given
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
        scales = _over_largest(wide.abs().amax(1, keepdim=True)).clamp(min=MIN_ROW_SCALE)
        return Outputs(_fp8(wide / scales), z, scales)
    groups = wide.unflatten(1, (-1, GROUP))
    scales = make_outputs(shape, z, scale).scales
    scales.copy_(_over_largest(groups.abs().amax(2).clamp(min=MIN_GROUP_LARGEST)))
    return Outputs(_fp8(groups / scales[:, :, None]).view(z.shape), z, scales)


def _over_largest(largest: torch.Tensor) -> torch.Tensor:
    """Divide as the kernels do; on GPUs torch multiplies where it divides by a Python number, and
    the last bit may be another."""
    return largest / torch.full_like(largest, MAX_FP8)


def _fp8(wide: torch.Tensor) -> torch.Tensor:
    return wide.clamp(-MAX_FP8, MAX_FP8).to(torch.float8_e4m3fn)


class FusedNorm:
    """Server of the op for one group: our kernels, None where it has none, or what serves the sum
    over ranks and the rest one after the other. The policy is the same on all ranks.

    Attributes:
        calls: by the name of who served them. Under CUDA graphs a call counts where it is captured.
    """

    def __init__(self, apart: Apart, ours: PushFused | None, policy: FusedPolicy) -> None:
        self._apart, self._ours, self.policy = apart, ours, policy
        self._is_ready: dict[FusedShape, bool] = {}
        self.calls: Counter[str] = Counter()

    def run(self, given: Operands) -> Outputs:
        shape, x = given.shape, given.x
        ours = self._usable(shape, x)
        ranking = self.policy.ranking(x.numel() * x.itemsize, shape.dtype)
        known = (name for name in ranking if name in (limits.FUSED_PUSH, limits.UNFUSED))
        if ours is not None and next(known, limits.UNFUSED) == limits.FUSED_PUSH:
            self.calls[limits.FUSED_PUSH] += 1
            return ours.run(given)
        self.calls[limits.UNFUSED] += 1
        return self._apart(given)

    def _usable(self, shape: FusedShape, x: torch.Tensor) -> PushFused | None:
        """Our kernels, where they are ready on all ranks and take the rows. They are prepared
        at a shape's first call, which is often vLLM's largest: a capture would come too late."""
        ours = self._ours
        if ours is None or not len(x):
            return None
        if shape not in self._is_ready:
            if x.is_cuda and torch.cuda.is_current_stream_capturing():
                if self.policy.forced:  # as for batch invariance: what began apart stays apart
                    self._is_ready[shape] = False
                return None
            self._is_ready[shape] = is_prepared(ours, shape)
        return ours if self._is_ready[shape] and ours.takes(shape, len(x)) else None


def is_prepared(backend: PushFused, shape: FusedShape) -> bool:
    """Prepare a shape on all ranks, and return whether that could be; collective. Logs why not."""
    try:
        backend.prepare(shape)
    except UnsupportedError as error:
        logger.warning("commext: allreduce: no %s for %s: %s", backend.name, shape, error)
        return False
    return True


def after_all_reduce(all_reduce: Callable[[torch.Tensor], torch.Tensor]) -> Apart:
    """Return what sums over ranks, in a fresh tensor, and then takes `steps`."""
    return lambda given: steps(given._replace(x=all_reduce(given.x)))


def register_group(name: str, norm: FusedNorm) -> None:
    _groups[name] = norm


def find_group(name: str) -> FusedNorm | None:
    return _groups.get(name)


def served_groups() -> dict[str, str]:
    return {name: norm.policy.identity() for name, norm in _groups.items()}


def forget_group(name: str) -> None:
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
    code, alignment = EPILOGUES[epilogue]
    if code == STATIC_FP8 and (scale is None or scale.numel() != 1):
        raise ConfigError("expected one float32 as the scale of fp8_static, got none or several")
    if code == GROUP_FP8 and hidden % GROUP:
        raise ConfigError(f"expected whole groups of {GROUP} elements, got rows of {hidden}")
    dtype, weight_dtype = (str(each.dtype).removeprefix("torch.") for each in (x, weight))
    has_residual = residual is not None
    return FusedShape(dtype, weight_dtype, hidden, has_residual, weight_bias, code, alignment)


def all_reduce_add_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    group: str,
    epilogue: str = "norm",
    scale: torch.Tensor | None = None,
    weight_bias: int = 0,
    next_weight: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Implement the op.

    Args:
        x: [rows, hidden], this rank's part of the sum: bfloat16, float16 or float32.
        residual: as `x`, the same on all ranks, or None.
        weight: [hidden] of any of the three types.
        eps: added to the mean of a row's squares.
        group: a name given to `register_group`.
        epilogue: one of `EPILOGUES`: the norm in x's dtype, or quantised to FP8.
        scale: float32, one number, for ``fp8_static``.
        weight_bias: added to each weight, 1 for Gemma's norm.
        next_weight: a matrix that multiplies `out` next, some of which may be prefetched.

    Returns:
        [rows, hidden] in x's dtype or float8_e4m3fn; the sum plus the residual in x's dtype; and
            float32 scales, [rows, 1] for ``fp8_row``, [rows, hidden / 128] for ``fp8_group``, else
            without elements. All are new. The scales of ``fp8_group_columns`` and
            ``fp8_group_columns_4`` lie column by column, the latter's at a distance of a multiple
            of four rows.
    """
    shape = _shape(x, residual, weight, epilogue, scale, weight_bias)
    norm = _groups.get(group)
    if norm is None:
        raise ConfigError(f"expected one of the groups {sorted(_groups)}, got {group!r}")
    residual = None if residual is None else residual.contiguous()
    x = x.contiguous()
    given = Operands(shape, x, residual, weight, eps, scale, next_weight)
    return _returned(shape, norm.run(given))


def _returned(shape: FusedShape, made: Outputs) -> Outputs:
    """An op must return no input: with a given scale there is none to return."""
    if shape.epilogue == STATIC_FP8:
        return made._replace(scales=made.scales.new_empty(0))
    return made


def _fake(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    group: str,
    epilogue: str = "norm",
    scale: torch.Tensor | None = None,
    weight_bias: int = 0,
    next_weight: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    del eps, group, next_weight
    shape = _shape(x, residual, weight, epilogue, scale, weight_bias)
    return _returned(shape, make_outputs(shape, x, scale))


def _fake_quantised(
    x: torch.Tensor, scale: torch.Tensor | None, epilogue: str
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = _shape(x, None, x.new_empty(x.shape[-1]), epilogue, scale, 0)
    out, _, scales = _returned(shape, make_outputs(shape, x, scale))
    return out, scales


_library.define(
    "all_reduce_add_rms_norm(Tensor x, Tensor? residual, Tensor weight, float eps, str group,"
    ' str epilogue="norm", Tensor? scale=None, int weight_bias=0, Tensor? next_weight=None)'
    " -> (Tensor, Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
for _key in ("CPU", "CUDA"):
    _library.impl("all_reduce_add_rms_norm", all_reduce_add_rms_norm, _key)
torch.library.register_fake(f"{NAMESPACE}::all_reduce_add_rms_norm", _fake, lib=_library)
# Stands in a graph between two passes: a norm that is quantised as an epilogue of ours would do it.
_library.define(
    "quantised(Tensor x, Tensor? scale, str epilogue) -> (Tensor, Tensor)",
    tags=(torch.Tag.pt2_compliant_tag,),
)
torch.library.register_fake(f"{NAMESPACE}::quantised", _fake_quantised, lib=_library)
