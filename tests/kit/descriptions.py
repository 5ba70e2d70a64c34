"""What a worker that a test makes up says of itself on a side channel."""

from vllm_commext.nixl.geometry.layout import CacheLayout, Family, Group, StateGeometry, StatePart
from vllm_commext.nixl.wire.description import WorkerDescription, encode_description

_STATE = StateGeometry(1, 64, (StatePart("ssm", "float32", 0, 2, False, 64),))


def description(
    engine_id: str,
    metadata: bytes = b"m",
    *,
    tp_size: int = 1,
    tp_rank: int = 0,
    layout: CacheLayout | None = None,
) -> bytes:
    """Encoded, with the NIXL agent's ``metadata``; without a layout it holds one state."""
    families = [Family(0, ["l"], [4096], _STATE)]
    return encode_description(
        WorkerDescription(
            engine_id=engine_id,
            facts={},
            agent_metadata=metadata,
            memory_type="DRAM",
            device_id=0,
            layout=layout or CacheLayout(tp_size, tp_rank, 1, [Group("state", 16)], families),
        )
    )
