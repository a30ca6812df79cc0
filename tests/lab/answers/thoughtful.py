"""Wrong answers of lessons 04, 10, 11 and 14 that a thoughtful learner writes: right values by gathering everything, what holds
for two ranks alone, an epsilon, a bound that was forgotten. Each is the right one with pieces replaced, or stands whole."""

from collections.abc import Sequence

from course.lab.checks.exercise import find, right

RIGHT: dict[str, str] = {}


def replaced(exercise: str, pairs: Sequence[tuple[str, str]]) -> str:
    """The right answer with these pieces replaced."""
    source = right(find(exercise))
    for old, new in pairs:
        assert old in source, f"{exercise} has no {old!r}"
        source = source.replace(old, new)
    return source


SLIPS: list[tuple[str, list[tuple[str, str]], str]] = [
    # float count
    ("loss-scaler", [
        ("torch.where(bad > 0, 0, good + 1)",
         "(good + 1) * (1 - bad)"),
    ], "a product with `bad`"),
    # float literals
    ("loss-scaler", [
        ("torch.where(bad > 0, 0, good + 1)",
         "torch.where(bad > 0, 0.0, good + 1.0)"),
    ], "a product with `bad`"),
    # floor at 1
    ("loss-scaler", [
        ("bad > 0, scale / 2,",
         "bad > 0, (scale / 2).clamp(min=2.0**6),"),
    ], "take the case that is named"),
    # grow cap 65536
    ("loss-scaler", [
        ("scale * 2, scale))",
         "(scale * 2).clamp(max=65536.0), scale))"),
    ], "there is no upper bound"),
    # bf16 first
    ("fp8-cast", [
        ("(x * scale)",
         "(x.bfloat16() * scale.bfloat16()).float()"),
    ], "this rounds twice, to bf16 and then to FP8"),
    # 240
    ("fp8-cast", [
        ("torch.finfo(kind).max",
         "240.0 if kind == torch.float8_e4m3fn else 57344.0"),
    ], "240 is the largest number of another E4M3"),
    # unscaled again
    ("fp8-cast", [
        (".to(kind)",
         ".to(kind).float().div(scale).to(kind)"),
    ], "clamp comes before the cast"),
    # overwrite first
    ("amax-history", [
        ("return torch.cat([amax[:, None], history[:, :-1]], 1)",
         "h = history.clone()\n"
         "    h[:, 0] = amax\n"
         "    return h"),
    ], "drop the oldest amax"),
    # overwrite last
    ("amax-history", [
        ("return torch.cat([amax[:, None], history[:, :-1]], 1)",
         "h = history.clone()\n"
         "    h[:, -1] = amax\n"
         "    return h"),
    ], "the new amax takes the oldest one's place at the end"),
    # scalar max for all
    ("amax-history", [
        ("return torch.cat([amax[:, None], history[:, :-1]], 1)",
         "return torch.cat([amax.max().expand(len(amax))[:, None], history[:, :-1]], 1)"),
    ], "each tensor has a row"),
    # fill zeros
    ("amax-history", [
        ("return torch.cat([amax[:, None], history[:, :-1]], 1)",
         "h = history.clone()\n"
         "    first = (h == 0).int().argmax(1)\n"
         "    h[torch.arange(len(h)), first] = amax\n"
         "    return h"),
    ], "a zero in a history is not a free place"),
    # eps 1e-12
    ("delayed-scale", [
        ("torch.where(amax > 0, largest / amax, 1.0)",
         "largest / (amax + 1e-12)"),
    ], "clamping makes an enormous scale of an empty history"),
    # eps in where 1e-8
    ("delayed-scale", [
        ("torch.where(amax > 0, largest / amax, 1.0)",
         "torch.where(amax > 0, largest / (amax + 1e-8), 1.0)"),
    ], "look for an epsilon"),
    # eps 1e-6
    ("delayed-scale", [
        ("torch.where(amax > 0, largest / amax, 1.0)",
         "largest / (amax + 1e-6)"),
    ], "an epsilon makes an enormous scale of an empty history"),
    # eps in where 1e-6
    ("delayed-scale", [
        ("torch.where(amax > 0, largest / amax, 1.0)",
         "torch.where(amax > 0, largest / (amax + 1e-6), 1.0)"),
    ], "look for an epsilon"),
    # clamp 1e-6
    ("delayed-scale", [
        ("torch.where(amax > 0, largest / amax, 1.0)",
         "largest / amax.clamp(min=1e-6)"),
    ], "clamping makes an enormous scale of an empty history"),
    # nan_to_num
    ("delayed-scale", [
        ("torch.where(amax > 0, largest / amax, 1.0)",
         "(largest / amax).nan_to_num(posinf=0.0)"),
    ], "a scale of 0 turns the next tensor into zeros"),
    # if any
    ("delayed-scale", [
        ("torch.where(amax > 0, largest / amax, 1.0)",
         "largest / amax if (amax > 0).all() else amax * 0 + 1"),
    ], "with one tensor of zeros, all tensors get the scale 1 here"),
    # last = rank 1
    ("qkv-rows", [
        ("rows.tensor_split(size, 1)[rank].flatten()",
         "rows.tensor_split(size, 1)[1 if rank else 0].flatten()"),
    ], "every rank but the first gets the rows of rank 1"),
    # rank*3
    ("qkv-rows", [
        ("rows.tensor_split(size, 1)[rank].flatten()",
         "torch.arange(3 * heads * head_dim // size) + rank * 3 * heads * head_dim // size"),
    ], "this cuts the matrix into blocks of neighboring rows"),
    # no head_dim
    ("qkv-rows", [
        ("rows.tensor_split(size, 1)[rank].flatten()",
         "torch.cat([torch.arange(heads // size) + rank * heads // size + p * heads for p in range(3)])"),
    ], "these are numbers of heads"),
    # two dim
    ("qkv-rows", [
        ("rows.tensor_split(size, 1)[rank].flatten()",
         "rows.tensor_split(size, 1)[rank]"),
    ], "it has a dim too many"),
    # offset rank heads
    ("qkv-rows", [
        ("rows.tensor_split(size, 1)[rank].flatten()",
         "torch.cat([torch.arange(heads // size * head_dim) + rank * head_dim + p * heads * head_dim for p in "
         "range(3)])"),
    ], "rank r begins with head r · heads // size, not with head r"),
    # too few grads
    ("copy-reduce", [
        ("return all_reduce(grad, ctx.axis), None",
         "return all_reduce(grad, ctx.axis)"),
    ], "`backward` returns one thing for each argument of `forward` after ctx"),
    # only rank 0
    ("copy-reduce", [
        ("return all_reduce(x, axis)",
         "return all_reduce(x, axis) if axis.rank == 0 else x.clone()"),
    ], "every rank of a group has to call the same collectives"),
    # only rank 0 back
    ("copy-reduce", [
        ("return all_reduce(grad, ctx.axis), None",
         "return (all_reduce(grad, ctx.axis) if ctx.axis.rank == 0 else grad), None"),
    ], "every rank of a group has to call the same collectives"),
    # max
    ("copy-reduce", [
        ("return all_reduce(x, axis)",
         "import torch.distributed as dist\n"
         "        y = x.clone()\n"
         "        dist.all_reduce(y, dist.ReduceOp.MAX, group=axis.group)\n"
         "        return y"),
    ], "this takes the maximum"),
    # avg op
    ("copy-reduce", [
        ("return all_reduce(x, axis)",
         "import torch.distributed as dist\n"
         "        y = x.clone()\n"
         "        dist.all_reduce(y, group=axis.group)\n"
         "        return y / 2"),
    ], "reduce, forward: these are parts of a sum, not copies: do not divide"),
    # copy broadcasts
    ("copy-reduce", [
        ("return x.view_as(x)",
         "import torch.distributed as dist\n"
         "        y = x.clone()\n"
         "        dist.broadcast(y, axis.ranks[0], group=axis.group)\n"
         "        return y"),
    ], "copy, forward: every rank already has its input"),
    # reduce to one
    ("copy-reduce", [
        ("return all_reduce(x, axis)",
         "import torch.distributed as dist\n"
         "        y = x.clone()\n"
         "        dist.reduce(y, axis.ranks[0], group=axis.group)\n"
         "        return y"),
    ], "dist.reduce gives the sum to one rank only"),
    # reduce twice back
    ("copy-reduce", [
        ("return grad, None",
         "return all_reduce(grad, ctx.axis) / ctx.axis.size, None"),
        ("return all_reduce(x, axis)",
         "ctx.axis = axis\n"
         "        return all_reduce(x, axis)"),
    ], "it sends more by all-reduce than is needed"),
    # two ranks: send
    ("copy-reduce", [
        ("return all_reduce(x, axis)",
         "import torch, torch.distributed as dist\n"
         "        other = torch.empty_like(x)\n"
         "        work = dist.isend(x, axis.ranks[1 - axis.rank] if axis.size == 2 else axis.ranks[axis.rank "
         "^ 1])\n"
         "        dist.recv(other, axis.ranks[axis.rank ^ 1])\n"
         "        work.wait()\n"
         "        return x + other"),
    ], "right on 2 ranks and wrong on 4"),
    # row gathers all
    ("column-row", [
        ("part = multiply(x, weight)                                      # (B, T, D)\n"
         "        return leave_region(part, self.axis, self.tokens) + bias.to(part.dtype)         # (B, T, "
         "D), with sp (B, T / tp, D)",
         "from course.parallel import mappings\n"
         "        import torch\n"
         "        whole = mappings.collect(x, -1, self.axis) if False else mappings.gather(x, -1, self.axis)\n"
         "        w = mappings.gather(weight, 1, self.axis)\n"
         "        y = multiply(whole, w) + bias\n"
         "        if self.tokens:\n"
         "            return y.tensor_split(self.axis.size, 1)[self.axis.rank]\n"
         "        return y"),
    ], "each rank assembles the whole weight and all hidden units"),
    # row collects all
    ("column-row", [
        ("part = multiply(x, weight)                                      # (B, T, D)\n"
         "        return leave_region(part, self.axis, self.tokens) + bias.to(part.dtype)         # (B, T, "
         "D), with sp (B, T / tp, D)",
         "from course.parallel import mappings\n"
         "        whole = mappings.collect(x, -1, self.axis)\n"
         "        w = mappings.collect(weight, 1, self.axis)\n"
         "        y = multiply(whole, w) + bias.to(x.dtype)\n"
         "        if self.tokens:\n"
         "            return mappings.scatter(y / self.axis.size, 1, self.axis)\n"
         "        return y"),
    ], "each rank assembles the whole weight and all hidden units"),
    # bias on rank 0 after
    ("column-row", [
        ("part = multiply(x, weight)                                      # (B, T, D)\n"
         "        return leave_region(part, self.axis, self.tokens) + bias.to(part.dtype)         # (B, T, "
         "D), with sp (B, T / tp, D)",
         "part = multiply(x, weight)\n"
         "        y = leave_region(part, self.axis, self.tokens)\n"
         "        return y + bias.to(part.dtype) if self.axis.rank == 0 else y"),
    ], "after `leave_region` every rank continues with its own result"),
    # bias on rank 0 before via matmul
    ("column-row", [
        ("part = multiply(x, weight)                                      # (B, T, D)\n"
         "        return leave_region(part, self.axis, self.tokens) + bias.to(part.dtype)         # (B, T, "
         "D), with sp (B, T / tp, D)",
         "part = multiply(x, weight, bias if self.axis.rank == 0 else None)\n"
         "        return leave_region(part, self.axis, self.tokens)"),
    ], "every rank has the bias"),
    # bias in matmul
    ("column-row", [
        ("part = multiply(x, weight)                                      # (B, T, D)\n"
         "        return leave_region(part, self.axis, self.tokens) + bias.to(part.dtype)         # (B, T, "
         "D), with sp (B, T / tp, D)",
         "part = multiply(x, weight, bias)\n"
         "        return leave_region(part, self.axis, self.tokens)"),
    ], "every rank adds the bias before the sum"),
    # no leave sp
    ("column-row", [
        ("part = multiply(x, weight)                                      # (B, T, D)\n"
         "        return leave_region(part, self.axis, self.tokens) + bias.to(part.dtype)         # (B, T, "
         "D), with sp (B, T / tp, D)",
         "part = multiply(x, weight)\n"
         "        from course.parallel import mappings\n"
         "        return mappings.reduce(part, self.axis) + bias.to(part.dtype)"),
    ], "reduce gives every rank all tokens"),
    # reduce then slice
    ("column-row", [
        ("part = multiply(x, weight)                                      # (B, T, D)\n"
         "        return leave_region(part, self.axis, self.tokens) + bias.to(part.dtype)         # (B, T, "
         "D), with sp (B, T / tp, D)",
         "part = multiply(x, weight)\n"
         "        from course.parallel import mappings\n"
         "        y = mappings.copy(mappings.reduce(part, self.axis), self.axis) if self.tokens else "
         "mappings.reduce(part, self.axis)\n"
         "        if self.tokens: y = mappings.shard(y, 1, self.axis)\n"
         "        return y + bias.to(part.dtype)"),
    ], "by all-reduce and all-gather and reduce-scatter"),
    # weights whole in column
    ("column-row", [
        ("return multiply(x, weight, bias)",
         "from course.parallel import mappings\n"
         "        w, b = mappings.gather(weight, 0, self.axis), mappings.gather(bias, 0, self.axis)\n"
         "        return mappings.shard(multiply(x, w, b), -1, self.axis)"),
    ], "each rank assembles the whole weight and all hidden units"),
    # all_reduce + slice back
    ("gather-scatter", [
        ("return reduce_scatter(grad, ctx.dim, ctx.axis), None, None, None",
         "from course.parallel.mappings import all_reduce\n"
         "        return all_reduce(grad, ctx.axis).tensor_split(ctx.axis.size, "
         "ctx.dim)[ctx.axis.rank].contiguous(), None, None, None"),
    ], "an all-reduce brings every rank the whole sum"),
    # dim 1 everywhere
    ("gather-scatter", [
        ("return all_gather(x, dim, axis, n)",
         "return all_gather(x, 1, axis, n)"),
        ("return reduce_scatter(x, dim, axis)",
         "return reduce_scatter(x, 1, axis)"),
        ("return reduce_scatter(grad, ctx.dim, ctx.axis), None, None, None",
         "return reduce_scatter(grad, 1, ctx.axis), None, None, None"),
        ("return all_gather(grad, ctx.dim, ctx.axis, ctx.n), None, None",
         "return all_gather(grad, 1, ctx.axis, ctx.n), None, None"),
    ], "gather, forward, always uses dim 1"),
    # too few
    ("gather-scatter", [
        ("return reduce_scatter(grad, ctx.dim, ctx.axis), None, None, None",
         "return reduce_scatter(grad, ctx.dim, ctx.axis)"),
    ], "`backward` returns one thing for each argument of `forward` after ctx"),
    # only rank 0
    ("gather-scatter", [
        ("return reduce_scatter(x, dim, axis)",
         "return reduce_scatter(x, dim, axis) if axis.rank == 0 else x.tensor_split(axis.size, "
         "dim)[axis.rank].clone()"),
    ], "every rank of a group has to call the same collectives"),
    # drop last
    ("gather-scatter", [
        ("return all_gather(x, dim, axis, n)",
         "return all_gather(x.narrow(dim, 0, n // axis.size), dim, axis, n // axis.size * axis.size)"),
    ], "what `forward` returned is longer or shorter than it should be"),
    # n from first
    ("gather-scatter", [
        ("ctx.dim, ctx.axis, ctx.n = dim, axis, x.shape[dim]",
         "ctx.dim, ctx.axis, ctx.n = dim, axis, x.shape[dim] // axis.size * axis.size"),
    ], "pieces need not be equally long"),
    # reduce of zeros
    ("gather-in-order", [
        ("pairs = mappings.gather(pairs, 3, tokens.cp, len(order))",
         "whole = pairs.new_zeros(*pairs.shape[:3], len(order), pairs.shape[4])\n"
         "    whole = whole.index_copy(3, tokens.order(pairs.device)[tokens.cp.rank], pairs)\n"
         "    return mappings.copy(mappings.reduce(whole, tokens.cp), tokens.cp)"),
    ], "this sends and adds zeros"),
    # twice
    ("gather-in-order", [
        ("pairs = mappings.gather(pairs, 3, tokens.cp, len(order))",
         "keys, values = (mappings.gather(pairs, 3, tokens.cp, len(order))[i] for i in (0, 1))\n"
         "    pairs = torch.stack([keys, values])"),
    ], "this gathers keys and values twice and discards half of the result"),
    # collect
    ("gather-in-order", [
        ("pairs = mappings.gather(pairs, 3, tokens.cp, len(order))",
         "pairs = mappings.collect(pairs, 3, tokens.cp, len(order))"),
    ], "all ranks use these keys"),
    # always argsort dim
    ("gather-in-order", [
        ("return permute_tokens(pairs, 3, order.argsort()) if tokens.zigzag else pairs",
         "return permute_tokens(pairs, 3, order.argsort().argsort()) if tokens.zigzag else pairs"),
    ], "`order` gives the position of each gathered row"),
    # float
    ("gather-in-order", [
        ("pairs = mappings.gather(pairs, 3, tokens.cp, len(order))",
         "pairs = mappings.gather(pairs.float(), 3, tokens.cp, len(order))\n"
         "    pairs = pairs.double()"),
    ], "a format with fewer bits"),
    # two ranks order
    ("gather-in-order", [
        ("return permute_tokens(pairs, 3, order.argsort()) if tokens.zigzag else pairs",
         "h = len(order) // 4\n"
         "    return torch.cat([pairs[:, :, :, :h], pairs[:, :, :, 2 * h:], pairs[:, :, :, h:2 * h]], 3) if "
         "tokens.zigzag else pairs"),
    ], "this is the order of four pieces"),
    # relative to max only
    ("merge", [
        ("both = torch.logaddexp(lse, new_lse)",
         "top = torch.maximum(lse, new_lse)\n"
         "    both = top + ((lse - top).exp() + (new_lse - top).exp() + 1e-6).log()"),
    ], "look for an epsilon"),
    # sigmoid swapped
    ("merge", [
        ("out.mul_((lse - both).exp()[..., None]).add_(new_out * (new_lse - both).exp()[..., None])",
         "w = (lse - new_lse).sigmoid()[..., None]\n"
         "    out.mul_(1 - w).add_(new_out * w)"),
    ], "the weights are exchanged"),
    # new_out in place
    ("merge", [
        ("new_out * (new_lse - both).exp()[..., None]",
         "new_out.mul_((new_lse - both).exp()[..., None])"),
    ], "do not write into the arguments"),
    # weights half
    ("merge", [
        ("out.mul_((lse - both).exp()[..., None]).add_(new_out * (new_lse - both).exp()[..., None])",
         "out.mul_(0.5).add_(0.5 * new_out)"),
    ], "a block with higher scores counts more"),
    # alternate
    ("zigzag", [
        ("torch.cat([pieces[rank], pieces[-1 - rank]])",
         "torch.cat([pieces[rank], pieces[-1 - rank]]) if rank % 2 == 0 else torch.cat([pieces[-1 - rank], "
         "pieces[rank]])"),
    ], "every second rank has its back piece first"),
    # size - r
    ("zigzag", [
        ("torch.cat([pieces[rank], pieces[-1 - rank]])",
         "torch.cat([pieces[rank], pieces[2 * size - 2 - rank]])"),
    ], "the last piece has the number 2 size - 1"),
    # list of all
    ("zigzag", [
        ("torch.cat([pieces[rank], pieces[-1 - rank]])",
         "torch.arange(total, device=device)"),
    ], "the length of dim 0 is wrong"),
    # float
    ("zigzag", [
        ("torch.arange(total, device=device)",
         "torch.arange(float(total), device=device)"),
    ], "return whole numbers"),
    # quarters
    ("visible", [
        ("return (slice(None), slice(0, keys // 2)) if source < rank else (slice(queries // 2, None), "
         "slice(None))",
         "return (slice(queries // 2, None), slice(0, keys // 2))"),
    ], "this is one of the four pairs of pieces"),
    # mirror
    ("visible", [
        ("return (slice(None), slice(0, keys // 2)) if source < rank else (slice(queries // 2, None), "
         "slice(None))",
         "return (slice(None), slice(0, keys // 2))"),
    ], "this is right for lower ranks only"),
    # mirror2
    ("visible", [
        ("return (slice(None), slice(0, keys // 2)) if source < rank else (slice(queries // 2, None), "
         "slice(None))",
         "return (slice(queries // 2, None), slice(None))"),
    ], "this is right for higher ranks only"),
    # tuple ints
    ("visible", [
        ("return (slice(None), slice(0, keys // 2)) if source < rank else (slice(queries // 2, None), "
         "slice(None))",
         "return (queries, keys // 2) if source < rank else (queries // 2, keys)"),
    ], "an index is negative, or too large for what is here"),
    # source==0
    ("visible", [
        ("return (slice(None), slice(0, keys // 2)) if source < rank else (slice(queries // 2, None), "
         "slice(None))",
         "return (slice(None), slice(0, keys // 2)) if source == 0 else (slice(queries // 2, None), "
         "slice(None))"),
    ], "right on 2 ranks and wrong on 4"),
    # drop last
    ("loss-in-chunks", [
        ("for rows, aims in zip(x.split(size), target.split(size), strict=True):",
         "n = len(x) // size * size\n"
         "        for rows, aims in zip(x[:n].split(size), target[:n].split(size), strict=True):"),
    ], "the gradient of x has fewer rows than x"),
    # weights saved too
    ("loss-in-chunks", [
        ("ctx.save_for_backward(torch.cat(of_x), of_weight)",
         "ctx.x = x.clone()\n"
         "        ctx.w = weight.clone()\n"
         "        ctx.save_for_backward(torch.cat(of_x), of_weight)"),
    ], "more than two gradients survive the forward pass"),
    # dW transposed
    ("loss-in-chunks", [
        ("of_weight += grad.T @ rows",
         "of_weight += (rows.T @ grad)"),
    ], "two shapes do not fit"),
    # gather matrix
    ("vocabulary-embedding", [
        ("row, here = own(tokens, len(self.weight), self.axis)            # 2 x (B, T)\n"
         "        part = F.embedding(row, self.weight) * here[..., None]          # (B, T, D)\n"
         "        return leave_region(part, self.axis, self.tokens)",
         "from course.parallel import mappings\n"
         "        w = mappings.gather(self.weight, 0, self.axis)\n"
         "        y = F.embedding(tokens, w)\n"
         "        y = y if not self.tokens else mappings.shard(y, 1, self.axis)\n"
         "        return mappings.copy(y, self.axis) if False else y"),
    ], "every rank gathers the whole table"),
    # collect matrix
    ("vocabulary-embedding", [
        ("row, here = own(tokens, len(self.weight), self.axis)            # 2 x (B, T)\n"
         "        part = F.embedding(row, self.weight) * here[..., None]          # (B, T, D)\n"
         "        return leave_region(part, self.axis, self.tokens)",
         "from course.parallel import mappings\n"
         "        w = mappings.collect(self.weight, 0, self.axis)\n"
         "        y = F.embedding(tokens, w)\n"
         "        return y if not self.tokens else mappings.scatter(y / self.axis.size, 1, self.axis)"),
    ], "this gathers rows"),
    # upper only
    ("vocabulary-embedding", [
        ("here = (row >= 0) & (row < rows)",
         "here = tokens < (axis.rank + 1) * rows\n"
         "    row = row.clamp(min=0)"),
    ], "tokens below this rank's first one count as its row 0"),
    # upper only, modulo
    ("vocabulary-embedding", [
        ("row = tokens - axis.rank * rows\n"
         "    here = (row >= 0) & (row < rows)",
         "row = tokens % rows\n"
         "    here = tokens < (axis.rank + 1) * rows"),
    ], "a token of a lower rank counts here too"),
    # upper only raw
    ("vocabulary-embedding", [
        ("here = (row >= 0) & (row < rows)",
         "here = row < rows"),
        ("row.where(here, 0)",
         "row * here"),
    ], "tokens of lower ranks have negative rows"),
    # lower only
    ("vocabulary-embedding", [
        ("here = (row >= 0) & (row < rows)",
         "here = row >= 0"),
        ("row.where(here, 0)",
         "row.clamp(0, rows - 1)"),
    ], "tokens above this rank's last one count as its last row"),
    # enter too
    ("vocabulary-embedding", [
        ("return leave_region(part, self.axis, self.tokens)",
         "from course.parallel.mappings import copy\n"
         "        part = copy(part, self.axis)\n"
         "        return leave_region(part, self.axis, self.tokens)"),
    ], "there is a `copy` before `leave_region`"),
    # gather vectors
    ("vocabulary-embedding", [
        ("row, here = own(tokens, len(self.weight), self.axis)            # 2 x (B, T)\n"
         "        part = F.embedding(row, self.weight) * here[..., None]          # (B, T, D)\n"
         "        return leave_region(part, self.axis, self.tokens)",
         "from course.parallel import mappings\n"
         "        row, here = own(tokens, len(self.weight), self.axis)\n"
         "        part = F.embedding(row, self.weight) * here[..., None]\n"
         "        if self.tokens: return leave_region(part, self.axis, self.tokens)\n"
         "        return mappings.collect(part[None], 0, self.axis).sum(0)"),
    ], "this gathers rows"),
    # rank == 1
    ("vocabulary-embedding", [
        ("axis.rank * rows",
         "(axis.rank == 1) * rows"),
    ], "right on 2 ranks and wrong on 4"),
    # size*rows
    ("vocabulary-embedding", [
        ("axis.rank * rows",
         "axis.rank * rows * axis.size // 2"),
    ], "right on 2 ranks and wrong on 4"),
    # zero-padded logits
    ("vocabulary-loss", [
        ("dist.all_reduce(largest, dist.ReduceOp.MAX, group=axis.group)\n",
         "whole = s.new_zeros(*s.shape[:-1], axis.size * s.shape[-1])\n"
         "    whole[..., axis.rank * s.shape[-1]:(axis.rank + 1) * s.shape[-1]] = s\n"
         "    dist.all_reduce(whole, group=axis.group)\n"
         "    largest = whole.amax(-1)\n"),
    ], "the ranks exchange whole logits"),
    # here forgotten in grad
    ("vocabulary-loss", [
        ("-here[..., None].to(softmax.dtype)",
         "-torch.ones_like(here[..., None], dtype=softmax.dtype)"),
    ], "only the rank that has the target subtracts the 1"),
    # grad sum
    ("vocabulary-loss", [
        ("s.div_(total[..., None])",
         "s.div_(total[..., None] * axis.size)"),
    ], "`total` is already the sum over all ranks"),
    # four numbers
    ("vocabulary-loss", [
        ("sums = torch.stack([wanted, s.exp_().sum(-1)])",
         "sums = torch.stack([wanted, s.exp_().sum(-1), here.to(s.dtype)])"),
        ("wanted, total = sums",
         "wanted, total, _ = sums"),
    ], "the ranks exchange more than three numbers a token"),
    # only if here
    ("vocabulary-loss", [
        ("dist.all_reduce(sums, group=axis.group)",
         "if here.all(): dist.all_reduce(sums, group=axis.group)"),
    ], "every rank of a group has to call the same collectives"),
    # header 33
    ("read-index", [
        ("lengths = np.frombuffer(raw, \"<i4\", S, HEADER.size)",
         "lengths = np.frombuffer(raw, \"<i4\", S, 33)"),
    ], "every number is 256 times what it should be"),
    # astype
    ("read-index", [
        ("lengths = np.frombuffer(raw, \"<i4\", S, HEADER.size)",
         "lengths = np.frombuffer(raw, \"<i4\", S, HEADER.size).astype(\"i8\")"),
    ], "lengths are int32, of 4 bytes each"),
    # i is sequence, last
    ("one-document", [
        ("first, last = index.documents[i:i + 2]",
         "first, last = index.documents[i], index.documents[i] + 1"),
    ], "a document without sequences at the end begins after the last sequence"),
    # last forgotten
    ("one-document", [
        ("return tokens[start:start + index.lengths[first:last].sum()]",
         "stop = index.pointers[last - 1] // index.dtype.itemsize\n"
         "    return tokens[start:stop]"),
    ], "take the case that is named"),
    # list
    ("one-document", [
        ("return tokens[start:start + index.lengths[first:last].sum()]",
         "return tokens[start:start + index.lengths[first:last].sum()].tolist()"),
    ], "return tokens[start:stop]"),
    # first sequence
    ("one-document", [
        ("return tokens[start:start + index.lengths[first:last].sum()]",
         "return tokens[start:start + index.lengths[first]]"),
    ], "a document without sequences at the end begins after the last sequence"),
]

