"""The rows of docs/performance.md's tables of measurements, each computed from a result file.
Pure: a row is a function of what the file holds."""

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Results = Mapping[str, Any]
Triples = list[tuple[float, float, float]]
"""Baseline, ours, speedup; above 1 ours is better."""


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        what: what was measured.
        file: the result file, without its ending.
        where: the hardware.
        unit: of the figures; empty where they are counted or are shares.
        figures: from the file's content, what is shown.
    """

    what: str
    file: str
    where: str
    unit: str
    figures: Callable[[Results], Triples]

    def cells(self, results: Results) -> tuple[str, str, str]:
        """Baseline, ours and speedup, as the table has them."""
        found = self.figures(results)
        baseline, ours = (
            "; ".join(number(one[side]) for one in found) + (f" {self.unit}" * bool(self.unit))
            for side in (0, 1)
        )
        return baseline, ours, "; ".join(f"{speedup:.2f}x" for _, _, speedup in found)


def _times(baseline: float, ours: float) -> tuple[float, float, float]:
    """Two times and the speedup."""
    return baseline, ours, baseline / ours


def number(value: float) -> str:
    """Three significant digits, thousands with commas."""
    if value >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def handover(
    figure: str, lengths: tuple[int, ...], ours: str = "ours"
) -> Callable[[Results], Triples]:
    """A figure of `benchmarks/handover.py`, one request at a time, vLLM's connector against ours,
    for each length."""

    def figures(results: Results) -> Triples:
        found = {
            (row["tokens"], row["engine"]): row[figure]
            for row in results["rows"]
            if row["at once"] == 1
        }
        return [_times(found[length, "vLLM's"], found[length, ours]) for length in lengths]

    return figures


def kernels(
    key: str, sizes: tuple[int, ...], baseline: str, ours: str, *, column: str = ""
) -> Callable[[Results], Triples]:
    """Microseconds of two columns of a GPU benchmark's results, for each size.

    Args:
        key: what `sizes` are in: ``bytes`` or ``tokens``.
        column: where the columns lie within a result; empty for the result itself.
    """

    def figures(results: Results) -> Triples:
        found = {}
        for row in results["results"]:
            if row.get("dtype", "bfloat16") == "bfloat16":
                found[row[key]] = (row[column] if column else row, row.get("best of ours", ""))
        return [
            _times(found[size][0][baseline], found[size][0][ours or found[size][1]])
            for size in sizes
        ]

    return figures


def queue(*cases: str) -> Callable[[Results], Triples]:
    """Medians of `benchmarks/shm_queue.py` with one reader and no other load."""

    def median(results: Results, case: str, who: str) -> float:
        return statistics.median(
            cell["value"]
            for cell in results["cells"]
            if (cell["case"], cell["variant"]) == (case, who)
            and (cell["placement"], cell["n_readers"], cell["unit"]) == ("free", 1, "us p50")
        )

    return lambda results: [
        _times(median(results, case, "vllm"), median(results, case, "ours")) for case in cases
    ]


def collectives(num_ranks: int, *sizes: int) -> Callable[[Results], Triples]:
    """Median microseconds of `benchmarks/cpu_collectives.py`, Gloo against ours; the speedup is the
    median of the rounds' own ratios."""

    def rounds(results: Results, size: int, who: str) -> list[float]:
        found = {
            cell["number"]: cell["median_us"]
            for cell in results["cells"]
            if (cell["num_ranks"], cell["num_bytes"], cell["variant"]) == (num_ranks, size, who)
        }
        return [found[number] for number in sorted(found)]

    def one(results: Results, size: int) -> tuple[float, float, float]:
        baseline, ours = (rounds(results, size, who) for who in ("gloo", "ours"))
        speedups = [theirs / own for theirs, own in zip(baseline, ours, strict=True)]
        return statistics.median(baseline), statistics.median(ours), statistics.median(speedups)

    return lambda results: [one(results, size) for size in sizes]


def serve(figure: str, *cells: str) -> Callable[[Results], Triples]:
    """Medians of `benchmarks/serve.py`, the package off against on; the speedup is the median of
    the rounds' own ratios."""

    def figures(results: Results) -> Triples:
        found = {
            row["cell"]: (row["off"], row["on"], row["ratios"][0])
            for row in results["rows"]
            if row["figure"] == figure
        }
        return [found[cell] for cell in cells]

    return figures


def fused_engine(*cells: str, ours: str = "ours") -> Callable[[Results], Triples]:
    """Milliseconds of `benchmarks/fused_engine.py`, vLLM's default against an engine with ours; the
    speedup is the median of the rounds' own ratios."""

    def figures(results: Results) -> Triples:
        found = {row["cell"]: row for row in results["rows"]}
        rows = [found[cell] for cell in cells]
        return [
            (row["ms"]["vllm"], row["ms"][ours], row[f"vllm / {ours}"]["median"]) for row in rows
        ]

    return figures


