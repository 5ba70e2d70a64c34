"""The commands that serve a model on this host: an engine for each group of GPUs, and the proxy.
Pure."""

import json
import shlex
import signal
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, pairwise, repeat
from pathlib import Path

from vllm_commext.drain import MIDDLEWARE, VARIABLE
from vllm_commext.errors import ConfigError

LOOPBACK = "127.0.0.1"
ENDING = (signal.SIGINT, signal.SIGTERM)
TOKEN = "token"
"""File of the admin port's token."""
TRANSFER = {
    "kv_connector": "CommextNixlConnector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
SHUTDOWN_SECONDS = 20
"""For requests of an engine that is asked to end; the proxy has waited for them before."""
LOCAL = ("--placement", "local")
OURS = (
    *("--host", "--port", "--tensor-parallel-size", "-tp", "--kv-transfer-config"),
    *("--middleware", "--shutdown-timeout"),
)
"""Options of ``vllm serve`` that this command sets itself."""
CPU_DEFAULTS = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
"""Several engines share a host's cores and memory; vLLM would take all for each."""


@dataclass(frozen=True)
class Request:
    """The command line. gpus: as for CUDA_VISIBLE_DEVICES, none: CPUs. num_engines: on CPUs.
    tpot_ms, ttft_ms: limits that placement keeps, 0: none. engine_args: of every ``vllm serve``."""

    model: str
    gpus: tuple[str, ...]
    num_engines: int
    tp: int
    host: str
    port: int
    tpot_ms: int
    ttft_ms: int
    engine_args: tuple[str, ...]

    def __post_init__(self) -> None:
        """Raise `ConfigError` for GPUs that cannot be divided so, or an option that is set here."""
        if len(self.gpus) % self.tp or len(set(self.gpus)) < len(self.gpus):
            wanted = f"multiples of --tp {self.tp}" if len(self.gpus) % self.tp else "each GPU once"
            raise ConfigError(f"--gpus {','.join(self.gpus)}: expected {wanted}; name other GPUs")
        for option in self.engine_args:  # vLLM also reads a name's beginning, or members
            name = option.partition("=")[0].partition(".")[0].replace("_", "-")
            if name.strip("-") and any(own.startswith(name) for own in OURS):
                raise ConfigError(
                    f"{option} after --: expected options of vllm serve other than "
                    f"{', '.join(OURS)}, which this command sets; leave it out"
                )

    @property
    def served_name(self) -> str:
        """The model's name in requests."""
        for option, value in pairwise((*self.engine_args, "")):
            name, equals, given = option.partition("=")
            if name.strip("-") and "--served-model-name".startswith(name.replace("_", "-")):
                return given if equals else value
        return self.model

    def groups(self) -> list[tuple[str, ...]]:
        """GPUs of each engine."""
        starts = range(0, len(self.gpus), self.tp)
        return [self.gpus[at : at + self.tp] for at in starts] or [()] * self.num_engines


@dataclass(frozen=True)
class Command:
    """One process; ``environ`` is laid over this one's, ``admin_url`` is the proxy's admin port."""

    name: str
    argv: Sequence[str]
    url: str
    environ: Mapping[str, str] = field(default_factory=dict[str, str])
    admin_url: str = ""

    def as_shell(self) -> str:
        """The command for a shell, with the commands' own names."""
        _, _, module, *rest = self.argv
        start = {"vllm.entrypoints.cli.main": "vllm", "vllm_commext": "vllm-commext"}
        environ = (f"{name}={shlex.quote(value)}" for name, value in self.environ.items())
        return " ".join([*environ, start[module], shlex.join(rest)])


def commands(
    request: Request, folder: Path, ports: Iterator[int], environ: Mapping[str, str]
) -> list[Command]:
    """The engines' commands, then the proxy's. *folder*: for drain files, the admin port's token
    and sockets. *ports*: free ones. *environ*: this process's, which wins over defaults."""
    engines = _engines(request, folder, ports, environ)
    urls = [engine.url for engine in engines]
    admin = next(ports)
    options = ["--admin-port", str(admin), "--admin-token-file", str(folder / TOKEN)]
    proxy = _proxy("proxy", request, _limits(request), zip(repeat("--engine"), urls), options)
    return [*engines, replace(proxy, admin_url=f"http://{LOOPBACK}:{admin}")]


def shapes(
    request: Request, folder: Path, ports: Iterator[int], environ: Mapping[str, str]
) -> tuple[list[Command], list[Command]]:
    """The engines' commands, and those of a proxy for each way to use them: ``replicas``, each
    request whole by the engine with the least work; ``roles``, the first half prefills, prompts in
    order; ``placed`` within the limits. One engine alone has but the first."""
    engines = _engines(request, folder, ports, environ)
    both, num = [("--engine", one.url) for one in engines], len(engines)
    roles = [(("--prefill", "--decode")[2 * n >= num], one.url) for n, one in enumerate(engines)]
    order = ("--prompt-order", "shortest", "--ttft-ms", str(request.ttft_ms))
    ways = {"replicas": (LOCAL, both), "roles": (order, roles), "placed": (_limits(request), both)}
    return engines, [
        _proxy(name, replace(request, port=next(ports)), *ways[name])
        for name in list(ways)[: 1 if num == 1 else None]
    ]


def _engines(
    request: Request, folder: Path, ports: Iterator[int], environ: Mapping[str, str]
) -> list[Command]:
    return [
        _engine(request, number, group, folder, ports, environ)
        for number, group in enumerate(request.groups())
    ]


def _engine(
    request: Request,
    number: int,
    gpus: Sequence[str],
    folder: Path,
    ports: Iterator[int],
    environ: Mapping[str, str],
) -> Command:
    port = next(ports)
    # Not VLLM_NIXL_SIDE_CHANNEL_PORT: in vLLM's key of compiled code, and another at each start.
    extra = {"side_channel_host": LOOPBACK, "side_channel_port": next(ports)}
    transfer = {**TRANSFER, "kv_connector_extra_config": extra}
    own = {VARIABLE: str(folder / f"drain-engine{number}"), "VLLM_RPC_BASE_PATH": str(folder)}
    if gpus:
        own["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    else:
        own |= {name: value for name, value in CPU_DEFAULTS.items() if name not in environ}
    argv = [
        *(sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", request.model),
        *("--host", LOOPBACK, "--port", str(port), "--middleware", MIDDLEWARE),
        *("--tensor-parallel-size", str(request.tp), "--kv-transfer-config", json.dumps(transfer)),
        *("--shutdown-timeout", str(SHUTDOWN_SECONDS), *request.engine_args),
    ]
    return Command(f"engine{number}", argv, f"http://{LOOPBACK}:{port}", own)


def _limits(request: Request) -> Sequence[str]:
    limits = {"--tpot-ms": request.tpot_ms, "--ttft-ms": request.ttft_ms}
    given = [word for option, value in limits.items() if value for word in (option, str(value))]
    return given or LOCAL


def _proxy(
    name: str,
    request: Request,
    placement: Sequence[str],
    engines: Iterable[tuple[str, str]],
    options: Sequence[str] = (),
) -> Command:
    """*engines*: the option for each, and its URL."""
    argv = [sys.executable, "-m", "vllm_commext", "proxy", "--host", request.host]
    argv += ["--port", str(request.port), *chain(*engines), *placement, *options]
    return Command(name, argv, f"http://{shown(request.host)}:{request.port}")


def shown(host: str) -> str:
    """An address under which a server that listens on *host* is reached from here."""
    if host in ("0.0.0.0", "::", ""):
        return LOOPBACK
    return f"[{host}]" if ":" in host else host
