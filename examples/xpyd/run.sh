#!/usr/bin/env bash
# Several prefill and several decode engines of different sizes behind one proxy; see README.md.
set -euo pipefail

MODEL=${1:?usage: run.sh MODEL}
read -r -a PREFILL_TP <<<"${PREFILL_TP:-1 2}"
read -r -a DECODE_TP <<<"${DECODE_TP:-1 2}"
DEVICE=${DEVICE:-gpu}
FIRST_PORT=${FIRST_PORT:-8100}
PROXY_PORT=${PROXY_PORT:-8000}
SIDE_CHANNEL_PORT=${SIDE_CHANNEL_PORT:-5600}
KEEP=${KEEP:-0}
read -r -a EXTRA <<<"${EXTRA_ARGS:-}"

. "$(dirname "${BASH_SOURCE[0]}")/../servers.sh"

# engine NAME ROLE TP: on the next port, side-channel port and GPUs.
names=() urls=() next_gpu=0 next_port=$FIRST_PORT
engine() {
    local name=$1 role=$2 tp=$3 number=${#names[@]} port=$next_port
    next_port=$((next_port + 1))
    local environment=("VLLM_NIXL_SIDE_CHANNEL_PORT=$((SIDE_CHANNEL_PORT + 100 * number))")
    if [ "$DEVICE" = cpu ]; then
        environment+=(VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind OMP_NUM_THREADS=1)
    else
        environment+=("CUDA_VISIBLE_DEVICES=$(seq -s, "$next_gpu" $((next_gpu + tp - 1)))")
        next_gpu=$((next_gpu + tp))
    fi
    names+=("$name") urls+=("http://127.0.0.1:$port")
    start "$name" env "${environment[@]}" \
        vllm serve "$MODEL" --host 127.0.0.1 --port "$port" --tensor-parallel-size "$tp" \
        --served-model-name demo \
        --kv-transfer-config "{\"kv_connector\": \"CommextNixlConnector\", \"kv_role\": \"$role\",
            \"kv_load_failure_policy\": \"recompute\"}" \
        "${EXTRA[@]}"
}

# ask TEXT: one answer through the proxy, the text in quotes.
ask() {
    curl -sf --max-time 300 "http://127.0.0.1:$PROXY_PORT/v1/completions" \
        -H 'Content-Type: application/json' \
        -d "{\"model\": \"demo\", \"prompt\": \"$1\", \"max_tokens\": 24, \"temperature\": 0}" |
        python3 -c 'import json, sys; print(json.dumps(json.load(sys.stdin)["choices"][0]["text"]))'
}

options=()
for number in "${!PREFILL_TP[@]}"; do
    engine "prefill$number-tp${PREFILL_TP[number]}" kv_producer "${PREFILL_TP[number]}"
    options+=(--prefill "${urls[-1]}")
done
next_port=$((FIRST_PORT + 100))
for number in "${!DECODE_TP[@]}"; do
    engine "decode$number-tp${DECODE_TP[number]}" kv_consumer "${DECODE_TP[number]}"
    options+=(--decode "${urls[-1]}")
done
for number in "${!names[@]}"; do
    wait_for "${names[number]}" "${pids[number]}" "${urls[number]}/health"
done
# Where prompts are streamed, engines are chosen in pairs, and a few requests meet the same pairs only.
start proxy vllm-commext proxy --port "$PROXY_PORT" --stream-chunks never "${options[@]}"
wait_for proxy "${pids[-1]}" "http://127.0.0.1:$PROXY_PORT/health"

asking=()
for number in $(seq 16); do
    ask "Prompt $((number % 4)): disaggregated prefill means that" >"$LOGS/answer$number.txt" &
    asking+=("$!")
done
for pid in "${asking[@]}"; do wait "$pid"; done
echo "16 requests at once, 4 prompts; how often each answer came:"
sort "$LOGS"/answer*.txt | uniq -c

for number in "${!names[@]}"; do
    case ${names[number]} in decode*)
        echo "${names[number]}:"
        curl -sf --max-time 30 "${urls[number]}/metrics" |
            grep -E '^vllm:commext_nixl_(bytes_total|transfer_seconds_count|handshake_seconds_count|failures_total)'
        ;;
    esac
done

if [ "$KEEP" = 1 ]; then
    echo "everything stays up until Ctrl-C"
    wait
fi
