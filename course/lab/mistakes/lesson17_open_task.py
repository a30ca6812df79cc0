"""Known wrong answers of lesson 17's open task, and correct ones that miss a level."""

from course.lab.checks.exercise import Mistake

FITS = " if needs(model, layout) <= machine.memory]"
CHOOSE = "    chosen, left = [], rows\n"
LAST = "fitting[int((torch.tensor(known, dtype=torch.float64) + (rows @ slowness)[:, 0]).argmin())]"
GUESS = ("this ranks the layouts as if all machines were equally fast. Which of two layouts is faster depends on what is slow "
         "here: measure some, and let them decide")

MISTAKES = {
    "plan-layout": (
        Mistake("memory is not looked at", FITS, "]",
                "a layout must fit into `machine.memory`: leave out what `needs` more. If nothing is left, return None"),
        Mistake("None is never returned", "        return None\n", "        fitting = layouts(model, machine)\n",
                "if no layout fits, return None: a run that would stop at once is no plan"),
        Mistake("the slowest", ".argmin())]\n", ".argmax())]\n", "this is the slowest layout: the fewest seconds win"),
        Mistake("speeds for their reciprocals", "(rows @ slowness)", "(rows @ (1 / slowness))",
                "the solution of the linear system is 1 / speed, with which a step's coefficients are multiplied: do not divide "
                "by it again"),
        Mistake("measurements that are alike", "        chosen.append(int(left.norm(dim=1).argmax()))\n",
                "        chosen.append(len(chosen))\n",
                "the first layouts of the list differ in the micro-batch only, so they say little about links and pipelines: "
                "measure layouts that differ in dp, pp and tp as well"),
        Mistake("the best of five", LAST, "fitting[chosen[int(took.argmin())]]",
                "the layouts that were measured to learn the speeds are seldom the fastest: compute all others from the speeds"),
        Mistake("all speeds alike", "rows @ slowness", "rows @ torch.ones_like(slowness)", GUESS),
        Mistake("the fewest FLOPs a second", "rows @ slowness", "rows[:, :1] @ slowness[:1]",
                "this counts the linear maps alone: memory, links and the bubble of each take time, too"),
        Mistake("no messages", "rows @ slowness", "rows[:, :3] @ slowness[:3]",
                "this leaves out the time of messages, within a node and between nodes: the last two of the five speeds"),
        Mistake("the least memory", f"    return {LAST}", "    return min(fitting, key=lambda layout: needs(model, layout))",
                "the layout that needs the least memory is cut into the most pieces, and slow: among those that fit, only the "
                "seconds count"),
        Mistake("as much data parallelism as fits", f"    return {LAST}", "    return max(fitting, key=lambda layout: layout.dp)",
                "data parallelism is cheap where links between nodes are fast. Here they may be slow: let measurements decide"),
        Mistake("all are measured", CHOOSE, f"    [measure(layout) for layout in fitting]\n{CHOOSE}",
                "a measurement is a real run. Rank the layouts by `seconds` with speeds that you guess, and measure the "
                "first ones",
                by=("some",)),
        Mistake("a dozen is measured", CHOOSE, f"    [measure(layout) for layout in fitting[:12]]\n{CHOOSE}",
                "five unknown speeds follow from five measurements: a step's time is linear in 1 / speed. Then compute the rest",
                by=("few",)),
    ),
}
