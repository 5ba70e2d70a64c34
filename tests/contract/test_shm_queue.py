"""Our queue beside the installed vLLM's: where it is put, who refuses whom, groups, tensors."""

import dataclasses
import json
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm_commext.shm._shm_ring", reason="the extension is not built")

import torch

from tests.contract.vllm_process import python, ranks
from tests.kit.ports import free_port
from vllm_commext.compat.monkey_patch import original_of
from vllm_commext.compat.shm_queue import GroupMessageQueue, finding_itself
from vllm_commext.errors import ProtocolError
from vllm_commext.shm.codec import MARK, Decoder, Encoder
from vllm_commext.shm.queue import MessageQueue

SCRIPT = Path(__file__).with_name("queue_ranks.py")
STOCK = "vllm.distributed.device_communicators.shm_broadcast"
TOGGLE = "VLLM_COMMEXT_SHM_QUEUE"
OURS, THEIRS = "GroupMessageQueue", "MessageQueue"

# Where the class is found at each name that vLLM uses, before and after its import.
LOOK = f"""
import importlib, json, sys
import vllm.v1.executor.multiproc_executor
if "foreign" in sys.argv:
    import {STOCK} as stock
    stock.MessageQueue = type("MessageQueue", (stock.MessageQueue,), {{"__module__": "foreign"}})
from vllm.plugins import load_general_plugins
load_general_plugins()
names = ["{STOCK}", "vllm.v1.executor.multiproc_executor"]
from vllm_commext import status
print(json.dumps({{
    "classes": [importlib.import_module(name).MessageQueue.__module__ for name in names],
    "lines": [outcome.line() for outcome in status.recorded()],
}}))
"""


def look(*args: str, **environ: str) -> dict[str, Any]:
    done = python(LOOK, *args, **environ)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("environ", [{TOGGLE: "1"}, {}], ids=["toggle", "default on CPUs"])
def test_it_is_put_at_every_name(environ: dict[str, str]) -> None:
    found = look(**environ)
    assert found["classes"] == ["vllm_commext.compat.shm_queue"] * 2
    assert "commext: shm_queue active" in found["lines"]


def test_turned_off_everything_is_vllms() -> None:
    found = look(**{TOGGLE: "0"})
    assert found["classes"] == [STOCK] * 2
    assert f"commext: shm_queue off ({TOGGLE}=0)" in found["lines"]


def test_a_queue_that_somebody_else_has_replaced_stays() -> None:
    found = look("foreign", **{TOGGLE: "auto"})
    assert found["classes"][0] == "foreign"
    [line] = [line for line in found["lines"] if "shm_queue" in line]
    assert "refused" in line
    assert "replaced by foreign already" in line


def test_two_kinds_of_queue_refuse_one_another_at_attach() -> None:
    stock = original_of(f"{STOCK}:MessageQueue")
    ours, theirs = MessageQueue(1, 1), stock(1, 1, None, 1 << 16, 2)
    with pytest.raises(ProtocolError, match=TOGGLE):
        stock.create_from_handle(ours.export_handle(), 0)
    with pytest.raises(ProtocolError, match=TOGGLE):
        MessageQueue.create_from_handle(theirs.export_handle(), 0)


@pytest.mark.parametrize(
    ("hosts", "classes"),
    [
        ("one", [[OURS] * 3, [OURS, OURS, THEIRS], [OURS, OURS, THEIRS]]),
        ("two", [[THEIRS, THEIRS, OURS], [THEIRS] * 3, [THEIRS] * 3]),
    ],
)
def test_groups_of_both_kinds(hosts: str, classes: list[list[str]]) -> None:
    """A group on two hosts is left to vLLM's class. Of the queues to one rank of the world only
    that rank's own is on its host: vLLM counts one rank a host with CPUs."""
    results = ranks(SCRIPT, 3, hosts, str(free_port()), str(free_port()))
    total = sum(range(100_000))
    everyone = ["from 0", "from 1", "from 2"]
    received = [[total, total, everyone], [total, total, []], [total, total, []]]
    assert results == [[*each] for each in zip(classes, received, strict=True)]


def test_the_queues_of_vllms_groups_and_of_an_executor_over_hosts() -> None:
    """Tensor, decode context and inner data parallelism; `external_writer_handle`, and `blocking`
    off. With CPUs vLLM counts one rank a host: the second one's answers come over the network."""
    results = ranks(SCRIPT, 2, "coordinator", str(free_port()))
    groups = ["tp:0", "dcp:0", "inner_dp_world:0", "from who is in no group"]
    assert results == [[[OURS] * 5, [*groups, [0, 1]]], [[OURS] * 4 + [THEIRS], [*groups, []]]]


