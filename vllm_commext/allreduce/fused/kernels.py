"""All-reduce, residual and RMSNorm in one launch of our own; see ``csrc/cuda/fused_one_phase.cu``
and ``csrc/cuda/fused_two_phase.cu``.

Both push packs through the memory of the all-reduce kernels, sum the ranks in their order in
float32, and round the sum before they add the residual, as two kernels would. A row has the same
bits whichever form serves it."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from vllm_commext.allreduce import limits
from vllm_commext.allreduce.fused import layout
from vllm_commext.allreduce.fused.layout import (
    GROUP,
    GROUP_FP8,
    NORM,
    ONE_PHASE,
    ROW_FP8,
    STATIC_FP8,
    Form,
    FusedShape,
)
from vllm_commext.allreduce.limits import PACK_BYTES
from vllm_commext.allreduce.push import TIMEOUT_SECONDS, PushMemory
from vllm_commext.errors import UnsupportedError
from vllm_commext.gpu import launch
from vllm_commext.gpu.launch import Program, arguments_type

if TYPE_CHECKING:
    import torch

    from vllm_commext.collective import Collective

ARGUMENTS = "fused_rows.h"


class Operands(NamedTuple):
    """The arguments of one call; see `op.all_reduce_add_rms_norm`."""

    shape: FusedShape
    x: "torch.Tensor"
    residual: "torch.Tensor | None"
    weight: "torch.Tensor"
    eps: float
    scale: "torch.Tensor | None" = None
    next_weight: "torch.Tensor | None" = None


class Outputs(NamedTuple):
    """Outputs of one call.

    Attributes:
        out: [rows, hidden], the norm in the input's dtype, or in float8_e4m3fn.
        residual: [rows, hidden], the sum plus the residual, in the input's dtype.
        scales: float32: of `ROW_FP8` [rows, 1], of `GROUP_FP8` [rows, hidden / 128] as the shape
            says that they lie, the given one of `STATIC_FP8`, else empty.
    """

    out: "torch.Tensor"
    residual: "torch.Tensor"
    scales: "torch.Tensor"


def make_outputs(
    shape: FusedShape, tensor: "torch.Tensor", scale: "torch.Tensor | None"
) -> Outputs:
    import torch

    rows = tensor.shape[0]
    quantised = shape.epilogue != NORM
    form, device = tensor.shape, tensor.device
    out = torch.empty(form, dtype=torch.float8_e4m3fn if quantised else tensor.dtype, device=device)
    columns = {ROW_FP8: 1, GROUP_FP8: shape.hidden // GROUP}.get(shape.epilogue, 0)
    if shape.epilogue == STATIC_FP8 and scale is not None:
        scales = scale
    elif shape.scale_alignment:
        apart = -(-rows // shape.scale_alignment) * shape.scale_alignment
        scales = torch.empty_strided(
            (rows, columns), (1, apart), dtype=torch.float32, device=device
        )
    else:
        scales = torch.empty((rows, columns), dtype=torch.float32, device=device)
    return Outputs(out, torch.empty(form, dtype=tensor.dtype, device=device), scales)


class FusedKernels:
    """A group's kernels, each compiled on all ranks together before its first use. The memory stays
    its owner's.

    Attributes:
        prefetched: bytes of the next weights that a launch of few rows has prefetched.
        prefetch_after: cycles after its beginning.
    """

    def __init__(self, memory: PushMemory, collective: "Collective") -> None:
        self._memory, self._collective = memory, collective
        self._device = launch.current_device()
        self.prefetched, self.prefetch_after = layout.TOTAL_BYTES, layout.AFTER_CYCLES
        self._functions: dict[tuple[FusedShape, Form], launch.Function] = {}
        made = arguments_type(ARGUMENTS, WORLD_SIZE=collective.world_size)()
        made.state, made.half_packs = memory.state, memory.half_packs
        made.timeout_ns = int(TIMEOUT_SECONDS * 1e9)
        made.memory[:] = memory.addresses
        self._arguments = made

    def prepare(self, shape: FusedShape, forms: Sequence[Form]) -> None:
        """Compile and load; collective, and never while a graph is captured. All ranks raise
        UnsupportedError where it failed on one."""
        self._collective.agree(lambda: self._load(shape, forms))

    def _load(self, shape: FusedShape, forms: Sequence[Form]) -> None:
        if problem := shape.problem():
            raise UnsupportedError(problem)
        world_size, rank = self._collective.world_size, self._collective.rank
        for form in forms:
            if (shape, form) in self._functions:
                continue
            self._functions[shape, form] = launch.load(
                Program(form.kernel),
                form.macros(shape, world_size, rank),
                form.warps * launch.WARP,
                self._device,
                programmatic=False,
            )

    def most_rows(self, shape: FusedShape, form: Form) -> int:
        return form.most_rows(shape, self._memory.half_packs, self._collective.world_size)

    def run(self, form: Form, given: Operands, outputs: Outputs | None = None) -> Outputs:
        """Launch once on the current stream, of a form that is prepared and that the rows fit.

        Tensors are contiguous and aligned to 16 bytes, the scale is on the GPU. A launch of few
        rows has a part of the next weight prefetched."""
        import torch

        shape, tensor, residual, weight, eps, scale, next_weight = given
        outputs = outputs or make_outputs(shape, tensor, scale)
        made = self._arguments
        made.input, made.weight = tensor.data_ptr(), weight.data_ptr()
        made.residual = 0 if residual is None else residual.data_ptr()
        made.residual_out, made.output = outputs.residual.data_ptr(), outputs.out.data_ptr()
        made.scales = outputs.scales.data_ptr()
        made.scale_rows = outputs.scales.stride(1) if shape.scale_alignment else 0
        made.num_rows, made.eps = tensor.shape[0], eps
        blocks = form.num_blocks(
            tensor.shape[0], self._collective.world_size, self._device.multiprocessors
        )
        spare = self._prefetch(form, blocks, next_weight)
        stream = torch.cuda.current_stream().cuda_stream
        self._functions[shape, form].launch(made, blocks + spare, stream)
        return outputs

    def _prefetch(self, form: Form, row_blocks: int, weight: "torch.Tensor | None") -> int:
        """Enter what blocks beside those of rows are to prefetch, and return how many they are."""
        made, multiprocessors = self._arguments, self._device.multiprocessors
        made.row_blocks = row_blocks
        if form.kernel != ONE_PHASE:
            return 0
        spare = layout.spare_blocks(row_blocks, multiprocessors)
        made.next, pieces = layout.of_weight(weight, multiprocessors, self.prefetched)
        made.prefetch_after = self.prefetch_after
        made.num_pieces, made.piece_bytes = pieces.count, pieces.num_bytes
        made.piece_stride = pieces.stride
        return spare if pieces.count else 0  # of no pieces nothing is asked


class PushFused:
    """Our kernels as `FusedNorm` calls them: one launch, or several where the staging memory holds
    a part of the rows."""

    name = limits.FUSED_PUSH

    def __init__(self, kernels: FusedKernels, world_size: int) -> None:
        self._kernels, self._world_size = kernels, world_size

    def prepare(self, shape: FusedShape) -> None:
        """Load every form that a number of rows may need; see `FusedKernels.prepare`."""
        self._kernels.prepare(shape, layout.forms(shape, self._world_size))

    def takes(self, shape: FusedShape, num_rows: int) -> bool:
        form = layout.choose(shape, num_rows, self._world_size)
        return num_rows > 0 and self._kernels.most_rows(shape, form) > 0

    def run(self, given: Operands) -> Outputs:
        """Launch one after the other, on as many rows each as find room."""
        shape, x, residual = given.shape, plain(given.x), given.residual
        residual = None if residual is None else plain(residual)
        given = given._replace(x=x, residual=residual, weight=plain(given.weight))
        form = layout.choose(shape, len(x), self._world_size)
        most = self._kernels.most_rows(shape, form)
        if len(x) <= most:
            return self._kernels.run(form, given)
        outputs = make_outputs(shape, x, given.scale)
        for first in range(0, len(x), most):
            part = slice(first, first + most)
            scales = outputs.scales if len(outputs.scales) < len(x) else outputs.scales[part]
            to = Outputs(outputs.out[part], outputs.residual[part], scales)
            old = None if residual is None else residual[part]
            rows = given._replace(x=x[part], residual=old, next_weight=None)
            self._kernels.run(form, rows, to)
        return outputs


def plain(tensor: "torch.Tensor") -> "torch.Tensor":
    """The tensor itself where a kernel can take it, else a copy."""
    import torch

    if tensor.is_contiguous() and tensor.data_ptr() % PACK_BYTES == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
