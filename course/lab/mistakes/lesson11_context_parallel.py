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
                "a zigzag's pieces come rank by rank, not in the order of time: sort them by their positions"),
        Mistake("the order for its inverse", "order.argsort()", "order",
                "`order` says which position each gathered row has; to put position 0 first you need to know where it stands: "
                "the inverse permutation, order.argsort()"),
        Mistake("no gradient", GATHER, "pairs = mappings.all_gather(pairs.detach(), 3, tokens.cp, len(order)) + 0 * pairs.sum()",
                "no gradient flows back: PyTorch's collectives have none that you could rely on; mappings.gather has"),
        Mistake("a collective without a gradient", GATHER, GATHER.replace("mappings.gather", "mappings.all_gather"),
                "all_gather alone has no gradient: mappings.gather is yours of lesson 10, which knows its backward pass"),
        Mistake("the gradient of one's own use alone", GATHER,
                "start, stop = mappings.bounds(len(order), tokens.cp.size, tokens.cp.rank)\n"
                "    whole = mappings.all_gather(pairs.detach(), 3, tokens.cp, len(order))\n"
                "    pairs = torch.cat([whole[:, :, :, :start], pairs, whole[:, :, :, stop:]], 3)",
                "all ranks use these keys, and each has a part of their gradient: mappings.gather adds them up on the way back"),
        Mistake("keys in order, values not", IN_ORDER,
                "return torch.stack([pairs[0].index_select(2, order.argsort()), pairs[1]]) if tokens.zigzag else pairs",
                "the keys are in order and the values are not: a value belongs to its key"),
        Mistake("a mean of gradients", GATHER,
                GATHER + "\n    pairs = pairs.detach() + (pairs - pairs.detach()) / tokens.cp.size",
                "the gradients of all ranks' uses add up: do not divide"),
        Mistake("all pieces as long as mine", "len(order))", "pairs.shape[3] * tokens.cp.size)",
                "pieces need not be equally long: give mappings.gather the number of all rows"),
        Mistake("zeros around the piece, and an all-reduce", GATHER + "\n    " + IN_ORDER,
                "whole = pairs.new_zeros(*pairs.shape[:3], len(order), pairs.shape[4])\n"
                "    whole = whole.index_copy(3, tokens.order(pairs.device)[tokens.cp.rank], pairs)\n"
                "    return mappings.copy(mappings.reduce(whole, tokens.cp), tokens.cp)",
                "zeros are sent and added: an all-reduce of all tokens' keys sends twice what an all-gather of the pieces does, "
                "and so again in the backward pass", by=("sent",)),
        Mistake("gathered twice", GATHER, GATHER.replace("pairs = ", "twice = ") + "\n    "
                + GATHER.replace("pairs = ", "pairs = torch.stack([twice[0], ") + "[1]])",
                "keys and values are gathered twice, and half of what comes is thrown away: they are one tensor, (2, ...), so "
                "one gather brings both", by=("sent",)),
        Mistake("the latest first", "order.argsort()", "order.argsort(descending=True)",
                "this puts the latest token first: the order of time begins with position 0"),
        Mistake("along the heads", GATHER, GATHER.replace("pairs, 3,", "pairs, 2,"),
                "tokens are dim 3 of (2, B, h, T / cp, d): this gathers along the heads"),
        Mistake("pieces of two ranks", IN_ORDER, "quarter = len(order) // 4\n"
                "    return torch.cat([pairs[:, :, :, :quarter], pairs[:, :, :, 2 * quarter:], pairs[:, :, :, quarter:2 * "
                "quarter]], 3) "
                "if tokens.zigzag else pairs",
                "this is the order of four pieces, which two ranks have: n ranks have 2 n. The inverse permutation is right for "
                "all"),
    ),
    "merge": (
        Mistake("a plain mean", WEIGHED, "out.add_(new_out).div_(2)",
                "a block whose scores are higher counts more: weigh each answer by exp(its lse) over the sum of both"),
        Mistake("a sum", WEIGHED, "out.add_(new_out)",
                "each block's answer is divided by its own denominator already: weigh them, so that the weights add up to 1"),
        Mistake("exponentials of large numbers", WEIGHED,
                "a, b = lse.exp()[..., None], new_lse.exp()[..., None]\n    out.mul_(a / (a + b)).add_(new_out * (b / (a + b)))",
                "exp(1000) is infinite: subtract first, exp(lse - both), where both is the log-sum-exp of the two"),
        Mistake("weights changed over", WEIGHED,
                "out.mul_((new_lse - both).exp()[..., None]).add_(new_out * (lse - both).exp()[..., None])",
                "the weights have changed places: `out` belongs to `lse`, `new_out` to `new_lse`"),
        Mistake("the old log-sum-exp", "    lse.copy_(both)\n", "",
                "`lse` still belongs to the old keys alone, so the next block's weight is wrong: write the new one into it"),
        Mistake("logarithms added", "torch.logaddexp(lse, new_lse)", "lse + new_lse",
                "denominators add up, not their logarithms: torch.logaddexp(lse, new_lse)"),
        Mistake("the larger of the two", "torch.logaddexp(lse, new_lse)", "torch.maximum(lse, new_lse)",
                "the maximum keeps exp from overflowing, but the denominator of both is their sum: torch.logaddexp"),
        Mistake("not in place", WEIGHED,
                "out = out.mul((lse - both).exp()[..., None]).add(new_out * (new_lse - both).exp()[..., None])",
                "this binds a new tensor to the name `out` and leaves the caller's as it is: write into it, with mul_ and add_"),
        Mistake("neither in place", BOTH, "out, lse = out.clone(), lse.clone()\n    " + BOTH,
                "this gives new tensors the names `out` and `lse`, and the caller's are as they were: write into both, with "
                "mul_, add_ and copy_"),
        Mistake("the new log-sum-exp for the old one", BOTH, "both = lse.copy_(torch.logaddexp(lse, new_lse))",
                "`lse` is overwritten before its old value has been used for the weight of `out`: compute both weights first"),
        Mistake("right for a whole tensor, not for a view", "out.mul_", "flat = out.reshape(-1).view_as(out)\n    flat.mul_",
                "the ring gives a view, a part of its queries: write into `out` itself, as mul_ and add_ do; what `reshape` "
                "gives can be a copy, and `out.data = ...` leaves the whole as it was"),
        Mistake("denominators before the logarithm", "torch.logaddexp(lse, new_lse)", "(lse.exp() + new_lse.exp()).log()",
                "exp(1000) is infinite, and so is its logarithm: torch.logaddexp subtracts the larger one first"),
        Mistake("the larger log-sum-exp is kept", "lse.copy_(both)", "lse.copy_(torch.maximum(lse, new_lse))",
                "the larger of the two is written into `lse`, so the next block weighs too much: the log-sum-exp of both is "
                "`both`"),
        Mistake("a mean of the log-sum-exps", "lse.copy_(both)", "lse.copy_((lse + new_lse) / 2)",
                "`lse` becomes a mean here: denominators add up, and their logarithm is `both`"),
        Mistake("logarithms for weights", WEIGHED,
                "out.mul_((lse / both)[..., None]).add_(new_out * (new_lse / both)[..., None])",
                "weights are denominators over their sum, and these are logarithms: exp(lse - both), not lse / both"),
        Mistake("an epsilon", BOTH, "both = torch.logaddexp(lse, new_lse) + 1e-6",
                "nothing can be zero here, so an epsilon has nothing to prevent: it only makes the weights add up to less than "
                "1"),
    ),
    "zigzag": (
        Mistake("one piece each", PIECES, "torch.cat([pieces[2 * rank], pieces[2 * rank + 1]])",
                "neighbouring pieces: rank 0 would have next to nothing to do, the last rank most. Pair front and back"),
        Mistake("the piece that is as far on", PIECES, "torch.cat([pieces[rank], pieces[size + rank]])",
                "piece r and piece size + r: then the last rank has more to do in both halves. Pair r with 2 size - 1 - r"),
        Mistake("the back first", PIECES, "torch.cat([pieces[-1 - rank], pieces[rank]])",
                "the right pieces, the back one first: a rank's tokens stand in the order of time"),
        Mistake("the back reversed", PIECES, "torch.cat([pieces[rank], pieces[-1 - rank].flip(0)])",
                "within a piece tokens stay in the order of time: do not reverse them"),
        Mistake("off by one", PIECES, "torch.cat([pieces[rank], pieces[-rank]])",
                "rank 0 pairs with the last piece, pieces[-1]; pieces[-0] is the first one"),
        Mistake("on the CPU", "torch.arange(total, device=device)", "torch.arange(total)",
                "these are on the CPU: torch.arange(total, device=device) makes them where they are needed"),
        Mistake("dealt like cards", PIECES, "torch.arange(total, device=device)[rank::size]",
                "this deals single tokens like cards, which balances as well, but no round is then a rectangle: pieces, please"),
        Mistake("3 - rank", PIECES, "torch.cat([pieces[rank], pieces[3 - rank]])",
                "3 - rank is right for two ranks, which have four pieces: of 2 size pieces it is 2 size - 1 - rank"),
        Mistake("as many pieces as ranks", "chunk(2 * size)", "chunk(size)",
                "each rank has two pieces, so there are 2 size of them"),
        Mistake("one piece too far in front", PIECES, "torch.cat([pieces[rank], pieces[max(2 * size - 2 - rank, 0)]])",
                "the last piece has the number 2 size - 1, so rank r pairs with 2 size - 1 - r"),
        Mistake("snaking", PIECES, "torch.cat([pieces[rank], pieces[-1 - rank]][::1 if rank % 2 == 0 else -1])",
                "every second rank has its back piece first: the front piece is first on all of them"),
        Mistake("ranks from the end", PIECES, "torch.cat([pieces[size - 1 - rank], pieces[size + rank]])",
                "rank 0 has the outermost pieces, the first and the last: here it has the two in the middle"),
        Mistake("token by token", PIECES, "torch.stack([pieces[rank], pieces[-1 - rank]], 1).flatten()",
                "the two pieces come one after the other, not a token of this and a token of that"),
    ),
    "visible": (
        Mistake("rows for columns", CAUSAL, CHANGED_OVER,
                "rows and columns have changed places: the first slice is of my queries, the second of the other rank's keys"),
        Mistake("as many keys as queries", "return slice(None), slice(None)", "return slice(None), slice(0, queries)",
                "pieces need not be equally long, so `keys` is not always `queries`: without causality all keys are seen"),
        Mistake("the comparison turned round", "if source < rank else", "if source > rank else",
                "turned round: it is a *lower* rank's front piece that lies before all of mine"),
        Mistake("everything is seen", "if not causal", "if True",
                "causal queries see no keys after them: half of each square stays out"),
        Mistake("always causal", "if not causal", "if False",
                "without causality every query sees every key: both slices whole"),
        Mistake("the back half of the keys", "slice(0, keys // 2)", "slice(keys // 2, None)",
                "of a lower rank it is the front piece, the first half of its keys, that lies before all of mine"),
        Mistake("the front half of the queries", "slice(queries // 2, None)", "slice(0, queries // 2)",
                "of a higher rank's keys my front piece sees nothing: it is my back piece, the second half of the queries"),
        Mistake("a quarter of the square", "(slice(None), slice(0, keys // 2)) if",
                "(slice(queries // 2, None), slice(0, keys // 2)) if",
                "a lower rank's front piece lies before *all* of mine: both halves of my queries see it"),
        Mistake("a ring without zigzag", CAUSAL,
                "return (slice(None), slice(None)) if source < rank else (slice(0, 0), slice(None))",
                "this is right if each rank has one piece, all before or all after mine; in a zigzag it is half of each square"),
        Mistake("everything of lower ranks", CAUSAL, CAUSAL.replace("slice(0, keys // 2)", "slice(None)"),
                "of a lower rank you do not see everything: its back piece lies behind all of yours, so the first half of its "
                "keys",
                by=("causal_work",)),
        Mistake("everything of lower ranks, back with back", CAUSAL,
                "return (slice(None), slice(None)) if source < rank else (slice(queries // 2, None), slice(keys // 2, None))",
                "of a lower rank only the front piece is seen, by all your queries; of a higher one all keys, by your back "
                "piece"),
        Mistake("nothing of higher ranks", CAUSAL, CAUSAL.replace("(slice(queries // 2, None), "
                "slice(None))", "(slice(0, 0), slice(None))"),
                "a higher rank's front piece and back piece both lie before your back piece: the second half of your queries "
                "sees them"),
        Mistake("back sees front, nothing else", CAUSAL, "return slice(queries // 2, None), slice(0, keys // 2)",
                "this is one pair of pieces of four, and two have to be computed: which is the other one, for a lower and for a "
                "higher rank?"),
        Mistake("as if all were lower", CAUSAL, "return slice(None), slice(0, keys // 2)",
                "right for lower ranks alone: of a higher rank's keys it is your back piece that sees all"),
        Mistake("as if all were higher", CAUSAL, "return slice(queries // 2, None), slice(None)",
                "right for higher ranks alone: of a lower rank's keys all your queries see the front piece"),
        Mistake("rank 1", CAUSAL, CAUSAL.replace("source < rank", "rank == 1"),
                "`rank == 1` says the same as `source < rank` for two ranks alone: with four it depends on both"),
        Mistake("the front half without causality", "return slice(None), slice(None)\n", "return slice(None), slice(0, keys // "
                "2)\n",
                "without causality every query sees every key, the second half too"),
        Mistake("one key too many", CAUSAL, CAUSAL.replace("slice(0, keys // 2)", "slice(0, keys // 2 + 1)"),
                "the front piece is the keys 0 to keys // 2 - 1, and a slice ends before its end: slice(0, keys // 2)"),
    ),
}
