#!/usr/bin/env bash
# laptop_cluster.sh start|stop: a Ray cluster of several nodes on this machine, from cluster_configs/laptop.yaml. Linux.
#
# Ray's autoscaler (v2; the first one knows no labels) asks a fake provider for nodes, which starts raylets instead of machines.
# Settings: PORT (6399), FOLDER (where Ray keeps its files: a new or empty one), RAY (the command).
set -euo pipefail
port=${PORT:-6399}
folder=${FOLDER:-/tmp/elastic-laptop-$(id -u)}
ray=${RAY:-ray}
config=${CONFIG:-$(dirname "$(readlink -f "$0")")/../cluster_configs/laptop.yaml}
head_id=ffffffffffffffffffffffffffffffffffffffffffffffffffffffff  # head_node_id of the file

mark="# made by laptop_cluster.sh"
made() { [ ! -L "$folder" ] && [ -O "$folder" ] && grep -qsx "$mark" "$folder/cluster.yaml"; }

# Ray opens its folder to every user (chmod 0777), so it is one inside of a folder that this user alone may enter.
make_own() {
    [ -L "$folder" ] || mkdir -p -m 700 "$folder"
    if [ -L "$folder" ] || [ ! -O "$folder" ] || [ "$(stat -c %a "$folder")" != 700 ]; then
        echo "$folder is there and not a folder of this user alone (mode 700); remove it, or set FOLDER to another" >&2
        exit 2
    fi
    if ! made && [ -n "$(ls -A "$folder")" ]; then
        echo "$folder holds other files: set FOLDER to one that is empty or not there" >&2
        exit 2
    fi
}

ours() { grep -lzx "ELASTIC_LAPTOP=$folder" /proc/[0-9]*/environ 2>/dev/null | cut -d/ -f3; }  # never `ray stop`: it ends every Ray

case ${1:-} in
start)
    if [ -n "$(ours)" ]; then echo "it runs already, at 127.0.0.1:$port; stop it first" >&2; exit 1; fi
    make_own
    export RAY_AUTH_MODE=token  # its ports are open to the network that this machine is in
    "$ray" get-auth-token --generate >/dev/null
    export ELASTIC_LAPTOP=$folder RAY_FAKE_CLUSTER=1 RAY_enable_autoscaler_v2=1 RAY_USAGE_STATS_ENABLED=0
    export RAY_CLOUD_INSTANCE_ID=$head_id RAY_OVERRIDE_NODE_ID_FOR_TESTING=$head_id RAY_NODE_TYPE_NAME=ray.head.default
    export AUTOSCALER_UPDATE_INTERVAL_S=${AUTOSCALER_UPDATE_INTERVAL_S:-1}
    { echo "$mark"; sed "s/^  gcs_address: .*/  gcs_address: 127.0.0.1:$port/" "$config"; } >"$folder/cluster.yaml"
    "$ray" start --head --port="$port" --num-cpus=1 --num-gpus=0 --object-store-memory=100000000 \
        --include-dashboard=false --disable-usage-stats --temp-dir="$folder/ray" --autoscaling-config="$folder/cluster.yaml" \
        --system-config='{"health_check_initial_delay_ms":5000,"health_check_period_ms":1000,"health_check_timeout_ms":1000,"health_check_failure_threshold":3}' \
        >"$folder/start.log" 2>&1 || { cat "$folder/start.log" >&2; exit 1; }
    echo "a cluster that can grow runs at 127.0.0.1:$port"
    ;;
stop)
    for sign in TERM KILL; do
        for pid in $(ours); do kill -"$sign" "$pid" 2>/dev/null || true; done
        for _ in $(seq 25); do [ -z "$(ours)" ] && break 2; sleep 0.1; done
    done
    if made; then  # what `start` puts there goes, and nothing else
        rm -rf "$folder/ray"
        rm -f "$folder/start.log" "$folder/cluster.yaml"
        rmdir "$folder" 2>/dev/null || echo "$folder holds other files, and stays" >&2
    fi
    ;;
*)
    echo "usage: laptop_cluster.sh start|stop" >&2
    exit 2
    ;;
esac
