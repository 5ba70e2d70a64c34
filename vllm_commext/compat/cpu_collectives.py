"""Sums and gathers through shared memory in vLLM's communicator for CPUs.

vLLM has shared memory of its own for that only in builds for AVX-512 and AArch64; everywhere else a
sum goes through Gloo: TCP, and several threads that wake one another. The communicator takes both
from an object with torch.distributed's functions, and that object is what it gets from us."""

import functools
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vllm_commext.compat import fits
from vllm_commext.compat.monkey_patch import wrap
from vllm_commext.errors import CommextError, UnsupportedError

if TYPE_CHECKING:
    import torch

    from vllm_commext.collective import Collective
    from vllm_commext.shm.collectives import RingGroup

logger = logging.getLogger("vllm.commext.cpu_collectives")

SYMBOL = "vllm.distributed.device_communicators.cpu_communicator:CpuCommunicator.__init__"


class RingModule:
    """Stands in for torch.distributed for the tensors of one group; what rings do not serve goes to
    the group that is given."""

    def __init__(self, rings: "RingGroup") -> None:
        from torch import distributed

        from vllm_commext.shm.collectives import is_worth_it

        self.rings = rings
        self.stock = distributed
        self._is_worth_it = is_worth_it

    def all_reduce(self, tensor: "torch.Tensor", group: Any = None) -> None:
        if self._is_worth_it(tensor.dtype, tensor.nbytes, self.rings.world_size):
            self.rings.all_reduce(tensor)
        else:
            self.stock.all_reduce(tensor, group=group)

    def all_gather_into_tensor(
        self, output: "torch.Tensor", tensor: "torch.Tensor", group: Any = None
    ) -> None:
        self.rings.all_gather(output, tensor)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stock, name)


def is_meant(communicator: Any) -> bool:
    return communicator.unique_name.split(":")[0] == "tp" and communicator.world_size > 1


def why_not(communicator: Any) -> str:
    """Return why a communicator gets no rings, or ""; collective, and the same on all ranks."""
    from torch import distributed
    from vllm.distributed.parallel_state import in_the_same_node_as

    if communicator.dist_module is not distributed:
        return "vLLM's own shared memory serves it"
    if not all(in_the_same_node_as(communicator.cpu_group, source_rank=0)):
        return "its ranks are on several hosts"
    return ""


def attach(communicator: Any) -> None:
    """Give a communicator its rings where it is meant to have them, or log why not; collective."""
    from vllm_commext.collective import Collective

    if not is_meant(communicator):
        return
    name, size = communicator.unique_name, communicator.world_size
    if reason := why_not(communicator):
        if communicator.rank_in_group == 0:
            logger.info("commext: cpu_collectives: not for group %s: %s", name, reason)
        return
    try:
        rings = _tried(communicator, Collective.over(communicator.cpu_group))
    except CommextError as error:
        if communicator.rank_in_group == 0:
            logger.warning("commext: cpu_collectives: Gloo serves group %s: %s", name, error)
        return
    communicator.dist_module = RingModule(rings)
    if communicator.rank_in_group == 0:
        logger.info("commext: cpu_collectives: ring buffers serve group %s of %d ranks", name, size)


def _tried(communicator: Any, ranks: "Collective") -> "RingGroup":
    """Rings among all ranks, which have passed their test where this vLLM needs one; collective."""
    from vllm_commext.shm.collectives import RingGroup

    rings = RingGroup.connect(ranks)
    if fits.must_test_itself("cpu_collectives"):
        try:
            ranks.agree(lambda: _self_test(communicator, rings))
        except CommextError:
            rings.close()
            raise
    return rings


def _self_test(communicator: Any, rings: "RingGroup") -> None:
    import torch
    from torch import distributed

    own = torch.full((256,), 1.0 + communicator.rank_in_group)
    wanted, found = own.clone(), own.clone()
    distributed.all_reduce(wanted, group=communicator.cpu_group)
    rings.all_reduce(found)
    gathered = torch.empty(communicator.world_size, 256)
    rings.all_gather(gathered, own)
    if not (torch.equal(wanted, found) and torch.equal(gathered.sum(0), wanted)):
        raise UnsupportedError("a sum is not the group's")


def _init(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807 - vLLM's name
        original(self, *args, **kwargs)
        attach(self)

    return __init__


def install() -> None:
    """Monkey-patch vLLM in this process; UnsupportedError on no CPU."""
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        raise UnsupportedError(f"expected vLLM for CPUs, got {current_platform.device_name}")
    wrap({SYMBOL: _init})
