"""Memory that processes of one host share and that has no name.

No limit of ``/dev/shm`` holds for it, and it goes with the last process that has it.  Others open
it through ``/proc`` of the process that made it.
"""

import mmap
import os
from pathlib import Path
from typing import NamedTuple, Self

from vllm_commext.errors import UnsupportedError


class Offer(NamedTuple):
    """Whereabouts of memory for another process."""

    host: str  # the running kernel's identity
    process: int
    descriptor: int  # of the memory's file, in that process
    file: tuple[int, int, int]  # its device, inode and size, to recognise it


def host_identity() -> str:
    """Identity of the running kernel, the same for all processes on it, and for no others."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _identity(descriptor: int) -> tuple[int, int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino, status.st_size


class AnonymousMemory:
    """Anonymous memory, mapped into this process; its file stays open until `forget_file`."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        try:
            self.map = mmap.mmap(descriptor, 0)
        except BaseException:
            self.forget_file()
            raise

    @classmethod
    def create(cls, name: str, num_bytes: int) -> Self:
        """Create memory whose mappings bear a name; OSError where there is none for it."""
        descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
        try:
            os.truncate(descriptor, num_bytes)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(descriptor)

    @classmethod
    def open(cls, offer: Offer) -> Self:
        """Map the memory of another process; UnsupportedError where that cannot be reached."""
        if offer.host != host_identity():
            raise UnsupportedError("expected all processes on one host, got several hosts")
        path = f"/proc/{offer.process}/fd/{offer.descriptor}"
        found = f"expected to open the memory of another process at {path}"
        remedy = "the processes need one user and one process namespace, as within one container"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise UnsupportedError(f"{found}, got {error}; {remedy}") from error
        if _identity(descriptor) != offer.file:
            os.close(descriptor)
            raise UnsupportedError(f"{found}, got another file; {remedy}")
        return cls(descriptor)

    @property
    def offer(self) -> Offer:
        """Whereabouts for others while its file is open here."""
        return Offer(host_identity(), os.getpid(), self._descriptor, _identity(self._descriptor))

    def forget_file(self) -> None:
        """Close the file; what is mapped stays."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
