"""A prefill and a decode server of one model on this machine, with the connector between them."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from tests.kit.parity import Completion, complete, prefill
from tests.kit.servers import LOOPBACK, Server, VllmServer, free_port
from vllm_commext.shm.segment import NAME as SEGMENT_NAME

BLOCK_SIZE = 32
MAX_MODEL_LEN = 1024
# Twice what as many requests as run at a time can need; a GiB a server is more than a small machine
# has for a dozen of them.
NUM_BLOCKS = 1024
MODEL_NAME = "tiny"
COLLECTIVES = "cpu_collectives: ring buffers serve group tp:0"
"""In the log of a server whose CPU collectives are ours: vLLM has its own on some processors."""
CONNECTOR = "CommextNixlConnector"

# Eager: the tiny models gain nothing from compilation, which would need a C++ compiler and a minute
# a server. The data type is named because vLLM's "auto" turns float32 weights into bfloat16.
ENGINE_ARGS = (
    *("--enforce-eager", "--dtype", "float32", "--block-size", str(BLOCK_SIZE)),
    *("--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "16"),
    *("--num-gpu-blocks-override", str(NUM_BLOCKS)),
)

# vLLM's queue keeps a core busy for each worker for a second after every message, and all the while
# that a prefilled request waits for its reader: on two cores the other servers wait for it.
QUEUE_ENVIRON = {"VLLM_COMMEXT_SHM_QUEUE": "1"}
PLAIN_ENVIRON = {"VLLM_COMMEXT": "1", "VLLM_COMMEXT_NIXL": "0", **QUEUE_ENVIRON}
"""Of a server without the connector that leaves cores to others."""

# A loaded machine with two cores answers late; how soon somebody gives up is not what is shown.
HANDSHAKE_SECONDS = 60.0
PATIENT_PROXY_ARGS = ("--health-timeout", "60")


def kv_transfer_config(
    role: str,
    *,
    connector: str = CONNECTOR,
    module_path: str | None = None,
    policy: str = "fail",
    extra: Mapping[str, Any] | None = None,
    engine_id: str | None = None,
) -> dict[str, Any]:
    """``--kv-transfer-config`` of one server, with its side channel on a free loopback port."""
    config: dict[str, Any] = {
        "kv_connector": connector,
        "kv_role": role,
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": policy,
        "kv_connector_extra_config": {
            "handshake_timeout": HANDSHAKE_SECONDS,
            "side_channel_host": LOOPBACK,
            "side_channel_port": free_port(),
            **(extra or {}),
        },
    }
    if module_path is not None:
        config["kv_connector_module_path"] = module_path
    if engine_id is not None:
        config["engine_id"] = engine_id
    return config


def _server(
    name: str,
    model: Path | str,
    folder: Path,
    *,
    environ: Mapping[str, str | None],
    more: Mapping[str, str | None] | None,
    args: Sequence[str] = (),
    **options: Any,
) -> VllmServer:
    args = [*ENGINE_ARGS, "--served-model-name", MODEL_NAME, str(model), *args]
    environ = {**environ, **(more or {})}
    return VllmServer(name, model, folder, args=args, environ=environ, **options)


def plain_server(
    name: str,
    model: Path | str,
    folder: Path,
    *,
    environ: Mapping[str, str | None] | None = None,
    **options: Any,
) -> VllmServer:
    """A server as it would be without this package: the plugin switched off, no connector.
    ``environ`` wins over that; ``options`` go to ``VllmServer``, as they do below."""
    return _server(name, model, folder, environ={"VLLM_COMMEXT": "0"}, more=environ, **options)


def engine_server(
    name: str,
    model: Path | str,
    folder: Path,
    config: Mapping[str, Any],
    *,
    environ: Mapping[str, str | None] | None = None,
    **options: Any,
) -> VllmServer:
    """A prefill or decode server with ``config`` as its ``--kv-transfer-config``; ``args`` and
    ``environ`` win over the common ones."""
    options["kv_transfer_config"] = config
    return _server(name, model, folder, environ=QUEUE_ENVIRON, more=environ, **options)


@contextmanager
def all_ready(servers: Iterable[Server]) -> Iterator[None]:
    """Start servers at the same time and wait until each is ready; they end with the context.

    Raises what ``Server.wait_ready`` raises."""
    made = list(servers)
    with ExitStack() as stack:
        for server in made:
            stack.callback(server.stop)
            server.start()
        for server in made:
            server.wait_ready()
        yield


def queue_segments(server: Server) -> set[str]:
    """Names of our message queues that at least two processes of the server have mapped."""
    count: Counter[str] = Counter()
    for pid in server.pids():
        with suppress(FileNotFoundError, ProcessLookupError):
            maps = Path(f"/proc/{pid}/maps").read_text()
            count.update({match[0] for match in SEGMENT_NAME.finditer(maps)})
    return {name for name, num_processes in count.items() if num_processes > 1}


def num_queues(server: Server, tensor_parallel_size: int) -> int:
    """Message queues of a server on CPUs: to its workers, from each, and between several; and where
    its log says that the workers' collectives use such queues, one more from each."""
    between = int(tensor_parallel_size > 1)
    collectives = tensor_parallel_size if COLLECTIVES in server.log_text() else 0
    return 1 + tensor_parallel_size + between + collectives


def disaggregated(
    prefill_url: str,
    decode_url: str,
    model: str,
    prompt: Sequence[int],
    *,
    changes: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
    **options: Any,
) -> Completion:
    """The two steps of a proxy: prefill one token, then decode with the parameters that this gave.

    ``changes`` are laid over those parameters, to see what a wrong one does, and ``extra`` over the
    request to decode; ``options`` go to ``complete()``."""
    params = {**prefill(prefill_url, model, prompt), **(changes or {})}
    body = {"kv_transfer_params": params, **(extra or {})}
    return complete(decode_url, model, prompt, extra=body, **options)
