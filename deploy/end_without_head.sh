#!/usr/bin/env bash
# Ends this machine when the cluster's head has been gone, or no raylet has run here, for LIMIT_S seconds: a node that nobody
# can release any more would be paid for ever. Started by worker_start_ray_commands:
#
#     bash ~/elastic/deploy/end_without_head.sh "$RAY_HEAD_IP" &> /dev/null
#
# It returns at once and watches in a session of its own, one watcher per machine: a second call only names the new head. A
# shutdown gives the machine back where its type says so (AWS: InstanceInitiatedShutdownBehavior: terminate); END is another
# command that does (Azure: delete_azure_vm.sh), its words split at spaces. One that fails is tried again.
#
# A shutdown that the machine's first boot has scheduled, for a head that dies before it comes here, is called off, also one that
# it schedules later than this starts: Ray's SSH may come before the boot's last scripts. What is scheduled BOOT_S seconds after
# that is somebody else's, and stands. `journalctl -t elastic` says what was called off.
set -eu
head=${1:?usage: end_without_head.sh HEAD_IP}
port=${PORT:-6379}             # Ray's GCS on the head
limit_s=${LIMIT_S:-1200}
every_s=${EVERY_S:-15}
boot_s=${BOOT_S:-900}
folder=${FOLDER:-$HOME/.elastic}
raylet=${RAYLET-raylet}        # the process that has to run here; "" = only the head counts
end=${END:-"sudo shutdown -h now"}
scheduled=${SCHEDULED:-/run/systemd/shutdown/scheduled}  # systemd's file of the shutdown that is to come
# GCS speaks gRPC. The kernel still accepts connections for a process that hangs: a byte in answer to HTTP/2's first words counts.
hello='exec 3<>"/dev/tcp/$0/$1" && printf "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0" >&3 && [ "$(head -c 1 <&3 | wc -c)" = 1 ]'

watch_head() {
    exec 9>"$folder/end_without_head.lock"
    flock -n 9 || exit 0       # another watcher is here, and reads the new head's address
    echo $$ >"$folder/end_without_head.pid"
    call_off
    local begun_s seen_s now_s missed=0 of_boot=""
    begun_s=$(uptime_s) seen_s=$(uptime_s)
    while sleep "$every_s" 9>&-; do
        now_s=$(uptime_s)      # of this machine: clocks may be set meanwhile
        if [ $((now_s - begun_s)) -lt "$boot_s" ]; then of_boot=$(poweroff); fi
        if answers && runs; then
            seen_s=$now_s missed=0
            if [ -n "$of_boot" ] && [ "$(poweroff)" = "$of_boot" ]; then call_off; fi
        else
            missed=$((missed + 1))
        fi
        if [ $((now_s - seen_s)) -ge "$limit_s" ] && [ "$missed" -ge 3 ]; then  # a machine that slept has not looked
            say "the head $(cat "$folder/head") has been gone for $((now_s - seen_s)) s: this machine ends"
            if $end 9>&-; then exit 0; fi
        fi
    done
}

call_off() {
    local of
    of=$(poweroff)
    if [ -n "${END:-}" ] || ! sudo -n shutdown -c >/dev/null 2>&1 9>&-; then return; fi
    if [ -n "$of" ]; then say "the shutdown that this machine's boot had scheduled is called off ($of)"; fi
}
poweroff() { { grep -qs MODE=poweroff "$scheduled" && tr '\n' ' ' <"$scheduled"; } 2>/dev/null || true; }  # what is to come; "" = none
say() { logger -t elastic "$1" 2>/dev/null 9>&- || true; }
uptime_s() { cut -d. -f1 /proc/uptime; }
answers() { timeout 5 bash -c "$hello" "$(cat "$folder/head")" "$port" 2>/dev/null 9>&-; }
runs() { [ -z "$raylet" ] || pgrep -x "$raylet" >/dev/null; }

mkdir -p "$folder"
if [ "${2:-}" = --watch ]; then watch_head; exit; fi
echo "$head" >"$folder/head"
setsid nohup bash "$0" "$head" --watch </dev/null >/dev/null 2>&1 &
