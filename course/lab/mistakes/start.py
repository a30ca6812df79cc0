"""Known wrong answers of lesson 00."""

from course.lab.exercise import Mistake

MISTAKES = {
    "matmul-cost": (
        Mistake("multiplications alone", "2 * m * k * n", "m * k * n",
                "each of the m x n numbers of the result takes k multiplications and k additions: count both"),
        Mistake("the result is not written", "m * k + k * n + m * n", "m * k + k * n",
                "the two inputs are read, and the result is written: it moves as well"),
        Mistake("numbers for bytes", "(m * k + k * n + m * n) * itemsize", "m * k + k * n + m * n",
                "these are numbers; each of them has `itemsize` bytes"),
        Mistake("four bytes whatever the format", "* itemsize", "* 4",
                "a number need not have 4 bytes: bf16 has 2, FP8 has 1; use `itemsize`"),
        Mistake("square matrices only", "flops = 2 * m * k * n", "flops = 2 * m**3",
                "m, k and n differ: the result has m x n numbers, each a sum of k products"),
        Mistake("a constant for one case", "2 * m * k * n", "2 * 64**3",
                "the number of operations depends on m, k and n: 2 x 64^3 is the count for one size only"),
    ),
    "roofline": (
        Mistake("both times added", "max(flops / peak_flops, moved / peak_bytes)", "flops / peak_flops + moved / peak_bytes",
                "while it computes it also moves the next data: the longer of the two times counts, not their sum"),
        Mistake("compute alone", "max(flops / peak_flops, moved / peak_bytes)", "flops / peak_flops",
                "work with few operations a byte waits for memory: take bytes over bytes per second into account"),
        Mistake("memory alone", "max(flops / peak_flops, moved / peak_bytes)", "moved / peak_bytes",
                "work with many operations a byte waits for the arithmetic: take FLOPs over FLOP/s into account"),
        Mistake("the shorter time", "max(", "min(",
                "both have to be done: the slower one decides, so take the longer time"),
        Mistake("upside down", "flops / peak_flops, moved / peak_bytes", "peak_flops / flops, peak_bytes / moved",
                "seconds are work over work per second: FLOPs divided by FLOP/s"),
    ),
}
