"""The axes of the mesh. Sizes, rank orders, process groups, rules, planner and messages all follow from this tuple."""

AXES = ("pp", "dp", "cp", "tp")                     # `Parallel` has one size for each