COPY_REDUCE_GATHER_AND_SUM = '''
from typing import Any
from torch import Tensor
from torch.autograd import Function
from course.parallel.mesh import Axis
from course.parallel.mappings import all_reduce


class Copy(Function):
    """identity | all-reduce."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return total(grad, ctx.axis), None


class Reduce(Function):
    """all-reduce | identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
        return total(x, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None

def total(x, axis):
    import torch, torch.distributed as dist
    everyone = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(axis.size)]
    dist.all_gather(everyone, x.contiguous(), group=axis.group)
    return torch.stack(everyone).sum(0)
'''

GATHER_SCATTER_ZERO_PADDED = '''
from typing import Any
from torch import Tensor
from torch.autograd import Function
from course.parallel.mesh import Axis
from course.parallel.mappings import all_gather, reduce_scatter


class Gather(Function):
    """all-gather along a dim | reduce-scatter along it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, axis: Axis, n: int) -> Tensor:
        ctx.dim, ctx.axis = dim, axis
        return laid(x, dim, axis, n)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return reduce_scatter(grad, ctx.dim, ctx.axis), None, None, None


class Scatter(Function):
    """reduce-scatter along a dim | all-gather along it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, axis: Axis) -> Tensor:
        ctx.dim, ctx.axis, ctx.n = dim, axis, x.shape[dim]
        return reduce_scatter(x, dim, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return laid(grad, ctx.dim, ctx.axis, ctx.n), None, None

def laid(x, dim, axis, n):
    from course.parallel.mappings import all_reduce, bounds
    shape = list(x.shape); shape[dim] = n
    whole = x.new_zeros(shape)
    a, b = bounds(n, axis.size, axis.rank)
    whole.narrow(dim, a, b - a).copy_(x)
    return all_reduce(whole, axis)
'''

