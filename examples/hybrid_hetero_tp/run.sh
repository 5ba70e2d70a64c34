#!/usr/bin/env bash
# A hybrid model between engines of different tensor-parallel sizes, on CPUs; see README.md.
# Options are passed on to `vllm-commext demo`; a later one wins.
set -euo pipefail
exec vllm-commext demo --model granite1 --p-tp 1 --d-tp 2 "$@"
