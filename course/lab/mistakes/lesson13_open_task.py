"""Known wrong answers of lesson 13's open task, and correct ones that miss a level."""

from course.lab.checks.exercise import Mistake

REDUCE = "        reduce_scatter_single(gradient, self.joined(grads), group=self.axis.group)\n"
SENT = ("a rank needs the sum of its own piece of the gradients only: a reduce-scatter sends half of an all-reduce. The "
        "parameters need one all-gather")
KEPT = ("a rank keeps more than the parameters and its share of the two moments: make the moments of the share's length, and "
        "keep no gradient or flat copy from one step to the next")
CORRECTION = "the moments begin at zero, so they are divided by 1 - beta**t, where t counts the steps from 1"

MISTAKES = {
    "sharded-adam": (
        Mistake("a sum for the mean", "        gradient /= self.axis.size\n", "",
                "the reduce-scatter adds up: divide by the number of ranks. Adam hides most of it, but not the epsilon"),
        Mistake("no bias correction", "self.mean / (1 - 0.9**self.steps), self.square / (1 - 0.999**self.steps)",
                "self.mean, self.square", CORRECTION),
        Mistake("steps counted from 0", "(1 - 0.9**self.steps), self.square / (1 - 0.999**self.steps)",
                "(1 - 0.9**(self.steps + 1)), self.square / (1 - 0.999**(self.steps + 1))", CORRECTION),
        Mistake("the betas changed over", "gradient, 0.1)\n        self.square.lerp_(gradient**2, 0.001)",
                "gradient, 0.001)\n        self.square.lerp_(gradient**2, 0.1)",
                "the first moment decays with 0.9, the second with 0.999"),
        Mistake("epsilon inside the root", "square.sqrt() + 1e-8", "(square + 1e-8).sqrt()",
                "Adam adds epsilon after the square root"),
        Mistake("the moments of one rank's gradients", REDUCE,
                "        gradient = self.joined(grads).view(self.axis.size, -1)[self.axis.rank] * self.axis.size\n",
                "this takes a piece of this rank's own gradients: the piece must be summed over the ranks first"),
        Mistake("the next rank's piece", "whole.view(self.axis.size, -1)[self.axis.rank]",
                "whole.view(self.axis.size, -1)[self.axis.rank - 1]",
                "the reduce-scatter leaves piece `axis.rank` here: update the same piece of the parameters"),
        Mistake("no gradient, no decay",
                "        self.mean.lerp_(gradient, 0.1)\n        self.square.lerp_(gradient**2, 0.001)\n",
                "        kept = gradient != 0\n        self.mean[kept] = self.mean.lerp(gradient, 0.1)[kept]\n"
                "        self.square[kept] = self.square.lerp(gradient**2, 0.001)[kept]\n",
                "a parameter without a gradient counts as one with a gradient of zero: its moments decay, and it still moves"),
        Mistake("an all-reduce for the gradients", REDUCE,
                "        import torch.distributed as dist\n        whole = self.joined(grads)\n"
                "        dist.all_reduce(whole, group=self.axis.group)\n"
                "        gradient = whole.view(self.axis.size, -1)[self.axis.rank].clone()\n", SENT, by=("sent",)),
        Mistake("the flat gradients stay", REDUCE, "        self.kept = self.joined(grads)\n"
                "        reduce_scatter_single(gradient, self.kept, group=self.axis.group)\n", KEPT, by=("kept",)),
        Mistake("the group forgotten", REDUCE, REDUCE.replace(", group=self.axis.group", ""),
                "the ranks of the axis are not always all ranks: every collective takes `group=axis.group`", silent=True),
    ),
}
