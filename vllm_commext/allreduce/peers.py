"""Whether the GPUs of a host reach each other's memory, and what can be measured where not."""

import itertools
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm_commext.allreduce import names

if TYPE_CHECKING:
    import torch

DISABLE, LEVEL = "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL"
NEVER = ("LOC", "0")  # of `LEVEL`
WITHOUT = (names.HOST, names.NCCL)  # what needs no peer access


def is_refused(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the user has told NCCL, and with it us, to do without peer access."""
    disabled = environ.get(DISABLE, "0") not in ("", "0")
    return disabled or environ.get(LEVEL, "").upper() in NEVER


def have_access(device: "torch.device", environ: Mapping[str, str] = os.environ) -> bool:
    """Whether every pair of the GPUs that this process sees has peer access.

    Of a process that sees one GPU nothing is known, and it counts as having access; so does one
    on a CPU.
    """
    import torch

    if is_refused(environ):
        return False
    if device.type != "cuda":
        return True
    pairs = itertools.permutations(range(torch.cuda.device_count()), 2)
    return all(torch.cuda.can_device_access_peer(one, other) for one, other in pairs)


def measurable(access: bool) -> tuple[str, ...]:
    """The backends that are worth measuring, in the order of `names.BACKENDS`."""
    if access:
        return tuple(name for name in names.BACKENDS if name != names.HOST)
    return WITHOUT
