"""The line on a Slurm cluster: batch texts, Slurm's commands, and what keeps each kind of job at its wanted number."""
