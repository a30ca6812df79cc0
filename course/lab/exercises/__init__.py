"""Exercises, a file for each theme: what an answer is drawn on, what it computes, and what is known to be wrong with it."""