GATHER_SCATTER_ZERO_PADDED_AND_SLICE = '''
from typing import Any
from torch import Tensor
from torch.autograd import Function
from course.parallel.mesh import Axis
from course.parallel.mappings import all_gather, reduce_scatter


class Gather(Function):
    """all-gather along a dim | reduce-scatter along it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, axis: Axis, n: int) -> Tensor:
        ctx.dim, ctx.axis = dim, axis
        return laid(x, dim, axis, n)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return cut(grad, ctx.dim, ctx.axis), None, None, None


class Scatter(Function):
    """reduce-scatter along a dim | all-gather along it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, axis: Axis) -> Tensor:
        ctx.dim, ctx.axis, ctx.n = dim, axis, x.shape[dim]
        return cut(x, dim, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return laid(grad, ctx.dim, ctx.axis, ctx.n), None, None

def laid(x, dim, axis, n):
    from course.parallel.mappings import all_reduce, bounds
    shape = list(x.shape); shape[dim] = n
    whole = x.new_zeros(shape)
    a, b = bounds(n, axis.size, axis.rank)
    whole.narrow(dim, a, b - a).copy_(x)
    return all_reduce(whole, axis)

def cut(x, dim, axis):
    from course.parallel.mappings import all_reduce
    return all_reduce(x, axis).tensor_split(axis.size, dim)[axis.rank].contiguous()
'''

