"""The axes of the mesh, in one place: sizes, rank orders, process groups, rules, planner and messages follow from the tuple."""

AXES = ("pp", "dp", "cp", "tp")                     # of each `Parallel` has the size
