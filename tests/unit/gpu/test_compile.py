"""Every kernel compiles for every architecture, without a GPU."""

from itertools import product

import pytest

from tests.kit.crossed import crossed
from tests.unit.allreduce.test_fused import KERNELS, SHAPES
from vllm_commext.allreduce.fused.layout import Form, warps
from vllm_commext.allreduce.push import PushLayout
from vllm_commext.gpu.ipc import PEER_CHECK
from vllm_commext.gpu.launch import ELEMENT_CODES, Program
from vllm_commext.nixl.transport import gather
from vllm_commext.reduce_rms import kernel
from vllm_commext.reduce_rms.kernel import PROGRAM, Shape

ARCHITECTURES = (80, 89, 90, 100, 120)
NORMS = (
    Shape("bfloat16", "bfloat16", 2, 3072, 512),
    Shape("float16", "float32", 8, 768, 128),
    Shape("float32", "bfloat16", 3, 2048, 344),
    Shape("bfloat16", "bfloat16", 4, 4096, 8, aligned=False),
)
PUSHES = [
    (PushLayout(size, 1 << 20), code) for size, code in product((2, 4, 8), ELEMENT_CODES.values())
]
CASES = {
    f"{name} {number}": (name, macros)
    for number, (name, macros) in enumerate(
        [
            (PEER_CHECK, {"WORLD_SIZE": 8, "RANK": 3}),
            (gather.NAME, gather.macros()),
            *((layout.kernel, layout.macros(code, rank=1)) for layout, code in PUSHES),
            *(
                (name, Form(name, warps(shape)).macros(shape, world_size=4, rank=1))
                for name, shape in product(KERNELS, SHAPES)
            ),
            *(
                (PROGRAM.name, kernel.macros(shape, tiling))
                for shape in NORMS
                for tiling in kernel.tilings(shape)
            ),
        ]
    )
}


@pytest.mark.usefixtures("needs_nvrtc")
@pytest.mark.parametrize(
    ("case", "architecture"), crossed(list(CASES), ARCHITECTURES, most=len(CASES)), ids=str
)
def test_it_compiles_for_every_architecture(case: str, architecture: int) -> None:
    name, macros = CASES[case]
    cubin = Program(name).compile_cubin(macros, architecture)
    assert cubin.startswith(b"\x7fELF")
    assert name.encode() in cubin
    assert b"multimem" not in cubin
    assert b"cuMulticast" not in cubin
