"""What of one side cannot be placed in the other, with the reason."""

from dataclasses import replace

import msgspec
import pytest

from tests.unit.nixl.reference_cache import Attention, Cache, Engine, Group, State
from tests.unit.nixl.reference_layout import geometry_of
from vllm_commext.errors import UnsupportedError
from vllm_commext.nixl.geometry.lanes import Grid, Lanes, lanes_between
from vllm_commext.nixl.geometry.layout import PAGES, AttentionGeometry, Geometry, StateGeometry
from vllm_commext.nixl.geometry.topology import Rank

ENGINE = Engine(1, 4, (8,), (1,))
HEADS = Attention(4, 2)
MAMBA2 = State("mamba2", 8, 2, 2, 3)


def geometry(layer: Attention | State, **engine: object) -> Geometry:
    kind = "full" if isinstance(layer, Attention) else "state"
    cache = Cache((Group(kind, (layer,)),), replace(ENGINE, **engine))
    return geometry_of(cache, cache.regions[0])


def lanes(
    local: Geometry, remote: Geometry, sizes: tuple[int, int] = (1, 1), source: int = 0
) -> Lanes | None:
    """Lanes of the first decode rank; ``sizes`` are those of the prefill and decode engine."""
    return lanes_between(local, remote, Rank(sizes[1], 0), Rank(sizes[0], source), "layer a.b")


def refused(local: Geometry, remote: Geometry, sizes: tuple[int, int] = (1, 1)) -> str:
    with pytest.raises(UnsupportedError) as raised:
        lanes(local, remote, sizes)
    message = str(raised.value)
    assert message.startswith("layer a.b")
    return message


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ("num_heads", 2),
        ("replicated", True),
        ("num_planes", 2),
        ("token_bytes", 4),
        ("content", "ANOTHER"),
        ("dtype", "bfloat16"),
    ],
)
def test_attention_of_another_kind_is_refused_by_its_difference(change: str, value: object) -> None:
    own = geometry(HEADS)
    assert isinstance(own, AttentionGeometry)
    other = msgspec.structs.replace(own, **{change: value})
    for local, remote in ((own, other), (other, own)):
        message = refused(local, remote)
        ours, theirs = getattr(local, change), getattr(remote, change)
        assert f"{change} is {ours!r} in the decode engine and {theirs!r} in the prefill" in message
        assert "start both with the same" in message


@pytest.mark.parametrize("change", ["dtype", "num_units", "replicated", "unit_bytes"])
def test_states_of_another_kind_are_refused_by_part_and_difference(change: str) -> None:
    own = geometry(MAMBA2)
    assert isinstance(own, StateGeometry)
    value = getattr(own.parts[1], change)
    changed = f"{value}x" if isinstance(value, str) else value + 1
    part = msgspec.structs.replace(own.parts[1], **{change: changed})
    other = msgspec.structs.replace(own, parts=(own.parts[0], part, *own.parts[2:]))
    message = refused(own, other)
    assert f"layer a.b, B: {change} is {value!r} in the decode engine and {changed!r}" in message


def test_states_of_other_parts_are_refused() -> None:
    own, other = geometry(MAMBA2), geometry(State("gdn", 8, 2, 2, 3))
    message = refused(own, other)
    assert "['x', 'B', 'C', 'ssm']" in message
    assert "['q', 'k', 'v', 'ssm']" in message


@pytest.mark.parametrize("sizes", [(1, 1), (2, 1)])
def test_the_two_orders_of_a_convolution_do_not_fit_each_other(sizes: tuple[int, int]) -> None:
    local = geometry(MAMBA2, tp_size=sizes[1])
    remote = geometry(MAMBA2, tp_size=sizes[0], dim_first=False)
    for message in (refused(local, remote, sizes), refused(remote, local, sizes[::-1])):
        assert message.startswith("layer a.b, x: one engine keeps channels first")
        assert "VLLM_SSM_CONV_STATE_LAYOUT" in message


def test_tokens_and_states_do_not_fit_each_other() -> None:
    for local, remote in ((HEADS, MAMBA2), (MAMBA2, HEADS)):
        assert "keeps tokens there, the other one a state" in refused(
            geometry(local), geometry(remote)
        )


PACKED = replace(HEADS, packed=True)


def test_packed_rows_of_another_length_are_refused() -> None:
    message = refused(geometry(PACKED), geometry(PACKED, rows_per_block=(2,)))
    assert "content 'SOME_BACKEND': the order of tokens in a block is that backend's own" in message
    assert "holds 8 tokens in the decode engine, 4 in the prefill engine" in message
    assert lanes(geometry(PACKED), geometry(PACKED, num_blocks=9)) is not None


def test_packed_rows_are_taken_apart_by_heads_only_where_a_head_is_one_run() -> None:
    """Of tokens that lie apart, nobody knows which bytes belong to a head of a packed row."""

    def by_token(tp_size: int) -> Geometry:
        one = geometry(HEADS, order="LBNHC", tp_size=tp_size)
        assert isinstance(one, AttentionGeometry)
        return msgspec.structs.replace(one, content="SOME_BACKEND")

    assert lanes(by_token(2), by_token(2), (2, 2)) is not None
    for local, remote, sizes in (
        (by_token(2), by_token(1), (1, 2)),
        (by_token(1), by_token(2), (2, 1)),
        (by_token(1), geometry(PACKED), (1, 1)),
        (geometry(PACKED), by_token(1), (1, 1)),
    ):
        assert "SOME_BACKEND" in refused(local, remote, sizes)


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC"])
def test_pages_are_moved_whole_or_not_at_all(order: str) -> None:
    """Data and scales of NVFP4 lie in parts of a page: what is a head's is no run of bytes."""

    def page(tp_size: int = 1, **engine: object) -> Geometry:
        one = geometry(HEADS, tp_size=tp_size, **{"order": order, **engine})
        assert isinstance(one, AttentionGeometry)
        return msgspec.structs.replace(one, content=f"{PAGES}NVFP4")

    for sizes in ((1, 1), (2, 2)):
        whole = lanes(page(sizes[0]), page(sizes[0], num_blocks=9), sizes)
        assert len(whole.lengths) == 1
    for local, remote, sizes in (
        (page(2), page(1), (1, 2)),
        (page(1), page(2), (2, 1)),
        (page(), page(rows_per_block=(2,)), (1, 1)),
        (page(order="LBNHC"), page(order="LBHNC"), (1, 1)),
    ):
        message = refused(local, remote, sizes)
        assert "content 'pages of NVFP4'" in message
        assert "start both engines with the same --tensor-parallel-size, --block-size" in message


def test_nothing_to_read_is_no_lanes() -> None:
    heads = geometry(HEADS, tp_size=2)
    assert lanes(heads, heads, (2, 2), source=0) is not None
    assert lanes(heads, heads, (2, 2), source=1) is None
    state = geometry(MAMBA2, tp_size=2)
    assert lanes(state, state, (2, 2), source=1) is None


def test_grids() -> None:
    grid = Grid(6, 32, 2, 4, 8)
    assert (grid.num_cells, grid.cells_per_block) == (24, 8)
    assert Grid(6, 32) == Grid(6, 32, rows_per_block=1, cells_per_row=1, cell_stride=0)
    assert grid.flattened() == Grid(24, 8, 8)
    assert Grid(6, 16, 2, 2, 8).flattened() == Grid(12, 8, 4)
    padded = replace(grid, row_stride=40)
    assert padded.flattened() == padded
    assert Grid(6, 32, 2).grouped(2) == Grid(3, 64, 1)
