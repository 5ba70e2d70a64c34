# What the examples' run.sh share: servers in the background, which end with the script. To be
# sourced, by bash with `set -euo pipefail`.
#
# A script may set `ask_from` to a command that curl is to run under, and define `clean_up` for
# what else it has to remove.

READY_SECONDS=${READY_SECONDS:-900}
LOGS=${LOGS:-$(mktemp -d)}

pids=()
ask_from=()
clean_up() { :; }
stop() {
    trap - EXIT INT TERM
    # The last one first: the proxy ends its answers before the engines that give them go.
    for ((i = ${#pids[@]} - 1; i >= 0; i--)); do
        pid=${pids[i]}
        kill -TERM -- "-$pid" 2>/dev/null || true
        for _ in $(seq 100); do kill -0 -- "-$pid" 2>/dev/null || break; sleep 0.2; done
        kill -KILL -- "-$pid" 2>/dev/null || true
    done
    clean_up
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
        if "${ask_from[@]}" curl -sf -o /dev/null --max-time 2 "$url" && kill -0 "$pid"; then
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
