#!/usr/bin/env bash
# The demo on CPUs; see README.md. Options are passed on to `vllm-commext demo`.
set -euo pipefail
exec vllm-commext demo "$@"
