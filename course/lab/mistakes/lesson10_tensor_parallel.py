"""Known wrong answers of lesson 10."""

from course.lab.checks.exercise import Mistake

MINE = "rows.tensor_split(size, 1)[rank].flatten()"
COPIES = "return x.view_as(x)"
SUM = "return all_reduce(x, axis)"
ALL_OF_ROW = """from course.parallel import mappings
        whole, weight = mappings.collect(x, -1, self.axis), mappings.collect(weight, 1, self.axis)
        y = multiply(whole, weight)
        y = mappings.scatter(y / self.axis.size, 1, self.axis) if self.tokens else y
        return y + bias.to(y.dtype)"""
ROW = """part = multiply(x, weight)                                      # (B, T, D)
        return leave_region(part, self.axis, self.tokens) + bias.to(part.dtype)         # (B, T, D), with sp (B, T / tp, D)"""
LAID = """from course.parallel.mappings import all_reduce
        whole = x.new_zeros(*x.shape[:dim], n, *x.shape[dim + 1:])
        whole.tensor_split(axis.size, dim)[axis.rank].copy_(x)
        return all_reduce(whole, axis)"""
ALL = "all_reduce(grad, ctx.axis), None"
LEAVES = "\n\n    @staticmethod\n    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None]:\n        return grad, None"

