"""The table: for a world size and dtype, which backends are fastest up to which message size."""

import msgspec

from vllm_commext.allreduce import names
from vllm_commext.errors import ConfigError

SCHEMA = 1


class Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One range of sizes.

    Attributes:
        max_bytes: the largest message of the range; it begins where the row before ends.
        ranking: backends, the fastest first; the next one serves what the first cannot take.
    """

    max_bytes: int
    ranking: tuple[str, ...]


class Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The ranges of each dtype.

    Attributes:
        world_size: the ranks that took part in the measurement.
        rows: by dtype, in rising order of size. Beyond the last nothing is known.
        origin: where the figures come from, in words, for the log.
        fused: as `rows`, of an all-reduce with the residual and the norm after it: who of
            `names.FUSED` is fastest. Beyond the last range its ranking goes on.
        schema: changes when a field changes its meaning.
    """

    world_size: int
    rows: dict[str, tuple[Row, ...]]
    origin: str
    fused: dict[str, tuple[Row, ...]] = msgspec.field(default_factory=dict)
    schema: int = SCHEMA

    def __post_init__(self) -> None:
        for dtype, rows in [*self.rows.items(), *self.fused.items()]:
            bounds = [row.max_bytes for row in rows]
            if any(low >= high for low, high in zip([0, *bounds], bounds, strict=False)):
                raise ValueError(f"expected rising positive sizes for {dtype}, got {bounds}")
            if any(not row.ranking for row in rows):
                raise ValueError(f"expected a backend in every row of {dtype}")

    def ranking(self, num_bytes: int, dtype: str) -> tuple[str, ...]:
        """Backends for that size, the fastest first; none where nothing is known."""
        for row in self.rows.get(dtype, ()):
            if num_bytes <= row.max_bytes:
                return row.ranking
        return ()

    def fused_ranking(self, num_bytes: int, dtype: str) -> tuple[str, ...]:
        """Of `names.FUSED`, the fastest first; none where nothing is known of the dtype."""
        rows = self.fused.get(dtype, ())
        fitting = (row.ranking for row in rows if num_bytes <= row.max_bytes)
        return next(fitting, rows[-1].ranking if rows else ())

    def of_ours(self, dtype: str) -> "Table | None":
        """What is left of one dtype where kernels of ours alone take part, and only where they come
        first: all else is left to vLLM. None where they never do."""
        rows = [
            Row(row.max_bytes, (names.PUSH if row.ranking[0] == names.PUSH else names.VLLM,))
            for row in self.rows.get(dtype, ())
        ]
        fused = self.fused.get(dtype, ())
        first = {row.ranking[0] for row in (*rows, *fused)}
        if not first.intersection((names.PUSH, names.FUSED_PUSH)):
            return None
        return Table(
            self.world_size, {dtype: tuple(rows)}, self.origin, {dtype: fused} if fused else {}
        )

    def leads_up_to(self, dtype: str, backends: tuple[str, ...]) -> int:
        """The largest size at which one of the backends comes first, or 0."""
        led = (row.max_bytes for row in self.rows.get(dtype, ()) if row.ranking[0] in backends)
        return max(led, default=0)

    def leads_fused(self, name: str) -> int:
        """The largest size of any dtype at which one of `names.FUSED` comes first, or 0."""
        rows = [row for of in self.fused.values() for row in of]
        return max((row.max_bytes for row in rows if row.ranking[0] == name), default=0)


def encode(table: Table) -> bytes:
    """As JSON."""
    return msgspec.json.encode(table)


def decode(text: bytes | str) -> Table:
    """From JSON.

    Raises:
        ConfigError: it is no table, or one of another schema.
    """
    try:
        table = msgspec.json.decode(text, type=Table)
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigError(f"expected an all-reduce table, got something else: {error}") from error
    if table.schema != SCHEMA:
        raise ConfigError(f"expected a table of schema {SCHEMA}, got {table.schema}; tune again")
    return table
