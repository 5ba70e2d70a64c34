"""`vllm-commext proxy`: serve the two-step prefill/decode request."""

import argparse
import logging
import sys
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

from vllm_commext.errors import ConfigError
from vllm_commext.proxy.config import (
    ADAPTIVE,
    AUTO,
    MODES,
    ORDERS,
    PLACEMENTS,
    SHORTEST,
    ProxyConfig,
)

HELP = "start the proxy alone, in front of engines that you started with vllm serve"

_LOG_LEVELS = ("debug", "info", "warning", "error")
_UNIT = "_seconds"


EPILOG = """example, two prefill engines and one decode engine:
  vllm-commext proxy --port 8000 --prefill http://p0:8100 --prefill http://p1:8100 \\
      --decode http://d0:8200
engines that take both steps, placed to keep 1 s to the first token and 15 ms for each other:
  vllm-commext proxy --engine http://a:8100 --engine http://b:8100 --ttft-ms 1000 --tpot-ms 15"""
_GROUPS = {
    "engines": ("prefill", "decode", "both", "engines_file"),
    "where it listens": ("host", "port", "reuse_port", "log_level", "access_log"),
    "which engines serve a request": (
        *("placement", "ttft_ms", "tpot_ms", "prompt_order", "min_prompt_tokens"),
        *("stream_chunks", "affinity"),
    ),
    "health and failures": (
        *("health_interval_seconds", "health_timeout_seconds", "engine_lost_seconds"),
        *("resume", "move"),
    ),
    "timeouts": (
        *("prefill_timeout_seconds", "decode_timeout_seconds"),
        *("client_timeout_seconds", "drain_timeout_seconds"),
    ),
    "limits, of this process": ("max_in_flight", "max_body_bytes"),
    "security": (
        *("api_key_file", "engine_api_key_file", "tls_cert_file", "tls_key_file"),
        *("engine_ca_file", "client_priority"),
    ),
    "admin port": ("admin_host", "admin_port", "admin_token_file"),
}
"""Every option, by the heading under which ``--help`` has it."""


GONE = {
    "--affinity-tokens": "an engine is taken to hold 500,000 tokens; --no-affinity ignores them",
    "--connect-timeout": "use --health-timeout, which bounds connecting, too",
    "--decode-attempts": "two decode engines are tried while none can be connected to",
    "--decode-idle-timeout": "120 s may pass between two pieces of a stream, or --decode-timeout",
    "--engine-wait": "a request waits 3 s for a healthy decode engine",
    "--fair-by": "limit each client's requests at the gateway that tells clients apart",
    "--health-fall": "two failed checks make an engine unhealthy; use --health-interval",
    "--health-rise": "one passed check makes an engine healthy again; use --health-interval",
    "--keep-alive": "idle connections to engines are closed after 4 s",
    "--max-buffered-bytes": "use --max-body-bytes; it is 16 times that",
    "--max-connections": "it is 4,096, or what the limit of descriptors (ulimit -n) allows",
    "--max-connections-per-peer": "it is 2,048; start several proxies with --reuse-port for more",
    "--move-pause": "a stream that moves pauses for 5 s at most; --no-move leaves it where it is",
    "--prefill-attempts": "two prefill engines are tried, then a decode engine computes the prompt",
    "--refresh-interval": "use --health-interval, which is also for --engines-file and dns+http",
    "--refuse-late": "use --max-num-queued-tokens of vllm serve",
    "--request-attempts": "a request is tried twice",
    "--resume-bytes": "256 MiB are kept to resume streams; --no-resume keeps nothing",
    "--upload-bytes-per-second": "a body has --client-timeout, and a second for each 256 KiB",
    "--reuse-blocks": "a conversation goes to the engine that has its KV cache, by default; for a "
    "cache that all engines share, add vLLM's OffloadingConnector to them",
    "--workers": "start several proxies with --reuse-port on one --port, or behind a balancer",
}
"""Options of earlier releases: what to use instead."""


_LEFT_OFF = {
    "affinity": "choose engines without regard to prefix caches",
    "resume": "end a begun stream with an error if its decode engine is lost",
    "move": "let streams finish at a decode engine that drains",
}
_TURNED_ON = {
    "reuse-port": "share the port with other proxies that set this (SO_REUSEPORT)",
    "access-log": "log requests at level info, a line each as they end",
    "client-priority": "let clients set vLLM's priority; else it is removed from requests",
}
_CHOSEN = {
    "stream_chunks": (
        MODES,
        "decode engines read a prompt while it is computed: auto (if the engines can) or never",
    ),
    "placement": (
        PLACEMENTS,
        "adaptive: both steps at one engine or split over two, by measured speed and the limits; "
        "local: both at the engine with the least work; fixed: by engines' roles; auto: adaptive "
        "while an engine does both, else fixed",
    ),
    "prompt_order": (
        ORDERS,
        "prompts at a busy engine: shortest first (with --ttft-ms only if some would be late), or "
        "by arrival; auto: shortest with adaptive placement and --ttft-ms, else arrival",
    ),
}


