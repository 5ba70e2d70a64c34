"""One rank of ``vllm-commext tune allreduce``: ``python -m vllm_commext.cli.tune_rank OPTIONS``.

OPTIONS is JSON. Rank 0 prints a line of JSON for each size, and at last the table and its file.
"""

import json
import os
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

PREFIX = "commext-tune "


class RankOptions(msgspec.Struct, frozen=True):
    """Options that the command hands to each rank.

    Attributes:
        rank: of `world_size`, which meet at `port` of this host.
        sizes: in bytes; the other fields are those of `measure.Options`.
        save: write the table to the user's cache folder.
    """

    rank: int
    world_size: int
    port: int
    sizes: tuple[int, ...]
    dtypes: tuple[str, ...]
    hidden: int
    samples: int
    seconds: float
    save: bool


def say(kind: str, **values: Any) -> None:
    """Print a line for the command; libraries may print lines of their own between them."""
    sys.stdout.write(f"\n{PREFIX}{json.dumps({'kind': kind, **values})}\n")
    sys.stdout.flush()


def run(options: RankOptions) -> None:
    """Measure all backends; rank 0 reports."""
    from vllm_commext.allreduce import multicast, names
    from vllm_commext.allreduce.backends import flashinfer
    from vllm_commext.allreduce.backends.flashinfer import MEASURING_BYTES
    from vllm_commext.allreduce.creation import Parts, create_dispatcher
    from vllm_commext.allreduce.table import cache, measure
    from vllm_commext.allreduce.table.machine import read_machine
    from vllm_commext.allreduce.table.table import build_table, encode
    from vllm_commext.collective import Collective
    from vllm_commext.compat.tp_group import fused_add_rms_norm, tensor_parallel

    multicast.keep_off()
    flashinfer.shared.budget_bytes = MEASURING_BYTES
    with tensor_parallel(options.rank, options.world_size, options.port) as group:
        made = group.device_communicator
        custom = made.ca_comm if made.ca_comm is not None and not made.ca_comm.disabled else None
        parts = Parts(made.cpu_group, made.device_group, made.device, custom, made.pynccl_comm)
        dispatcher = create_dispatcher(parts, None, wanted=names.BACKENDS)
        collective = Collective.over(parts.cpu_group)
        first = options.rank == 0
        if first:
            say("backends", names=list(dispatcher.backends))

        def progress(dtype: str, size: int, times: Mapping[str, float]) -> None:
            if first:
                say("size", dtype=dtype, size=size, times=dict(times))

        chosen = measure.Options(
            options.sizes, options.dtypes, options.hidden, options.samples, seconds=options.seconds
        )
        times = measure.measure_backends(
            *(dispatcher, collective, chosen, group.graph_capture, progress),
            norm=fused_add_rms_norm,
        )
        machine = read_machine(made.device)
        origin = f"measured on {options.world_size} x {machine.gpu}"
        table = build_table(times, options.world_size, origin)
        if first:
            path = str(cache.save(machine, table, options.hidden)) if options.save else ""
            text = encode(table).decode()
            say("table", table=text, path=path, machine=msgspec.to_builtins(machine))
        collective.run(lambda: None)


if __name__ == "__main__":
    run(msgspec.json.decode(sys.argv[1], type=RankOptions))
    # The measurement is out; tearing down libraries that share memory need not go well.
    sys.stdout.flush()
    os._exit(0)
