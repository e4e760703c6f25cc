#!/usr/bin/env bash
# node.sh crash NODE: a node of up.sh's cluster dies with all its jobs. node.sh start NODE: it comes back.
# node.sh cut NODE: SLURM loses sight of it, and its jobs go on. node.sh hide NODE FOLDER: it comes back without a folder.
# node.sh crash slurmctld: the controller dies. node.sh start slurmctld: it comes back, and reads its configuration.
set -u
# shellcheck source=tests/cluster/common.sh
. "$(cd "$(dirname "$0")" && pwd)/common.sh"
name=${2:?}
[ "$name" = slurmctld ] && daemon=slurmctld || daemon=slurmd.$name
case $1 in
  crash)
    kill -KILL "$(cat "$lab/run/$daemon.pid")"
    [ "$name" != slurmctld ] || exit 0
    for pid in $(ss -Hxlp | grep -F "$lab/spool/$name/" | grep -o 'pid=[0-9]*' | cut -d= -f2 | sort -u); do
      kill -KILL "$pid" # a slurmstepd
    done
    for pid in $(of_cluster "^SLURMD_NODENAME=$name\$"); do kill -KILL "$pid" 2>/dev/null; done
    ;;
  cut) kill -KILL "$(cat "$lab/run/$daemon.pid")" ;;
  hide) unshare --mount sh -c 'mount -t tmpfs none "$2" && slurmd -N "$1"' - "$name" "${3:?}" ;;
  start) if [ "$name" = slurmctld ]; then slurmctld; else slurmd -N "$name"; fi ;;
  *) echo "usage: node.sh crash|start NODE|slurmctld, cut NODE, hide NODE FOLDER" >&2; exit 2 ;;
esac
exit 0
