"""What `course bench` measures on this machine, and the recorded results that lessons read."""
