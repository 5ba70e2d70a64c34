"""What a measurement holds for: the machine and the libraries that it was made with."""

import hashlib

import msgspec

from vllm_commext import __version__

NO_ACCESS = "no peer access"  # instead of how GPUs are joined, where nothing can go over it


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """All on which the speed of an all-reduce depends.

    Attributes:
        gpu: the GPU's name, as the driver gives it.
        link: how the GPUs are joined, such as ``NV18`` for every pair, ``unknown``, or `NO_ACCESS`.
        driver: the driver's version; `torch`, `nccl`, `flashinfer` and `vllm` likewise, empty
            where there is none.
        multicast: whether NVLink multicast was allowed.
        package: this package's release, whose kernels were measured.
    """

    gpu: str
    link: str
    driver: str
    torch: str
    nccl: str
    flashinfer: str
    vllm: str
    multicast: bool = False
    package: str = __version__


def digest(machine: Machine, world_size: int) -> str:
    """Sixteen hexadecimal digits that name the machine and a number of its GPUs."""
    text = msgspec.json.encode([machine, world_size])
    return hashlib.sha256(text).hexdigest()[:16]
