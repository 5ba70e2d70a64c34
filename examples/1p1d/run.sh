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
READY_SECONDS=${READY_SECONDS:-900}
LOGS=${LOGS:-$(mktemp -d)}
read -r -a EXTRA <<<"${EXTRA_ARGS:-}"

pids=()
stop() {
    trap - EXIT INT TERM
    for pid in "${pids[@]}"; do kill -TERM -- "-$pid" 2>/dev/null || true; done
    for pid in "${pids[@]}"; do
        for _ in $(seq 100); do kill -0 -- "-$pid" 2>/dev/null || break; sleep 0.2; done
        kill -KILL -- "-$pid" 2>/dev/null || true
    done
    echo "stopped; logs are in $LOGS"
}
trap stop EXIT
trap 'exit 130' INT TERM

# start NAME COMMAND...: in a process group of its own, so that its workers end with it.
start() {
    local name=$1
    shift
    setsid "$@" >"$LOGS/$name.log" 2>&1 &
    pids+=("$!")
    echo "$name: pid $!, log $LOGS/$name.log"
}

# wait_for NAME PID URL: until it answers, ends, or the time is up.
wait_for() {
    local name=$1 pid=$2 url=$3
    for _ in $(seq "$READY_SECONDS"); do
        if curl -sf -o /dev/null --max-time 2 "$url"; then
            echo "$name is ready"
            return
        fi
        if ! kill -0 "$pid" 2>/dev/null; then
            echo "$name ended before it was ready:" >&2
            tail -n 20 "$LOGS/$name.log" >&2
            exit 1
        fi
        sleep 1
    done
    echo "$name was not ready within $READY_SECONDS s" >&2
    exit 1
}

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
        --kv-transfer-config "{\"kv_connector\": \"CommextNixlConnector\", \"kv_role\": \"$role\"}" \
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
