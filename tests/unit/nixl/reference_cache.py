"""Where the reference engines keep what: models, engines and the memory of their ranks.

Sizes are in bytes. Offsets count from the start of a rank's memory; all ranks of an engine place
things alike, only the units that they hold differ."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

GAP_BYTES = 7


@dataclass(frozen=True)
class Attention:
    """An attention layer's cache.

    Attributes:
        token_bytes: bytes of a token in one head of one plane.
        num_planes: 2 where keys and values lie apart.
        latent: every rank holds all heads.
        packed: within a head's row, tokens do not lie one after the other.
    """

    num_heads: int
    token_bytes: int
    num_planes: int = 1
    latent: bool = False
    packed: bool = False


@dataclass(frozen=True)
class State:
    """A state-space layer's cache: inputs of a convolution, then a recurrent state.

    Attributes:
        kind: "mamba1", "mamba2", "gdn" or "short_conv".
        num_heads: heads; channels of "mamba1" and "short_conv".
        head_dim: channels of a head.
        num_groups: groups of B and C in "mamba2", heads of queries and keys in "gdn".
        state_size: channels of one of these, and columns of the recurrent state.
        conv_item: bytes of an element of the convolution.
        ssm_item: the same of the recurrent state.
    """

    kind: str
    num_heads: int
    head_dim: int = 1
    num_groups: int = 1
    state_size: int = 1
    length: int = 3
    conv_item: int = 2
    ssm_item: int = 4
    replicated: bool = False

    @property
    def projections(self) -> tuple[tuple[str, int, int], ...]:
        """(part, units, channels of a unit) of the convolution, in their order."""
        heads = (self.num_heads, self.head_dim)
        pair = (self.num_groups, self.state_size)
        if self.kind == "mamba2":
            return ("x", *heads), ("B", *pair), ("C", *pair)
        if self.kind == "gdn":
            return ("q", *pair), ("k", *pair), ("v", *heads)
        return (("x" if self.kind == "mamba1" else "conv", *heads),)

    @property
    def recurrent_bytes(self) -> int:
        """Bytes of a head of the recurrent state, 0 where there is none."""
        return 0 if self.kind == "short_conv" else self.head_dim * self.state_size * self.ssm_item


@dataclass(frozen=True)
class Group:
    """Layers that share a request's blocks; ``kind`` is "full", "window" or "state"."""

    kind: str
    layers: tuple[Attention | State, ...]


@dataclass(frozen=True)
class Engine:
    """How one engine keeps the caches of a model.

    Attributes:
        block_sizes: tokens of a block, a group at a time.
        rows_per_block: kernel blocks in a block, a group at a time.
        order: dimensions from the outermost: layers, blocks, heads, tokens (N), content.
        dim_first: a convolution's channels come before its positions.
        shared: groups lie over one another, each block belongs to one of them.
        padding: bytes that are left empty behind a page.
    """

    tp_size: int
    num_blocks: int
    block_sizes: tuple[int, ...]
    rows_per_block: tuple[int, ...]
    order: str = "LBHNC"
    dim_first: bool = True
    shared: bool = False
    padding: int = 0


@dataclass(frozen=True)
class Table:
    """A request's blocks in one group: ``block_ids[i]`` at position ``first + i``."""

    first: int
    block_ids: tuple[int, ...]


