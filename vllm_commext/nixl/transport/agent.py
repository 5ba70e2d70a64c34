"""NIXL as the connector uses it, and the log of UCX below it."""

import contextlib
import ctypes
import importlib
import importlib.metadata
import logging
import os
import re
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from packaging.version import Version

from vllm_commext.errors import UnsupportedError
from vllm_commext.nixl.config import ConnectorConfig
from vllm_commext.nixl.geometry.layout import Int32Array, UInt64Array
from vllm_commext.nixl.log import logger
from vllm_commext.settings import INSTALL_NIXL

_LEVEL, _FILE = "UCX_LOG_LEVEL", "UCX_LOG_FILE"
_LANES = re.compile(r"\b(?:intra-node|inter-node) cfg#\d+ (?P<lanes>.+)$")
_LANE = re.compile(r"([a-z0-9_]+)/")
_LEVELS = {"WARN": logging.WARNING, "ERROR": logging.ERROR, "FATAL": logging.ERROR}
_LIBRARY = re.compile(r"/\S*/libucs[-.]\S*$", re.MULTILINE)
_SETTLE_SECONDS = 0.1
_MAX_LANES = 64

PROGRESS_SECONDS = 0.02
"""Longest pause between two turns of NIXL's progress thread, which would otherwise keep a core
busy. What arrives wakes it, save where UCX misses an event."""


class UcxLog:
    """UCX's log in this process; empty where the user has set UCX's log level or file."""

    def __init__(self) -> None:
        self._lanes: list[str] = []
        self._reading = -1
        self._writing: int | None = None
        self._path = ""
        self._library: Any = None

    def attach(self) -> None:
        """Let UCX write here; call it before UCX is loaded, and ``detach`` after that."""
        if _LEVEL in os.environ or _FILE in os.environ or self._writing is not None:
            return
        self._reading, self._writing = os.pipe()
        os.environ[_LEVEL] = "info"
        # By number, as processes that are started meanwhile inherit it, and UCX ends those in which
        # it cannot open its log.
        os.environ[_FILE] = self._path = f"/proc/{os.getpid()}/fd/{self._writing}"
        threading.Thread(
            target=self._follow, args=(self._reading,), name="commext-ucx-log", daemon=True
        ).start()

    def detach(self) -> None:
        """UCX has opened its log: leave nothing of that to other processes."""
        if self._writing is None or os.environ.get(_FILE) != self._path:
            return
        del os.environ[_LEVEL], os.environ[_FILE]
        # UCX also logs where its caller keeps others from running Python, such as when an agent is
        # collected: it must not wait for the thread that reads, and what that has no room for goes.
        for end in _descriptors_of(self._writing):
            if end != self._reading:
                os.set_blocking(end, False)
        self._library = _loaded_library()
        if self._library is None:
            logger.warning("UCX's library is not where it was expected: its messages come late")

    def flush(self) -> None:
        if self._library is not None:
            self._library.ucs_log_flush()

    def transports(self) -> tuple[str, ...]:
        self.flush()
        time.sleep(_SETTLE_SECONDS if self._library is not None else 0)
        lanes, self._lanes = self._lanes, []
        return parse_transports(" ".join(lanes))

    def _follow(self, reading: int) -> None:
        with os.fdopen(reading, errors="replace") as lines:
            for line in lines:
                self._take(line.rstrip())

    def _take(self, line: str) -> None:
        found = _LANES.search(line)
        if found:
            self._lanes = [*self._lanes[1 - _MAX_LANES :], found["lanes"]]
            return
        for word, level in _LEVELS.items():
            if f" {word} " in line:
                logger.log(level, "UCX: %s", line)


def _descriptors_of(descriptor: int) -> Iterator[int]:
    file = os.fstat(descriptor)
    for one in map(int, os.listdir("/proc/self/fd")):
        with contextlib.suppress(OSError):  # it is closed again
            if os.path.samestat(os.fstat(one), file):
                yield one


def _loaded_library() -> Any:
    try:
        found = _LIBRARY.search(Path("/proc/self/maps").read_text())
        return ctypes.CDLL(found[0]) if found else None
    except OSError:
        return None


def parse_transports(lanes: str) -> tuple[str, ...]:
    """Names of transports in a line of UCX such as ``rma(rc_mlx5/mlx5_0:1) am(tcp/lo)``."""
    return tuple(dict.fromkeys(_LANE.findall(lanes)))


OLDEST = (1, 5)  # the first release of NIXL that takes strided descriptors
ucx_log = UcxLog()
DONE = "DONE"
IN_PROGRESS = "PROC"


def load_nixl() -> Any:
    """Import NIXL's Python interface; raises UnsupportedError."""
    _check_version()
    # UCX keeps every registration it ever made unless told otherwise; this bounds what it keeps.
    os.environ.setdefault("UCX_RCACHE_MAX_UNRELEASED", "1024")
    # Meeting a peer waits for a TCP connection, and every transfer of this worker with it: for 7 s
    # where packets are dropped, in place of the kernel's two minutes.
    os.environ.setdefault("UCX_TCP_SYN_CNT", "2")
    ucx_log.attach()
    try:
        return importlib.import_module("nixl._api")
    except ImportError as error:
        raise UnsupportedError(
            f"CommextNixlConnector needs NIXL, which does not load here ({error}): "
            f"`{INSTALL_NIXL}` brings it, `vllm-commext doctor` checks it"
        ) from error


