"""An engine that is dropped without `shutdown()`, as vLLM's own tests do, holds up no collection
and no end of its process."""

from pathlib import Path

from tests.contract import dropped_part
from tests.contract.vllm_process import python_at_once

COLLECTION_SECONDS = 5.0


def test_no_part_holds_up_a_collection(folder: Path) -> None:
    code = Path(dropped_part.__file__).read_text()
    all_args = [(part, str(folder)) for part in dropped_part.PARTS]
    for done in python_at_once(code, all_args):
        assert done.returncode == 0, f"{done.args}: {done.stderr}"
        assert float(done.stdout.splitlines()[-1]) < COLLECTION_SECONDS
