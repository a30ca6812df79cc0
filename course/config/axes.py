"""The axes of the mesh. Sizes, rank orders, process groups, rules, planner and messages all follow from this tuple."""

from course.utils.errors import CourseError

AXES = ("pp", "dp", "cp", "tp")                     # `Parallel` has one size for each


def check_shard(shard: int, ranks: int) -> None:
    """Raise `CourseError` if `parallel.shard` (0: all) does not divide the ranks of dp x cp."""
    if shard and ranks % shard:
        raise CourseError(f"parallel.shard={shard} does not divide the {ranks} ranks of dp x cp: choose one of "
                          f"{', '.join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)}, or 0 for all")


def check_ep(ep: int, ranks: int) -> None:
    """Raise `CourseError` if `parallel.ep` does not divide the ranks of dp x cp, from which it is carved."""
    if ranks % ep:
        raise CourseError(f"parallel.ep={ep} does not divide the {ranks} ranks of dp x cp, over which it spreads the experts: "
                          f"choose one of {', '.join(str(n) for n in range(1, ranks + 1) if ranks % n == 0)}")