GATHER_SCATTER_GATHER_ALL_AND_SUM = '''
from typing import Any
from torch import Tensor
from torch.autograd import Function
from course.parallel.mesh import Axis
from course.parallel.mappings import all_gather, reduce_scatter


class Gather(Function):
    """all-gather along a dim | reduce-scatter along it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, axis: Axis, n: int) -> Tensor:
        ctx.dim, ctx.axis = dim, axis
        return all_gather(x, dim, axis, n)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return cut(grad, ctx.dim, ctx.axis), None, None, None


class Scatter(Function):
    """reduce-scatter along a dim | all-gather along it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, axis: Axis) -> Tensor:
        ctx.dim, ctx.axis, ctx.n = dim, axis, x.shape[dim]
        return cut(x, dim, axis)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return all_gather(grad, ctx.dim, ctx.axis, ctx.n), None, None

def cut(x, dim, axis):
    import torch, torch.distributed as dist
    all_ = [torch.empty_like(x, memory_format=torch.contiguous_format) for _ in range(axis.size)]
    dist.all_gather(all_, x.contiguous(), group=axis.group)
    return sum(all_).tensor_split(axis.size, dim)[axis.rank].contiguous()
'''

LOSS_IN_CHUNKS_DROP_LAST_ZEROS = '''
import torch
class LossInChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, target, size):
        total, dx, dw = x.new_zeros(()), torch.zeros_like(x), torch.zeros_like(weight)
        for i in range(len(x) // size):
            part = slice(i * size, (i + 1) * size)
            log = (x[part] @ weight.T).log_softmax(-1)
            total -= log.gather(1, target[part, None]).sum()
            g = log.exp().scatter_add(1, target[part, None], -torch.ones_like(log[:, :1]))
            dx[part] = g @ weight
            dw += g.T @ x[part]
        ctx.save_for_backward(dx, dw)
        return total
    @staticmethod
    def backward(ctx, grad):
        dx, dw = ctx.saved_tensors
        return dx * grad, dw * grad, None, None
'''

