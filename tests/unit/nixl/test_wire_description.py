"""A worker's description: what goes out comes in, what does not hold is refused, and what opens can
be planned with."""

import contextlib
import random
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from vllm_commext.errors import CommextError, ProtocolError
from vllm_commext.nixl.geometry.layout import (
    AttentionGeometry,
    CacheLayout,
    Family,
    Group,
    StateGeometry,
    StatePart,
)
from vllm_commext.nixl.geometry.plan import MAX_PLAN_ROWS, Blocks, plan_read
from vllm_commext.nixl.wire import messages as wire
from vllm_commext.nixl.wire.description import (
    FENCES,
    GENERATIONS,
    MappedOffer,
    MappedRegion,
    WorkerDescription,
    describe,
    encode_description,
    open_description,
)

ATTENTION = AttentionGeometry(
    num_rows=14,
    rows_per_block=2,
    row_stride=256,
    row_tokens=8,
    num_heads=2,
    replicated=False,
    num_planes=1,
    head_stride=128,
    token_stride=16,
    token_bytes=16,
    content="tokens",
    dtype="float32",
)
CONV = StatePart("conv", "bfloat16", 0, 8, False, 6, num_runs=3, run_stride=48)
SSM = StatePart("ssm", "float32", 144, 2, True, 64)
LAYOUT = CacheLayout(
    tp_size=2,
    tp_rank=1,
    num_blocks=7,
    groups=[Group("full", 16), Group("state", 4096)],
    families=[
        Family(0, ["l0", "l2"], [0x7FFF_0000_0000, 4096], ATTENTION),
        Family(1, ["l1"], [8192], StateGeometry(7, 512, (CONV, SSM))),
    ],
)
DESCRIPTION = WorkerDescription(
    engine_id="p",
    facts={"model": "m"},
    agent_metadata=b"\x00\xff",
    memory_type="DRAM",
    device_id=0,
    layout=LAYOUT,
    tables={FENCES: ((1 << 62) - 1, 65536)},
)
OFFER = MappedOffer(
    place="a kernel and a namespace",
    regions=[MappedRegion(address=4096, num_bytes=1 << 36, handle=bytes(64))],
    token_address=4096,
    token=b"known",
)
ENCODED = encode_description(DESCRIPTION)
DESCRIBED = describe(ENCODED, "start-1")


def described(**changes: Any) -> wire.Described:
    """What a peer may send that does not check what it sends."""
    return describe(msgspec.msgpack.encode(replace(DESCRIPTION, **changes)), "start-1")


def test_a_description_survives_the_round_trip() -> None:
    reply = wire.decode_reply(wire.encode(DESCRIBED))
    assert isinstance(reply, wire.Described)
    assert reply.incarnation == "start-1"
    assert open_description(reply) == DESCRIPTION


def test_an_offer_of_mapped_memory_survives_the_round_trip() -> None:
    assert open_description(described(mapped=OFFER)).mapped == OFFER


@pytest.mark.parametrize(
    "change",
    [
        {"regions": [MappedRegion(address=-1, num_bytes=1, handle=bytes(64))]},
        {"regions": [MappedRegion(address=1, num_bytes=0, handle=bytes(64))]},
        {"regions": [MappedRegion(address=1, num_bytes=1 << 62, handle=bytes(64))]},
        {"regions": [MappedRegion(address=1, num_bytes=1, handle=bytes(63))]},
        {"regions": OFFER.regions * 4097},
        {"token_address": 0},
        {"token_address": 1 << 62},
        {"token": b""},
        {"token": bytes(1025)},
    ],
)
def test_an_offer_that_is_out_of_range_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match=r"Expected .*\$\.mapped"):
        open_description(described(mapped=replace(OFFER, **change)))


def test_any_altered_byte_breaks_the_checksum() -> None:
    for position in range(len(ENCODED)):
        altered = bytearray(ENCODED)
        altered[position] ^= 1 << random.Random(position).randrange(8)
        reply = replace(DESCRIBED, description=bytes(altered))
        with pytest.raises(ProtocolError, match="checksum"):
            open_description(reply)


@pytest.mark.parametrize(
    "change",
    [
        {"device_id": -1},
        {"device_id": 4096},
        {"tables": {FENCES: (4096, 0)}},
        {"tables": {FENCES: (4096, (1 << 30) + 1)}},
        {"tables": {FENCES: (1 << 62, 1)}},
        {"layout": replace(LAYOUT, num_blocks=8)},  # test_layout.py has the others
    ],
)
def test_an_inconsistent_description_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ProtocolError, match="worker description"):
        open_description(described(**change))