def units_held(num_units: int, tp_size: int, rank: int, everywhere: bool = False) -> list[int]:
    """Units that vLLM's layers give a rank: equal shares, or one unit to each of several ranks."""
    if everywhere:
        return list(range(num_units))
    if num_units >= tp_size:
        share = num_units // tp_size
        return list(range(rank * share, (rank + 1) * share))
    return [rank // (tp_size // num_units)]


@dataclass(frozen=True)
class Region:
    """Where a layer lies, see ``Cache``; the strides of heads and so on are those of attention."""

    number: int
    group: int
    layer: Attention | State
    base: int
    row_stride: int
    strides: dict[str, int]

    @property
    def name(self) -> str:
        return f"layers.{self.number}"


class Cache:
    """The memory of each rank of an engine."""

    def __init__(self, model: Sequence[Group], engine: Engine) -> None:
        self.model = model
        self.engine = engine
        layers = [(group, one) for group, of in enumerate(model) for one in of.layers]
        self._layers = [(number, *layer) for number, layer in enumerate(layers)]
        self.regions: list[Region] = []
        self.num_bytes = GAP_BYTES
        if engine.shared:
            self._place_over_one_another()
        else:
            self._place_apart()

    def __repr__(self) -> str:
        return f"Cache({self.model!r}, {self.engine!r})"

    def num_units(self, num_units: int, everywhere: bool = False) -> int:
        return len(units_held(num_units, self.engine.tp_size, 0, everywhere))

    def row_tokens(self, group: int) -> int:
        return self.engine.block_sizes[group] // self.engine.rows_per_block[group]

    def row_heads(self, layer: Attention) -> int:
        """Heads of a rank, in all planes."""
        return layer.num_planes * self.num_units(layer.num_heads, layer.latent)

    def num_channels(self, layer: State) -> int:
        return sum(
            self.num_units(units, layer.replicated) * size for _, units, size in layer.projections
        )

    def block_bytes(self, group: int, layer: Attention | State) -> int:
        if isinstance(layer, Attention):
            tokens = self.engine.block_sizes[group]
            return self.row_heads(layer) * tokens * layer.token_bytes
        conv = self.num_channels(layer) * layer.length * layer.conv_item
        return conv + self.num_units(layer.num_heads, layer.replicated) * layer.recurrent_bytes

    def _attention_strides(
        self, group: int, layer: Attention, num_layers: int, padding: int
    ) -> tuple[dict[str, int], int]:
        """Distance of neighbours in each dimension of a dense array, and its bytes."""
        sizes = {
            "L": num_layers,
            "B": self.engine.num_blocks * self.engine.rows_per_block[group],
            "H": self.row_heads(layer),
            "N": self.row_tokens(group),
            "C": layer.token_bytes,
        }
        order = self.engine.order
        return _dense(order.replace("NC", "CN") if layer.packed else order, sizes, padding)

    def _place_apart(self) -> None:
        """Neighbours of one kind have an array of their own."""
        order, padding = self.engine.order, self.engine.padding
        for (group, layer), members in groupby(self._layers, lambda one: one[1:]):
            numbers = [number for number, _, _ in members]
            if isinstance(layer, Attention):
                strides, size = self._attention_strides(group, layer, len(numbers), padding)
            else:
                page = {"C": self.block_bytes(group, layer)}
                sizes = {"L": len(numbers), "B": self.engine.num_blocks, **page}
                outer = "BL" if order[0] == "B" else "LB"
                strides, size = _dense(f"{outer}C", sizes, padding)
            for place, number in enumerate(numbers):
                base = self.num_bytes + place * strides["L"]
                self.regions.append(Region(number, group, layer, base, strides["B"], strides))
            self.num_bytes += size + GAP_BYTES

    def _place_over_one_another(self) -> None:
        """The groups' first layers share a page of each block, and so do the second ones, ..."""
        num_slots = max(len(group.layers) for group in self.model)
        unit = math.lcm(*self.engine.rows_per_block)
        needed = max(self.block_bytes(group, layer) for _, group, layer in self._layers)
        page = unit * (-(-needed // unit) + self.engine.padding)
        sizes = {"L": num_slots, "B": self.engine.num_blocks, "C": page}
        pages, size = _dense(f"{self.engine.order[:2]}C", sizes, 0)
        places = [0] * len(self.model)
        for number, group, layer in self._layers:
            strides: dict[str, int] = {}
            if isinstance(layer, Attention):
                strides, _ = self._attention_strides(group, layer, 1, 0)
            row = pages["B"] // self.engine.rows_per_block[group]
            base = self.num_bytes + places[group] * pages["L"]
            self.regions.append(Region(number, group, layer, base, row, strides))
            places[group] += 1
        self.num_bytes += size + GAP_BYTES


def _dense(order: str, sizes: dict[str, int], padding: int) -> tuple[dict[str, int], int]:
    """Strides and bytes of an array in this order, pages of it padded."""
    strides: dict[str, int] = {}
    step = 1
    for place, dim in reversed(list(enumerate(order))):
        if set(order[: place + 1]) <= {"L", "B"} and not {"L", "B"} & set(strides):
            step += padding
        strides[dim] = step
        step *= sizes[dim]
    return strides, step
