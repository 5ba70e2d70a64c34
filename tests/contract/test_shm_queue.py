"""Our queue beside the installed vLLM's: where it is put, who refuses whom, groups, tensors."""

import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm_commext.shm._shm_ring", reason="the extension is not built")

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


def test_a_queue_with_readers_on_other_hosts_or_an_arena_is_vllms(theirs: type) -> None:
    queue = GroupMessageQueue(2, 1, None, 1 << 16, 2, connect_ip="127.0.0.1")
    assert type(queue) is theirs
    assert queue.export_handle().remote_subscribe_addr.startswith("tcp://127.0.0.1:")
    assert type(GroupMessageQueue(2, 2, None, 1 << 16, 2)) is GroupMessageQueue
    with_arena: Any = GroupMessageQueue(1, 1, None, 1 << 16, 2, enable_shm_tensor_arena=True)
    assert type(with_arena) is theirs
    assert with_arena.export_handle().tensor_arena_handle is not None


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