FIRST_TOKEN, TPOT = "time to first token, p50", "time per output token, p50"
FIRST, STREAMED = "2026-11-26_handover_vllm_0_33", "ours, proxy, streamed"
LENGTHS = (1000, 8000)
FUSED, FP8 = "2026-11-25_fused_norm_h200", "2026-11-25_fp8_engine_h200"
ENGINE, ENGINE_H100 = "2026-11-25_fused_engine_h200", "2026-11-24_fused_engine_h100"
AUTO = "ours, auto"
OF_REQUESTS = tuple(f"time per output token, {number} requests" for number in (1, 16, 64))
QK_NORM, ALL_REDUCE = "2026-11-22_reduce_rms_tp", "2026-11-22_allreduce_tp"
SERVE = "2026-11-22_serve_"
TWO_H100, TWO, FOUR = "Two H100", "Two H200", "Four H200"
TWO_H100_0_33 = "Two H100, vLLM 0.33"
EPYC, XEON = "Two cores of an AMD EPYC (no AVX-512)", "Two cores of an Intel Xeon (AVX-512)"
EPYC_AVX512 = "Two cores of an AMD EPYC (AVX-512)"

ROWS = (
    Row(
        "first token (a), 1,000; 8,000 tokens",
        FIRST,
        TWO_H100_0_33,
        "ms",
        handover("first token", LENGTHS, STREAMED),
    ),
    Row(
        "second token (a), the same",
        FIRST,
        TWO_H100_0_33,
        "ms",
        handover("second token", LENGTHS, STREAMED),
    ),
    Row(
        "time per output token (a), the same",
        FIRST,
        TWO_H100_0_33,
        "ms",
        handover("TPOT", LENGTHS, STREAMED),
    ),
    Row(
        "prefill to decode (a), the same",
        FIRST,
        TWO_H100_0_33,
        "ms",
        handover("hand-over", LENGTHS),
    ),
    Row(
        "ms a token (f), 1; 16; 64",
        ENGINE_H100,
        TWO_H100,
        "",
        fused_engine(*OF_REQUESTS, ours=AUTO),
    ),
    Row(
        "first token (f), 8,192 tokens",
        ENGINE_H100,
        TWO_H100,
        "ms",
        fused_engine("first token", ours=AUTO),
    ),
    Row(
        "fused all-reduce + norm (c), 16 KiB; 2 MiB",
        FUSED,
        TWO,
        "us",
        kernels("bytes", (1 << 14, 1 << 21), "flashinfer", "", column="microseconds"),
    ),
    Row("ms a token (f), 1; 16; 64", ENGINE, TWO, "", fused_engine(*OF_REQUESTS, ours=AUTO)),
    Row("first token (f), 8,192 tokens", ENGINE, TWO, "ms", fused_engine("first token", ours=AUTO)),
    Row("FP8 (f): ms a token, the same", FP8, TWO, "", fused_engine(*OF_REQUESTS)),
    Row("FP8 (f): first token, the same", FP8, TWO, "ms", fused_engine("first token")),
    Row(
        "all-reduce (g), 16 KiB; 16 MiB",
        f"{ALL_REDUCE}2",
        TWO,
        "us",
        kernels("bytes", (1 << 14, 1 << 24), "vllm", "ours", column="microseconds"),
    ),
    Row(
        "QK RMSNorm (g), 1; 2,048 tokens",
        f"{QK_NORM}2",
        TWO,
        "us",
        kernels("tokens", (1, 2048), "vllm fused", "ours"),
    ),
    Row(
        "prefill and decode (b), first token",
        f"{SERVE}gpu_1p1d",
        FOUR,
        "ms",
        serve(FIRST_TOKEN, "1P1D, minimax, TP 2"),
    ),
    Row(
        "prefill and decode (b), time per output token",
        f"{SERVE}gpu_1p1d",
        FOUR,
        "ms",
        serve(TPOT, "1P1D, minimax, TP 2"),
    ),
    Row(
        "prefill and decode (b), CPU for 1,000 tokens",
        f"{SERVE}gpu_1p1d",
        FOUR,
        "ms",
        serve("CPU, all processes", "1P1D, minimax, TP 2"),
    ),
    Row(
        "all-reduce (g), 16 KiB; 16 MiB",
        f"{ALL_REDUCE}4",
        FOUR,
        "us",
        kernels("bytes", (1 << 14, 1 << 24), "vllm", "ours", column="microseconds"),
    ),
    Row(
        "QK RMSNorm (g), 1; 2,048 tokens",
        f"{QK_NORM}4",
        FOUR,
        "us",
        kernels("tokens", (1, 2048), "vllm fused", "ours"),
    ),
    Row(
        "CPU all-reduce beside Gloo, 8 KiB; 32 MiB",
        "2026-11-22_cpu_collectives",
        EPYC,
        "us",
        collectives(2, 8192, 32 << 20),
    ),
    Row(
        "tokens a second (e), one server; prefill and decode",
        f"{SERVE}cpu",
        EPYC,
        "",
        serve("throughput", "single, llama, TP 2", "1P1D, llama, TP 2"),
    ),
    Row(
        "queue, a step there and back (d), 8; 256",
        "2026-11-25_shm_queue",
        EPYC_AVX512,
        "us",
        queue("step of 8", "step of 256"),
    ),
    Row(
        "tokens a second (e), one server",
        f"{SERVE}cpu_avx512",
        XEON,
        "",
        serve("throughput", "single, llama, TP 2"),
    ),
)
"""In the order of the page, a table for each `where`."""
