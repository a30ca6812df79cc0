"""Known wrong answers of lesson 20."""

from course.lab.checks.exercise import Mistake

GATHER = """        allocate(self.whole)
        all_gather_single(self.whole, self.share.detach(), group=self.axis.group)
"""
HEAD_OF_FREE = '''
    def free(self) -> None:
        """Free the memory of `whole`, which the parameters and what autograd saved refer to."""
'''
FREE = "        free_memory(self.whole)\n"
BOTH = GATHER + HEAD_OF_FREE + FREE
OWN = """        allocate(self.whole)
        self.whole.zero_()
        self.part(self.whole).copy_(self.share.detach())
"""
PART = "flat[self.axis.rank * size:(self.axis.rank + 1) * size]"
FREED = '        if unit < last:\n            events.append(("free", unit))\n'
SCATTER = """    mean = torch.empty_like(unit.share)                         # (n / size,)
    reduce_scatter_single(mean, flat, group=unit.axis.group)
"""
FILL = """    flat = torch.zeros_like(unit.whole)                         # (n,)
    for parameter, view in zip(unit.parameters, views(flat, unit.parameters), strict=True):
        if parameter.grad is not None:
            view.copy_(parameter.grad)
        parameter.grad = None
"""
ADD = "    unit.share.grad = mean if unit.share.grad is None else unit.share.grad + mean\n"
START = """    events = [("gather", 0)]
    for unit in range(units):
"""
FORWARD = """        if unit < last:
            events.append(("gather", unit + 1))
        events.append(("forward", unit))
        if unit < last:
            events.append(("free", unit))
"""
BACKWARD_LOOP = "    for unit in reversed(range(units)):\n"
BACKWARD = """        if unit > 0:
            events.append(("gather", unit - 1))
        events += [("backward", unit), ("free", unit), ("reduce", unit)]
"""

