"""Lessons, stubs of exercises and releases: what instructors make."""
