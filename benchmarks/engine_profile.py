"""What the GPU of an engine's worker does in a step: kernels by name, counted and timed."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

SHOWN = 12  # kernels a table
NAME_LENGTH = 96


def start(worker: Any) -> None:
    """In a worker: watch its GPU, by CUPTI, from now on."""
    import torch

    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
    profile.start()
    worker.commext_profile = profile


def stop(worker: Any) -> dict[str, Any]:
    """In a worker: what its GPU did since `start`.

    Returns:
        ``span_us`` from the first kernel's start to the last one's end, ``busy_us`` with at least
        one of them at work, and ``kernels``: by name, how many, their microseconds together, and
        those of the longest.
    """
    import torch

    torch.cuda.synchronize()
    profile = worker.commext_profile
    profile.stop()
    found = [
        (event.start_ns(), event.start_ns() + event.duration_ns(), event.name())
        for event in profile.profiler.kineto_results.events()
        if event.device_type() == torch.profiler.DeviceType.CUDA
    ]
    return summary(sorted(found))


def summary(kernels: list[tuple[int, int, str]]) -> dict[str, Any]:
    """Of (start, end, name) in nanoseconds, in the order of their starts; see `stop`."""
    by_name: dict[str, list[float]] = defaultdict(lambda: [0, 0.0, 0.0])
    busy, reached = 0, 0
    for begun, ended, name in kernels:
        row = by_name[name[:NAME_LENGTH]]
        row[0] += 1
        row[1] += (ended - begun) / 1e3
        row[2] = max(row[2], (ended - begun) / 1e3)
        busy += max(0, ended - max(begun, reached))
        reached = max(reached, ended)
    span = reached - kernels[0][0] if kernels else 0
    return {"span_us": span / 1e3, "busy_us": busy / 1e3, "kernels": dict(by_name)}


def least(workers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of every kernel the worker that spent least on it, and of the others' figures the smallest: a
    rank that comes early waits in a collective for one that comes late, and the latter does not.

    Args:
        workers: what `stop` returned of each.
    """
    kernels: dict[str, Any] = {}
    for worker in workers:
        for name, row in worker["kernels"].items():
            kernels[name] = min(row, kernels.get(name, row), key=lambda of: of[1])
    spans = {key: min(worker[key] for worker in workers) for key in ("span_us", "busy_us")}
    return {**spans, "kernels": kernels}


def section(profiles: Mapping[str, Sequence[Mapping[str, Any]]], steps: int) -> list[str]:
    """The lines of a page about them; none where nothing was watched.

    Args:
        profiles: by engine, what `stop` returned of its workers.
        steps: of the model while it was watched.
    """
    if not profiles:
        return []
    head = ["", "One request at a time, of each kernel the worker with least of it:", ""]
    return head + table({name: least(of) for name, of in profiles.items()}, steps)


def table(profiles: Mapping[str, Mapping[str, Any]], steps: int) -> list[str]:
    """Lines of Markdown: microseconds a step of each engine, and the kernels in which they differ
    most.

    Args:
        profiles: by engine, what `least` returned of its workers.
        steps: of the model while it was watched.
    """
    engines = list(profiles)
    lines = [
        "| us a step (launches a step, the longest of all steps) | " + " | ".join(engines) + " |"
    ]
    lines += ["|" + " --- |" * (1 + len(engines))]
    for key, label in (("span_us", "first start to last end"), ("busy_us", "GPU at work")):
        cells = [f"{profiles[name][key] / steps:.1f}" for name in engines]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    names = {name for profile in profiles.values() for name in profile["kernels"]}
    for kernel in sorted(names, key=lambda name: -_spread(profiles, name))[:SHOWN]:
        rows = [profiles[name]["kernels"].get(kernel, (0, 0.0, 0.0)) for name in engines]
        cells = [
            f"{spent / steps:.1f} ({count / steps:.1f}, longest {longest:.1f})"
            for count, spent, longest in rows
        ]
        lines.append(f"| `{kernel.replace('|', '/')}` | " + " | ".join(cells) + " |")
    return lines


def _spread(profiles: Mapping[str, Mapping[str, Any]], kernel: str) -> float:
    spent = [profile["kernels"].get(kernel, (0, 0.0, 0.0))[1] for profile in profiles.values()]
    return max(spent) - min(spent)
