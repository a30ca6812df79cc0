"""Checking exercises: find the answer in a notebook, draw its inputs, give a verdict and a hint."""
