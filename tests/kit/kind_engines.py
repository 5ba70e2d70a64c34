"""The engines of one kind on GPUs, and those of the kinds that come next, which start meanwhile."""

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.kit import CORRUPTING_MODULE, MARKED_CORRUPTING
from tests.kit.cluster import PATIENT_PROXY_ARGS
from tests.kit.gpu_engines import EngineKind, gpu_server
from tests.kit.parity import Completion, complete
from tests.kit.served import Served
from tests.kit.servers import ProxyServer, Server, ServerEndedError, VllmServer

READY_SECONDS = 300.0
CONNECTOR = (MARKED_CORRUPTING, CORRUPTING_MODULE)
_writing = threading.Lock()
"""Models are drawn from generators of the whole process."""


@dataclass(frozen=True)
class Layout:
    """Which engines each kind has: engine, as P1 or D2m, to its GPUs, with "m" where it reads
    through mappings; pairs, each with a proxy; and what each engine is asked by itself."""

    gpus: Mapping[str, str]
    pairs: Sequence[tuple[str, str]]
    chunk_tokens: int
    prompts: Sequence[Sequence[int]]
    max_tokens: int


@dataclass
class Engines:
    """One kind's servers by name, and what each engine answers by itself, twice; or of a kind that
    is refused, the line that says so."""

    name: str
    served: Served
    folder: Path
    layout: Layout
    servers: dict[str, VllmServer] = field(default_factory=dict[str, VllmServer])
    proxies: dict[tuple[str, str], ProxyServer] = field(
        default_factory=dict[tuple[str, str], ProxyServer]
    )
    own: dict[str, list[Completion]] = field(default_factory=dict[str, list[Completion]])
    again: dict[str, list[Completion]] = field(default_factory=dict[str, list[Completion]])
    refusal: str = ""
    has_ended: bool = False
    _stack: ExitStack = field(default_factory=ExitStack)

    @property
    def model(self) -> Path:
        return self.folder / "model"

    @property
    def model_name(self) -> str:
        return self.served.name or str(self.model)

    def write(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        with _writing:
            self.served.write(self.folder)

    def prepare(self) -> "Engines":
        """Start everything, and ask each engine.

        Skips where vLLM does not serve this kind without this package, either."""
        self.write()
        if self.served.refused:
            self.refusal = self._refusal()
            return self
        for name in self.layout.gpus:
            self.servers[name] = self.make(name)
            self._begin(self.servers[name])
        try:
            for server in self.servers.values():
                server.wait_ready()
            with ThreadPoolExecutor() as pool:
                for own in (self.own, self.again):
                    answers = pool.map(self._answers, self.servers.values())
                    own.update(zip(self.servers, answers, strict=True))
        except Exception as error:
            if self.has_ended:
                raise
            found = [server.first_errors(1) for server in self.servers.values()]
            self._stack.close()
            if reason := self._error_of_its_own():
                pytest.skip(f"kind {self.name} is not served by vLLM itself: {reason}")
            raise AssertionError(f"kind {self.name}: {error!s:.400}; errors: {found}") from error
        for pair in self.layout.pairs:
            source, target = (self.servers[one].url for one in pair)
            label = f"proxy-{'-'.join(pair)}"
            args = list(PATIENT_PROXY_ARGS)
            self.proxies[pair] = ProxyServer(label, [source], [target], self.folder, args=args)
            self._begin(self.proxies[pair])
        for proxy in self.proxies.values():
            proxy.wait_ready()
        return self

    def make(self, name: str, *, plain: bool = False) -> VllmServer:
        """An engine that has not started; a plain one is without the package."""
        kind = EngineKind(
            self.layout.chunk_tokens,
            self.served.gpu_options(self.model),
            mapped_reads="auto" if name.startswith("P") or name.endswith("m") else "never",
            connector=CONNECTOR,
            ready_seconds=READY_SECONDS,
            beside=self.served.beside,
        )
        label = f"{name}-plain" if plain else name
        gpus = self.layout.gpus[name]
        if self.served.num_gpus == 1:
            return gpu_server(label, gpus, self.model, self.folder, kind, plain=plain)
        gpus = ",".join(map(str, range(self.served.num_gpus)))
        return gpu_server(label, gpus, self.model, self.folder, kind, plain=plain, tp=1)

    def _begin(self, server: Server) -> None:
        self._stack.callback(server.stop)
        server.start()

    def _answers(self, server: VllmServer) -> list[Completion]:
        return [
            complete(server.url, self.model_name, prompt, max_tokens=self.layout.max_tokens)
            for prompt in self.layout.prompts
        ]

    def _error_of_its_own(self) -> str:
        server = self.make("P1", plain=True)
        try:
            with server:
                self._answers(server)
        except Exception as error:  # noqa: BLE001 whatever it is, it is not ours
            return str(server.first_errors(2) or error)[:600]
        return ""

    def _refusal(self) -> str:
        server = self.make("P1")
        with suppress(ServerEndedError), server:
            raise AssertionError(f"kind {self.name}: expected a refusal, but the engine started")
        line = server.wait_for_log(self.served.refused, 0.0)
        return line[line.rindex("Error: ") :] if "Error: " in line else line

    def stop(self) -> None:
        self.has_ended = True
        self._stack.close()


class Fleet:
    """Engines of several kinds, some of which start while the tests of others run.

    Args:
        kinds: in the order in which they are asked for.
        side_by_side: how many kinds have engines at a time.
    """

    def __init__(
        self, kinds: Mapping[str, Served], folder: Path, layout: Layout, side_by_side: int
    ) -> None:
        self._order = list(kinds)
        self._side_by_side = side_by_side
        self._pool = ThreadPoolExecutor(2 * side_by_side)
        self._engines = {
            name: Engines(name, served, folder / name, layout) for name, served in kinds.items()
        }
        self._prepared: dict[str, Future[Engines]] = {}

    def engines(self, name: str) -> Engines:
        first = self._order.index(name)
        for one in self._order[first : first + self._side_by_side]:
            if one not in self._prepared:
                self._prepared[one] = self._pool.submit(self._engines[one].prepare)
        return self._prepared[name].result()

    def end(self, name: str) -> None:
        self._pool.submit(self._engines[name].stop)

    def close(self) -> None:
        for prepared in self._prepared.values():
            prepared.cancel()
        for name in self._prepared:
            self.end(name)
        self._pool.shutdown()
