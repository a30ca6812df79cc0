"""Known wrong answers of lesson 00."""

from course.lab.checks.exercise import Mistake

TIMES = "flops / peak_flops, moved / peak_bytes"
LONGER = f"max({TIMES})"

MISTAKES = {
    "matmul-cost": (
        Mistake("multiplications alone", "2 * m * k * n", "m * k * n",
                "each of the m x n results takes k multiplications and k additions: count both"),
        Mistake("one addition less", "2 * m * k * n", "m * n * (2 * k - 1)",
                "strictly, a sum of k products takes k - 1 additions. By convention everybody counts k, so that the total is 2 "
                "m k n"),
        Mistake("the two exchanged", "return flops, moved", "return moved, flops",
                "the numbers are right, but in the wrong order: FLOPs come first, then bytes"),
        Mistake("the result is not written", "m * k + k * n + m * n", "m * k + k * n",
                "the two inputs are read and the result is written: count the bytes of the result too"),
        Mistake("the inputs are not read", "m * k + k * n + m * n", "m * n",
                "the result is written, but both inputs are read before: count their bytes too"),
        Mistake("read for every product", "m * k + k * n + m * n", "2 * m * k * n + m * n",
                "this counts two reads for every product. The least possible is one read for each number of a and b"),
        Mistake("numbers for bytes", "* itemsize", "* 1",
                "this counts numbers, not bytes: each number has `itemsize` bytes"),
        Mistake("four bytes whatever the format", "* itemsize", "* 4",
                "not every number has 4 bytes: bf16 has 2, FP8 has 1. Use `itemsize`"),
        Mistake("bits for bytes", "* itemsize", "* itemsize // 8",
                "`itemsize` counts bytes, not bits: do not divide by 8"),
        Mistake("itemsize for one of three", "(m * k + k * n + m * n) * itemsize", "m * k + k * n + m * n * itemsize",
                "`itemsize` multiplies only the last product: put parentheses around the sum of all three"),
        Mistake("square matrices only", "2 * m * k * n", "2 * m**3",
                "m, k and n differ: the result has m x n numbers, each a sum of k products"),
        Mistake("a constant for one case", "2 * m * k * n", "2 * 64**3",
                "the number of operations depends on m, k and n: 2 x 64^3 is the count for one size only"),
        Mistake("bits",
                "* itemsize",
                "* itemsize * 8",
                "this counts bits: `itemsize` is in bytes already, so leave out the 8"),
    ),
    "roofline": (
        Mistake("both times added", LONGER, "flops / peak_flops + moved / peak_bytes",
                "the chip computes and moves data at the same time: the longer of the two times counts, not their sum"),
        Mistake("both times multiplied", LONGER, "(flops / peak_flops) * (moved / peak_bytes)",
                "the product of two times is not a time: take the longer one"),
        Mistake("their mean", LONGER, "(flops / peak_flops + moved / peak_bytes) / 2",
                "both run at once and the longer one decides: take the maximum, not the mean"),
        Mistake("compute alone", LONGER, "flops / peak_flops",
                "work with few operations a byte waits for memory: take bytes over bytes per second into account"),
        Mistake("memory alone", LONGER, "moved / peak_bytes",
                "work with many operations a byte waits for the arithmetic: take FLOPs over FLOP/s into account"),
        Mistake("the shorter time", "max(", "min(",
                "both have to finish, so the slower one decides: take the longer time"),
        Mistake("times for over", TIMES, "flops * peak_flops, moved * peak_bytes",
                "time multiplied by work per second is not a time: divide the work by the ceiling"),
        Mistake("upside down", TIMES, "peak_flops / flops, peak_bytes / moved",
                "a time is work divided by work per second: FLOPs divided by FLOP/s"),
        Mistake("the ceilings exchanged", TIMES, "flops / peak_bytes, moved / peak_flops",
                "each kind of work has its own ceiling: FLOPs over FLOP/s, and bytes over bytes per second"),
        Mistake("whole seconds", TIMES, "flops // peak_flops, moved // peak_bytes",
                "// drops the digits after the decimal point, and most times here are fractions of a second: divide with /"),
    ),
}
