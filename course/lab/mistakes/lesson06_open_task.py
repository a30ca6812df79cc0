"""Known wrong answers of lesson 06's open task, and correct ones that miss a level."""

from course.lab.checks.exercise import Mistake

RATE = "        self.rate.fill_(rate)\n"
MICROS = "        self.micros.fill_(len(micros))\n"
CLONES = "self.batch = self.batch or {name: tensor.clone() for name, tensor in micros[0].items()}"
KEEP = "        self.losses.append(self.loss.clone())"
ZERO = "            gradient.zero_()\n"
BACK = "        loss.backward()\n"
SCALE = "            velocity.mul_(self.momentum).add_(gradient * factor)\n"
CAPTURE = """            with capturing(self.graphs[work]):
                work()
        self.graphs[work].replay()"""
MOVE = "            p.sub_(self.rate * velocity)\n"
FROZEN = ("a replay reads the tensor that was captured, and a new tensor under the same name changes nothing there: fill the old "
          "one in place")
STALE = "this list has many names for one tensor, which every replay writes over: clone the loss after the replay"
LAST = ("only the last micro-batch counts: make gradients zero once a step, after the update. With `p.grad = None` in the "
        "capture, every replay writes new gradients, and adds to none")

MISTAKES = {
    "graph-trainer": (
        Mistake("a rate that is frozen", RATE, "        self.rate = torch.full_like(self.rate, rate)\n", FROZEN),
        Mistake("a number of micro-batches that is frozen", MICROS,
                "        self.micros = torch.full_like(self.micros, len(micros))\n", FROZEN),
        Mistake("the rate of the warm-up", RATE, "        if self.steps <= WARM:\n    " + RATE,
                "replays use the rate that was there at the capture: fill the tensor that they read in every step"),
        Mistake("the micro-batches of the warm-up", MICROS, "        if self.steps <= WARM:\n    " + MICROS,
                "replays divide by the number of micro-batches at the capture: fill the tensor that they read in every step"),
        Mistake("gradients are never zero", ZERO, "            pass\n",
                "gradients add up over all steps: make them zero after the update, in place and in the graph"),
        Mistake("gradients are made anew in each micro-batch", BACK,
                "        for p in self.parameters:\n            p.grad = None\n" + BACK,
                LAST),
        Mistake("gradients are zero in each micro-batch", BACK,
                "        for p in self.parameters:\n            p.grad.zero_()\n" + BACK,
                LAST),
        Mistake("a sum for the mean", "loss = self.loss_of(self.batch) / self.micros", "loss = self.loss_of(self.batch)",
                "the gradient of a step is the mean over its micro-batches, and so is the loss: divide by their number, which is "
                "another one in each step"),
        Mistake("the sum is clipped", BACK, "        (loss * self.micros).backward()\n",
                "the norm is that of the mean gradient: this clips the sum over the micro-batches"),
        Mistake("the norm of the sum", "(self.clip / norm)", "(self.clip / (norm * self.micros))",
                "the norm is that of the mean gradient: divide by the number of micro-batches first, then clip"),
        Mistake("no clipping", SCALE, SCALE.replace(" * factor", ""),
                "gradients that are larger than `clip` together are scaled down before they change the momentum"),
        Mistake("everything is clipped", ".clamp(max=1.0)", "",
                "a gradient smaller than `clip` stays as it is: the factor is at most 1"),
        Mistake("each parameter is clipped by itself", SCALE,
                SCALE.replace("factor", "(self.clip / gradient.norm()).clamp(max=1.0)"),
                "one norm over the gradients of all parameters decides, and one factor scales all of them"),
        Mistake("the step is clipped", SCALE + MOVE,
                SCALE.replace(" * factor", "") + "            p.sub_(self.rate * factor * velocity)\n",
                "clip the gradient before it enters the momentum: this scales the velocity, old gradients and all"),
        Mistake("the rate within the momentum", SCALE + MOVE,
                SCALE.replace("gradient * factor", "self.rate * gradient * factor") + MOVE.replace("self.rate * ", ""),
                "the velocity adds up gradients alone, and the rate multiplies it when a parameter moves: here old gradients "
                "keep the rate of their step"),
        Mistake("parameters in new memory", MOVE, "            p.data = p - self.rate * velocity\n",
                "a replay writes where the capture wrote, and the parameter's name then leads elsewhere: change it in place, "
                "`p.sub_(...)`"),
        Mistake("the momentum starts anew", SCALE, "            velocity = torch.zeros_like(p)\n" + SCALE,
                "each replay begins with new velocities of zero: make them before the capture, and change them in place"),
        Mistake("a loss that later steps write over", KEEP, KEEP.replace(".clone()", ""), STALE),
        Mistake("the loss of the last micro-batch", "        self.total += loss.detach()\n",
                "        self.total.copy_(loss.detach() * self.micros)\n",
                "the loss of a step is the mean over its micro-batches, and this is the last one's: add them up in a tensor"),
        Mistake("the loss is never zero", "        self.total.zero_()\n", "",
                "the sum of losses goes on from step to step: make it zero in the graph once it was copied"),
        Mistake("the losses stay in the list", "losses, self.losses = self.losses, []", "losses = self.losses",
                "`read_losses` returns the losses since the last call: begin a new list with each call"),
        Mistake("the first batch for ever", "            for name, tensor in self.batch.items():\n"
                "                tensor.copy_(micro[name])\n", "            self.batch = micro\n",
                "replays read the tensors that were captured: copy each micro-batch there, instead of giving it that name"),
        Mistake("captured in the loader's memory", CLONES, "self.batch = self.batch or dict(micros[0])",
                "what a replay reads must be yours: this copies later micro-batches into memory of the loader, which may hold "
                "another one by then"),
        Mistake("a capture is taken for a step", CAPTURE, """            with capturing(self.graphs[work]):
                work()
            return
        self.graphs[work].replay()""",
                "a capture computes nothing: replay after it, or that micro-batch, or that update, is lost"),
        Mistake("the step before the capture happens twice", "        if work not in self.graphs:\n",
                "        if work not in self.graphs:\n            work()\n",
                "the work is done once before the capture, and once more by the replay: let the capture follow the warm-up steps "
                "without another run"),
        Mistake("nothing is captured", "if self.steps <= WARM:", "if True:",
                "Python still runs the loss: after the warm-up, capture one micro-batch and replay it for each",
                by=("captured",)),
        Mistake("the host waits for the loss", KEEP, "        self.last = self.loss.item()\n" + KEEP,
                "a step waits for the device when the host reads a value, by `.item()`, `float` or an `if`: keep the loss as a "
                "tensor, and read it later", by=("stall",)),
        Mistake("losses are read one by one", "torch.stack(losses).tolist() if losses else []",
                "[float(loss) for loss in losses]",
                "each number that is read waits for the device, and is a copy of its own: `torch.stack` makes one tensor of all",
                by=("reads",)),
        Mistake("the update is not captured", "        self.run(self.update)\n", "        self.update()\n",
                "the update is launched operation by operation: capture it in a second graph", by=("launches",)),
    ),
}
