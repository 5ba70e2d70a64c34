"""Facts about one rank that decide whether our kernels take part in a tensor-parallel group; all
ranks agree about them before anything is made, set or chosen."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace

from vllm_commext.collective import Collective
from vllm_commext.errors import UnsupportedError

ANY_HOST = ""


@dataclass(frozen=True)
class Facts:
    """One rank's host, engine and settings."""

    host: str = ANY_HOST
    gpu: str = ""  # the driver's name of it; empty where there is none
    dtype: str = "bfloat16"  # of the model
    hidden: int = 8192  # elements of a row
    max_tokens: int = 0  # rows of the largest step; 0 where unknown
    eager: bool = False
    invariant: bool = False  # a row has the same bits whatever else is in the batch
    microbatches: bool = False  # a batch runs in parts on several streams
    multicast: bool = False  # vLLM's own collectives may use NVLink multicast here
    settings: tuple[str, ...] = ()  # the toggles that matter, as ``NAME=value``


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
