"""Known wrong answers of lesson 09's open task, and correct ones that miss a level."""

from course.lab.checks.exercise import Mistake

CHOICE = "    return min(candidates, key=measure)"
IMPORT = "    from course.lab.instruments.gpu_paths import slowest_paths\n"
GUESS = ("the numbers in `PATHS` are an order, not times: from one path to the next the time may double or stay nearly the same. "
         "Measure the placements that may be the best")
RANDOM = ("this is as slow as any placement by chance. `placement[r]` is the GPU of rank r, not the rank of GPU r; and GPUs are "
          "numbered in any order here, so their numbers say nothing of their paths")
BLIND = ("this asks neither how many bytes an axis sends, nor how slow a path is: `PATHS` is an order, not times. Measure one "
         "placement for each combination of slowest paths that may be the best, and take the fastest")

MISTAKES = {
    "place-ranks": (
        Mistake("the default", CHOICE, "    return list(ranks)", RANDOM),
        Mistake("the slowest", CHOICE, "    return max(candidates, key=measure)",
                "this is the slowest of the placements that were measured: the fewest seconds win"),
        Mistake("in the order of the search", "[chosen[turn[rank]] for rank in ranks]", "chosen",
                "the search goes through the ranks in an order of its own: `placement[r]` is the GPU of rank r, not of the r-th "
                "one in that order"),
        Mistake("the rank of each GPU", CHOICE,
                CHOICE.replace("return", "best =") + "\n    return [best.index(gpu) for gpu in ranks]", RANDOM),
        Mistake("the heaviest axis first", CHOICE, IMPORT + "    heavy = sorted(range(len(axes)), key=lambda i: -axes[i].bytes)\n"
                "    return min(candidates, key=lambda one: [slowest_paths(axes, paths, one)[i] for i in heavy])",
                "the axis that sends most has the fastest paths here, whatever the others pay for it. If two others need a slow "
                "path then, a slow path for the first may take less time"),
        Mistake("the sum of paths", CHOICE,
                f"{IMPORT}    return min(candidates, key=lambda one: sum(slowest_paths(axes, paths, one)))",
                BLIND),
        Mistake("bytes times paths", CHOICE, f"{IMPORT}    return min(candidates, key=lambda one: sum(\n"
                "        axis.bytes * path for axis, path in zip(axes, slowest_paths(axes, paths, one), strict=True)))", GUESS),
        Mistake("fewest axes on slow paths", CHOICE, f"{IMPORT}    return min(candidates, key=lambda one: sorted(\n"
                "        slowest_paths(axes, paths, one), reverse=True))",
                BLIND),
        Mistake("one limit for all", "product(kinds, repeat=len(axes))", "([kind] * len(axes) for kind in kinds)",
                "one limit for all axes is as slow as the slowest path that any axis needs: give each axis its own, so that one "
                "may have fast paths while another has not"),
        Mistake("the first that was found", CHOICE, "    return candidates[0]",
                BLIND),
        Mistake("hundreds are measured", CHOICE, f"    [measure(one) for one in candidates for _ in range(201)]\n{CHOICE}",
                "a measurement is a real run. Placements with the same slowest paths take the same time: measure one of them",
                by=("some",)),
        Mistake("dozens are measured", CHOICE, f"    [measure(one) for one in candidates[:4] for _ in range(20)]\n{CHOICE}",
                "fewer are worth a measurement: leave out a placement if another one has no slower path along any axis",
                by=("few",)),
    ),
}
