"""vLLM's quantisers to 8 bits behind our op, whichever form a graph has them in.

vLLM writes a quantiser as one op of its own, or as many of torch's, by which torch's compiler makes
the kernel. Both are found by what vLLM's own passes look for, and marked for `fused_graph.absorb`.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch._higher_order_ops.auto_functionalize import can_auto_functionalize
from torch._inductor import pattern_matcher
from vllm.compilation.passes.fusion.matcher_utils import QUANT_OPS, MatcherQuantFP8
from vllm.compilation.passes.inductor_pass import enable_fake_mode
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    kFp8Dynamic128Sym,
    kFp8DynamicTokenSym,
    kFp8StaticTensorSym,
)

from vllm_commext.allreduce.fused import graph as fused_graph

Form = Callable[..., Any]
ROWS, COLUMNS = 5, 256  # of the examples from which patterns are made
# epilogue: vLLM's name of the kind, and how its scales lie
KINDS: dict[str, tuple[Any, dict[str, bool]]] = {
    "fp8_static": (kFp8StaticTensorSym, {}),
    "fp8_row": (kFp8DynamicTokenSym, {}),
    "fp8_group": (kFp8Dynamic128Sym, {}),
    "fp8_group_columns": (kFp8Dynamic128Sym, {"has_col_major_scales": True}),
    "fp8_group_columns_4": (
        kFp8Dynamic128Sym,
        {"has_col_major_scales": True, "is_tma_aligned": True},
    ),
}


class QuantiserPatterns:
    """Marks quantisers of norms that our op makes. It is made where vLLM's configuration, which
    says how vLLM writes quantisers, is the current one."""

    def __init__(self, ops: fused_graph.Ops, dtype: torch.dtype, device: Any) -> None:
        self._ops, self._dtype, self._device = ops, dtype, device
        self._patterns = pattern_matcher.PatternMatcherPass(pass_name="commext_quantisers")
        self._register()

    def mark(self, graph: torch.fx.Graph) -> int:
        """Replace what our op could make by its mark; returns how often."""
        return self._patterns.apply(graph)

    @enable_fake_mode
    def _register(self) -> None:
        for epilogue, (key, layout) in KINDS.items():
            for as_op in (True, False):
                if self._can_be(key, as_op):
                    matcher = MatcherQuantFP8(key, enabled=as_op, **layout)
                    self._add(epilogue, matcher)
        # As vLLM's: the next manager of passes starts empty.
        pattern_matcher._seen_patterns.clear()  # pyright: ignore[reportPrivateUsage]

    @staticmethod
    def _can_be(key: Any, as_op: bool) -> bool:
        """Check that vLLM can write it so. A group's scales need its op, which says how they lie.
        Builds for CPUs have some of the ops by name alone."""
        op = QUANT_OPS.get(key)
        return op is not None and (
            can_auto_functionalize(op) if as_op else key is not kFp8Dynamic128Sym
        )

    def _add(self, epilogue: str, matcher: Callable[..., Any]) -> None:
        def empty(shape: tuple[int, int], stride: tuple[int, int], dtype: torch.dtype) -> Any:
            return torch.empty_strided(shape, stride, dtype=dtype, device=self._device)

        def mark(x: Any, scale: Any) -> Any:
            return torch.ops.vllm_commext.quantised.default(x, scale, epilogue)

        # A pattern of a quantiser, and what takes its place, take the same operands.
        operands = [empty((ROWS, COLUMNS), (COLUMNS, 1), self._dtype)]
        form: tuple[Form, Form] = (lambda x: matcher(x), lambda x: mark(x, None))
        if epilogue == "fp8_static":
            operands.append(empty((1, 1), (1, 1), torch.float32))
            form = (lambda x, scale: matcher(x, scale)[0], lambda x, scale: mark(x, scale)[0])
        elif epilogue == "fp8_group_columns_4":
            # Where the scales go is made outside of the pattern, as its size depends on the rows.
            operands.append(empty((ROWS, COLUMNS // 128), (1, ROWS + 3), torch.float32))
            form = (lambda x, scale: matcher(x, scale), lambda x, scale: mark(x, None))

        pattern, replacement = form

        def fits(match: Any) -> bool:
            x, scale = match.kwargs["x"], match.kwargs.get("scale")
            return fused_graph.can_absorb(self._ops, x, match.nodes, epilogue, scale)

        patterns: Any = self._patterns
        pattern_matcher.register_replacement(
            *(pattern, replacement, operands, pattern_matcher.fwd_only, patterns), extra_check=fits
        )
