"""The dispatcher and its backends speak of tensors; the arithmetic needs no torch."""

import importlib.util

if importlib.util.find_spec("torch") is None:
    collect_ignore = [
        *("test_dispatcher.py", "test_flashinfer.py", "test_push_on_cpu.py"),
        *("test_fused_on_cpu.py", "test_fused_op.py", "test_fused_graph.py"),
        *("test_peer_check.py", "test_ranks.py", "ranks.py"),
    ]
