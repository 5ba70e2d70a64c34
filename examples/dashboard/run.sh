#!/usr/bin/env bash
# Prometheus beside the engines and the proxy of ../xpyd, and every query of the dashboard asked once;
# see README.md.
set -euo pipefail

HERE=$(dirname "${BASH_SOURCE[0]}")
PORT=${PORT:-9091} # a Prometheus of the system has 9090
KEEP=${KEEP:-0}
URL=http://127.0.0.1:$PORT

command -v prometheus >/dev/null || { echo "expected prometheus: apt-get install prometheus" >&2; exit 1; }

. "$HERE/../servers.sh"

start prometheus prometheus --config.file "$HERE/prometheus.yml" --storage.tsdb.path "$LOGS/data" \
    --web.listen-address "127.0.0.1:$PORT"
wait_for prometheus "${pids[-1]}" "$URL/-/ready"
sleep "${SECONDS_OF_SCRAPES:-15}"
python3 "$HERE/queries.py" "$URL" "$HERE/../../deploy/grafana/commext_nixl.json"
if [ "$KEEP" != 0 ]; then
    echo "Prometheus stays up on $URL until Ctrl-C"
    wait
fi
