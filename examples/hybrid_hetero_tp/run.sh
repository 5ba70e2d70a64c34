#!/usr/bin/env bash
# A hybrid model between engines of different tensor-parallel sizes, on CPUs; see README.md.
# Options are passed on to `python -m tests.kit.demo`; a later one wins.
set -euo pipefail
cd "$(dirname "$0")/../.."
exec python -m tests.kit.demo --model granite1 --p-tp 1 --d-tp 2 "$@"