@pytest.fixture
def theirs(monkeypatch: pytest.MonkeyPatch) -> type:
    """Our queue as it is installed; vLLM's class, to which it leaves readers on other hosts."""
    stock = finding_itself(original_of(f"{STOCK}:MessageQueue"))
    monkeypatch.setattr(GroupMessageQueue, "stock", stock)
    return stock


def test_a_queue_with_readers_on_other_hosts_is_vllms(theirs: type) -> None:
    queue = GroupMessageQueue(2, 1, None, 1 << 16, 2, connect_ip="127.0.0.1")
    assert type(queue) is theirs
    assert queue.export_handle().remote_subscribe_addr.startswith("tcp://127.0.0.1:")
    assert type(GroupMessageQueue(2, 2, None, 1 << 16, 2)) is GroupMessageQueue


ARENA_BYTES = 9 << 20  # of one tensor: vLLM's arena takes those from 8 MiB on
ARENA_SLOTS = 8


@pytest.fixture
def ends(theirs: type) -> tuple[MessageQueue, MessageQueue]:
    """Of a queue with the tensor arena."""
    del theirs
    pytest.importorskip("vllm.distributed.device_communicators.shm_tensor_arena")
    queue = GroupMessageQueue(1, 1, max_chunk_bytes=1 << 20, enable_shm_tensor_arena=True)
    assert type(queue) is GroupMessageQueue
    handle = pickle.loads(pickle.dumps(queue.export_handle()))
    return queue, GroupMessageQueue.create_from_handle(handle, 0)


