"""Facts about one rank that decide whether our kernels take part in a tensor-parallel group; all
ranks agree about them before anything is made, set or chosen."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

from vllm_commext.collective import Collective
from vllm_commext.errors import UnsupportedError

ANY_HOST = ""


@dataclass(frozen=True)
class Facts:
    """One rank's host, engine and settings.

    Attributes:
        gpu: the driver's name of it; empty where there is none.
        hidden: elements of a row of the model, whose dtype is `dtype`.
        max_tokens: rows of the largest step; 0 where unknown.
        invariant: a row has the same bits whatever else is in the batch.
        microbatches: a batch runs in parts on several streams.
        multicast: vLLM's own collectives may use NVLink multicast here.
        settings: the toggles that matter, as ``NAME=value``.
    """

    host: str = ANY_HOST
    gpu: str = ""
    dtype: str = "bfloat16"
    hidden: int = 8192
    max_tokens: int = 0
    eager: bool = False
    invariant: bool = False
    microbatches: bool = False
    multicast: bool = False
    settings: tuple[str, ...] = ()


def _differences(everybody: Sequence[Facts]) -> str:
    values = {
        field.name: [getattr(facts, field.name) for facts in everybody] for field in fields(Facts)
    }
    unlike = {name: of for name, of in values.items() if len(set(of)) > 1}
    return ", ".join(f"{name} {of}" for name, of in unlike.items())


def agree_about(read: Callable[[], Facts], collective: Collective) -> Facts:
    """Return the record that all ranks read alike; collective.

    Raises:
        UnsupportedError: the ranks are on several hosts, or differ in something; all raise it.
    """
    everybody = collective.run(read)
    hosts = {facts.host for facts in everybody}
    if len(hosts) > 1:
        raise UnsupportedError(f"its ranks are on {len(hosts)} hosts")
    alike = [replace(facts, host=ANY_HOST) for facts in everybody]
    if len(set(alike)) > 1:
        raise UnsupportedError(
            f"expected the same on all ranks, got {_differences(alike)} in the order of ranks; set "
            "the toggles alike"
        )
    return everybody[0]
