"""Slurm for lesson 18: a cluster on one machine, stand-ins for Slurm's programs, and a linter for batch scripts."""
