"""Known mistakes, a file for each theme: a change of the reference answer, and the sentence for whoever makes it."""
