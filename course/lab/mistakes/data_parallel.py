"""Known wrong answers of lesson 07."""

from course.lab.exercise import Mistake

MISTAKES = {
    "average-gradients": (
        Mistake("a missing all-reduce", "dist.all_reduce(flat, group=axis.group)", "pass",
                "each rank still has the gradients of its own samples alone: add them up over the axis first (all-reduce)"),
        Mistake("a sum for a mean", "flat /= axis.size", "pass",
                "after the all-reduce the gradients are sums over the ranks: divide by axis.size"),
        Mistake("not copied back", "gradient.copy_(mean)", "pass",
                "the averages are computed, but the parameters keep their own gradients: copy them back into p.grad"),
        Mistake("divided twice", "flat /= axis.size", "flat /= axis.size**2",
                "the gradients are too small by the number of ranks: divide once"),
        Mistake("one rank never arrives", "flat = _flatten",
                "if axis.rank == axis.size - 1:\n        return\n    flat = _flatten",
                "every rank of the axis has to call the collective", silent=True),
    ),
}
