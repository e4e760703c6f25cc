"""How jobs are started and followed, on this machine or by SLURM."""