def call_with_a_tensor(number: int) -> Any:
    """A call to the workers with a large tensor in its new request."""
    (name, (output,), *rest), _ = vllm_step(4, number)
    output.scheduled_new_reqs[0].prompt_embeds = torch.full((ARENA_BYTES // 4,), float(number))
    return (name, (output,), *rest)


def tensor_of(call: Any) -> torch.Tensor:
    return call[1][0].scheduled_new_reqs[0].prompt_embeds


def memory_at(address: int) -> str:
    """What is mapped there in this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, _, last = line.split()[0].partition("-")
        if int(first, 16) <= address < int(last, 16):
            return line
    return ""


def test_large_tensors_of_a_step_lie_in_vllms_arena_until_the_reader_lets_them_go(
    ends: tuple[MessageQueue, MessageQueue],
) -> None:
    queue, reader = ends
    for number in range(2 * ARENA_SLOTS):
        queue.enqueue(call_with_a_tensor(number), timeout=60)
        got = tensor_of(reader.dequeue(timeout=60))
        assert torch.equal(got, torch.full_like(got, float(number)))
        assert "/dev/shm/" in memory_at(got.data_ptr())
    assert queue.counters()["bytes"] < ARENA_BYTES


def test_tensors_go_through_the_ring_where_the_arena_is_full(
    ends: tuple[MessageQueue, MessageQueue],
) -> None:
    queue, reader = ends
    kept: list[torch.Tensor] = []
    for number in range(ARENA_SLOTS + 2):
        queue.enqueue(call_with_a_tensor(number), timeout=60)
        kept.append(tensor_of(reader.dequeue(timeout=60)))
    for number, got in enumerate(kept):
        assert torch.equal(got, torch.full_like(got, float(number)))
    assert 2 * ARENA_BYTES < queue.counters()["bytes"] < 3 * ARENA_BYTES


def test_parameters_and_lone_tensors_go_through_the_arena_and_what_vllm_leaves_out_does_not(
    ends: tuple[MessageQueue, MessageQueue],
) -> None:
    queue, reader = ends
    large = torch.randn(ARENA_BYTES // 4)
    for message in (large, torch.nn.Parameter(large, requires_grad=False), torch.arange(9)):
        queue.enqueue(message, timeout=60)
        got = reader.dequeue(timeout=60)
        assert type(got) is type(message)
        assert torch.equal(got, message)
    assert queue.counters()["bytes"] < ARENA_BYTES
    others = [large.clone().requires_grad_(), torch.randn(2 * ARENA_BYTES // 4)[::2]]
    queue.enqueue(others, timeout=60)
    assert all(map(torch.equal, reader.dequeue(timeout=60), others))
    assert queue.counters()["bytes"] > 2 * ARENA_BYTES


def test_an_arena_that_cannot_be_attached_is_told_when_it_is_needed(
    ends: tuple[MessageQueue, MessageQueue],
) -> None:
    queue, _ = ends
    handle = queue.export_handle()
    assert handle.tensor_arena_handle is not None
    place = GroupMessageQueue(1, 1, max_chunk_bytes=1 << 20)
    gone = (*handle.tensor_arena_handle[:-1], "no_such_arena")
    both = dataclasses.replace(place.export_handle(), tensor_arena_handle=gone)
    reader = GroupMessageQueue.create_from_handle(both, 0)
    for message in ("small", torch.arange(9)):
        place.enqueue(message, timeout=60)
        assert repr(reader.dequeue(timeout=60)) == repr(message)
    rebuild: Any = pytest.importorskip(f"{STOCK.rpartition('.')[0]}.shm_tensor_arena")
    stub = rebuild._rebuild_arena_tensor, ("no_such_arena", 0, 4, "float32", (1,))
    place.enqueue(Reduced(stub), timeout=60)
    with pytest.raises(KeyError, match="no_such_arena"):
        reader.dequeue(timeout=60)
    place.enqueue("next", timeout=60)
    assert reader.dequeue(timeout=60) == "next"


class Reduced:
    """Is unpickled as the function and arguments that it is given."""

    def __init__(self, reduced: Any) -> None:
        self.reduced = reduced

    def __reduce__(self) -> Any:
        return self.reduced


def test_queues_of_both_classes_are_read(theirs: type) -> None:
    queues: list[Any] = [kind(1, 1, None, 1 << 16, 2) for kind in (theirs, GroupMessageQueue)]
    readers = [GroupMessageQueue.create_from_handle(queue.export_handle(), 0) for queue in queues]
    assert [type(reader) for reader in readers] == [theirs, GroupMessageQueue]
    with pytest.raises(ProtocolError, match="expected a handle of vllm_commext's queue"):
        GroupMessageQueue.create_from_handle(object(), 0)
    for queue, reader in zip(queues, readers, strict=True):
        other = threading.Thread(target=reader.wait_until_ready, daemon=True)
        other.start()
        queue.wait_until_ready()
        other.join(60)
        queue.enqueue("a message", timeout=60)
        assert reader.dequeue(timeout=60) == "a message"


def vllm_step(n_requests: int, number: int) -> tuple[Any, Any]:
    """A call and its answer as vLLM makes them, in the `number`th decode step."""
    from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
    from vllm.v1.executor.multiproc_executor import WorkerProc
    from vllm.v1.outputs import ModelRunnerOutput

    names = [f"cmpl-{at:032x}-0" for at in range(number, number + n_requests)]
    cached, output = CachedRequestData.make_empty(), SchedulerOutput.make_empty()
    cached.req_ids = names
    cached.new_block_ids = [([at],) if at % 16 == 0 else None for at in range(n_requests)]
    cached.num_computed_tokens = [100 + at + number for at in range(n_requests)]
    cached.num_output_tokens = list(range(n_requests))
    output.scheduled_cached_reqs = cached
    fields = dict.fromkeys(field.name for field in dataclasses.fields(NewRequestData))
    fields |= {"req_id": f"new-{number}", "prompt_token_ids": [5, 6, 7], "block_ids": ([3],)}
    output.scheduled_new_reqs = [NewRequestData(**fields)]  # pyright: ignore[reportArgumentType]
    output.num_scheduled_tokens = dict.fromkeys(names, 1)
    output.total_num_scheduled_tokens = n_requests
    output.scheduled_spec_decode_tokens = {names[0]: [5, 6]}
    answer = ModelRunnerOutput(
        req_ids=list(names),
        req_id_to_index={name: at for at, name in enumerate(names)},
        sampled_token_ids=[[at * 7] for at in range(n_requests)],
    )
    return ("execute_model", (output,), {}, None), (WorkerProc.ResponseStatus.SUCCESS, answer)


def test_vllms_steps_go_field_by_field_and_arrive_as_pickle_makes_them() -> None:
    from vllm_commext.compat.shm_queue import vllm_steps

    classes = vllm_steps()
    assert classes is not None
    ends = [(Encoder(classes), Decoder(classes)) for _ in range(2)]
    for number in range(4):
        for (encoder, decoder), message in zip(ends, vllm_step(20, number // 2), strict=True):
            record = encoder.encode(message)
            assert isinstance(record, bytes)
            assert record[:1] == MARK
            assert decoder.decode(record) == message
            assert len(record) < (0.5 if number else 0.95) * len(pickle.dumps(message))
