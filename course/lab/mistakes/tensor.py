"""Known wrong answers of lesson 10."""

from course.lab.exercise import Mistake

MINE = "rows.tensor_split(size, 1)[rank].flatten()"
SUM = "return all_reduce(x, axis)"
ALL = "all_reduce(grad, ctx.axis), None"
LEAVES = "\n\n    @staticmethod\n    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:\n        return grad, None"

MISTAKES = {
    "qkv-rows": (
        Mistake("one block of rows", MINE, "rows.flatten().tensor_split(size)[rank]",
                "this cuts the matrix into blocks of neighbouring rows, so a rank may have queries and no values: cut by heads"),
        Mistake("heads cut through", MINE, "rows.tensor_split(size, 2)[rank].flatten()",
                "this gives each rank a part of every head: a head's scores need all of its dims, so a head stays in one piece"),
        Mistake("queries alone", MINE, "rows.tensor_split(size, 1)[rank][0].flatten()",
                "these are rows of the queries: the heads need their keys and values as well"),
        Mistake("every rank the first heads", "[rank]", "[0]",
                "every rank gets the heads of rank 0: take the part of `rank`"),
        Mistake("heads dealt like cards", MINE, "rows[:, rank::size].flatten()",
                "neighbouring heads belong to one rank: rank 0 has the first heads / size of them"),
        Mistake("another layout", "rows = torch.arange(3 * heads * head_dim).view(3, heads, head_dim)",
                "rows = torch.arange(3 * heads * head_dim).view(heads, 3, head_dim).transpose(0, 1)",
                "the rows of qkv.weight are laid out as (3, heads, head_dim): all queries, then all keys, then all values"),
        Mistake("head by head", MINE, "rows.tensor_split(size, 1)[rank].transpose(0, 1).flatten()",
                "the right rows in another order: all queries first, because the code after it splits them like that"),
    ),
    "copy-reduce": (
        Mistake("no all-reduce in the backward pass", "return all_reduce(grad, ctx.axis), None", "return grad, None",
                "copy, backward: each rank computed a part from the same input, so the input's gradient is the sum of all parts: "
                "all-reduce it"),
        Mistake("no all-reduce in the forward pass", SUM, "return x.clone()",
                "reduce, forward: each rank has a part of a sum; add them up"),
        Mistake("two all-reduces", SUM + LEAVES, "ctx.axis = axis\n        " + SUM + LEAVES.replace("grad, None", ALL),
                "reduce, backward: every rank has the whole gradient already; adding up multiplies it by their number"),
        Mistake("a mean for a sum", SUM, "return all_reduce(x, axis) / axis.size",
                "reduce, forward: these are parts of a sum, not copies: do not divide"),
        Mistake("a mean of gradients", "return all_reduce(grad, ctx.axis), None",
                "return all_reduce(grad, ctx.axis) / ctx.axis.size, None",
                "copy, backward: the gradients of the parts add up: do not divide"),
        Mistake("an input written in place", SUM,
                "import torch.distributed as dist\n        dist.all_reduce(x, group=axis.group)\n        return x.clone()",
                "reduce writes into its input, which others may still need: dist.all_reduce works in place, so clone first"),
        Mistake("a gradient written in place", "return all_reduce(grad, ctx.axis), None",
                "import torch.distributed as dist\n        dist.all_reduce(grad, group=ctx.axis.group)\n"
                "        return grad, None",
                "copy's backward writes into its gradient, which autograd may still need elsewhere: clone it first"),
        Mistake("an all-reduce in copy's forward pass", "return x.view_as(x)", "return all_reduce(x, axis)",
                "copy, forward: every rank has the whole input already; adding it up multiplies it by the number of ranks"),
    ),
    "column-row": (
        Mistake("nothing at the entrance", "x = enter(x, self.axis, self.tokens)",
                "x = enter(x, self.axis, self.tokens) if self.tokens else x",
                "the column linear's input needs `enter`: forward it changes nothing, backward it adds up the ranks' gradients"),
        Mistake("nothing at the exit", "leave(part, self.axis, self.tokens)",
                "(leave(part, self.axis, self.tokens) if self.tokens else part)",
                "the row linear's product is a part of a sum: add the parts up, with `leave`"),
        Mistake("a bias on each rank", "leave(part, self.axis, self.tokens) + self.bias",
                "leave(part + self.bias, self.axis, self.tokens)",
                "every rank adds the bias before the sum, so it counts once for each rank: add it after `leave`"),
        Mistake("the bias forgotten", "leave(part, self.axis, self.tokens) + self.bias",
                "leave(part, self.axis, self.tokens) + 0 * self.bias",
                "the row linear has a bias too: add it, once, after the sum"),
        Mistake("a bias divided", "+ self.bias", "+ self.bias / self.axis.size",
                "after the sum every rank has the whole result: add the whole bias"),
        Mistake("heads cut through", ".global_shape) - 2)", ".global_shape) - 1)",
                "this cuts the last dim of (3, heads, head_dim), a part of every head: cut the dim of the heads instead"),
        Mistake("the exit without tokens", "leave(part, self.axis, self.tokens)",
                "leave(part, self.axis, self.tokens) * (self.axis.size if self.tokens else 1)",
                "with sequence parallelism the sum is multiplied by the number of ranks: `leave` adds up once, which is enough"),
        Mistake("an entrance at the row linear too", "part = self.matmul(x, self.weight)",
                "from course.parallel import mappings\n        part = self.matmul(mappings.copy(x, self.axis), self.weight)",
                "the row linear's input is this rank's own, not a copy of what all have: its gradient is complete, no `copy`"),
    ),
    "gather-scatter": (
        Mistake("a slice of the gradient", "return reduce_scatter(grad, ctx.dim, ctx.axis), None",
                "return grad.tensor_split(ctx.axis.size, ctx.dim)[ctx.axis.rank].clone(), None",
                "gather, backward: every rank used the whole, each for a part of the features, so the gradients have to be "
                "added up before you take your piece: reduce-scatter"),
        Mistake("a mean of gradients", "return reduce_scatter(grad, ctx.dim, ctx.axis), None",
                "return reduce_scatter(grad, ctx.dim, ctx.axis) / ctx.axis.size, None",
                "gather, backward: the ranks' gradients add up: do not divide"),
        Mistake("a slice for a sum", "return reduce_scatter(x, dim, axis)",
                "return x.tensor_split(axis.size, dim)[axis.rank].clone()",
                "scatter, forward: this is a piece of this rank's part alone; add up all parts first: reduce-scatter"),
        Mistake("a mean for a sum", "return reduce_scatter(x, dim, axis)", "return reduce_scatter(x, dim, axis) / axis.size",
                "scatter, forward: these are parts of a sum, not copies: do not divide"),
        Mistake("the gradient divided", "return all_gather(grad, ctx.dim, ctx.axis, ctx.n), None",
                "return all_gather(grad, ctx.dim, ctx.axis, ctx.n) / ctx.axis.size, None",
                "scatter, backward: every part went into the sum whole, so its gradient comes back whole: do not divide"),
        Mistake("an input written in place", "return reduce_scatter(x, dim, axis)",
                "import torch.distributed as dist\n        dist.all_reduce(x, group=axis.group)\n"
                "        return x.tensor_split(axis.size, dim)[axis.rank].clone()",
                "scatter writes into its input; besides, an all-reduce sends twice what a reduce-scatter does"),
        Mistake("a gradient written in place", "return all_gather(grad, ctx.dim, ctx.axis, ctx.n), None",
                "whole = all_gather(grad, ctx.dim, ctx.axis, ctx.n)\n        grad.zero_()\n        return whole, None",
                "scatter's backward writes into its gradient, which autograd may still need elsewhere"),
    ),
}
