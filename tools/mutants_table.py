"""What ``mutants.py`` changes and in which files, which tests must notice, and what none can."""

import ast
from dataclasses import dataclass

_ORDERED = ((ast.Lt, ast.LtE, ast.GtE), (ast.LtE, ast.Lt, ast.Gt))
_ORDERED += ((ast.Gt, ast.GtE, ast.LtE), (ast.GtE, ast.Gt, ast.Lt))
_PAIRS = ((ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn), (ast.And, ast.Or))
_PAIRS += ((ast.Add, ast.Sub), (ast.Mult, ast.FloorDiv), (ast.LShift, ast.RShift))
_PAIRS += ((ast.BitAnd, ast.BitOr),)
_SINGLE = ((ast.Div, ast.Mult), (ast.Mod, ast.Mult), (ast.BitXor, ast.BitAnd), (ast.USub, ast.UAdd))
FLIPPED: dict[type[ast.AST], tuple[type[ast.AST], ...]] = {
    **{one: others for one, *others in _ORDERED},
    **{one: (other,) for pair in _PAIRS for one, other in (pair, pair[::-1])},
    **{one: (other,) for one, other in _SINGLE},
}
CALLED = {"min": "max", "max": "min", "any": "all", "all": "any"}

GEOMETRY = "vllm_commext/nixl/geometry"
NIXL, SHM, ALLREDUCE = "tests/unit/nixl", "tests/unit/shm", "tests/unit/allreduce"


@dataclass(frozen=True)
class Target:
    """Files, and the tests that cover them."""

    files: tuple[str, ...]
    tests: tuple[str, ...]


