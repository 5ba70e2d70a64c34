"""The dispatcher and its backends speak of tensors; the arithmetic needs no torch."""

import importlib.util
import sys
from pathlib import Path

HELPERS = {  # in an order in which each finds those that it imports
    "allreduce_push_emulation": "push_emulation.py",
    "allreduce_fused_emulation": "fused_emulation.py",
}

if importlib.util.find_spec("torch") is None:
    collect_ignore = [
        *("test_dispatcher.py", "test_flashinfer.py", "test_push_on_cpu.py"),
        *("test_fused_on_cpu.py", "test_fused_op.py", "test_fused_graph.py"),
        *("test_peer_check.py", "test_ranks.py", "ranks.py"),
    ]
else:
    for name, file in HELPERS.items():
        if name not in sys.modules:
            spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(file))
            assert spec is not None
            assert spec.loader is not None
            sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(sys.modules[name])
