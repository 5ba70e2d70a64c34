"""`vllm-commext proxy`: serve the two-step prefill/decode request."""

import argparse
import importlib
import logging
import sys
from dataclasses import fields

from vllm_commext.errors import ConfigError
from vllm_commext.proxy.config import MODES, ORDERS, PLACEMENTS, ProxyConfig
from vllm_commext.proxy.process import run_loop

HELP = "an OpenAI endpoint in front of prefill and decode engines"

_LOG_LEVELS = ("debug", "info", "warning", "error")
_UNIT = "_seconds"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One option a field of `ProxyConfig`."""
    for role in ("prefill", "decode"):
        parser.add_argument(
            f"--{role}",
            action="append",
            default=[],
            metavar="URL",
            help=f"a {role} engine, http://HOST:PORT; repeat it for several; dns+http://NAME:PORT: "
            "one at each address of NAME",
        )
    parser.add_argument(
        "--engine",
        action="append",
        dest="both",
        default=[],
        metavar="URL",
        help="an engine that takes either step (kv_role kv_both), or both of one request",
    )
    parser.add_argument("--host", default=ProxyConfig.host, help="default: %(default)s")
    parser.add_argument(
        "--port", type=int, default=ProxyConfig.port, help="0: any free port; default: %(default)s"
    )
    parser.add_argument("--admin-host", default=ProxyConfig.admin_host, help="default: %(default)s")
    parser.add_argument(
        "--admin-port",
        type=int,
        default=None,
        help="port on which engines are added, removed and drained; 0: any free one; default: none",
    )
    parser.add_argument(
        "--access-log", action="store_true", help="log a line for every request that ends"
    )
    parser.add_argument(
        "--no-affinity",
        dest="affinity",
        action="store_false",
        help="balance by load alone, whichever engine may hold the beginning of a prompt",
    )
    parser.add_argument(
        "--no-resume",
        dest="resume",
        action="store_false",
        help="end streams with an error where their decode engine is lost",
    )
    parser.add_argument(
        "--no-move",
        dest="move",
        action="store_false",
        help="let streams end at a decode engine that drains",
    )
    parser.add_argument(
        "--stream-chunks",
        choices=MODES,
        default=ProxyConfig.stream_chunks,
        help="send prompts to both engines at once, so that D reads while P computes and sends the "
        "first token when P has it: wherever the engines can, or never; "
        "default: %(default)s",
    )
    parser.add_argument(
        "--placement",
        choices=PLACEMENTS,
        default=ProxyConfig.placement,
        help="adaptive: both steps at one engine, or one at each of two, by measured speed and the "
        "limits given; local: both at the engine with the least work; fixed: by engines' roles; "
        "auto: adaptive where an engine takes both steps, else fixed; default: %(default)s",
    )
    parser.add_argument(
        "--refuse-late",
        action="store_true",
        help="answer 503 with Retry-After where a request's first token is expected later than "
        "--ttft-ms because of prompts before it, wherever it is placed best",
    )
    parser.add_argument(
        "--prompt-order",
        choices=ORDERS,
        default=ProxyConfig.prompt_order,
        help="in which order prompts go to an engine that computes others: short ones before long "
        "ones, or as they come, at once; default: %(default)s",
    )
    parser.add_argument(
        "--reuse-blocks",
        action="store_true",
        help="name to P the decode engines that may hold the beginning of a prompt, whose blocks P "
        "then reads; needs reuse_blocks in all engines' kv_connector_extra_config",
    )
    for option in fields(ProxyConfig):
        if "file" in option.metadata:
            name = "--" + option.name.replace("_", "-")
            parser.add_argument(name, default="", metavar="FILE", help=option.metadata["file"])
        if "help" in option.metadata:
            parser.add_argument(
                "--" + option.name.removesuffix(_UNIT).replace("_", "-"),
                dest=option.name,
                type=type(option.default),
                default=option.default,
                metavar="SECONDS" if option.name.endswith(_UNIT) else "N",
                help=f"{option.metadata['help']}; default: %(default)s",
            )
    parser.add_argument("--log-level", choices=_LOG_LEVELS, default="info")


def run(args: argparse.Namespace) -> int:
    """Serve until a signal. 0: ended by one; 1: could not listen; 2: wrong options."""
    try:
        values = {option.name: getattr(args, option.name) for option in fields(ProxyConfig)}
        config = ProxyConfig(**values)
    except ConfigError as error:
        return _fail(2, str(error))
    try:
        importlib.import_module("vllm_commext.proxy.server")
    except ModuleNotFoundError as error:
        return _fail(2, f"{error}: pip install aiohttp prometheus-client brings what it needs")
    logging.basicConfig(
        level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    try:
        run_loop(_serving(config, args.log_level.upper()))
    except ConfigError as error:
        return _fail(1, str(error))
    return 0


async def _serving(config: ProxyConfig, log_level: str) -> None:
    from vllm_commext.proxy.process import fitted, raise_limit

    config = fitted(config, raise_limit())
    if config.workers > 1:
        from vllm_commext.proxy.supervisor import serve_by_workers

        await serve_by_workers(config, log_level, _announce)
    else:
        from vllm_commext.proxy.server import serve

        await serve(config, _announce)


def _announce(line: str) -> None:
    print(line, flush=True)


def _fail(status: int, message: str) -> int:
    print(f"vllm-commext proxy: {message}", file=sys.stderr)
    return status
