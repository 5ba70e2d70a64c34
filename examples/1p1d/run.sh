#!/usr/bin/env bash
# One prefill engine, one decode engine and the proxy on one machine; see README.md.
set -euo pipefail

MODEL=${1:?usage: run.sh MODEL}
TP=${TP:-1}
DEVICE=${DEVICE:-cuda}
PREFILL_PORT=${PREFILL_PORT:-8100}
DECODE_PORT=${DECODE_PORT:-8200}
PROXY_PORT=${PROXY_PORT:-8000}
SIDE_CHANNEL_PORT=${SIDE_CHANNEL_PORT:-5600}
KEEP=${KEEP:-0}
read -r -a EXTRA <<<"${EXTRA_ARGS:-}"

. "$(dirname "${BASH_SOURCE[0]}")/../servers.sh"

# engine NAME ROLE HTTP_PORT SIDE_CHANNEL_PORT FIRST_GPU
engine() {
    local name=$1 role=$2 port=$3 side_channel=$4 first=$5
    local environment=("VLLM_NIXL_SIDE_CHANNEL_PORT=$side_channel")
    if [ "$DEVICE" = cpu ]; then
        environment+=(VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind)
    else
        environment+=("CUDA_VISIBLE_DEVICES=$(seq -s, "$first" $((first + TP - 1)))")
    fi
    start "$name" env "${environment[@]}" \
        vllm serve "$MODEL" --host 127.0.0.1 --port "$port" --tensor-parallel-size "$TP" \
        --served-model-name demo \
        --kv-transfer-config "{\"kv_connector\": \"CommextNixlConnector\", \"kv_role\": \"$role\",
            \"kv_load_failure_policy\": \"recompute\"}" \
        "${EXTRA[@]}"
}

engine prefill kv_producer "$PREFILL_PORT" "$SIDE_CHANNEL_PORT" 0
engine decode kv_consumer "$DECODE_PORT" "$((SIDE_CHANNEL_PORT + 100))" "$TP"
wait_for prefill "${pids[0]}" "http://127.0.0.1:$PREFILL_PORT/health"
wait_for decode "${pids[1]}" "http://127.0.0.1:$DECODE_PORT/health"
start proxy vllm-commext proxy --port "$PROXY_PORT" \
    --prefill "http://127.0.0.1:$PREFILL_PORT" --decode "http://127.0.0.1:$DECODE_PORT"
wait_for proxy "${pids[2]}" "http://127.0.0.1:$PROXY_PORT/health"

curl -sf --max-time 300 "http://127.0.0.1:$PROXY_PORT/v1/completions" \
    -H 'Content-Type: application/json' \
    -d '{"model": "demo", "prompt": "Disaggregated prefill means that", "max_tokens": 24, "temperature": 0}'
echo
curl -sf --max-time 30 "http://127.0.0.1:$DECODE_PORT/metrics" |
    grep -E '^vllm:commext_nixl_(bytes|blocks|failures)_total'

if [ "$KEEP" = 1 ]; then
    echo "everything stays up until Ctrl-C"
    wait
fi
