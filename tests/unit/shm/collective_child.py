"""One rank of a group of rings, as a process of its own; test_collectives.py starts it.

    python tests/unit/shm/collective_child.py RANK WORLD_SIZE FOLDER CALLS

Ranks exchange their addresses through files in FOLDER. Sums CALLS times, says `done`, then waits
in one more sum, which the others may never join.
"""

import pickle
import sys
import time
from pathlib import Path
from typing import Any

import torch

from vllm_commext.collective import Collective
from vllm_commext.shm.collectives import RingGroup

SECONDS = 60.0


def exchange_by_files(rank: int, world_size: int, folder: Path) -> Any:
    """What `Collective` takes, for processes that share a folder."""
    turn = iter(range(10))

    def exchange(mine: Any) -> list[Any]:
        number = next(turn)
        draft = folder / f"{number}_{rank}.draft"
        draft.write_bytes(pickle.dumps(mine))
        draft.rename(folder / f"{number}_{rank}")
        paths = [folder / f"{number}_{other}" for other in range(world_size)]
        deadline = time.monotonic() + SECONDS
        while not all(path.exists() for path in paths):
            if time.monotonic() > deadline:
                raise TimeoutError(f"expected {paths}")
            time.sleep(0.01)
        return [pickle.loads(path.read_bytes()) for path in paths]

    return exchange


def main() -> None:
    rank, world_size, folder, calls = sys.argv[1:]
    exchange = exchange_by_files(int(rank), int(world_size), Path(folder))
    group = RingGroup.connect(Collective(int(rank), int(world_size), exchange))
    for number in range(int(calls)):
        values = torch.full((1000,), number + int(rank))
        group.all_reduce(values)
        expected = sum(number + other for other in range(int(world_size)))
        assert values.eq(expected).all()
    sys.stdout.write("done\n")
    sys.stdout.flush()
    group.all_reduce(torch.zeros(4))


if __name__ == "__main__":
    main()
