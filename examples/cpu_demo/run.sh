#!/usr/bin/env bash
# The demo on CPUs; see README.md. Options are passed on to `python -m tests.kit.demo`.
set -euo pipefail
cd "$(dirname "$0")/../.."
exec python -m tests.kit.demo "$@"
