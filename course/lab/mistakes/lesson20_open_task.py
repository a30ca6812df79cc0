"""Known wrong answers of lesson 20's open task, and correct ones that miss a level."""

from course.lab.checks.exercise import Mistake

SETS = "    sets = [{last, *some} for size in range(count) for some in combinations(range(last), size)]\n"
FITS = "    sets = [kept for kept in sets if max(needed(kept)) <= limit]\n"
FREE = "            if kind == \"backward\" or unit not in kept:\n"
REDUCE = "            if kind == \"backward\":\n                found.append((\"reduce\", unit))\n"

LEFT = ("after its backward pass a unit has weights and gradients in memory: free the weights, also of units that stayed, and "
        "reduce the gradients")

MISTAKES = {
    "order-step": (
        Mistake("no reduce", REDUCE, "", LEFT),
        Mistake("kept units are never freed", FREE, "            if unit not in kept:\n", LEFT),
        Mistake("all are freed after forward", FREE, "            if True:\n",
                "a unit that was freed after its forward pass has to be gathered again before its backward pass"),
        Mistake("backward goes up", "for unit in reversed(range(count))]", "for unit in range(count)]",
                "the backward pass begins with the last unit: its gradient is what the unit before needs"),
        Mistake("gradients need no memory", "* (2 if kind == \"backward\" else 1)", "* 1",
                "a backward pass makes gradients as large as the unit's weights: count its bytes twice"),
        Mistake("freed before it computes", "*((\"gather\", other) for other in gathers), (kind, unit)]",
                "*((\"gather\", other) for other in gathers), (\"free\", unit), (kind, unit), (\"gather\", unit)]",
                "a unit is freed after its pass, not before it"),
        Mistake("only the last unit stays", SETS, "    sets = [{last}]\n",
                "there is memory for more units than the last one to stay whole from forward to backward", by=("gathered",)),
        Mistake("the last unit is gathered again", "{last, *some}", "{*some}",
                "the last unit's backward pass follows its forward pass: it can always stay whole", by=("gathered",)),
        Mistake("the largest units stay", FITS, "    chosen = {last}\n"
                "    for unit in sorted(range(last), key=lambda u: -units[u].bytes):\n"
                "        if max(needed(chosen | {unit})) <= limit:\n            chosen.add(unit)\n    sets = [chosen]\n",
                "the largest first is not always the most: two smaller units can be more bytes than a large one, and an early "
                "unit needs its memory during more passes than a late one", by=("gathered",)),
    ),
}
