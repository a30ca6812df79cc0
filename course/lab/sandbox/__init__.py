"""Other people's code in a process of its own, cut off and limited."""
