#!/usr/bin/env bash
# Takes the cluster of up.sh down. --remove also deletes its files and the packages that up.sh installed or unpacked.
set -uo pipefail
# shellcheck source=tests/cluster/common.sh
. "$(cd "$(dirname "$0")" && pwd)/common.sh"
stop() { # SECONDS NAMES PIDFILE...: SIGTERM to all of them, then wait: daemons remove their pid files before they end
  local seconds=$1 names=$2 file pid i pids=()
  shift 2
  for file; do
    pid=$(tr -dc 0-9 2>/dev/null <"$file") && [ -n "$pid" ] && is "$pid" "$names" && kill "$pid" && pids+=("$pid")
  done
  for pid in "${pids[@]}"; do
    for ((i = 0; i < seconds * 20; i++)); do is "$pid" "$names" || break; sleep .05; done
    is "$pid" "$names" && kill -KILL "$pid"
  done
  rm -f "$@"
} 2>/dev/null
if alive slurmctld slurmctld; then
  timeout 10 scancel -p gpu
  for ((i = 0; i < 70; i++)); do [ -z "$(timeout 5 squeue -h)" ] && break; sleep .1; done
fi 2>/dev/null
stop 20 'slurmd|slurmctld' "$lab"/run/slurmd.*.pid "$lab/run/slurmctld.pid"
for pid in $(grep -lsx slurmstepd /proc/[0-9]*/comm | cut -d/ -f3); do # what jobs left behind
  grep -szqxF "SLURM_CONF=$SLURM_CONF" "/proc/$pid/environ" && kill -KILL "$pid"
done 2>/dev/null
for pid in $(of_cluster '^SLURMD_NODENAME=node[0-9]+$'); do kill -KILL "$pid" 2>/dev/null; done
stop 20 slurmdbd "$lab/run/slurmdbd.pid"
stop 30 'mariadbd|mysqld|munged' "$lab/run/mariadb.pid" "$lab/run/munged.pid"
[ "$(readlink /etc/slurm/slurm.conf)" != "$SLURM_CONF" ] || rm -f /etc/slurm/slurm.conf
if [ "${1:-}" = --remove ]; then
  if [ -s "$lab/installed" ]; then
    mapfile -t packages < <(sort -u "$lab/installed")
    apt-get -o DPkg::Lock::Timeout=300 purge -y "${packages[@]}" >/dev/null
  fi
  if [ -s "$lab/unpacked" ]; then
    mapfile -t files <"$lab/unpacked"
    rm -f "${files[@]}"
    ldconfig
  fi
  rm -rf "$lab"
fi
exit 0
