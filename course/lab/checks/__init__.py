"""Exercises checked: the answer in a notebook, its inputs, the verdict and its hint."""
