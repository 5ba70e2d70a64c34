"""A process that has imported vLLM, and forks servers and pieces of code from itself: the import
takes ten seconds of a core, and a server with one worker does it three times.

    python -m tests.kit.fork_server SOCKET OWNER_PID MODULE ...

What is forked runs as a program of its own: arguments, environment, standard streams and session
are new, and ``multiprocessing``'s start method "spawn", vLLM's for engines and workers, forks from
a copy of this process in which nothing has run. It ends with its owner."""

import array
import atexit
import contextlib
import fcntl
import gc
import importlib
import importlib.util
import json
import logging
import os
import runpy
import select
import signal
import socket
import sys
import threading
import traceback
import types
import warnings
from collections.abc import Callable, Sequence
from multiprocessing import util
from pathlib import Path
from typing import Any, NoReturn

from tests.kit import supervisor

MAX_REQUEST_BYTES = 1 << 20
MAX_DESCRIPTORS = 64


def send(channel: socket.socket, message: Any, descriptors: Sequence[int] = ()) -> None:
    """One JSON message with open file descriptors, over a SOCK_SEQPACKET socket."""
    rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
    channel.sendmsg([json.dumps(message).encode()], [rights] if descriptors else [])


def receive(channel: socket.socket) -> tuple[Any, list[int]]:
    """The next message and its descriptors; (None, []) when the other side has closed."""
    found = array.array("i")
    space = socket.CMSG_SPACE(MAX_DESCRIPTORS * found.itemsize)
    data, rights, _, _ = channel.recvmsg(MAX_REQUEST_BYTES, space)
    for level, kind, content in rights:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(content[: len(content) - len(content) % found.itemsize])
    return (json.loads(data) if data else None), list(found)


def serve(listener: socket.socket, owner_pid: int) -> None:
    """Fork for each connection, until the owner has ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for what is forked here
    owner = os.pidfd_open(owner_pid)
    while True:
        readable, _, _ = select.select([listener, owner], [], [])
        if owner in readable:
            return
        channel, _ = listener.accept()
        if os.fork() == 0:
            _end(_answer, listener, owner, channel)
        channel.close()


def _answer(listener: socket.socket, owner: int, channel: socket.socket) -> int:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    listener.close()
    os.close(owner)
    request, descriptors = receive(channel)
    os.setsid()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.nice(max(0, request["nice"] - os.nice(0)))
    if "worker" in request:
        _end(_work, request, channel, as_program=True)
    status = supervisor.guard(request["grace"], lambda: Forked(request, channel))
    send(channel, {"status": status})
    return status


def _work(request: dict[str, Any], channel: socket.socket) -> int:
    """Be a worker of pytest-xdist; the channel is open as long as that lives."""
    send(channel, {"pid": os.getpid()})
    _become(request["environ"], ["-c"], request["folder"])
    for name in [name for name in sys.modules if name.partition(".")[0] == "tests"]:
        del sys.modules[name]
    sys.modules["__main__"] = types.ModuleType("__main__")
    exec(request["worker"], vars(sys.modules["__main__"]))
    return 0


class Forked:
    """The program that was asked for, as a child: what the supervisor needs of a ``Popen``."""

    def __init__(self, request: dict[str, Any], channel: socket.socket) -> None:
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            channel.close()
            _end(_run, request, as_program=True)
        send(channel, {"pid": os.getpid()})

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def _run(request: dict[str, Any]) -> int:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setsid()
    supervisor.prctl(supervisor.PR_SET_PDEATHSIG, signal.SIGKILL)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    serve_spawns()
    _become(request["environ"], ["-c", *request["arguments"]], request["folder"])
    if "code" in request:
        exec(request["code"], {"__name__": "__main__"})
        return 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
    return 0


def _become(environ: dict[str, str], arguments: list[str], folder: str) -> None:
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    sys.argv = arguments
    paths = environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [path for path in paths if path and path not in sys.path]


def inspect_models_here() -> None:
    """From now on vLLM looks at a model's class in its own process.

    It starts one for each architecture that it has not met on this machine, which imports vLLM
    anew, so that looking cannot initialise CUDA."""
    registry = sys.modules.get("vllm.model_executor.models.registry")
    if registry is not None:
        setattr(registry, "_run_in_subprocess", lambda look: look())  # noqa: B010


def override_kernels_here() -> None:
    """Have the kernels for CPUs take the places of Triton's now, not in each worker, which looks
    for these in every module that there is: a quarter of a second."""
    platforms = sys.modules.get("vllm.platforms")
    if platforms is not None:
        platform = platforms.current_platform
        platform.register_triton_kernel_overrides()
        setattr(type(platform), "register_triton_kernel_overrides", lambda *_: None)  # noqa: B010


def share_gloo_device() -> None:
    """From now on a process's Gloo groups share one device: each thread of one looks for work 100
    times a second, and a worker, which has ten groups, takes a hundredth of a core when idle."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None:
        return
    gloo: Any = distributed.ProcessGroupGloo
    make, devices = gloo.__init__, list[Any]()

    def make_with_device(self: Any, store: Any, rank: int, size: int, timeout: Any) -> None:
        if not devices:
            devices.append(gloo.create_default_device())
        options = gloo._Options()
        options._timeout, options._devices = timeout, devices
        make(self, store, rank, size, options)

    gloo.__init__ = make_with_device


