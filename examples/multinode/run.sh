#!/usr/bin/env bash
# Two network namespaces stand for two hosts: prefill engine in one, decode engine and proxy in the
# other, a veth pair between them; see README.md. Run it as root.
set -euo pipefail

MODEL=${1:?usage: run.sh MODEL}
TP=${TP:-1}
DEVICE=${DEVICE:-cuda}
SUBNET=${SUBNET:-10.214.77}
KEEP=${KEEP:-0}
read -r -a EXTRA <<<"${EXTRA_ARGS:-}"

if [ "$(id -u)" != 0 ]; then
    echo "expected to run as root, which making network namespaces takes" >&2
    exit 1
fi

P_HOST=commext-p-$$
D_HOST=commext-d-$$
P_ADDRESS=$SUBNET.1
D_ADDRESS=$SUBNET.2

. "$(dirname "${BASH_SOURCE[0]}")/../servers.sh"
ask_from=(ip netns exec "$D_HOST")
clean_up() {
    for host in "$P_HOST" "$D_HOST"; do ip netns delete "$host" 2>/dev/null || true; done
}

# host NAME ADDRESS: a network of its own, with nothing but loopback and its end of the cable.
host() {
    ip -n "$1" link set lo up
    ip -n "$1" address add "$2/24" dev eth0
    ip -n "$1" link set eth0 up
}

# engine HOST ADDRESS NAME ROLE FIRST_GPU
engine() {
    local host=$1 address=$2 name=$3 role=$4 first=$5
    # Without UCX_TLS, UCX would find out that both "hosts" are one machine and share memory; without
    # mapped_reads "never", the decode engine would map the GPU memory of the prefill engine.
    local environment=("VLLM_NIXL_SIDE_CHANNEL_HOST=$address" "VLLM_HOST_IP=$address"
        UCX_TLS=tcp UCX_NET_DEVICES=eth0)
    if [ "$DEVICE" = cpu ]; then
        environment+=(VLLM_CPU_KVCACHE_SPACE=1 VLLM_CPU_OMP_THREADS_BIND=nobind)
    else
        environment+=("CUDA_VISIBLE_DEVICES=$(seq -s, "$first" $((first + TP - 1)))"
            UCX_TLS=tcp,cuda_copy)
    fi
    start "$name" ip netns exec "$host" env "${environment[@]}" \
        vllm serve "$MODEL" --host "$address" --port 8000 --tensor-parallel-size "$TP" \
        --served-model-name demo \
        --kv-transfer-config "{\"kv_connector\": \"CommextNixlConnector\", \"kv_role\": \"$role\",
            \"kv_load_failure_policy\": \"recompute\",
            \"kv_connector_extra_config\": {\"mapped_reads\": \"never\"}}" \
        "${EXTRA[@]}"
}

# received: bytes that have come to the decode host over the cable.
received() { "${ask_from[@]}" cat /sys/class/net/eth0/statistics/rx_bytes; }

ip netns add "$P_HOST"
ip netns add "$D_HOST"
ip link add eth0 netns "$P_HOST" type veth peer name eth0 netns "$D_HOST"
host "$P_HOST" "$P_ADDRESS"
host "$D_HOST" "$D_ADDRESS"

engine "$P_HOST" "$P_ADDRESS" prefill kv_producer 0
engine "$D_HOST" "$D_ADDRESS" decode kv_consumer "$TP"
wait_for prefill "${pids[0]}" "http://$P_ADDRESS:8000/health"
wait_for decode "${pids[1]}" "http://$D_ADDRESS:8000/health"
start proxy ip netns exec "$D_HOST" vllm-commext proxy --host "$D_ADDRESS" --port 9000 \
    --prefill "http://$P_ADDRESS:8000" --decode "http://$D_ADDRESS:8000"
wait_for proxy "${pids[2]}" "http://$D_ADDRESS:9000/health"

PROMPT="prefill means that one host computes the keys and values of a prompt, and that another one reads them over the network and goes on from there, token by token, until the answer is complete."

# ask URL FIRST_WORD: the answer's text and nothing else.
ask() {
    "${ask_from[@]}" curl -sf --max-time 300 "$1/v1/completions" -H 'Content-Type: application/json' \
        -d "{\"model\": \"demo\", \"prompt\": \"$2 $PROMPT\", \"max_tokens\": 24, \"temperature\": 0}" |
        python3 -c 'import json, sys; print(json.load(sys.stdin)["choices"][0]["text"])'
}

# read_so_far: bytes of KV cache that the decode engine says it has read.
read_so_far() {
    "${ask_from[@]}" curl -sf --max-time 30 "http://$D_ADDRESS:8000/metrics" |
        awk '/^vllm:commext_nixl_bytes_total/ { sum += $NF } END { printf "%d", sum }'
}

# The first read of a peer is followed by a measurement of the network, which would count as well.
ask "http://$D_ADDRESS:9000" First >/dev/null
reference=$(ask "http://$P_ADDRESS:8000" Disaggregated)
read_before=$(read_so_far)
came_before=$(received)
answer=$(ask "http://$D_ADDRESS:9000" Disaggregated)
came=$(($(received) - came_before))
read=$(($(read_so_far) - read_before))

echo "bytes of KV cache that the decode engine read: $read"
echo "bytes that came over the cable meanwhile: $came"
if [ "$answer" != "$reference" ]; then
    echo "FAIL: the answer differs from the prefill engine's own"
    exit 1
fi
if [ "$read" -eq 0 ] || [ "$came" -lt "$read" ]; then
    echo "FAIL: the KV cache did not come over the cable"
    exit 1
fi
echo "ok: the answer is the prefill engine's own, and its KV cache came over the cable"

if [ "$KEEP" = 1 ]; then
    echo "everything stays up until Ctrl-C; ip netns exec $D_HOST curl http://$D_ADDRESS:9000/v1/models"
    wait
fi
