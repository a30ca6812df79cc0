"""Known wrong answers of lesson 19's open task, and correct ones that miss a level."""

from course.lab.checks.exercise import Mistake

SUM = "        total = total * tl.exp(top - new) + tl.sum(tl.exp(x - new), 0)\n"
NEW = "new = tl.maximum(top, tl.max(x, 0))"
TOP = """        x = tl.load(logits + start + column, mask=start + column < end, other=-float("inf")).to(tl.float32)
        new = tl.maximum(top, tl.max(x, 0))
"""
LOOP = "    for start in range(0, end, BLOCK):\n"
WANTED = "    wanted = tl.load(logits + target, mask=kept, other=0.0).to(tl.float32)\n"
LOSS = """    tl.store(losses + token, tl.where(kept, top - wanted + tl.log(total), 0.0))
"""
GRADIENT = """    scale = tl.load(factor)
    for start in range(0, V, BLOCK):
        at = start + column
        x = tl.load(logits + at, mask=at < end, other=-float("inf")).to(tl.float32)
        grad = scale * (tl.exp(x - top) / total - tl.where(at == target, 1.0, 0.0))
        tl.store(gradient + at, tl.where(kept, grad, 0.0).to(gradient.dtype.element_ty), mask=at < V)
"""
MENDED = """    softmax = tl.load(gradient + target, mask=kept, other=0.0).to(tl.float32)
    tl.store(gradient + target, (softmax - scale).to(gradient.dtype.element_ty), mask=kept)
"""