MISTAKES = {
    "qkv-rows": (
        Mistake("one block of rows", MINE, "rows.flatten().tensor_split(size)[rank]",
                "this cuts the matrix into blocks of neighboring rows, so a rank may have queries and no values: cut by heads"),
        Mistake("heads cut through", MINE, "rows.tensor_split(size, 2)[rank].flatten()",
                "this gives each rank a part of every head, but a head's scores need all of its dims: keep each head on one "
                "rank", stops="InvalidReturn"),
        Mistake("queries alone", MINE, "rows.tensor_split(size, 1)[rank][0].flatten()",
                "these are rows of the queries only: the heads need their keys and values too", stops="InvalidReturn"),
        Mistake("every rank the first heads", "[rank]", "[0]",
                "every rank gets the heads of rank 0: take the part of `rank`"),
        Mistake("heads dealt like cards", MINE, "rows[:, rank::size].flatten()",
                "neighboring heads belong to one rank: rank 0 has the heads 0 to heads // size - 1"),
        Mistake("another layout", "rows = torch.arange(3 * heads * head_dim).view(3, heads, head_dim)",
                "rows = torch.arange(3 * heads * head_dim).view(heads, 3, head_dim).transpose(0, 1)",
                "the rows of qkv.weight are laid out as (3, heads, head_dim): all queries, then all keys, then all values"),
        Mistake("head by head", MINE, "rows.tensor_split(size, 1)[rank].transpose(0, 1).flatten()",
                "these are the right rows in another order: all queries come first, because the next operation splits them in "
                "this order"),
        Mistake("two halves", MINE, "(rows[:, :heads // 2] if rank == 0 else rows[:, heads // 2:]).flatten()",
                "halves are right for two ranks only: each of `size` ranks has heads // size of the heads",
                stops="InvalidReturn"),
        Mistake("rank 1 for all but the first", "[rank]", "[min(rank, 1)]",
                "every rank but the first gets the rows of rank 1, which is right for two ranks only: take the part of `rank`"),
        Mistake("from the end", "[rank]", "[size - 1 - rank]",
                "the parts follow the order of the ranks: rank 0 has the first heads, not the last"),
        Mistake("rank for its first head", MINE, "rows[:, rank:rank + heads // size].flatten()",
                "rank r begins with head r · heads // size, not with head r"),
        Mistake("numbers within q, k and v", MINE, "(rows.tensor_split(size, 1)[rank] % (heads * head_dim)).flatten()",
                "these are row numbers within q, within k and within v. In the matrix, the keys begin at heads · head_dim, and "
                "the values at twice that"),
        Mistake("heads, not rows", MINE, "torch.arange(3 * heads).view(3, heads).tensor_split(size, 1)[rank].flatten()",
                "these are numbers of heads, not of rows: each head has head_dim rows", stops="InvalidReturn"),
    ),
    "copy-reduce": (
        Mistake("no all-reduce in the backward pass", "return all_reduce(grad, ctx.axis), None", "return grad, None",
                "copy, backward: each rank computed a part from the same input, so the input's gradient is the sum of all parts: "
                "all-reduce it"),
        Mistake("no all-reduce in the forward pass", SUM, "return x.clone()",
                "reduce, forward: each rank has a part of a sum, so add the parts"),
        Mistake("two all-reduces", SUM + LEAVES, "ctx.axis = axis\n        " + SUM + LEAVES.replace("grad, None", ALL),
                "reduce, backward: every rank already has the whole gradient, and a sum multiplies it by the number of ranks"),
        Mistake("a mean for a sum", SUM, "return all_reduce(x, axis) / axis.size",
                "reduce, forward: these are parts of a sum, not copies: do not divide"),
        Mistake("a mean of gradients", "return all_reduce(grad, ctx.axis), None",
                "return all_reduce(grad, ctx.axis) / ctx.axis.size, None",
                "copy, backward: the gradients of the parts add up: do not divide"),
        Mistake("an input written in place", SUM,
                "import torch.distributed as dist\n        dist.all_reduce(x, group=axis.group)\n        return x.clone()",
                "reduce writes into its input, which the caller may still need: dist.all_reduce works in place, so clone first"),
        Mistake("a gradient written in place", "return all_reduce(grad, ctx.axis), None",
                "import torch.distributed as dist\n        dist.all_reduce(grad, group=ctx.axis.group)\n"
                "        return grad, None",
                "copy's backward writes into its gradient, which autograd may still need elsewhere: clone it first"),
        Mistake("an all-reduce in copy's forward pass", "return x.view_as(x)", "return all_reduce(x, axis)",
                "copy, forward: every rank already has the whole input, and a sum multiplies it by the number of ranks"),
        Mistake("copy and reduce changed over", SUM + LEAVES, SUM + LEAVES + "\n\n\nCopy, Reduce = Reduce, Copy",
                "the two are exchanged: copy, at the entrance, does nothing in the forward pass and sums in the backward pass"),
        Mistake("all ranks for those of the axis", SUM,
                "import torch.distributed as dist\n        total = x.clone()\n        dist.all_reduce(total)\n"
                "        return total",
                "this sums over all ranks of the job: the sum is over the ranks of `axis`, group=axis.group"),
        Mistake("the axis kept on the class", "ctx.axis", "Copy.axis",
                "what `forward` keeps for `backward` belongs in `ctx`, which is new for each call: a class attribute holds the "
                "value of the last call"),
        Mistake("gathered and added up", SUM, "import torch\n        import torch.distributed as dist\n"
                "        everyone = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(axis.size)]\n"
                "        dist.all_gather(everyone, x.contiguous(), group=axis.group)\n        return "
                "torch.stack(everyone).sum(0)",
                "every rank sends its tensor to all others, and each rank sums them: that is n - 1 times the tensor, and "
                "memory for n of them. An all-reduce sends 2 (n - 1) / n times the tensor", by=("sent",)),
        Mistake("the largest for the sum", SUM, "import torch.distributed as dist\n        x = x.clone()\n"
                "        dist.all_reduce(x, dist.ReduceOp.MAX, group=axis.group)\n        return x",
                "this takes the maximum, but these are parts of a sum: all_reduce sums by default"),
        Mistake("the sum on one rank", SUM, "import torch.distributed as dist\n        x = x.clone()\n"
                "        dist.reduce(x, axis.ranks[0], group=axis.group)\n        return x",
                "dist.reduce gives the sum to one rank only, but every rank needs it: use all-reduce"),
        Mistake("a broadcast in copy", COPIES, "import torch.distributed as dist\n        x = x.clone()\n"
                "        dist.broadcast(x, axis.ranks[0], group=axis.group)\n        return x",
                "copy, forward: every rank already has its input, so nothing is sent. The backward "
                "pass communicates", by=("copied", "sent")),
        Mistake("in float32", SUM, "return all_reduce(x.float(), axis).to(x.dtype)",
                "the sum is computed in float32: keep the dtype of x", by=("reduced",)),
        Mistake("a mean in reduce's backward pass",
                "return all_reduce(x, axis)\n\n    @staticmethod\n"
                "    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None]:\n        return grad, None",
                "ctx.axis = axis\n        return all_reduce(x, axis)\n\n    @staticmethod\n"
                "    def backward(ctx: Context, grad: Tensor) -> tuple[Tensor, None]:\n"
                "        return grad / ctx.axis.size, None",
                "reduce, backward: each rank's part counts fully in the sum, so its gradient is the whole gradient: do "
                "not divide"),
    ),
    "column-row": (
        Mistake("nothing at the entrance", "x = enter_region(x, self.axis, self.tokens)",
                "x = enter_region(x, self.axis, self.tokens) if self.tokens else x",
                "the column linear's input needs `enter_region`: it changes nothing in the forward pass, and sums the ranks' "
                "gradients in the backward pass"),
        Mistake("nothing at the exit", "leave_region(part, self.axis, self.tokens)",
                "(leave_region(part, self.axis, self.tokens) if self.tokens else part)",
                "the row linear's product is a part of a sum: add the parts with `leave_region`"),
        Mistake("a bias on each rank", "leave_region(part, self.axis, self.tokens) + bias",
                "leave_region(part + bias, self.axis, self.tokens)",
                "every rank adds the bias before the sum, so the bias counts once for each rank: add it after `leave_region`"),
        Mistake("the bias forgotten", "leave_region(part, self.axis, self.tokens) + bias",
                "leave_region(part, self.axis, self.tokens) + 0 * bias",
                "the row linear has a bias too: add it once, after the sum"),
        Mistake("a bias divided", "+ bias.to", "+ (bias / self.axis.size).to",
                "after the sum every rank has the whole result: add the whole bias"),
        Mistake("the exit without tokens", "leave_region(part, self.axis, self.tokens)",
                "leave_region(part, self.axis, self.tokens) * (self.axis.size if self.tokens else 1)",
                "with sequence parallelism this multiplies the sum by the number of ranks: `leave_region` already sums"),
        Mistake("an entrance at the row linear too", "part = multiply(x, weight)",
                "from course.parallel import mappings\n        part = multiply(mappings.copy(x, self.axis), weight)",
                "the row linear's input belongs to this rank, it is not a copy of a common input: its gradient is complete "
                "without `copy`"),
        Mistake("a part of the bias on each rank", "leave_region(part, self.axis, self.tokens) + bias",
                "leave_region(part + bias / self.axis.size, self.axis, self.tokens)",
                "the parts of the bias sum to the bias, but its gradient is divided too: add the whole bias, after "
                "`leave_region`"),
        Mistake("the bias on one rank", "leave_region(part, self.axis, self.tokens) + bias",
                "leave_region(part + bias.to(part.dtype) if self.axis.rank == 0 else part, self.axis, self.tokens)",
                "every rank has the bias and needs its gradient: add it on all ranks, after `leave_region`",
                by=("losses", "weights", "sp_losses", "sp_weights")),
        Mistake("no bias in the column linear", "multiply(x, weight, bias)",
                "multiply(x, weight) + 0 * bias.sum()",
                "the column linear has a bias too, for its own outputs: multiply(x, weight, bias)"),
        Mistake("doors without tokens", "self.axis, self.tokens)", "self.axis, None)",
                "with sequence parallelism each rank has some of the tokens: pass `self.tokens` on to `enter_region` and to "
                "`leave_region`"),
        Mistake("the bias in its own format", "+ bias.to(part.dtype)", "+ bias",
                "weights are kept in float32, and their sum with bf16 is float32: convert the bias to the product's dtype, "
                "bias.to(part.dtype)"),
        Mistake("the bias added in place", "return leave_region(part, self.axis, self.tokens) + bias",
                "whole = leave_region(part, self.axis, self.tokens)\n        whole += bias\n        return whole",
                "the result of `leave_region` can be a view, and autograd does not allow writing into it: y + bias makes a new "
                "tensor, y += bias writes into it", stops="RuntimeError"),
        Mistake("F.linear for every product", "multiply(x, weight",
                "(lambda x, weight, bias=None: x @ weight.T + (0 if bias is None else bias))(x, weight",
                "F.linear bypasses FP8: `multiply` is the function that FP8 replaces by its own product"),
        Mistake("input and weight gathered", ROW, ALL_OF_ROW,
                "each rank assembles the whole weight and all hidden units, and multiplies everything: tensor parallelism "
                "avoids exactly this. Multiply with this rank's part, and `leave_region` sums the products",
                by=("lean",)),
        Mistake("the bias after the sum, on one rank", "leave_region(part, self.axis, self.tokens) + bias.to(part.dtype)",
                "leave_region(part, self.axis, self.tokens) + (self.axis.rank == 0) * bias.to(part.dtype)",
                "after `leave_region` every rank continues with its own result, so each rank has to add the bias: here only "
                "rank 0 does",
                by=("losses", "weights")),
        Mistake("through the door twice", "x = enter_region(x, self.axis, self.tokens)",
                "x = enter_region(enter_region(x, self.axis, self.tokens), self.axis, None)",
                "the input passes `enter_region` twice, so its gradient is summed twice: call it once"),
        Mistake("an exit at the column linear too", "return multiply(x, weight, bias)",
                "return leave_region(multiply(x, weight, bias), self.axis, self.tokens)",
                "a column linear's outputs are different features on each rank, not parts of a sum: do not call `leave_region`",
                stops="RuntimeError"),
        Mistake("no door at the row linear", ROW,
                ROW.replace("leave_region(part, self.axis, self.tokens)", "mappings.reduce(part, "
                "self.axis)")
                .replace("part = ", "from course.parallel import mappings\n        part = "),
                "reduce gives every rank all tokens, but with sequence parallelism a rank continues with its own tokens only: "
                "`leave_region` handles both cases", stops="RuntimeError"),
        Mistake("half of the product", ROW, ROW.replace("multiply(x, weight)", "multiply(x, weight) / 2"),
                "the products are parts of a sum: do not divide by the number of ranks, or by two"),
    ),
    "gather-scatter": (
        Mistake("a slice of the gradient", "return reduce_scatter(grad, ctx.dim, ctx.axis), None",
                "return grad.tensor_split(ctx.axis.size, ctx.dim)[ctx.axis.rank].clone(), None",
                "gather, backward: every rank used the whole tensor for its part of the features, so sum the gradients before "
                "you take your piece: reduce-scatter"),
        Mistake("a mean of gradients", "return reduce_scatter(grad, ctx.dim, ctx.axis), None",
                "return reduce_scatter(grad, ctx.dim, ctx.axis) / ctx.axis.size, None",
                "gather, backward: the gradients of the ranks are summed: do not divide"),
        Mistake("a slice for a sum", "return reduce_scatter(x, dim, axis)",
                "return x.tensor_split(axis.size, dim)[axis.rank].clone()",
                "scatter, forward: this is a piece of this rank's part only: sum all parts first, with a reduce-scatter"),
        Mistake("a mean for a sum", "return reduce_scatter(x, dim, axis)", "return reduce_scatter(x, dim, axis) / axis.size",
                "scatter, forward: these are parts of a sum, not copies: do not divide"),
        Mistake("the gradient divided", "return all_gather(grad, ctx.dim, ctx.axis, ctx.n), None",
                "return all_gather(grad, ctx.dim, ctx.axis, ctx.n) / ctx.axis.size, None",
                "scatter, backward: every part went into the sum with weight 1, so its gradient is the whole gradient: do not "
                "divide"),
        Mistake("an input written in place", "return reduce_scatter(x, dim, axis)",
                "import torch.distributed as dist\n        dist.all_reduce(x, group=axis.group)\n"
                "        return x.tensor_split(axis.size, dim)[axis.rank].clone()",
                "scatter writes into its input. In addition, an all-reduce sends twice as much as a reduce-scatter"),
        Mistake("a gradient written in place", "return all_gather(grad, ctx.dim, ctx.axis, ctx.n), None",
                "whole = all_gather(grad, ctx.dim, ctx.axis, ctx.n)\n        grad.zero_()\n        return whole, None",
                "scatter's backward writes into its gradient, which autograd may still need elsewhere"),
        Mistake("gathered by rank 0 alone", "return all_gather(x, dim, axis, n)",
                "return all_gather(x, dim, axis, n) if axis.rank == 0 else x",
                "every rank needs the whole, and every rank has to call the collective: one that does not leaves the others "
                "waiting", stops="RuntimeError"),
        Mistake("dim 1 for every dim", "reduce_scatter(grad, ctx.dim,", "reduce_scatter(grad, 1,",
                "this always uses dim 1 and ignores `dim`: keep the dim in `ctx` and use it", stops="RuntimeError"),
        Mistake("dim and axis kept on the class", "ctx.", "Gather.",
                "what `forward` keeps for `backward` belongs in `ctx`, which is new for each call: a class attribute holds the "
                "value of the last call", stops="RuntimeError"),
        Mistake("all pieces as long as mine", "ctx.n), None", "grad.shape[ctx.dim] * ctx.axis.size), None",
                "pieces need not be equally long: keep the total number of rows, x.shape[dim], in `ctx`", stops="ranks"),
        Mistake("zeros around the gradient", "return all_gather(grad, ctx.dim, ctx.axis, ctx.n), None",
                "whole = grad.new_zeros(*grad.shape[:ctx.dim], ctx.n, *grad.shape[ctx.dim + 1:])\n"
                "        whole.tensor_split(ctx.axis.size, ctx.dim)[ctx.axis.rank].copy_(grad)\n        return whole, None",
                "scatter, backward: this rank's part went into the sums of all ranks, so it needs the gradients of all ranks: "
                "all-gather them"),
        Mistake("an all-reduce and a slice", "return reduce_scatter(x, dim, axis)",
                "from course.parallel.mappings import all_reduce\n"
                "        return all_reduce(x, axis).tensor_split(axis.size, dim)[axis.rank].contiguous()",
                "an all-reduce brings every rank the whole sum, and the rank keeps one piece: that is twice the bytes of a "
                "reduce-scatter",
                by=("sent_sum",)),
        Mistake("all gathered, added up and cut", "return reduce_scatter(x, dim, axis)",
                "import torch\n        from course.parallel.mappings import all_gather\n"
                "        every = all_gather(x[None], 0, axis, axis.size)\n"
                "        return every.sum(0).tensor_split(axis.size, dim)[axis.rank].contiguous()",
                "every rank sends its whole tensor to all others, n times the bytes of a reduce-scatter, and keeps one piece",
                by=("sent_sum",)),
        Mistake("zeros around the piece, and an all-reduce", "return all_gather(x, dim, axis, n)", LAID,
                "this sends and adds zeros: an all-reduce of the whole tensor sends twice as much as an all-gather of the "
                "pieces",
                by=("sent_whole",)),
        Mistake("gathered along dim 1", "return all_gather(x, dim, axis, n)", "return all_gather(x, 1, axis, n)",
                "gather, forward, always uses dim 1 and ignores `dim`", stops="ranks"),
        Mistake("scattered along dim 1", "return reduce_scatter(x, dim, axis)", "return reduce_scatter(x, 1, axis)",
                "scatter, forward, always uses dim 1 and ignores `dim`", stops="RuntimeError"),
        Mistake("gathered along dim 1 in the backward pass", "return all_gather(grad, ctx.dim,", "return all_gather(grad, 1,",
                "scatter, backward, always uses dim 1 and ignores `dim`: keep the dim in `ctx`", stops="ranks"),
        Mistake("a piece from the end", "return reduce_scatter(x, dim, axis)",
                "from course.parallel.mappings import all_reduce\n"
                "        return all_reduce(x, axis).tensor_split(axis.size, dim)[axis.size - 1 - axis.rank].contiguous()",
                "rank r has piece r: this counts the pieces from the end", stops="RuntimeError"),
        Mistake("n from its own piece",
                "return all_gather(x, dim, axis, n)",
                "return all_gather(x, dim, axis, x.shape[dim] * axis.size)",
                "gather, forward: the pieces need not be equally long, so n is not the own piece times the number of "
                "ranks: pass on the n that you are given", stops="ranks"),
    ),
}
