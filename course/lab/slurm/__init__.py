"""Slurm for lesson 18: a cluster on one machine, a stand-in, and the lint of batch scripts."""