TARGETS = {
    "planner": Target(
        tuple(
            f"{GEOMETRY}/{name}.py"
            for name in (
                "plan",
                "lanes",
                "layout",
                "mamba",
                "topology",
                "request_blocks",
            )
        ),
        tuple(
            f"{NIXL}/test_{name}.py"
            for name in (
                "topology",
                "layout",
                "lanes",
                "request_blocks",
                "descriptors",
                "plan_lists",
                "plan_runs",
                "mamba",
                "plan",
                "plan_stages",
                "pipeline",
            )
        ),
    ),
    "fence": Target(("vllm_commext/nixl/prefill/fence.py",), (f"{NIXL}/test_fence.py",)),
    "leases": Target(("vllm_commext/nixl/prefill/leases.py",), (f"{NIXL}/test_leases.py",)),
    "records": Target(
        ("vllm_commext/nixl/decode/load_state.py", "vllm_commext/nixl/prefill/prefill_state.py"),
        tuple(
            f"{NIXL}/test_{name}.py"
            for name in ("request_phases", "prompt_tracker", "prefill_keys", "quarantine")
        ),
    ),
    "client": Target(
        ("vllm_commext/nixl/wire/client.py",),
        tuple(f"{NIXL}/test_{name}.py" for name in ("client", "client_thread", "peer_states")),
    ),
    "tables": Target(
        ("vllm_commext/nixl/transport/tables.py",),
        (f"{NIXL}/test_tables.py",),
    ),
    "codec": Target(
        ("vllm_commext/shm/codec.py",),
        (f"{SHM}/test_plain.py", f"{SHM}/test_codec.py", f"{SHM}/test_steps.py"),
    ),
    "ring": Target(
        tuple(f"vllm_commext/shm/{name}.py" for name in ("ring", "segment")),
        tuple(
            f"{SHM}/test_{name}.py" for name in ("segment", "ring", "liveness", "ring_processes")
        ),
    ),
    "dispatcher": Target(
        tuple(f"vllm_commext/allreduce/{name}.py" for name in ("dispatcher", "table/table")),
        (f"{ALLREDUCE}/test_dispatcher.py", f"{ALLREDUCE}/test_tables.py"),
    ),
}
_PREFILL = "vllm_commext/nixl/prefill"
_CLIENT = "vllm_commext/nixl/wire/client.py"
_LONG_PAST = "a time that has passed on every clock"
_DISPATCHER = "vllm_commext/allreduce/dispatcher.py"
_TABLE = "vllm_commext/allreduce/table/table.py"
_NEVER_ASKED = "the dispatcher makes the plan for no elements by itself and asks nobody"
_EMPTY = "return message.num_elements == 0"
_SHM = "vllm_commext/shm"
_CODEC = f"{_SHM}/codec.py"
CAPACITY = "a capacity: another number is as right"
CAPACITIES: dict[str, tuple[str, ...]] = {
    f"{_PREFILL}/leases.py": ("MAX_EARLY_RELEASES", "MAX_EARLY_CONSUMERS", "MAX_SENDERS"),
    f"{_PREFILL}/prefill_state.py": ("MAX_RELEASES", "MAX_EARLY"),
    f"{_PREFILL}/fence.py": ("NUM_SLOTS", "NUM_CELLS", "KEY_BYTES"),
    _CLIENT: ("MAX_FRAMES",),
    f"{GEOMETRY}/layout.py": ("MAX_COUNT", "MAX_STAGES", "MAX_PARTS"),
    f"{GEOMETRY}/plan.py": ("MAX_IDS",),
    _DISPATCHER: ("MAX_PLANS",),
    _CODEC: ("IN_BAND_BYTES", "MAX_BUFFERS", "MOST_KEPT"),
    f"{_SHM}/segment.py": ("ATTEMPTS", "MAX_READERS", "LARGEST_RING_BYTES"),
}
"""Of a file, the names that a number is given to by a line of their own: where more of something is
refused, done in steps or done in another way, with the same outcome. Tests take the number from
there, and try what is on either side of it."""
EQUIVALENT: dict[tuple[str, str, str], str] = {
    (_CLIENT, "doublings = min(num_failures - 1, 62)", "62 -> 63"): "beyond the longest wait",
    (_CLIENT, "NO_BACK_OFF = BackOff(0.0, 0.0)", "0.0 -> 1.0"): "the other one bounds it",
    (_CLIENT, "self.retry_at = 0.0", "0.0 -> 1.0"): _LONG_PAST,
    (_CLIENT, "self._next_check = 0.0", "0.0 -> 1.0"): _LONG_PAST,
    (_DISPATCHER, _EMPTY, "0 -> 1"): _NEVER_ASKED,
    (_DISPATCHER, _EMPTY, "message.num_elements == 0 -> message.num_elements != 0"): _NEVER_ASKED,
    (_TABLE, "SCHEMA = 1", "1 -> 2"): "a version: any number would do",
    (
        _CODEC,
        "if len(_builders) >= MOST_KEPT:",
        "len(_builders) >= MOST_KEPT -> len(_builders) > MOST_KEPT",
    ): CAPACITY,
    (
        _CODEC,
        "if len(self._heads) >= MOST_KEPT:",
        "len(self._heads) >= MOST_KEPT -> len(self._heads) > MOST_KEPT",
    ): CAPACITY,
    **{
        (_CODEC, "if len(self._reducers) < 2:", change): "asks again: slower, no other record"
        for change in ("len(self._reducers) < 2 -> len(self._reducers) <= 2", "2 -> 3")
    },
    (
        _CODEC,
        'name, *lengths = head[1:].decode().split(",")',
        "1 -> 2",
    ): "an array in this machine's order of bytes has the same dtype without the mark of it",
    (
        f"{GEOMETRY}/lanes.py",
        "for own, theirs in zip(local.parts, remote.parts, strict=True):",
        "True -> False",
    ): "as many parts on both sides, or the line before had refused them",
    (
        f"{_SHM}/ring.py",
        "self.check(self.core.write(parts, timeout, False, False))",
        "False -> True",
    ): "a record that was given up is never gone on with here",
    (
        f"{_SHM}/ring.py",
        "segment: Segment, capacity_bytes: int, n_readers: int, rank: int, nonce: bytes, "
        "budget: int = 0",
        "0 -> 1",
    ): "a reader spends none",
    (
        f"{_SHM}/segment.py",
        "LARGEST_QUEUE_BYTES = 2 << 20",
        "2 -> 3",
    ): "the power of two below it counts",
    (
        f"{_SHM}/segment.py",
        "if capacity_bytes & (capacity_bytes - 1):",
        "1 -> 2",
    ): "the same for even numbers, and odd ones have their last bit in both",
    (
        _CODEC,
        "assert MAX_BUFFERS < _shm_ring.MAX_PARTS",
        "MAX_BUFFERS < _shm_ring.MAX_PARTS -> MAX_BUFFERS <= _shm_ring.MAX_PARTS",
    ): "both are constants, and far apart",
}
"""(file, the line's text, the change) to the reason."""
