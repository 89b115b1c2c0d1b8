#!/bin/sh
# What a worker's pod does before it ends: its workers are told by the notice file, and have LIMIT_S to leave. A pod on which none runs
# (given back, or idle) ends at once: nobody pays for waiting.
LIMIT_S="${1:-110}"
NOTICE="${ELASTIC_NOTICE_FILE:-/tmp/notice}"
PROC="${PROC:-/proc}"

workers() {  # processes of elastic's workers, as Ray names them
  for command in "$PROC"/[0-9]*/cmdline; do
    tr '\0' ' ' <"$command" 2>/dev/null | grep -q '^ray::.*Worker' && return 0
  done
  return 1
}

workers || exit 0
echo "$LIMIT_S" >"$NOTICE"
while [ "$LIMIT_S" -gt 0 ] && workers; do
  sleep 1
  LIMIT_S=$((LIMIT_S - 1))
done
