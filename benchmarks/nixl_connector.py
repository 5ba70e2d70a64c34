"""Our NIXL connector against the one in the installed vLLM, in one run.

Both work on the same caches in the same processes and take turns, so that what else the machine
does meets both.  vLLM's side is its own worker class, built without a model: its constructor, its
registration, its handshake and its reads are what runs.  Only ratios of one run mean anything.

    python benchmarks/nixl_connector.py --out benchmarks/results/mine

writes mine.md and mine.json.  ``--quick`` runs small sizes and no servers; ``--only`` runs some of
the parts:

    setup    making a new peer ready; the local lists for a peer of four ranks
    stall    how long the engine's thread stands still while a large read is posted
    fence    what the proof costs that blocks were still the request's when they were read
    blocks   descriptors that NIXL moves for a request, on pools that vLLM's BlockPool fragmented
    states   the same for the states of a Mamba2 model
    latency  one request through a prefill and a decode server
"""

import sys

import repository  # noqa: F401
from kv_connector.command import run

if __name__ == "__main__":
    sys.exit(run(__doc__ or ""))
