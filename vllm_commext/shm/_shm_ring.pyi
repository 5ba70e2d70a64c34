from collections.abc import Callable
from typing import Any

from typing_extensions import Buffer

VERSION: int
MAX_PARTS: int
STEP_FORMAT: int
STEP_NO_SLOT: int

class Ring:
    def __new__(
        cls,
        fd: int,
        map_bytes: int,
        capacity: int,
        n_readers: int,
        rank: int,
        nonce: bytes,
        budget: int,  # the writer's, of bytes behind the ring
        /,
    ) -> Ring: ...
    def write(
        self,
        parts: Buffer | tuple[Buffer, ...],
        timeout: float | None,
        keep: bool,  # after a timeout, the record may be gone on with
        resume: bool,  # go on with the same record, if it was kept
        /,
    ) -> int: ...
    def read(self, timeout: float | None, /) -> bytes | list[bytes | bytearray] | int: ...
    def wait_attached(self, timeout: float | None, /) -> int: ...
    def announce_ready(self) -> None: ...
    def wait_ready(self, timeout: float | None, /) -> int: ...
    def cancel(self) -> None: ...
    def leave(self) -> None: ...
    def predict(self, on: bool, /) -> None: ...
    def counters(self) -> dict[str, int]: ...
    def peers(self) -> list[tuple[int, int, int, bool, int, int, int]]: ...
    def failure(self) -> tuple[int, str | None]: ...

def create_file(path: str, num_bytes: int, /) -> int: ...
def remove_abandoned(path: str, /) -> bool: ...

class Packer:
    def __new__(
        cls,
        kinds: tuple[tuple[type, tuple[str, ...], bytes], ...],  # class, fields, their slots
        constants: tuple[object, ...],
        fingerprint: int,
        /,
    ) -> Packer: ...
    def pack(self, message: object, /) -> tuple[bytes, list[Any] | None] | None: ...
    def forget(self) -> None: ...

class Unpacker:
    def __new__(
        cls,
        kinds: tuple[tuple[type, tuple[str, ...], bytes], ...],
        constants: tuple[object, ...],
        fingerprint: int,
        error: type[Exception],
        /,
    ) -> Unpacker: ...
    def unpack(self, head: bytes, loads: Callable[[bytes], Any], /) -> Any: ...
