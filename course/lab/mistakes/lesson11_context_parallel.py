"""Known wrong answers of lesson 11."""

from course.lab.checks.exercise import Mistake

IN_ORDER = "return permute_tokens(pairs, 3, order.argsort()) if tokens.zigzag else pairs"
GATHER = "pairs = mappings.gather(pairs, 3, tokens.cp, len(order))"
WEIGHED = "out.mul_((lse - both).exp()[..., None]).add_(new_out * (new_lse - both).exp()[..., None])"
BOTH = "both = torch.logaddexp(lse, new_lse)"
PIECES = "torch.cat([pieces[rank], pieces[-1 - rank]])"
CHANGED_OVER = "return (slice(0, queries // 2), slice(None)) if source < rank else (slice(None), slice(keys // 2, None))"
CAUSAL = "return (slice(None), slice(0, keys // 2)) if source < rank else (slice(queries // 2, None), slice(None))"

MISTAKES = {
    "gather-in-order": (
        Mistake("as they come", IN_ORDER, "return pairs",
                "the pieces of a zigzag arrive rank by rank, not in time order: sort them by their positions"),
        Mistake("the order for its inverse", "order.argsort()", "order",
                "`order` gives the position of each gathered row. To put position 0 first, you need the row where it is: the "
                "inverse permutation, order.argsort()"),
        Mistake("no gradient", GATHER, "pairs = mappings.all_gather(pairs.detach(), 3, tokens.cp, len(order)) + 0 * pairs.sum()",
                "no gradient flows back: you cannot rely on PyTorch's collectives for a gradient, but mappings.gather has one"),
        Mistake("a collective without a gradient", GATHER, GATHER.replace("mappings.gather", "mappings.all_gather"),
                "all_gather alone has no gradient: mappings.gather, your function from lesson 10, has a backward pass",
                stops="RuntimeError"),
        Mistake("the gradient of one's own use alone", GATHER,
                "start, stop = mappings.bounds(len(order), tokens.cp.size, tokens.cp.rank)\n"
                "    whole = mappings.all_gather(pairs.detach(), 3, tokens.cp, len(order))\n"
                "    pairs = torch.cat([whole[:, :, :, :start], pairs, whole[:, :, :, stop:]], 3)",
                "all ranks use these keys, and each rank has a part of their gradient: mappings.gather sums the parts in the "
                "backward pass"),
        Mistake("keys in order, values not", IN_ORDER,
                "return torch.stack([pairs[0].index_select(2, order.argsort()), pairs[1]]) if tokens.zigzag else pairs",
                "the keys are in order but the values are not: each value belongs to its key"),
        Mistake("a mean of gradients", GATHER,
                GATHER + "\n    pairs = pairs.detach() + (pairs - pairs.detach()) / tokens.cp.size",
                "the gradients of all ranks are summed: do not divide"),
        Mistake("all pieces as long as mine", "len(order))", "pairs.shape[3] * tokens.cp.size)",
                "pieces need not be equally long: pass the total number of rows to mappings.gather", stops="ranks"),
        Mistake("zeros around the piece, and an all-reduce", GATHER + "\n    " + IN_ORDER,
                "whole = pairs.new_zeros(*pairs.shape[:3], len(order), pairs.shape[4])\n"
                "    whole = whole.index_copy(3, tokens.order(pairs.device)[tokens.cp.rank], pairs)\n"
                "    return mappings.copy(mappings.reduce(whole, tokens.cp), tokens.cp)",
                "this sends and adds zeros: an all-reduce of all keys sends twice as much as an all-gather of the pieces, and "
                "the backward pass does so again", by=("sent",)),
        Mistake("gathered twice", GATHER, GATHER.replace("pairs = ", "twice = ") + "\n    "
                + GATHER.replace("pairs = ", "pairs = torch.stack([twice[0], ") + "[1]])",
                "this gathers keys and values twice and discards half of the result: they are one tensor, (2, ...), so one "
                "gather brings both", by=("sent",)),
        Mistake("the latest first", "order.argsort()", "order.argsort(descending=True)",
                "this puts the latest token first: the time order begins with position 0"),
        Mistake("along the heads", GATHER, GATHER.replace("pairs, 3,", "pairs, 2,"),
                "tokens are dim 3 of (2, B, h, T / cp, d): this gathers along the heads", stops="ranks"),
        Mistake("pieces of two ranks", IN_ORDER, "quarter = len(order) // 4\n"
                "    return torch.cat([pairs[:, :, :, :quarter], pairs[:, :, :, 2 * quarter:], pairs[:, :, :, quarter:2 * "
                "quarter]], 3) "
                "if tokens.zigzag else pairs",
                "this is the order of four pieces, which is right for two ranks only: n ranks have 2 n pieces. The inverse "
                "permutation is right for all"),
    ),
    "merge": (
        Mistake("a plain mean", WEIGHED, "out.add_(new_out).div_(2)",
                "a block with higher scores counts more: weight each output by exp(its lse) over the sum of both"),
        Mistake("a sum", WEIGHED, "out.add_(new_out)",
                "each block's output is already divided by its own denominator: weight the outputs so that the weights sum to 1"),
        Mistake("exponentials of large numbers", WEIGHED,
                "a, b = lse.exp()[..., None], new_lse.exp()[..., None]\n    out.mul_(a / (a + b)).add_(new_out * (b / (a + b)))",
                "exp(1000) is infinite: subtract first, exp(lse - both), where both is the log-sum-exp of the two"),
        Mistake("weights changed over", WEIGHED,
                "out.mul_((new_lse - both).exp()[..., None]).add_(new_out * (lse - both).exp()[..., None])",
                "the weights are exchanged: `out` belongs to `lse`, `new_out` to `new_lse`"),
        Mistake("the old log-sum-exp", "    lse.copy_(both)\n", "",
                "`lse` still belongs to the old keys only, so the next block's weight is wrong: write the new value into it"),
        Mistake("logarithms added", "torch.logaddexp(lse, new_lse)", "lse + new_lse",
                "denominators are summed, not their logarithms: torch.logaddexp(lse, new_lse)"),
        Mistake("the larger of the two", "torch.logaddexp(lse, new_lse)", "torch.maximum(lse, new_lse)",
                "the maximum keeps exp from overflowing, but the denominator of both is their sum: torch.logaddexp"),
        Mistake("not in place", WEIGHED,
                "out = out.mul((lse - both).exp()[..., None]).add(new_out * (new_lse - both).exp()[..., None])",
                "this binds a new tensor to the name `out` and does not change the caller's tensor: write into it, with mul_ "
                "and add_"),
        Mistake("neither in place", BOTH, "out, lse = out.clone(), lse.clone()\n    " + BOTH,
                "this binds new tensors to the names `out` and `lse` and does not change the caller's tensors: write into "
                "both, with mul_, add_ and copy_"),
        Mistake("the new log-sum-exp for the old one", BOTH, "both = lse.copy_(torch.logaddexp(lse, new_lse))",
                "this overwrites `lse` before the weight of `out` uses its old value: compute both weights first"),
        Mistake("right for a whole tensor, not for a view", "out.mul_", "flat = out.reshape(-1).view_as(out)\n    flat.mul_",
                "the ring passes a view, a part of its queries: write into `out` itself, as mul_ and add_ do. `reshape` may "
                "return a copy, and `out.data = ...` does not change the whole tensor"),
        Mistake("denominators before the logarithm", "torch.logaddexp(lse, new_lse)", "(lse.exp() + new_lse.exp()).log()",
                "exp(1000) is infinite, and so is its logarithm: torch.logaddexp subtracts the larger one first"),
        Mistake("the larger log-sum-exp is kept", "lse.copy_(both)", "lse.copy_(torch.maximum(lse, new_lse))",
                "this writes the larger of the two into `lse`, so the weight of the next block is too large: the log-sum-exp "
                "of both is `both`"),
        Mistake("a mean of the log-sum-exps", "lse.copy_(both)", "lse.copy_((lse + new_lse) / 2)",
                "this makes `lse` a mean: denominators are summed, and their logarithm is `both`"),
        Mistake("logarithms for weights", WEIGHED,
                "out.mul_((lse / both)[..., None]).add_(new_out * (new_lse / both)[..., None])",
                "a weight is a denominator over the sum of denominators, and these are logarithms: exp(lse - both), not lse / "
                "both"),
        Mistake("an epsilon", BOTH, "both = torch.logaddexp(lse, new_lse) + 1e-6",
                "the sum of two exponentials is never zero, so no epsilon is needed: it only makes the weights sum to less "
                "than 1"),
    ),
    "zigzag": (
        Mistake("one piece each", PIECES, "torch.cat([pieces[2 * rank], pieces[2 * rank + 1]])",
                "these are neighboring pieces: rank 0 would have almost no work, the last rank the most. Pair a front piece "
                "with a back piece"),
        Mistake("the piece that is as far on", PIECES, "torch.cat([pieces[rank], pieces[size + rank]])",
                "this pairs piece r with piece size + r, so the last rank has more work in both halves: pair r with 2 size - 1 "
                "- r"),
        Mistake("the back first", PIECES, "torch.cat([pieces[-1 - rank], pieces[rank]])",
                "the pieces are right, but the back one comes first: a rank's tokens are in time order"),
        Mistake("the back reversed", PIECES, "torch.cat([pieces[rank], pieces[-1 - rank].flip(0)])",
                "within a piece, tokens stay in time order: do not reverse them"),
        Mistake("off by one", PIECES, "torch.cat([pieces[rank], pieces[-rank]])",
                "rank 0 pairs with the last piece, pieces[-1]; pieces[-0] is the first one"),
        Mistake("on the CPU", "torch.arange(total, device=device)", "torch.arange(total)",
                "these are on the CPU: torch.arange(total, device=device) creates them on the right device"),
        Mistake("dealt like cards", PIECES, "torch.arange(total, device=device)[rank::size]",
                "this interleaves single tokens. The work is balanced too, but no round is a rectangle: use pieces"),
        Mistake("3 - rank", PIECES, "torch.cat([pieces[rank], pieces[3 - rank]])",
                "3 - rank is right for two ranks only, which have four pieces: with 2 size pieces it is 2 size - 1 - rank"),
        Mistake("as many pieces as ranks", "chunk(2 * size)", "chunk(size)",
                "each rank has two pieces, so there are 2 size pieces", stops="InvalidReturn"),
        Mistake("one piece too far in front", PIECES, "torch.cat([pieces[rank], pieces[max(2 * size - 2 - rank, 0)]])",
                "the last piece has the number 2 size - 1, so rank r pairs with 2 size - 1 - r"),
        Mistake("snaking", PIECES, "torch.cat([pieces[rank], pieces[-1 - rank]][::1 if rank % 2 == 0 else -1])",
                "every second rank has its back piece first: the front piece comes first on all ranks"),
        Mistake("ranks from the end", PIECES, "torch.cat([pieces[size - 1 - rank], pieces[size + rank]])",
                "rank 0 has the outermost pieces, the first and the last: here it has the two in the middle"),
        Mistake("token by token", PIECES, "torch.stack([pieces[rank], pieces[-1 - rank]], 1).flatten()",
                "the two pieces come one after the other: do not interleave their tokens"),
    ),
    "visible": (
        Mistake("rows for columns", CAUSAL, CHANGED_OVER,
                "rows and columns are exchanged: the first slice selects my queries, the second selects the other rank's keys"),
        Mistake("as many keys as queries", "return slice(None), slice(None)", "return slice(None), slice(0, queries)",
                "pieces need not be equally long, so `keys` may differ from `queries`: without causality, queries see all keys"),
        Mistake("the comparison turned round", "if source < rank else", "if source > rank else",
                "the comparison is reversed: the front piece of a *lower* rank lies before all my tokens"),
        Mistake("everything is seen", "if not causal", "if True",
                "causal queries see no later keys: half of each square is left out"),
        Mistake("always causal", "if not causal", "if False",
                "without causality every query sees every key: return both slices whole"),
        Mistake("the back half of the keys", "slice(0, keys // 2)", "slice(keys // 2, None)",
                "of a lower rank, the front piece lies before all my tokens: the first half of its keys"),
        Mistake("the front half of the queries", "slice(queries // 2, None)", "slice(0, queries // 2)",
                "my front piece sees none of a higher rank's keys, but my back piece does: the second half of the queries"),
        Mistake("a quarter of the square", "(slice(None), slice(0, keys // 2)) if",
                "(slice(queries // 2, None), slice(0, keys // 2)) if",
                "a lower rank's front piece lies before *all* my tokens: both halves of my queries see it"),
        Mistake("a ring without zigzag", CAUSAL,
                "return (slice(None), slice(None)) if source < rank else (slice(0, 0), slice(None))",
                "this is right if each rank has one piece, all before or all after mine: in a zigzag it is half of each square"),
        Mistake("everything of lower ranks", CAUSAL, CAUSAL.replace("slice(0, keys // 2)", "slice(None)"),
                "you do not see all keys of a lower rank, because its back piece lies after all your tokens: take the first "
                "half of its keys",
                by=("causal_work",)),
        Mistake("everything of lower ranks, back with back", CAUSAL,
                "return (slice(None), slice(None)) if source < rank else (slice(queries // 2, None), slice(keys // 2, None))",
                "of a lower rank, all your queries see the front piece only. Of a higher rank, your back piece sees all keys"),
        Mistake("nothing of higher ranks", CAUSAL, CAUSAL.replace("(slice(queries // 2, None), "
                "slice(None))", "(slice(0, 0), slice(None))"),
                "both pieces of a higher rank lie before your back piece: the second half of your queries sees them"),
        Mistake("back sees front, nothing else", CAUSAL, "return slice(queries // 2, None), slice(0, keys // 2)",
                "this is one of the four pairs of pieces, but two have to be computed: which is the other one, for a lower and "
                "for a higher rank?"),
        Mistake("as if all were lower", CAUSAL, "return slice(None), slice(0, keys // 2)",
                "this is right for lower ranks only: your back piece sees all keys of a higher rank"),
        Mistake("as if all were higher", CAUSAL, "return slice(queries // 2, None), slice(None)",
                "this is right for higher ranks only: all your queries see the front piece of a lower rank"),
        Mistake("rank 1", CAUSAL, CAUSAL.replace("source < rank", "rank == 1"),
                "`rank == 1` equals `source < rank` for two ranks only: with four ranks it depends on both"),
        Mistake("the front half without causality", "return slice(None), slice(None)\n", "return slice(None), slice(0, keys // "
                "2)\n",
                "without causality every query sees every key, the second half too"),
        Mistake("one key too many", CAUSAL, CAUSAL.replace("slice(0, keys // 2)", "slice(0, keys // 2 + 1)"),
                "the front piece has the keys 0 to keys // 2 - 1, and a slice excludes its end: slice(0, keys // 2)"),
    ),
}
