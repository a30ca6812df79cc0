"""Known wrong answers of lesson 21."""

from course.lab.checks.exercise import Mistake

SCALE = """    if top_k > 1:
        gates = gates / gates.sum(-1, keepdim=True)
"""
TOPK = "logits.softmax(-1).topk(top_k)"
SHARES = "    shares = counts / counts.sum()\n"
LOSS = "number * (shares * probabilities.mean(0)).sum()"
FORWARD = """        arrived = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(arrived, rows.contiguous(), received, sent, group=axis.group)
        return arrived
"""
BACKWARD = """        returned = grad.new_empty(sum(ctx.sent), *grad.shape[1:])
        dist.all_to_all_single(returned, grad.contiguous(), ctx.sent, ctx.received, group=ctx.axis.group)
        return returned, None, None, None
"""
OUTPUTS = "    outputs = compute(arrived, own.repeat_interleave(arriving))\n"
ARRIVED = "ExchangeRows.apply(rows[order], sent, received, axis)"
BACK = """    returned = ExchangeRows.apply(outputs, received, sent, axis)
    return returned[order.argsort()]
"""

MISTAKES = {
    "route": (
        Mistake("gates not scaled", SCALE, "",
                "the gates are the probabilities among all experts, so they sum to less than 1: divide them by their sum over "
                "the chosen experts"),
        Mistake("a single gate scaled, too", "if top_k > 1", "if top_k",
                "with one expert the scaled gate is always 1, whatever the router says, so no gradient reaches the router: keep "
                "the probability itself"),
        Mistake("softmax over the tokens", "softmax(-1)", "softmax(0)",
                "each token chooses among experts, so its probabilities over the experts sum to 1: softmax over the last dim"),
        Mistake("logits for gates", TOPK, "logits.topk(top_k)",
                "the gates are made of logits, which may be negative: take the softmax first"),
        Mistake("sigmoid for softmax", TOPK, "logits.sigmoid().topk(top_k)",
                "these are sigmoids, each by itself: here the probabilities of a token over all experts sum to 1, a softmax"),
        Mistake("the smallest", "topk(top_k)", "topk(top_k, largest=False)",
                "each token goes to the experts with the smallest probabilities: take the largest"),
        Mistake("one expert too many", TOPK, "logits.softmax(-1).topk(min(top_k + 1, logits.shape[-1]))",
                "each token goes to `top_k` experts, and here to more", silent=True),
        Mistake("a second softmax", "gates / gates.sum(-1, keepdim=True)", "gates.softmax(-1)",
                "the gates are a softmax of probabilities, which makes them too equal: divide them by their sum instead"),
        Mistake("cut off from the router", SCALE, SCALE + "    gates = gates.detach()\n",
                "the values are right, but no gradient reaches the logits, so the router never learns: the gates must stay in "
                "the graph"),
        Mistake("the sum is cut off", "gates.sum(-1, keepdim=True)", "gates.detach().sum(-1, keepdim=True)",
                "the gradient treats the sum of the gates as a constant: divide by the sum itself, without detach"),
    ),
    "balance-loss": (
        Mistake("not times E", LOSS, "(shares * probabilities.mean(0)).sum()",
                "balanced experts give 1 / E here: multiply by the number of experts, so that the loss does not depend on it"),
        Mistake("counts for shares", SHARES, "    shares = counts\n",
                "f is an expert's share of all choices, between 0 and 1, and here it is the number of its tokens"),
        Mistake("shares of the tokens", SHARES, "    shares = counts / len(experts)\n",
                "with k experts a token, k times as many choices are made as there are tokens: divide by the number of choices"),
        Mistake("a sum for the mean", "probabilities.mean(0)", "probabilities.sum(0)",
                "P is the mean probability over the tokens, and here it is the sum: the loss would grow with the batch"),
        Mistake("the mean over the wrong dim", "(shares * probabilities.mean(0)).sum()",
                "(probabilities * shares).mean(1).sum()",
                "P is a mean over tokens, one number for each expert, and here the mean goes over the experts"),
        Mistake("the last experts forgotten", "torch.bincount(experts.flatten(), minlength=number)",
                "torch.bincount(experts.flatten())",
                "an expert that nobody chooses still has a share, 0: bincount needs minlength", silent=True),
        Mistake("the first choice alone", "experts.flatten()", "experts[:, 0]",
                "a token with several experts counts for each of them, and here only for its first"),
        Mistake("shares twice", "shares * probabilities.mean(0)", "shares * shares * (1 + 0 * probabilities.mean(0))",
                "this is a sum of f times f. Counts have no gradient, so nothing reaches the router: the second factor is P"),
        Mistake("probabilities twice", "shares * probabilities.mean(0)", "probabilities.mean(0) ** 2",
                "this is a sum of P times P: it balances probabilities, but not what is chosen. One factor is f"),
        Mistake("cut off from the router", "probabilities.mean(0)", "probabilities.detach().mean(0)",
                "no gradient reaches the router, so nothing gets balanced: P must stay in the graph"),
        Mistake("the distance from balance", LOSS, "number * (shares - probabilities.mean(0)).square().sum()",
                "this compares f with P. It is zero when both are equally unbalanced: multiply them"),
    ),
    "exchange-rows": (
        Mistake("counts exchanged", "arrived, rows.contiguous(), received, sent", "arrived, rows.contiguous(), sent, received",
                "the numbers are in the wrong order: all_to_all_single(output, input, sizes of the output, sizes of the input)",
                silent=True),
        Mistake("backward as forward", "returned, grad.contiguous(), ctx.sent, ctx.received",
                "returned, grad.contiguous(), ctx.received, ctx.sent",
                "backward, the gradients go the other way: what was received is sent, and what was sent is received",
                silent=True),
        Mistake("no way back", BACKWARD, "        return grad[:sum(ctx.sent)].new_zeros(sum(ctx.sent), *grad.shape[1:]), "
                "None, None, None\n",
                "the gradients of the rows are zero: send each gradient back to the rank that sent its row"),
        Mistake("equal parts", BACKWARD,
                "        whole = grad.new_zeros(sum(ctx.sent), *grad.shape[1:])\n"
                "        whole[:min(len(grad), len(whole))] = grad[:len(whole)]\n"
                "        return whole, None, None, None\n",
                "the gradients stay on this rank: they belong to the rows that other ranks have sent, so they travel back"),
        Mistake("all ranks' rows", FORWARD,
                "        most = torch.tensor([len(rows), *sent])\n"
                "        tables = [torch.empty_like(most) for _ in sent]\n"
                "        dist.all_gather(tables, most, group=axis.group)\n"
                "        longest = max(int(table[0]) for table in tables)\n"
                "        padded = rows.new_zeros(longest, *rows.shape[1:])\n"
                "        padded[:len(rows)] = rows\n"
                "        whole = [torch.empty_like(padded) for _ in sent]\n"
                "        dist.all_gather(whole, padded, group=axis.group)\n"
                "        parts = []\n"
                "        for one, table in zip(whole, tables, strict=True):\n"
                "            start = int(table[1:1 + axis.rank].sum())\n"
                "            parts.append(one[start:start + int(table[1 + axis.rank])])\n"
                "        return torch.cat(parts)\n",
                "every rank gets the rows of all: send each row only to the rank that wants it, by an all-to-all", by=("sent",),
                stops="NameError"),
        Mistake("rows without their order", "        return arrived\n", "        return arrived.flip(0)\n",
                "the rows have to be in the order of their senders: rank 0's first, as an all-to-all returns them"),
    ),
    "through-experts": (
        Mistake("rows not sorted", "rows[order], sent", "rows, sent",
                "the all-to-all sends the first sent[0] rows to rank 0: sort the rows by expert first"),
        Mistake("not put back", BACK, "    return ExchangeRows.apply(outputs, received, sent, axis)\n",
                "the outputs are in the order of the experts, and they belong in the order of `rows`: undo the sorting, "
                "order.argsort()"),
        Mistake("put back by the wrong permutation", "returned[order.argsort()]", "returned[order]",
                "order sorts the rows. What undoes it is the inverse permutation, order.argsort()"),
        Mistake("experts numbered from 0", "torch.arange(here).repeat(axis.size) + axis.rank * here",
                "torch.arange(here).repeat(axis.size)",
                "rank r's first expert has the number r * here, not 0", silent=True),
        Mistake("rows sorted by expert on arrival", "torch.arange(here).repeat(axis.size) + axis.rank * here",
                "torch.arange(here).repeat_interleave(axis.size) + axis.rank * here",
                "the rows arrive by sender, and for each sender by expert: the experts' numbers repeat for each sender"),
        Mistake("counts not exchanged", "    dist.all_to_all_single(arriving, counts, group=axis.group)\n",
                "    arriving.copy_(counts)\n",
                "how many rows arrive is known to their senders: exchange the counts first, by an all-to-all of one number for "
                "each expert", silent=True),
        Mistake("counted without empty experts", "torch.bincount(experts, minlength=number)", "torch.bincount(experts)",
                "an expert without rows has a count, 0: bincount needs minlength", silent=True),
        Mistake("all rows everywhere", OUTPUTS + BACK,
                "    longest = torch.tensor(len(rows))\n"
                "    dist.all_reduce(longest, dist.ReduceOp.MAX, group=axis.group)\n"
                "    padded = torch.cat([rows.detach(), rows.new_zeros(int(longest) - len(rows), rows.shape[1])])\n"
                "    dist.all_gather([torch.empty_like(padded) for _ in sent], padded, group=axis.group)\n"
                + OUTPUTS + BACK,
                "all rows travel to all ranks: a row goes only to the rank of its expert", by=("sent",)),
        Mistake("outputs cut off", "ExchangeRows.apply(outputs, received", "ExchangeRows.apply(outputs.detach(), received",
                "the outputs are cut off from the graph, so no gradient reaches rows and experts"),
        Mistake("rows cut off", "ExchangeRows.apply(rows[order], sent", "ExchangeRows.apply(rows[order].detach(), sent",
                "the experts learn, but no gradient reaches the rows: leave them in the graph"),
        Mistake("one expert after another", OUTPUTS,
                "    numbers = own.repeat_interleave(arriving)\n"
                "    outputs = torch.zeros_like(arrived)\n"
                "    for expert in range(here):\n"
                "        mine = numbers == axis.rank * here + expert\n"
                "        outputs = outputs.index_add(0, mine.nonzero()[:, 0], compute(arrived[mine], numbers[mine]))\n",
                "`compute` takes the rows of all experts of this rank: call it once", by=("computed",)),
    ),
}