MISTAKES = {
    "sharded-unit": (
        Mistake("never freed", FREE, "        pass\n",
                "the whole weights stay in memory between the uses: `free` frees the storage that they lie in, "
                "free_memory(self.whole)"),
        Mistake("stale weights", BOTH, "        if self.whole.untyped_storage().nbytes() == 0:\n"
                "            allocate(self.whole)\n"
                "            all_gather_single(self.whole, self.share.detach(), group=self.axis.group)\n"
                + HEAD_OF_FREE + "        pass\n",
                "the weights are gathered once and never again, so they are those of the first step: the optimizer changes "
                "`share`, `free` frees `whole`, and the next `gather` brings all ranks' new shares"),
        Mistake("freed by name alone", FREE, "        self.whole = self.whole.new_empty(0)\n",
                "the parameters are views of the old storage and keep it in memory; the name `whole` alone is gone. Free the "
                "storage itself", stops="RuntimeError"),
        Mistake("gathered into a new tensor", GATHER,
                "        self.whole = torch.empty_like(self.whole)\n"
                "        all_gather_single(self.whole, self.share.detach(), group=self.axis.group)\n",
                "the parameters are views of the old tensor, which has no memory: give that one its memory again with allocate",
                stops="InvalidReturn"),
        Mistake("the parameters moved to a new tensor", GATHER,
                "        self.whole = torch.empty_like(self.whole)\n"
                "        all_gather_single(self.whole, self.share.detach(), group=self.axis.group)\n"
                "        for parameter, view in zip(self.parameters, views(self.whole, self.parameters)):\n"
                "            parameter.data = view\n",
                "the forward pass reads the new tensor, but autograd saved views of the old one, which has no memory in the "
                "backward pass: fill the same storage again", stops="InvalidReturn"),
        Mistake("its own share alone", GATHER,
                OWN,
                "the other ranks' shares are missing: gather them"),
        Mistake("everybody's part is the first", PART, "flat[:size]",
                "every rank keeps the first part: rank r keeps the numbers from r * size on"),
        Mistake("a part that begins one number early", PART,
                "flat[max(self.axis.rank * size - 1, 0):][:size]",
                "the boundary of the parts is off by one: rank r keeps the numbers from r * size to (r + 1) * size, the last not "
                "included"),
        Mistake("dealt like cards", PART,
                "flat[self.axis.rank::self.axis.size]",
                "an all-gather joins shares end to end, so a share is one piece, not every axis.size-th number"),
        Mistake("all ranks for those of the axis", GATHER, GATHER.replace(", group=self.axis.group", ""),
                "without `group` all ranks take part, and the axis need not have all: group=self.axis.group",
                stops="RuntimeError"),
        Mistake("an all-reduce of zeros and a share", GATHER,
                OWN + "        torch.distributed.all_reduce(self.whole, group=self.axis.group)\n",
                "the weights are right, but an all-reduce of a tensor of zeros sends twice what an all-gather sends",
                by=("sent",)),
        Mistake("a copy kept", GATHER, GATHER + "        self.copy = self.whole.clone()\n",
                "`whole` is freed, but another tensor of all weights stays in memory: keep only the share"),
        Mistake("gathered in pieces and joined", GATHER,
                "        parts = [torch.empty_like(self.share) for _ in range(self.axis.size)]\n"
                "        torch.distributed.all_gather(parts, self.share.detach(), group=self.axis.group)\n"
                "        allocate(self.whole)\n        self.whole.copy_(torch.cat(parts))\n",
                "the shares arrive in tensors of their own and are joined into another, so the weights are in memory three "
                "times: let the all-gather write into `whole`"),
        Mistake("whole until the first use", "clone())\n        self.free()\n", "clone())\n",
                "all units are whole until their first use, so the model has to fit on one rank after all: free `whole` at the "
                "end of `__init__`"),
        Mistake("one rank stays out", GATHER, "        if self.axis.rank == self.axis.size - 1:\n            return\n" + GATHER,
                "every rank of the axis has to call the all-gather", silent=True),
    ),
    "reduce-gradients": (
        Mistake("a sum for a mean", "    mean /= unit.axis.size\n", "",
                "a reduce-scatter adds up the ranks' gradients: divide by axis.size for the mean"),
        Mistake("divided by the world's size", "mean /= unit.axis.size", "mean /= torch.distributed.get_world_size()",
                "the axis has fewer ranks than there are processes: divide by axis.size"),
        Mistake("all ranks for those of the axis", SCATTER, SCATTER.replace(", group=unit.axis.group", ""),
                "without `group` all ranks take part, and the axis need not have all: group=unit.axis.group",
                stops="RuntimeError"),
        Mistake("reduced twice", ADD, "    again = torch.empty_like(mean)\n"
                "    reduce_scatter_single(again, flat, group=unit.axis.group)\n"
                "    mean = mean + again / unit.axis.size\n" + ADD,
                "the same gradients are reduced and added twice: one reduce-scatter for each micro-batch"),
        Mistake("whole gradients stay", "        parameter.grad = None\n", "",
                "each parameter keeps its whole gradient, which stage 2 wants to free; autograd also adds the next micro-batch "
                "to it, which is then counted twice. Set `.grad` to None"),
        Mistake("the last micro-batch alone", ADD, "    unit.share.grad = mean\n",
                "the gradients of earlier micro-batches are lost: add to `share.grad` if it is there"),
        Mistake("a running mean", ADD,
                "    unit.share.grad = mean if unit.share.grad is None else (unit.share.grad + mean) / 2\n",
                "`share.grad` adds up the micro-batches, as autograd does with `.grad`: a mean of the two makes the later one "
                "count more"),
        Mistake("its own gradient alone", SCATTER, "    mean = unit.part(flat).clone() * unit.axis.size\n",
                "each rank uses its own gradient: the part of the *sum* over the ranks comes from a reduce-scatter"),
        Mistake("an all-reduce", SCATTER,
                "    torch.distributed.all_reduce(flat, group=unit.axis.group)\n    mean = unit.part(flat).clone()\n",
                "an all-reduce brings each rank all sums, of which it needs an n-th: a reduce-scatter sends half as much",
                by=("sent",)),
        Mistake("a view of all gradients", SCATTER,
                SCATTER + "    all_gradients = torch.zeros_like(flat)\n    unit.part(all_gradients).copy_(mean)\n"
                "    mean = unit.part(all_gradients)\n",
                "`share.grad` is a piece of a tensor of all gradients, and keeps all of it in memory: give it memory of its own",
                by=("kept",)),
        Mistake("padding forgotten", FILL, "    flat = torch.cat([p.new_zeros(p.numel()) if p.grad is None\n"
                "                      else p.grad.flatten() for p in unit.parameters])\n"
                "    for parameter in unit.parameters:\n        parameter.grad = None\n",
                "the gradients have fewer numbers than axis.size shares have: pad them with zeros, at the end, to the length of "
                "`whole`", stops="RuntimeError"),
        Mistake("a missing gradient left out", FILL, "    flat, start = torch.zeros_like(unit.whole), 0\n"
                "    for parameter in unit.parameters:\n        if parameter.grad is not None:\n"
                "            flat[start:start + parameter.numel()] = parameter.grad.flatten()\n"
                "            start += parameter.numel()\n        parameter.grad = None\n",
                "after a parameter without gradient the others move up: it counts as zero and keeps its place"),
        Mistake("padding in front", FILL, FILL + "    flat = flat.roll(len(flat) - sum(p.numel() for p in unit.parameters))\n",
                "the padding comes at the end, as in `whole`: here every gradient is shifted"),
    ),
    "step-events": (
        Mistake("all gathered at the start", START + FORWARD,
                '    events = [("gather", unit) for unit in range(units)]\n    for unit in range(units):\n'
                '        events.append(("forward", unit))\n        if unit < last:\n            events.append(("free", unit))\n',
                "all units are gathered at the start, so all are whole at once: gather one unit ahead of the one that computes"),
        Mistake("a gather after the compute",
                '            events.append(("gather", unit + 1))\n        events.append(("forward", unit))\n',
                '            pass\n        events.append(("forward", unit))\n        if unit < last:\n'
                '            events.append(("gather", unit + 1))\n',
                "a gather begins when the compute that should hide it is over: put it before that compute"),
        Mistake("no prefetch", START + FORWARD + BACKWARD_LOOP + BACKWARD,
                '    events = []\n    for unit in range(units):\n        events += [("gather", unit), ("forward", unit)]\n'
                '        if unit < last:\n            events.append(("free", unit))\n' + BACKWARD_LOOP +
                '        if unit < last:\n            events.append(("gather", unit))\n'
                '        events += [("backward", unit), ("free", unit), ("reduce", unit)]\n',
                "each gather begins just before its own unit computes, so every compute waits for it: begin it before the "
                "compute before that"),
        Mistake("no prefetch in backward", BACKWARD,
                '        if unit < last:\n            events.append(("gather", unit))\n'
                '        events += [("backward", unit), ("free", unit), ("reduce", unit)]\n',
                "in the backward pass each gather begins just before its own unit computes: begin that of unit i - 1 before the "
                "backward of unit i"),
        Mistake("forward order in backward", BACKWARD,
                '        if unit < last:\n            events.append(("gather", unit + 1))\n'
                '        events += [("backward", unit), ("free", unit), ("reduce", unit)]\n',
                "the backward pass goes from the last unit to the first, so the next unit is unit - 1: prefetch that one",
                stops="InvalidReturn"),
        Mistake("not gathered for backward", BACKWARD,
                '        events += [("backward", unit), ("free", unit), ("reduce", unit)]\n',
                "the forward pass has freed the units: gather each of them again for its backward, but not the last, which is "
                "still whole", stops="InvalidReturn"),
        Mistake("kept for backward", FORWARD + BACKWARD_LOOP + BACKWARD,
                FORWARD.replace(FREED, "") + BACKWARD_LOOP +
                '        events += [("backward", unit), ("free", unit), ("reduce", unit)]\n',
                "units stay whole from their forward to their backward, so all of them are whole in between (this is what "
                "reshard_after=backward does): free each after its forward too"),
        Mistake("not freed in forward", FORWARD, FORWARD.replace(
                FREED, ""),
                "nothing is freed in the forward pass: at its end all units are whole"),
        Mistake("not freed in backward", BACKWARD, BACKWARD.replace('("free", unit), ', ""),
                "nothing is freed in the backward pass: at the end of the step all units are whole"),
        Mistake("the last unit gathered twice", FORWARD + BACKWARD_LOOP,
                FORWARD.replace(FREED,
                                '        events.append(("free", unit))\n')
                + '    events.append(("gather", last))\n' + BACKWARD_LOOP,
                "the last unit is freed and gathered again at once: its backward comes right after its forward, so leave it "
                "whole"),
        Mistake("two units ahead", START + FORWARD,
                '    events = [("gather", unit) for unit in range(min(2, units))]\n    for unit in range(units):\n'
                '        if unit + 2 < units:\n            events.append(("gather", unit + 2))\n'
                '        events.append(("forward", unit))\n        if unit < last:\n            events.append(("free", unit))\n',
                "in the forward pass gathers run two units ahead, so three units are whole at once: one ahead is enough to hide "
                "a gather behind a compute"),
        Mistake("the next before the last is freed", START + FORWARD,
                '    events = [("gather", unit) for unit in range(min(2, units))]\n    for unit in range(units):\n'
                '        events.append(("forward", unit))\n        if unit + 2 < units:\n'
                '            events.append(("gather", unit + 2))\n'
                '        if unit < last:\n            events.append(("free", unit))\n',
                "after a forward the gather of the next unit but one begins before the unit is freed, so three are whole: free "
                "first, then gather"),
        Mistake("reduced at the end", BACKWARD_LOOP + BACKWARD + "    return events\n",
                BACKWARD_LOOP + BACKWARD.replace(', ("reduce", unit)]', "]")
                + '    return events + [("reduce", unit) for unit in reversed(range(units))]\n',
                "the gradients of all units wait for the end of the backward pass, in memory and with nothing to hide behind: "
                "reduce each unit's right after its backward"),
        Mistake("reduced twice", BACKWARD, BACKWARD.replace('("reduce", unit)]', '("reduce", unit), ("reduce", unit)]'),
                "each unit's gradients are reduced twice: one reduce-scatter for each unit"),
        Mistake("never reduced", BACKWARD, BACKWARD.replace(', ("reduce", unit)]', "]"),
                "no gradients are reduced, so no share gets one: reduce each unit's right after its backward"),
        Mistake("freed too early", BACKWARD, BACKWARD.replace('("backward", unit), ("free", unit)',
                                                              '("free", unit), ("backward", unit)'),
                "a unit is freed before its backward: free it after", stops="InvalidReturn"),
        Mistake("backward in forward order", BACKWARD_LOOP, "    for unit in range(units):\n",
                "the backward pass goes from the last unit to the first: reversed(range(units))", stops="InvalidReturn"),
    ),
}