MISTAKES = {
    "cross-entropy": (
        Mistake("sums of other maxima", SUM, SUM.replace("total * tl.exp(top - new)", "total"),
                "the sum so far was relative to the old maximum: multiply it by exp(old - new) before you add the next block"),
        Mistake("a sum with the old maximum", SUM, "        total += tl.sum(tl.exp(x - top), 0)\n",
                "the exponentials of this block are relative to the old maximum, and can overflow: first find the new one, "
                "rescale the sum so far, then add exp(x - new)"),
        Mistake("rescaled after the block is added", SUM,
                "        total = (total + tl.sum(tl.exp(x - new), 0)) * tl.exp(top - new)\n",
                "this block's exponentials are relative to the new maximum already: rescale only the sum so far, then add them"),
        Mistake("rescaled the wrong way", SUM, SUM.replace("tl.exp(top - new)", "tl.exp(new - top)"),
                "a larger maximum makes the sum so far smaller: multiply it by exp(old - new)"),
        Mistake("the last block is left out", LOOP, LOOP.replace("end, BLOCK", "end // BLOCK * BLOCK, BLOCK"),
                "the sum leaves out what follows the last whole block: loop up to V, and let a mask end the last block"),
        Mistake("no maximum", NEW, "new = tl.full((), 0.0, tl.float32)",
                "exp overflows for large logits: subtract the largest logit so far, and rescale the sum when it grows"),
        Mistake("the last block's maximum", NEW, "new = tl.max(x, 0)",
                "this is the block's own maximum: keep the larger one of it and the maximum so far, or a later block of small "
                "logits makes the sum overflow"),
        Mistake("a maximum that begins at 0", "-1e38", "0.0",
                "all logits of a token may lie far below the number with which the maximum begins, and then each exponential is "
                "0: begin with -1e38"),
        Mistake("a maximum that begins at -inf", "-1e38", '-float("inf")',
                "a whole block of -inf leaves the maximum at -inf, and exp(-inf + inf) is NaN: begin with a finite one, -1e38"),
        Mistake("-10,000 beyond the vocabulary", TOP, TOP.replace('-float("inf")', "-1e4"),
                "behind the last logit a masked load gives -10,000, and the logits of a token may lie below that: let it give "
                "-inf"),
        Mistake("zeros beyond the vocabulary", TOP, TOP.replace('-float("inf")', "0.0"),
                "behind the last logit a masked load gives 0, and exp(0 - maximum) counts in the sum: let it give -inf"),
        Mistake("nothing beyond the vocabulary", TOP, TOP.replace(', other=-float("inf")', ""),
                "what a masked load leaves out has no defined value on a GPU, and here it is NaN: give `other`, minus infinity"),
        Mistake("the target's place in each block", "tl.where(at == target", "tl.where(column == target",
                "the target is a place in the vocabulary: compare it with start + column. `column` begins at 0 in each block"),
        Mistake("no 1 at the target", " - tl.where(at == target, 1.0, 0.0)", "",
                "this is the softmax alone: the gradient is 1 less at the target"),
        Mistake("a rounded softmax", "tl.exp(x - top) / total", "(tl.exp(x - top) / total).to(gradient.dtype.element_ty)",
                "round once, when you store: where a token is sure of its target, softmax - 1 is small, and a softmax that has "
                "been rounded before leaves it few digits"),
        Mistake("the loss times scale", "return losses.sum() / kept", "return scale * losses.sum() / kept",
                "`scale` is a factor of the gradient alone: return the mean loss without it"),
        Mistake("the loss of an ignored token is not stored", LOSS,
                "    tl.store(losses + token, top - wanted + tl.log(total), mask=kept)\n",
                "torch.empty holds what was in memory before, and here NaN: store 0 as the loss of an ignored token"),
        Mistake("the mean over all tokens", "losses.sum() / kept", "losses.mean()",
                "the loss is the mean over the kept tokens: divide by their number, not by the number of all"),
        Mistake("the gradient of a mean over all tokens", "scale / kept, V", "torch.full((), scale / T), V",
                "the loss is divided by the kept tokens, and so is its gradient"),
        Mistake("the gradient of a sum", "scale / kept, V", "torch.full((), scale), V",
                "this is the gradient of the sum over tokens: divide it by the number of kept ones, too"),
        Mistake("no scale", "scale / kept, V", "1 / kept, V",
                "the gradient is that of `scale` times the loss. In training, scale is what the rest of the step multiplies the "
                "loss by, such as 1 / micro-batches"),
        Mistake("no token is kept", ".clamp(min=1)", "",
                "if every target is ignored, the sum and the number of kept tokens are 0, and 0 / 0 is NaN: divide by 1 "
                "at least"),
        Mistake("ignored targets are negative", "kept = target != ignored", "kept = target >= 0",
                "`ignored` may be any number, such as that of a padding word: compare targets with it"),
        Mistake("-100 is ignored", "kept = target != ignored", "kept = target != -100",
                "`ignored` is an argument, and -100 is only what PyTorch takes if nobody says otherwise"),
        Mistake("a sum in bf16", SUM, SUM.replace("        total = ", "        new_total = ")
                + "        total = new_total.to(logits.dtype.element_ty).to(tl.float32)\n",
                "the sum is rounded to the logits' format: keep it in float32, and cast only what you store", by=("digits",)),
        Mistake("the loss after the gradient", LOSS + GRADIENT, GRADIENT + WANTED + LOSS,
                "when you read the target's logit, the gradient has overwritten it: read it before"),
        Mistake("the target's logit after the last sum", LOSS, WANTED + LOSS,
                "threads of a program wait for each other only in sums, maxima and tl.debug_barrier(). Two lines touch the same "
                "number, one of them stores it, and none of these lies between: read the target's logit before the first loop, "
                "and store the gradient of a block at once", by=("threads",)),
        Mistake("1 is subtracted after the loop", GRADIENT,
                GRADIENT.replace(" - tl.where(at == target, 1.0, 0.0)", "") + MENDED,
                "subtract 1 before you store. When one thread reads the target's element back, another one may not have stored "
                "it yet; and it is rounded"),
        Mistake("three reads", TOP,
                TOP.replace(NEW, "top = tl.maximum(top, tl.max(x, 0))") + LOOP + TOP.replace(NEW, "new = top"),
                "each logit can be read twice: the maximum and the sum need one loop, not two. A new maximum rescales the sum so "
                "far, as in the exercise on online softmax", by=("reads",)),
        Mistake("a new tensor", "gradient = logits ", "gradient = torch.empty_like(logits) ",
                "the logits' memory is free after the second reading: store the gradient there, and return `logits`",
                by=("over",)),
        Mistake("ignored tokens are read", "tl.where(kept, V, 0)", "V",
                "the gradient of an ignored token is 0, whatever its logits: end its loops that read before they begin",
                by=("skipped",)),
    ),
}