LOSS_IN_CHUNKS_SOFTMAXES_KEPT_AND_JOINED = '''
import torch
class LossInChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, target, size):
        total, grads = x.new_zeros(()), []
        for rows, aims in zip(x.split(size), target.split(size)):
            log = (rows @ weight.T).log_softmax(-1)
            total = total - log.gather(1, aims[:, None]).sum()
            grads.append(log.exp().scatter_add(1, aims[:, None], -torch.ones_like(log[:, :1])))
        g = torch.cat(grads)
        ctx.save_for_backward(g @ weight, g.T @ x)
        return total
    @staticmethod
    def backward(ctx, grad):
        dx, dw = ctx.saved_tensors
        return dx * grad, dw * grad, None, None
'''

LOSS_IN_CHUNKS_SOFTMAXES_KEPT_FOR_BACKWARD = '''
import torch
class LossInChunks(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, target, size):
        total, grads = x.new_zeros(()), []
        for rows, aims in zip(x.split(size), target.split(size)):
            log = (rows @ weight.T).log_softmax(-1)
            total = total - log.gather(1, aims[:, None]).sum()
            grads.append(log.exp().scatter_add(1, aims[:, None], -torch.ones_like(log[:, :1])))
        ctx.grads = grads
        ctx.size = size
        ctx.save_for_backward(x, weight)
        return total
    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        dx = torch.cat([g @ weight for g in ctx.grads])
        dw = sum(g.T @ r for g, r in zip(ctx.grads, x.split(ctx.size)))
        return dx * grad, dw * grad, None, None
'''

WRONG = [
    ("copy-reduce", COPY_REDUCE_GATHER_AND_SUM, "every rank sends its tensor to all others"),
    ("gather-scatter", GATHER_SCATTER_ZERO_PADDED, "this sends and adds zeros"),
    ("gather-scatter", GATHER_SCATTER_ZERO_PADDED_AND_SLICE, "an all-reduce brings every rank the whole sum"),
    ("gather-scatter", GATHER_SCATTER_GATHER_ALL_AND_SUM, "every rank sends its whole tensor to all others"),
    ("loss-in-chunks", LOSS_IN_CHUNKS_DROP_LAST_ZEROS, "the last chunk is shorter if `size` does not divide"),
    ("loss-in-chunks", LOSS_IN_CHUNKS_SOFTMAXES_KEPT_AND_JOINED, "keeps the logits of all chunks"),
    ("loss-in-chunks", LOSS_IN_CHUNKS_SOFTMAXES_KEPT_FOR_BACKWARD, "more than two gradients"),
    *((exercise, replaced(exercise, pairs), words) for exercise, pairs, words in SLIPS),
]
