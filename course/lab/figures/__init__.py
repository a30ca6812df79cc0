"""Pictures of the lessons: pure functions from numbers to a figure."""
