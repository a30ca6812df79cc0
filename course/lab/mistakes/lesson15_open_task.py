"""Known wrong answers of lesson 15's open task, and correct ones that miss a level."""

from course.lab.checks.exercise import Mistake

FIRST = "    step({0: 30})                                     # FP8"
TARGETS = "        for channel, target in targets.items():\n"
JUMP = ("scales are frozen if a gradient that outgrew them still saturates one step later. Let a target grow a hundredfold, "
        "so that all scales are too small, give them a step to follow, and compare the two steps")
STILL = ("every prediction is zero here: with `noise = latent` for all samples nothing moves, and each `start()` begins anew. "
         "Give some sample a target, and go on with the same `run`")

MISTAKES = {
    "diagnose": (
        Mistake("the class in the second step", "alike(third, 0, 1)", "alike(second, 0, 1)",
                "in the second step no sound model knows the class yet: the modulation leaves zero in that step. Compare two "
                "classes from the third step on"),
        Mistake("the time in the second step", "alike(third, 0, 2)", "alike(second, 0, 2)",
                "in the second step no sound model knows the time yet: the modulation leaves zero in that step. Compare two "
                "times from the third step on"),
        Mistake("the class too late", "if not alike(second, 0, 1)", "if not alike(third, 0, 1)",
                "from the third step on every sound model knows the class. A modulation that did not start at zero shows it one "
                "step earlier"),
        Mistake("the modulation in the first prediction", "if not alike(second, 0, 1)",
                'if not bool(start()(latent, latent + 1, time, label)["prediction"].eq(0).all())',
                "the first prediction is zero even if the modulation is not: the output layer starts at zero. In the second step "
                "two classes differ that must not differ yet"),
        Mistake("the noise in the middle", "torch.tensor([100.0, 100.0, 600.0, 0.0, 0.0])",
                "torch.tensor([100.0, 100.0, 600.0, 500.0, 500.0])",
                "in the middle of the schedule the noise is in the input of every training. At time 0 it must not be"),
        Mistake("the time at another input", "latent[1:3], latent[4] = latent[0], latent[3]",
                "latent[1], latent[4] = latent[0], latent[3]",
                "two samples that are to show whether the model knows the time must have the same input. With `noise = latent` "
                "the input is the latent at every time"),
        Mistake("the average in the first step", 'if not second["average"].any()',
                'if not start()(latent, latent + 1, time, label)["average"].any()',
                "before the first step every average predicts zero, like the weights it began with: look one step later"),
        Mistake("a target that E4M3 can hold", "1: 3e-6", "1: 3e-2",
                "both formats hold a gradient a thousand times smaller than the largest. Below about 2^-18 of the largest E4M3 "
                "rounds to zero, and E5M2 below about 2^-33"),
        Mistake("a target that no format holds", "1: 3e-6", "1: 3e-11",
                "E5M2 rounds that gradient to zero, too: it holds what is above about 2^-33 of the largest, and E4M3 what is "
                "above about 2^-18"),
        Mistake("scales without a jump", "third = step({2: 3000})", "third = step({0: 30, 2: 3000})\n"
                '    second["gradient"][2] = third["gradient"][2]', JUMP),
        Mistake("scales by a target that stays", "{0: 30, 1: 3e-6, 2: 3000}", "{0: 30, 1: 3e-6, 2: 30}", JUMP),
        Mistake("no target, no training", TARGETS, "        for channel, target in {}.items():\n", STILL),
        Mistake("started anew before each step", "        return run(latent, noise, time, label)\n",
                "        return start()(latent, noise, time, label)\n", STILL),
        Mistake("many trainings", FIRST, f"    [start()(latent, latent, time, label) for _ in range(6)]\n{FIRST}",
                "several questions fit into one training: put the pairs that you compare into one batch, and let a step move the "
                "model for the next question while it answers this one", by=("few",)),
        Mistake("a step that asks nothing", FIRST, f"    start()(latent, latent, time, label)\n{FIRST}",
                "three steps answer everything. The channels of a target are independent: one moves the model, one tests the "
                "format, one tests the scales, in the same step", by=("fewest",)),
    ),
}