def keep_levels() -> None:
    """From now on a logger that is given the level it has forgets nothing: each process of a server
    gives 400 loggers of vLLM's theirs anew, and each time all 1,500 would forget what they have
    found out, in pages that the processes share."""
    give = logging.Logger.setLevel

    def give_another(self: logging.Logger, level: int | str) -> None:
        if self.level != level:
            give(self, level)

    logging.Logger.setLevel = give_another


def stay_frozen() -> None:
    """From now on no collection of garbage looks at what is there: vLLM unfreezes it at the end of
    an engine and of a worker, which would look at all modules several times, and copy their
    pages."""
    gc.freeze()
    gc.unfreeze = lambda: None


def find_options() -> None:
    """Have vLLM find out now what options it has, which it remembers."""
    arguments = sys.modules.get("vllm.engine.arg_utils")
    if arguments is not None:
        arguments.EngineArgs.add_cli_args(arguments.FlexibleArgumentParser())


def serve_spawns() -> None:
    """From now on ``multiprocessing`` spawns by forking a copy of this process as it is here.

    The copy forks twice, and this process is made the reaper of its orphans: what is spawned is a
    child of this process, as it would be otherwise."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        _end(_fork_spawned, theirs)
    theirs.close()
    os.set_inheritable(ours.fileno(), False)
    supervisor.prctl(supervisor.PR_SET_CHILD_SUBREAPER, 1)
    execute = util.spawnv_passfds

    def spawn(path: bytes, arguments: Sequence[str], descriptors: Sequence[int]) -> int:
        if "--multiprocessing-fork" not in arguments:
            return execute(path, arguments, descriptors)
        code = arguments[arguments.index("-c") + 1]
        numbers = sorted({1, 2, *descriptors})
        request = {
            "code": code,
            "arguments": list(arguments[arguments.index("-c") + 2 :]),
            "environ": dict(os.environ),
            "folder": os.getcwd(),
            "numbers": numbers,
        }
        send(ours, request, numbers)
        return receive(ours)[0]["pid"]

    util.spawnv_passfds = spawn


def _fork_spawned(channel: socket.socket) -> int:
    while True:
        request, descriptors = receive(channel)
        if request is None:
            return 0
        reader, writer = os.pipe()
        middle = os.fork()
        if middle == 0:
            channel.close()
            _end(_fork_again, writer, request, descriptors)
        os.waitpid(middle, 0)
        send(channel, {"pid": int(os.read(reader, 32))})
        for descriptor in (reader, writer, *descriptors):
            os.close(descriptor)


def _fork_again(writer: int, request: dict[str, Any], descriptors: list[int]) -> int:
    pid = os.fork()
    if pid == 0:
        os.close(writer)
        _end(_run_spawned, request, descriptors, as_program=True)
    os.write(writer, str(pid).encode())
    return 0


def _run_spawned(request: dict[str, Any], descriptors: list[int]) -> int:
    _place(descriptors, request["numbers"])
    serve_spawns()
    _become(request["environ"], ["-c", *request["arguments"]], request["folder"])
    exec(request["code"], {"__name__": "__main__"})
    return 0


def _place(descriptors: list[int], numbers: list[int]) -> None:
    above = max(numbers) + 1
    moved = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, above) for descriptor in descriptors]
    for descriptor in descriptors:
        os.close(descriptor)
    for descriptor, number in zip(moved, numbers, strict=True):
        os.dup2(descriptor, number)
        os.close(descriptor)


def _end(run: Callable[..., int], *arguments: Any, as_program: bool = False) -> NoReturn:
    status = 1
    try:
        status = run(*arguments)
    except SystemExit as end:
        if isinstance(end.code, str):
            sys.stderr.write(f"{end.code}\n")
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001 - the end of a process
        traceback.print_exc()
    finally:
        if as_program:
            threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
            atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    path, owner_pid, *modules = sys.argv[1:]
    gc.disable()  # a tenth of the time of the imports, which leave little
    for module in modules:
        with contextlib.suppress(ModuleNotFoundError):  # an older vLLM has fewer
            importlib.import_module(module)
    if importlib.util.find_spec("setproctitle") is not None:
        importlib.import_module("setproctitle").getproctitle()  # finds its place while it is there
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm_commext"]:
        del sys.modules[name]  # the supervisor's: what is forked has imported nothing of ours
    inspect_models_here()
    override_kernels_here()
    share_gloo_device()
    keep_levels()
    find_options()
    stay_frozen()
    gc.enable()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        unnamed = Path(path).with_suffix(".new")
        listener.bind(str(unnamed))
        listener.listen(16)
        unnamed.rename(path)  # whoever finds it can connect
        serve(listener, int(owner_pid))


if __name__ == "__main__":
    main()
