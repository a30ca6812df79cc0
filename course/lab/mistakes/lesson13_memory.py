"""Known wrong answers of lesson 13."""

from course.lab.checks.exercise import Mistake

GATHER = "        all_gather_single(self.weights, self.mine.detach(), group=self.axis.group)\n"
UPDATE = "        self.optimizer.step()\n"
MAKE = "        self.optimizer = make([self.mine])\n"
STEP = "        reduce_scatter_single(total, gradient, group=self.axis.group)\n        self.mine.grad = total / self.axis.size\n"

MISTAKES = {
    "training-bytes": (
        Mistake("one state for each parameter", "8.0 * parameters", "4.0 * parameters",
                "Adam keeps two numbers for each parameter, the running means of the gradient and of its square"),
        Mistake("numbers for bytes", "4.0 * parameters, 4.0 * parameters, 8.0 * parameters",
                "1.0 * parameters, 1.0 * parameters, 2.0 * parameters", "these are numbers: in float32 each has 4 bytes"),
        Mistake("sixteen bits", "4.0 * parameters, 4.0 * parameters, 8.0 * parameters",
                "2.0 * parameters, 2.0 * parameters, 4.0 * parameters", "this would be a 16-bit format: float32 has 4 bytes"),
        Mistake("the recipe in 16 bits", "4.0 * parameters, 4.0 * parameters, 8.0 * parameters",
                "2.0 * parameters, 2.0 * parameters, 12.0 * parameters",
                "this is the 16-bit recipe, with a float32 copy in the states: in float32 there is none, and each has 4 bytes"),
        Mistake("a copy of the weights", "8.0 * parameters", "12.0 * parameters",
                "in float32 the optimizer needs no copy of the weights: two numbers of 4 bytes for each parameter"),
        Mistake("weights before gradients", "gradients /= ranks\n    if stage >= 3:\n        weights /= ranks",
                "weights /= ranks\n    if stage >= 3:\n        gradients /= ranks",
                "stage 2 cuts the gradients, stage 3 the weights"),
        Mistake("cut at stage 0", "if stage >= 1:", "if stage >= 0:",
                "stage 0 is plain data parallelism: every rank has everything"),
        Mistake("gradients cut too early", "if stage >= 2:", "if stage >= 1:",
                "stage 1 cuts the optimizer's states alone; gradients are cut from stage 2 on"),
        Mistake("each stage alone", "if stage >= 1:", "if stage == 1:",
                "each stage cuts what the one before cut, and one thing more: >=, not =="),
        Mistake("weights never cut", "        weights /= ranks\n", "        pass\n", "stage 3 cuts the weights as well"),
        Mistake("rounded down", "/= ranks", "//= ranks", "`//` rounds down, and a share may have a fraction: divide with /"),
        Mistake("states in the place of weights", "return weights, gradients, states", "return states, gradients, weights",
                "the order is weights, gradients, states"),
    ),
    "zero-optimizer": (
        Mistake("a sum for a mean", "total / self.axis.size", "total",
                "the reduce-scatter adds up: divide by axis.size. Adam hardly notices, as it divides by the gradient's own size; "
                "gradient descent does"),
        Mistake("its own gradient alone", STEP,
                "        self.mine.grad = gradient.chunk(self.axis.size)[self.axis.rank].clone()\n",
                "each rank uses its own gradient: reduce-scatter first, which adds up over the ranks and leaves each its share"),
        Mistake("shares are not gathered", GATHER,
                "        self.weights.view(self.axis.size, -1)[self.axis.rank] = self.mine.detach()\n",
                "only this rank's share of the weights moves: gather the shares of all ranks after the update"),
        Mistake("nothing comes back", GATHER, "",
                "`weights` never changes: after the update, gather all ranks' shares into it"),
        Mistake("everybody's share is the first", "slice(axis.rank * share, (axis.rank + 1) * share)", "slice(0, share)",
                "rank r starts with the weights from r * share on, the part whose gradient the reduce-scatter leaves to it"),
        Mistake("gathered before the update",
                UPDATE + GATHER, GATHER + UPDATE,
                "the weights are one step behind: update first, then gather"),
        Mistake("states forgotten", UPDATE, f"        self.optimizer.state.clear()\n{UPDATE}",
                "Adam starts anew in every step: make the optimizer once, in __init__, and keep its states"),
        Mistake("all states everywhere", MAKE, f"{MAKE}        self.other = make([nn.Parameter(weights.clone())])\n"
                "        self.other.param_groups[0]['params'][0].grad = torch.zeros_like(weights)\n        self.other.step()\n",
                "this rank keeps states for all weights: give the optimizer its own share alone"),
        Mistake("gradients add up", "self.mine.grad = total / self.axis.size",
                "self.mine.grad = total / self.axis.size + (0 if self.mine.grad is None else self.mine.grad)",
                "the gradients of the steps before are still in it: assign the share's gradient, do not add to it"),
        Mistake("a share dealt like cards", "weights[mine].clone()", "weights[axis.rank::axis.size].clone()",
                "the reduce-scatter leaves rank r the r-th part in one piece, not every axis.size-th number: cut the weights so"),
        Mistake("an all-reduce", STEP,
                "        whole = gradient.clone()\n        torch.distributed.all_reduce(whole, group=self.axis.group)\n"
                "        self.mine.grad = whole.chunk(self.axis.size)[self.axis.rank].clone() / self.axis.size\n",
                "an all-reduce brings each rank all sums, of which it needs an n-th: a reduce-scatter sends half as much",
                by=("shares",)),
        Mistake("all gradients gathered", STEP,
                "        every = torch.empty(self.axis.size * len(gradient), dtype=gradient.dtype)\n"
                "        all_gather_single(every, gradient, group=self.axis.group)\n"
                "        self.mine.grad = every.view(self.axis.size, self.axis.size, -1).mean(0)[self.axis.rank].clone()\n",
                "whole gradients are gathered from all ranks and added up here: a reduce-scatter brings this rank its share of "
                "the sum alone, an n-th of that", by=("shares",)),
        Mistake("a share that is a view", "weights[mine].clone()", "weights.clone()[mine]",
                "a tensor of all weights or gradients stays in memory: keep none between steps, and cut before you copy, "
                "weights[mine].clone(), since a piece of a copy keeps the whole copy"),
        Mistake("divided by the world's size", "total / self.axis.size", "total / torch.distributed.get_world_size()",
                "the axis has fewer ranks than there are processes: divide by axis.size"),
        Mistake("all ranks for those of the axis", GATHER, GATHER.replace(", group=self.axis.group", ""),
                "without `group` all ranks take part, and the axis need not have all: group=self.axis.group"),
        Mistake("one rank stays out", "        total = torch.empty_like",
                "        if self.axis.rank == self.axis.size - 1:\n            return\n        total = torch.empty_like",
                "every rank of the axis has to call the collectives", silent=True),
    ),
    "recompute": (
        Mistake("no graph the second time", "torch.enable_grad()", "torch.no_grad()",
                "the second time there has to be a graph: PyTorch calls backward with gradients off, so switch them on"),
        Mistake("the gradient from behind is lost", "torch.autograd.backward(y, grad)",
                "torch.autograd.backward(y, torch.ones_like(y))",
                "this is the gradient of the sum of y: start from `grad`, what came from the layers behind"),
        Mistake("parameters get nothing", "torch.autograd.backward(y, grad)", "x.grad, = torch.autograd.grad(y, x, grad)",
                "autograd.grad gives the gradient of x alone; the block's parameters need theirs in `.grad`: autograd.backward"),
        Mistake("gradients of the micro-batch before are lost", "torch.autograd.backward(y, grad)",
                "ctx.block.zero_grad()\n        torch.autograd.backward(y, grad)",
                "what is in `.grad` has to stay, since gradients of several micro-batches add up: clear nothing, and add"),
        Mistake("written into the gradient", "return None, x.grad", "return None, grad.copy_(x.grad)",
                "`grad` is not yours: the residual sum has the same tensor. Return new memory, as lesson 10's mappings do"),
        Mistake("the input gets nothing", "return None, x.grad", "return None, None",
                "the layers before need a gradient too: return that of x"),
        Mistake("passed on unchanged", "return None, x.grad", "return None, grad",
                "this is the gradient of the block's output: return that of its input, which is in x.grad"),
        Mistake("the graph is kept", "return block(x)",
                "with torch.enable_grad():\n            ctx.y = block(x.detach().requires_grad_())\n"
                "        return ctx.y.detach()",
                "the forward pass builds a graph, which keeps all activations: compute the block without one there"),
        Mistake("the output is kept too", "ctx.save_for_backward(x)\n        return block(x)",
                "y = block(x)\n        ctx.save_for_backward(x, y)\n        return y",
                "the backward pass needs x alone, and computes the output again: what is saved, or put on ctx, is kept"),
        Mistake("still part of the graph", "ctx.saved_tensors[0].detach()", "ctx.saved_tensors[0]",
                "the saved x is still part of the graph that came before, and the gradient runs on into it: cut it off with "
                "x.detach() first"),
        Mistake("computed once more", "return block(x)", "block(x)\n        return block(x)",
                "the block runs twice in the forward pass: once is enough"),
    ),
}
