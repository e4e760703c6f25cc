# shellcheck shell=bash
# Where the cluster of up.sh lives, for the scripts beside this one.
lab=$(realpath -m "${LAB_DIR:-/var/tmp/minfer-slurm}")
# shellcheck disable=SC2034
port=${LAB_PORT:-26800} # + 6: MariaDB, + 17: slurmctld, + 19: slurmdbd, + 100 + n: slurmd of node n
export SLURM_CONF="$lab/etc/slurm.conf"
export PATH="$PATH:/usr/sbin:/sbin"

is() { # PID NAMES: whether a process runs and has one of these names
  grep -qxE "Name:\s+($2)" "/proc/$1/status" && ! grep -q '^State:\s*[ZX]' "/proc/$1/status"
} 2>/dev/null

alive() { # DAEMON NAMES: whether the daemon of a pid file runs
  local pid
  pid=$(tr -dc 0-9 <"$lab/run/$1.pid" 2>/dev/null) && [ -n "$pid" ] && is "$pid" "$2"
} 2>/dev/null

of_cluster() { # WORDS: the processes with such an environment variable that this cluster started
  local pid
  for pid in $(grep -lszE "$1" /proc/[0-9]*/environ | cut -d/ -f3); do
    grep -szqxF "SLURM_CONF=$SLURM_CONF" "/proc/$pid/environ" && [ "$pid" != $$ ] && echo "$pid"
  done
}
