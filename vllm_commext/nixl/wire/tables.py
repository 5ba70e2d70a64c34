"""A worker's tables in its description, which has fields of their own for each."""

from collections.abc import Mapping

from vllm_commext.nixl.wire.messages import WorkerDescription

FENCES, GENERATIONS = "fences", "generations"
STREAM_HEADERS, STREAM_PIECES = "stream headers", "stream pieces"
_FIELDS = {
    FENCES: ("fence_address", "num_fence_slots"),
    GENERATIONS: ("generations", "num_generations"),
    STREAM_HEADERS: ("stream_headers", "num_stream_rows"),
    STREAM_PIECES: ("stream_entries", "pieces_per_row"),
}
"""Address and number of records; of pieces, that in each row."""

Places = Mapping[str, tuple[int, int]]
"""Address and number of records by the table's name."""


def described(tables: Places) -> dict[str, int]:
    """The fields of ``WorkerDescription`` that say where tables are."""
    fields: dict[str, int] = {}
    for name, place in tables.items():
        fields.update(zip(_FIELDS[name], place, strict=True))
    if STREAM_PIECES in tables:
        fields["pieces_per_row"] //= fields["num_stream_rows"]
    return fields


def tables_in(description: WorkerDescription) -> Places:
    """Where a worker's tables are; what it does not have is not there."""
    found = {
        name: (getattr(description, address), getattr(description, number))
        for name, (address, number) in _FIELDS.items()
    }
    address, per_row = found[STREAM_PIECES]
    found[STREAM_PIECES] = address, per_row * description.num_stream_rows
    return {name: place for name, place in found.items() if place[1]}
