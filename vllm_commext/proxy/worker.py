"""One of several worker processes: serves the port that all share, and does as it is told.

`python -m vllm_commext.proxy.worker FD PLACE`: FD is a socket to the supervisor, over which each
side sends JSON objects, one a line. The first one brings the configuration. PLACE is the worker's
number, under which it counts on from where the one before it ended.
"""

import asyncio
import json
import logging
import os
import shutil
import socket
import sys
from typing import Any

from vllm_commext.errors import ConfigError
from vllm_commext.proxy.access import server_tls
from vllm_commext.proxy.admin import AdminState
from vllm_commext.proxy.app import ProxyApp
from vllm_commext.proxy.config import ProxyConfig
from vllm_commext.proxy.metrics import SHARED_FOLDER, share_values
from vllm_commext.proxy.process import run_loop
from vllm_commext.proxy.server import connections_of, drained, make_runner, open_port

logger = logging.getLogger("vllm.commext.proxy")

GAUGES_SECONDS = 1.0
MAX_LINE_BYTES = 4 << 20


def message(**content: Any) -> bytes:
    """Encode *content* as one line."""
    return json.dumps(content).encode() + b"\n"


async def serve_for(supervisor: socket.socket) -> None:
    """Serve until the supervisor says so or has gone, then drain. Signals are the supervisor's:
    it starts its workers with them blocked."""
    reader, writer = await asyncio.open_connection(sock=supervisor, limit=MAX_LINE_BYTES)
    first = json.loads(await reader.readline())
    logging.basicConfig(
        level=first["log_level"],
        format="%(asctime)s %(levelname)s %(process)d %(name)s: %(message)s",
    )
    config = ProxyConfig(**first["config"])
    proxy = ProxyApp(config)
    runner = make_runner(proxy)
    await runner.setup()
    gauges = asyncio.create_task(_set_gauges(proxy))
    try:
        _apply(proxy, first["admin"])
        tls, connections = server_tls(config), connections_of(config)
        port = await open_port(runner, connections, config.host, config.port, tls, reuse_port=True)
        writer.write(message(ready=True))
        is_alone = not await _obey(proxy, reader, writer)
        port.close()
        await drained(proxy)
        if is_alone:  # nobody else is left to remove it
            shutil.rmtree(os.environ[SHARED_FOLDER], ignore_errors=True)
    finally:
        gauges.cancel()
        await runner.cleanup()
        writer.close()


async def _obey(
    proxy: ProxyApp, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> bool:
    """Obey the supervisor until it ends this worker; False if it has gone without a word."""
    while line := await reader.readline():
        told = json.loads(line)
        if "drain" in told:
            return True
        if "heartbeat" in told:
            writer.write(message(heartbeat=True))
        if "admin" in told:
            _apply(proxy, told["admin"])
        if "report" in told:
            engines = await proxy.engines()
            writer.write(
                message(report=told["report"], engines=engines, in_flight=proxy.num_in_flight)
            )

    return False


def _apply(proxy: ProxyApp, state: dict[str, Any]) -> None:
    try:
        proxy.apply(AdminState.from_json(state))
    except ConfigError as error:
        logger.warning("admin request rejected: %s", error)


async def _set_gauges(proxy: ProxyApp) -> None:
    """Keep gauges in this worker's file, which whichever worker is asked for metrics reads."""
    while True:
        proxy.metrics.set_gauges()
        await asyncio.sleep(GAUGES_SECONDS)


if __name__ == "__main__":
    share_values(int(sys.argv[2]))
    run_loop(serve_for(socket.socket(fileno=int(sys.argv[1]))))
