"""Tools for instructors: build lessons, blank exercises, make releases."""
