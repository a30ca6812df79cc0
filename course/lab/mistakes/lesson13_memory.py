"""Known wrong answers of lesson 13."""

from course.lab.checks.exercise import Mistake

GATHER = "        all_gather_single(self.weights, self.mine.detach(), group=self.axis.group)\n"
UPDATE = "        self.optimizer.step()\n"
MAKE = "        self.optimizer = make([self.mine])\n"
STEP = "        reduce_scatter_single(total, gradient, group=self.axis.group)\n        self.mine.grad = total / self.axis.size\n"

MISTAKES = {
    "training-bytes": (
        Mistake("one state for each parameter", "8.0 * parameters", "4.0 * parameters",
                "Adam keeps two numbers for each parameter: the running means of the gradient and of its square"),
        Mistake("numbers for bytes", "4.0 * parameters, 4.0 * parameters, 8.0 * parameters",
                "1.0 * parameters, 1.0 * parameters, 2.0 * parameters",
                "this counts numbers, not bytes: in float32 each number has 4 bytes"),
        Mistake("sixteen bits", "4.0 * parameters, 4.0 * parameters, 8.0 * parameters",
                "2.0 * parameters, 2.0 * parameters, 4.0 * parameters", "this is right for a 16-bit format: float32 has 4 bytes"),
        Mistake("the recipe in 16 bits", "4.0 * parameters, 4.0 * parameters, 8.0 * parameters",
                "2.0 * parameters, 2.0 * parameters, 12.0 * parameters",
                "this is the 16-bit recipe, with a float32 copy of the weights in the states: float32 training has no such "
                "copy, and each number has 4 bytes"),
        Mistake("a copy of the weights", "8.0 * parameters", "12.0 * parameters",
                "in float32 the optimizer needs no copy of the weights: it keeps two numbers of 4 bytes for each parameter"),
        Mistake("weights before gradients", "gradients /= ranks\n    if stage >= 3:\n        weights /= ranks",
                "weights /= ranks\n    if stage >= 3:\n        gradients /= ranks",
                "stage 2 cuts the gradients, stage 3 the weights"),
        Mistake("cut at stage 0", "if stage >= 1:", "if stage >= 0:",
                "stage 0 is plain data parallelism: every rank has everything, so nothing is cut"),
        Mistake("gradients cut too early", "if stage >= 2:", "if stage >= 1:",
                "stage 1 cuts the optimizer states only: gradients are cut from stage 2 on"),
        Mistake("each stage alone", "if stage >= 1:", "if stage == 1:",
                "each stage cuts everything that the previous stage cuts, and one thing more: use >=, not =="),
        Mistake("weights never cut", "        weights /= ranks\n", "        pass\n", "stage 3 cuts the weights too"),
        Mistake("rounded down", "/= ranks", "//= ranks", "`//` rounds down, and a share may have a fraction: divide with /"),
        Mistake("states in the place of weights", "return weights, gradients, states", "return states, gradients, weights",
                "the order is weights, gradients, states"),
        Mistake("weights at stage 2",
                "if stage >= 3:",
                "if stage >= 2:",
                "stage 2 cuts gradients and states; only stage 3 cuts the weights"),
    ),
    "zero-optimizer": (
        Mistake("a sum for a mean", "total / self.axis.size", "total",
                "the reduce-scatter sums: divide by axis.size. Adam hardly notices the scale, because it divides by the "
                "gradient's own size, but gradient descent does"),
        Mistake("its own gradient alone", STEP,
                "        self.mine.grad = gradient.chunk(self.axis.size)[self.axis.rank].clone()\n",
                "each rank uses only its own gradient: call reduce-scatter first, which sums over the ranks and leaves each "
                "rank its share"),
        Mistake("shares are not gathered", GATHER,
                "        self.weights.view(self.axis.size, -1)[self.axis.rank] = self.mine.detach()\n",
                "only this rank's share of the weights moves: gather the shares of all ranks after the update"),
        Mistake("nothing comes back", GATHER, "",
                "`weights` never changes: after the update, gather all ranks' shares into it"),
        Mistake("everybody's share is the first", "slice(axis.rank * share, (axis.rank + 1) * share)", "slice(0, share)",
                "rank r starts with the weights from r * share on: the reduce-scatter leaves it the gradient of this part"),
        Mistake("gathered before the update",
                UPDATE + GATHER, GATHER + UPDATE,
                "the weights are one step behind: update first, then gather"),
        Mistake("states forgotten", UPDATE, f"        self.optimizer.state.clear()\n{UPDATE}",
                "Adam starts again in every step: create the optimizer once, in __init__, and keep its states"),
        Mistake("all states everywhere", MAKE, f"{MAKE}        self.other = make([nn.Parameter(weights.clone())])\n"
                "        self.other.param_groups[0]['params'][0].grad = torch.zeros_like(weights)\n        self.other.step()\n",
                "this rank keeps states for all weights: give the optimizer only its own share"),
        Mistake("gradients add up", "self.mine.grad = total / self.axis.size",
                "self.mine.grad = total / self.axis.size + (0 if self.mine.grad is None else self.mine.grad)",
                "the gradients of earlier steps are still in it: assign the share's gradient, do not add to it"),
        Mistake("a share dealt like cards", "weights[mine].clone()", "weights[axis.rank::axis.size].clone()",
                "the reduce-scatter leaves rank r the r-th part in one piece, not every axis.size-th number: cut the weights "
                "in the same way"),
        Mistake("an all-reduce", STEP,
                "        whole = gradient.clone()\n        torch.distributed.all_reduce(whole, group=self.axis.group)\n"
                "        self.mine.grad = whole.chunk(self.axis.size)[self.axis.rank].clone() / self.axis.size\n",
                "an all-reduce brings each rank the whole sum, but the rank needs 1/n of it: a reduce-scatter sends half as "
                "much",
                by=("shares",)),
        Mistake("all gradients gathered", STEP,
                "        every = torch.empty(self.axis.size * len(gradient), dtype=gradient.dtype)\n"
                "        all_gather_single(every, gradient, group=self.axis.group)\n"
                "        self.mine.grad = every.view(self.axis.size, self.axis.size, -1).mean(0)[self.axis.rank].clone()\n",
                "this gathers whole gradients from all ranks and sums them: a reduce-scatter brings this rank only its share "
                "of the sum, 1/n of that", by=("shares",)),
        Mistake("a share that is a view", "weights[mine].clone()", "weights.clone()[mine]",
                "a tensor of all weights or gradients stays in memory: keep none between steps. Cut before you copy, "
                "weights[mine].clone(), because a slice of a copy keeps the whole copy in memory"),
        Mistake("divided by the world's size", "total / self.axis.size", "total / torch.distributed.get_world_size()",
                "the axis has fewer ranks than there are processes: divide by axis.size"),
        Mistake("all ranks for those of the axis", GATHER, GATHER.replace(", group=self.axis.group", ""),
                "without `group`, all ranks of the job take part, but the axis may have fewer: pass group=self.axis.group",
                stops="RuntimeError"),
        Mistake("one rank stays out", "        total = torch.empty_like",
                "        if self.axis.rank == self.axis.size - 1:\n            return\n        total = torch.empty_like",
                "every rank of the axis has to call the collectives", silent=True),
    ),
    "recompute": (
        Mistake("no graph the second time", "torch.enable_grad()", "torch.no_grad()",
                "the second forward pass needs a graph, but PyTorch calls backward with gradients off: switch them on",
                stops="RuntimeError"),
        Mistake("the gradient from behind is lost", "torch.autograd.backward(y, grad)",
                "torch.autograd.backward(y, torch.ones_like(y))",
                "this is the gradient of the sum of y: start from `grad`, which comes from the later layers"),
        Mistake("parameters get nothing", "torch.autograd.backward(y, grad)", "x.grad, = torch.autograd.grad(y, x, grad)",
                "autograd.grad returns the gradient of x only, but the block's parameters need theirs in `.grad`: use "
                "autograd.backward"),
        Mistake("gradients of the micro-batch before are lost", "torch.autograd.backward(y, grad)",
                "ctx.block.zero_grad()\n        torch.autograd.backward(y, grad)",
                "gradients of several micro-batches accumulate in `.grad`: do not clear it"),
        Mistake("written into the gradient", "return None, x.grad", "return None, grad.copy_(x.grad)",
                "`grad` is not yours, because the residual sum uses the same tensor: return new memory, as lesson 10's "
                "mappings do"),
        Mistake("the input gets nothing", "return None, x.grad", "return None, None",
                "the earlier layers need a gradient too: return the gradient of x"),
        Mistake("passed on unchanged", "return None, x.grad", "return None, grad",
                "this is the gradient of the block's output: return the gradient of its input, which is in x.grad"),
        Mistake("the graph is kept", "return block(x)",
                "with torch.enable_grad():\n            ctx.y = block(x.detach().requires_grad_())\n"
                "        return ctx.y.detach()",
                "the forward pass builds a graph, which keeps all activations: compute the block without a graph there"),
        Mistake("the output is kept too", "ctx.save_for_backward(x)\n        return block(x)",
                "y = block(x)\n        ctx.save_for_backward(x, y)\n        return y",
                "the backward pass needs only x, and computes the output again: every tensor that you save or put on ctx stays "
                "in memory"),
        Mistake("still part of the graph", "ctx.saved_tensors[0].detach()", "ctx.saved_tensors[0]",
                "the saved x is still part of the earlier graph, so the gradient continues into it: use x.detach() first",
                stops="RuntimeError"),
        Mistake("computed once more", "return block(x)", "block(x)\n        return block(x)",
                "the block runs twice in the forward pass: run it once"),
    ),
}