class _Gone(argparse.Action):
    """Ends the command at an option that is gone."""

    def __call__(
        self, parser: argparse.ArgumentParser, _: object, value: Any, typed: str | None = None
    ) -> None:
        given = f"{typed} {value}" if value is not None else typed
        remedy = GONE[self.option_strings[0]]
        parser.exit(2, f"vllm-commext proxy: {given} is gone: {remedy}\n")


def _add(parser: argparse.ArgumentParser) -> Callable[..., None]:
    groups = {title: parser.add_argument_group(title) for title in _GROUPS}
    of = {name: groups[title] for title, names in _GROUPS.items() for name in names}

    def add(flag: str, *, dest: str = "", **options: Any) -> None:
        name = dest or flag.removeprefix("--").replace("-", "_")
        of[name].add_argument(flag, dest=name, **options)

    return add


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One option a field of `ProxyConfig`."""
    add = _add(parser)
    for flag in GONE:
        parser.add_argument(
            flag, action=_Gone, nargs="?", help=argparse.SUPPRESS, default=argparse.SUPPRESS
        )
    urls: dict[str, Any] = {"action": "append", "default": [], "metavar": "URL"}
    for role in ("prefill", "decode"):
        told = f"a {role} engine, http://HOST:PORT; repeat it for several; dns+http://NAME:PORT: "
        add(f"--{role}", help=told + "one at each address of NAME", **urls)
    told = "an engine that can prefill and decode (kv_role kv_both)"
    add("--engine", dest="both", help=told, **urls)
    for name, meaning in (("host", "to listen on"), ("admin_host", "of the admin port")):
        default, told = getattr(ProxyConfig, name), f"{meaning}; default: %(default)s"
        add(_flag(name), default=default, metavar="ADDRESS", help=told)
    add("--port", type=int, default=ProxyConfig.port, help="0: any free port; default: %(default)s")
    add(
        "--admin-port",
        type=int,
        default=None,
        help="port to see, add, remove and drain engines; 0: any free one; default: none",
    )
    for name, meaning in _TURNED_ON.items():
        add(f"--{name}", action="store_true", help=meaning)
    add("--log-level", choices=_LOG_LEVELS, default="info", help="default: %(default)s")
    for name, meaning in _LEFT_OFF.items():
        add(f"--no-{name}", dest=name, action="store_false", help=meaning)
    for name, (choices, meaning) in _CHOSEN.items():
        default, told = getattr(ProxyConfig, name), f"{meaning}; default: %(default)s"
        add(_flag(name), choices=choices, default=default, help=told)
    for option in fields(ProxyConfig):
        name = _flag(option.name.removesuffix(_UNIT))
        if "file" in option.metadata:
            add(name, default="", metavar="FILE", help=option.metadata["file"])
        if "help" in option.metadata:
            add(
                name,
                dest=option.name,
                type=type(option.default),
                default=option.default,
                metavar="SECONDS" if option.name.endswith(_UNIT) else "N",
                help=f"{option.metadata['help']}; default: %(default)s",
            )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def run(args: argparse.Namespace) -> int:
    """Serve until a signal. 0: ended by one; 2: it cannot serve, and says why."""
    try:
        config = make_config(args)
    except ConfigError as error:
        return _fail(_as_typed(str(error)))
    try:
        from vllm_commext.proxy.process import fitted, raise_limit, run_loop
        from vllm_commext.proxy.routes_readiness_shutdown import check, serve
    except ModuleNotFoundError as error:
        return _fail(f'{error}: pip install "vllm_commext[proxy]" brings it')
    logging.basicConfig(
        level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        check(config)
        run_loop(serve(fitted(config, raise_limit()), partial(print, flush=True)))
    except ConfigError as error:
        return _fail(str(error))
    return 0


def make_config(args: argparse.Namespace) -> ProxyConfig:
    """Raises ConfigError for limits that nothing would keep."""
    names = [option.name for option in fields(ProxyConfig) if hasattr(args, option.name)]
    config = ProxyConfig(**{name: getattr(args, name) for name in names})
    is_open = config.engines_file or config.admin_port is not None  # any engine may come
    is_adaptive = config.placement == ADAPTIVE or (
        config.placement == AUTO and bool(config.both or is_open)
    )
    for name in ("tpot_ms", "ttft_ms"):
        value = getattr(config, name)
        if value and not is_adaptive and config.prompt_order != SHORTEST:
            raise ConfigError(
                f"{name}: expected engines that are placed adaptively, got {value} and fixed "
                "roles; name engines by --engine, or leave it out"
            )
    if config.ttft_ms and not config.tpot_ms and config.prompt_order != SHORTEST:
        raise ConfigError(
            f"ttft_ms: expected --tpot-ms beside it, got {config.ttft_ms} alone; add --tpot-ms"
        )
    return config


def _as_typed(message: str) -> str:
    """*message* with the option in place of the field that it begins with."""
    name, colon, rest = message.partition(":")
    if name not in {option.name for option in fields(ProxyConfig)}:
        return message
    return _flag(name.removesuffix(_UNIT)) + colon + rest


def _fail(message: str) -> int:
    print(f"vllm-commext proxy: {message}", file=sys.stderr)
    return 2