def test_there_is_a_generation_for_each_block() -> None:
    num_blocks = LAYOUT.num_blocks
    open_description(described(tables={GENERATIONS: (4096, num_blocks)}))
    with pytest.raises(ProtocolError, match=f"expected {num_blocks} generations.*, got 1"):
        open_description(described(tables={GENERATIONS: (4096, 1)}))


@pytest.mark.parametrize("path", ["layout", "layout.families.0.geometry", "layout.groups.1"])
def test_a_description_with_a_part_left_out_is_refused(path: str) -> None:
    *parents, last = path.split(".")
    plain = inside = msgspec.msgpack.decode(ENCODED)
    for step in parents:
        inside = inside[int(step) if step.isdigit() else step]
    inside[int(last) if last.isdigit() else last] = None
    with pytest.raises(ProtocolError, match="not a frame of this protocol"):
        open_description(_unopened(msgspec.msgpack.encode(plain)))


@given(st.data())
@settings(max_examples=80)
def test_a_description_with_any_number_changed_opens_or_is_refused(data: st.DataObject) -> None:
    """What opens can be planned with: no number in it is beyond what arithmetic takes."""
    plain = msgspec.msgpack.decode(ENCODED)
    inside, key = data.draw(st.sampled_from(_numbers(plain)))
    inside[key] = data.draw(
        st.integers(-(1 << 63), (1 << 64) - 1)
        | st.sampled_from([0, 1, 1 << 31, 1 << 40, 1 << 63])
        | st.integers(-9, 9)
    )
    try:
        opened = open_description(_unopened(msgspec.msgpack.encode(plain)))
    except ProtocolError:
        return
    with contextlib.suppress(CommextError):
        plan_read(LAYOUT, opened.layout, local_device=0, remote_device=opened.device_id)


SIZES = st.sampled_from([1, 2, 7, 8, 16, 128, 1 << 12, 1 << 16, 1 << 20, 1 << 31, (1 << 40) - 1])


@st.composite
def hostile_layouts(draw: st.DrawFn) -> CacheLayout:
    """Consistent, and as large or small as numbers go."""
    row_tokens, rows_per_block = draw(SIZES), draw(st.sampled_from([1, 2, 1 << 8, 1 << 16]))
    num_blocks = draw(st.sampled_from([1, 7, 1 << 12, (1 << 31) - 1]))
    geometry = replace(
        ATTENTION,
        num_rows=num_blocks * rows_per_block,
        rows_per_block=rows_per_block,
        row_tokens=row_tokens,
        **{name: draw(SIZES) for name in ("row_stride", "head_stride", "token_stride")},
    )
    state = StateGeometry(num_blocks, draw(SIZES), (CONV, SSM))
    rank = draw(st.integers(0, 3))
    return CacheLayout(
        tp_size=draw(st.sampled_from([1, 2, 4, 1 << 16])) if rank == 0 else 4,
        tp_rank=rank,
        num_blocks=num_blocks,
        groups=[Group("full", row_tokens * rows_per_block), Group("state", draw(SIZES))],
        families=[
            Family(0, ["l0", "l2"], [4096, 8192], geometry),
            Family(1, ["l1"], [8192], state),
        ],
    )


@given(hostile_layouts())
@settings(max_examples=150, deadline=None)
def test_no_description_makes_a_reader_allocate_without_bounds(layout: CacheLayout) -> None:
    """Neither for the plan nor for a request's pairs; what is refused costs next to nothing."""
    frame = msgspec.msgpack.encode(replace(DESCRIPTION, layout=layout))
    own, made = [Blocks(0, [1]), Blocks(0, [2])], None
    tracemalloc.start()
    try:
        opened = open_description(describe(frame, "start-1")).layout
        made = plan_read(LAYOUT, opened, local_device=0, remote_device=0)
        made.pairs(own, [[0], [0]], num_tokens=16, num_remote_tokens=16)
    except CommextError:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak <= (2 << 20 if made is None else 160 << 20)
    assert made is None or len(made.remote_rows) <= MAX_PLAN_ROWS


def _numbers(plain: Any) -> list[tuple[Any, Any]]:
    """Every place of a whole number within nested lists and mappings."""
    found: list[tuple[Any, Any]] = []
    for key, value in plain.items() if isinstance(plain, dict) else enumerate(plain):
        if isinstance(value, (dict, list)):
            found += _numbers(value)
        elif isinstance(value, int) and not isinstance(value, bool):
            found.append((plain, key))
    return found


def test_a_description_that_is_not_one_is_refused() -> None:
    for frame in (b"hello", wire.encode(wire.Refused(reason="no")), ENCODED[:-1], ENCODED + b"x"):
        with pytest.raises(ProtocolError, match="worker description"):
            open_description(_unopened(frame))


def _unopened(frame: bytes) -> wire.Described:
    return describe(frame, "start")
