"""The benchmarks of `course bench`, and the recorded results that lessons read."""