def _check_version() -> None:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found = importlib.metadata.version("nixl")
        if Version(found).release < OLDEST:
            raise UnsupportedError(
                f"CommextNixlConnector: expected NIXL {OLDEST[0]}.{OLDEST[1]} or newer, got "
                f"{found}: `{INSTALL_NIXL}`"
            )


@contextlib.contextmanager
def progress_every(api: Any, seconds: float) -> Iterator[None]:
    """Let the agent that is made inside have a progress thread that sleeps between its turns.

    NIXL's Python interface fixes the pause at 0, which keeps a core busy for each agent, idle or
    not; the native configuration that it fills takes any number of microseconds. While the agent is
    made, this stands in for that configuration and puts the wanted pause in."""
    module = importlib.import_module(api.nixl_agent.__module__)
    original = module.nixlBind.nixlAgentConfig
    microseconds = max(1, round(seconds * 1e6))

    class PausedConfig(original):
        @property
        def pthrDelay(self) -> int:  # noqa: N802 NIXL's name
            return original.pthrDelay.__get__(self)

        @pthrDelay.setter
        def pthrDelay(self, _: int) -> None:  # noqa: N802 NIXL's name
            original.pthrDelay.__set__(self, microseconds)

    module.nixlBind.nixlAgentConfig = PausedConfig
    try:
        yield
    finally:
        module.nixlBind.nixlAgentConfig = original


class NixlAgent:
    """One NIXL agent.  Not safe for threads: one thread owns it."""

    def __init__(self, config: ConnectorConfig) -> None:
        api = load_nixl()
        self.name = str(uuid.uuid4())
        settings = api.nixl_agent_config(backends=[])
        try:
            with progress_every(api, PROGRESS_SECONDS):
                self._agent = api.nixl_agent(self.name, settings)
            self._create_backends(config)
        finally:
            ucx_log.detach()
        self._registered: list[Any] = []
        self._own_lists: list[Any] = []

    def _create_backends(self, config: ConnectorConfig) -> None:
        plugins = self._agent.get_plugin_list()
        missing = [name for name in config.backends if name not in plugins]
        if missing:
            raise UnsupportedError(f"NIXL has no plug-in for backend {missing}; it has {plugins}")
        for name in config.backends:
            threads = {"num_threads": str(config.num_threads)} if name == "UCX" else {}
            self._agent.create_backend(name, {**threads, **config.backend_params})

    def register(self, ranges: Sequence[tuple[int, int]], memory_type: str, device_id: int) -> None:
        rows = [(address, num_bytes, device_id, "") for address, num_bytes in ranges]
        self._registered.append(self._agent.register_memory(rows, memory_type))

    @contextlib.contextmanager
    def registered(self, memory: tuple[int, int, int], memory_type: str) -> Iterator[None]:
        token = self._agent.register_memory([(*memory, "")], memory_type)
        try:
            yield
        finally:
            self._agent.deregister_memory(token)

    def metadata(self) -> bytes:
        return self._agent.get_agent_metadata()

    def add_peer(self, metadata: bytes) -> str:
        return self._agent.add_remote_agent(metadata)

    def connect(self, name: str) -> None:
        self._agent.make_connection(name)

    def remove_peer(self, name: str) -> None:
        self._agent.remove_remote_agent(name)

    def prepare(self, name: str, rows: UInt64Array, memory_type: str) -> Any:
        """Prepare ``[n, 5]`` strided descriptors of a peer's agent, "" for this one."""
        return self._agent.prep_xfer_dlist(name, rows, memory_type)

    def prepare_own(self, rows: UInt64Array) -> Any:
        self._own_lists.append(self.prepare("", rows, "DRAM"))
        return self._own_lists[-1]

    def release_list(self, prepared: Any) -> None:
        self._agent.release_dlist_handle(prepared)

    def make_read(
        self,
        local_list: Any,
        local_indices: Int32Array,
        remote_list: Any,
        remote_indices: Int32Array,
    ) -> Any:
        return self._agent.make_prepped_xfer(
            "READ", local_list, local_indices, remote_list, remote_indices
        )

    def post(self, read: Any) -> str:
        return self._agent.transfer(read)

    def state(self, read: Any) -> str:
        return self._agent.check_xfer_state(read)

    def release_read(self, read: Any) -> None:
        self._agent.release_xfer_handle(read)

    def notify(self, peer: str, message: bytes) -> None:
        self._agent.send_notif(peer, message)

    def notifications(self) -> list[bytes]:
        return [
            message for messages in self._agent.get_new_notifs().values() for message in messages
        ]

    def close(self) -> None:
        """No read may be in flight."""
        while self._own_lists:
            self._agent.release_dlist_handle(self._own_lists.pop())
        while self._registered:
            self._agent.deregister_memory(self._registered.pop())
