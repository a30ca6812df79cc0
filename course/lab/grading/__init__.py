"""A class's submissions: collected, checked, marked."""
