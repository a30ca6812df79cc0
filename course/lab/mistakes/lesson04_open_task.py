"""Known wrong answers of lesson 04's open task, and correct ones that miss a level."""

from course.lab.checks.exercise import Mistake

CAST = "        halves = {name: weight.half().requires_grad_() for name, weight in self.weights.items()}\n"
ZEROS = """        sums = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}
        total = torch.zeros(())
        for micro in micros:
"""
MICRO = "            loss = self.loss_of(halves, micro)\n"
LOOP = ("            for name, gradient in zip(halves, torch.autograd.grad(loss * self.scale, list(halves.values())), "
        "strict=True):\n")
ADD = "                sums[name] += gradient\n"
TOTAL = "            total += loss.detach()\n"
FREE = "        del halves, gradient\n"
UPDATE = "        self.update(sums, len(micros), rate)\n"
RETURN = "        return total / len(micros)\n"
BACKWARD = """            (loss * self.scale).backward()
            for name, half in halves.items():
                sums[name] += half.grad
"""                                                  # and nothing sets `half.grad` to None
PARTS = "        for gradient in sums.values():\n"
UNSCALE = "            gradient /= self.scale * micros\n"
FACTOR = "        bad, factor = ~norm.isfinite(), (self.clip / norm).clamp(max=1.0)\n"
EACH = "        for name, weight in self.weights.items():\n            velocity = self.velocities[name]\n"
NEW = "            new = (self.momentum * velocity).add_(sums[name].mul_(factor))\n"
KEEP = "            velocity.copy_(torch.where(bad, velocity, new))\n"
MOVE = "            weight.copy_(torch.where(bad, weight, weight - rate * new))\n"
COUNT = "        self.good = torch.where(bad, 0, self.good + 1)\n        grows = self.good == self.grow_after\n"
SCALE = "        self.scale = torch.where(bad, self.scale / 2, torch.where(grows, self.scale * 2, self.scale))\n"
RESET = "        self.good = torch.where(grows, 0, self.good)"

MISTAKES = {
    "half-trainer": (
        Mistake("no loss scale", LOOP + ADD, (LOOP + ADD).replace("loss * self.scale", "loss").replace(
            "+= gradient", "+= gradient.float() * self.scale"),
                "these gradients have lost bits: multiply the loss before `backward`. What float16 has rounded to zero, no later "
                "factor brings back", by=("moved",)),
        Mistake("divided in float16", ADD + TOTAL + FREE + UPDATE, """                sums[name] += gradient / self.scale
            total += loss.detach()
        del halves, gradient
        for gradient in sums.values():
            gradient *= self.scale
        self.update(sums, len(micros), rate)
""", "small gradients get lost when you divide by the scale in float16: a float16 tensor over a number, or over a scalar tensor, "
                "is float16 again. Add to a float32 sum first, then divide the sum", by=("moved",)),
        Mistake("a sum in float16", LOOP + ADD + TOTAL + FREE, """            (loss * self.scale).backward()
            total += loss.detach()
        for name, half in halves.items():
            sums[name] += half.grad
        del halves, half
""", "`backward` adds to a float16 gradient in float16: a large one rounds small ones away. Add each "
                "micro-batch to a float32 sum"),
        Mistake("gradients that are counted again", LOOP + ADD + TOTAL + FREE, BACKWARD + TOTAL + "        del halves, half\n",
                "`backward` adds to the gradient of the micro-batch before: set it to None once you have added it to the sum"),
        Mistake("the loss of the last micro-batch", RETURN, "        return loss.detach()\n",
                "`step` returns the loss of one micro-batch: return the mean over all of them"),
        Mistake("the sum of the losses", RETURN, "        return total\n",
                "`step` returns the sum of its losses: divide by the number of micro-batches"),
        Mistake("the scaled loss", TOTAL, "            total += loss.detach() * self.scale\n",
                "`step` returns the loss times the scale: multiply a copy by the scale, and return the loss as it was"),
        Mistake("clipped before it is unscaled", "(self.clip / norm)", "(self.clip / (norm * self.scale))",
                "the norm is that of the gradient without the scale: divide by the scale first, then clip"),
        Mistake("a sum for the mean", UNSCALE, "            gradient /= self.scale\n",
                "gradients are clipped that are small enough: the norm is that of the mean over the micro-batches, so divide by "
                "their number first, and the factor is at most 1"),
        Mistake("never clipped", FACTOR, FACTOR.replace("(self.clip / norm).clamp(max=1.0)", "1.0"),
                "large gradients move the weights too far: where the norm of all gradients together exceeds `clip`, multiply "
                "each of them by `clip / norm`", by=("moved",)),
        Mistake("always clipped", FACTOR, FACTOR.replace(".clamp(max=1.0)", ""),
                "a gradient that is small enough is not clipped, and this makes it as large as `clip`: the factor is at most 1"),
        Mistake("each parameter clipped alone", NEW, NEW.replace(
            "mul_(factor)", "mul_((self.clip / sums[name].norm()).clamp(max=1.0))"),
                "one factor for all parameters: it follows from the norm of all gradients together, and keeps their direction",
                by=("moved",)),
        Mistake("each number clipped alone", NEW, NEW.replace("mul_(factor)", "clamp_(-self.clip, self.clip)"),
                "`clip` bounds the norm of all gradients together, not each number: multiply all by one factor", by=("moved",)),
        Mistake("the velocity is clipped", FACTOR + EACH + NEW, FACTOR.replace("(self.clip / norm)", "(self.clip / torch.stack("
                "[(self.momentum * self.velocities[name] + x).norm() for name, x in sums.items()]).norm())") + EACH +
                "            new = (self.momentum * velocity + sums[name]) * factor\n",
                "clip the gradient, not the velocity: the velocity may become larger than `clip`", by=("moved",)),
        Mistake("each micro-batch clipped", LOOP + ADD, """
            every = torch.autograd.grad(loss * self.scale, list(halves.values()))
            size = torch.stack([x.float().norm() for x in every]).norm() / self.scale
            for name, gradient in zip(halves, every, strict=True):
                sums[name] += gradient.float() * (self.clip / size).clamp(max=1.0)
            del every
""", "clip once in a step, the mean over all micro-batches: here each micro-batch is clipped before", by=("moved",)),
        Mistake("divided by the next scale", PARTS + UNSCALE, """
        bad = ~torch.stack([x.isfinite().all() for x in sums.values()]).all()
        grows = self.good + 1 == self.grow_after
        scale = torch.where(bad, self.scale / 2, torch.where(grows, self.scale * 2, self.scale))
""" + PARTS + UNSCALE.replace("self.scale", "scale"),
                "the step in which the scale grows moves the weights half as far: divide by the scale of this step, and change "
                "the scale afterwards", by=("moved",)),
        Mistake("infinity alone", "~norm.isfinite()", "norm.isinf()",
                "an overflow shows as infinity, and as NaN where infinities of opposite signs meet: `isfinite` is False for "
                "both, while `isinf` sees one of them"),
        Mistake("each parameter decides for itself", NEW,
                "            bad = ~sums[name].isfinite().all()\n" + NEW,
                "one flag decides for all parameters: here those whose own gradient is finite move, and with a factor from "
                "an infinite norm"),
        Mistake("the momentum fades in a bad step", KEEP, KEEP.replace("bad, velocity", "bad, self.momentum * velocity"),
                "a step with an overflow changes nothing but the scale: the velocities stay as they are, too"),
        Mistake("a product with the flag", KEEP + MOVE, """            velocity.copy_(bad * velocity + ~bad * new)
            weight.copy_(weight - ~bad * rate * new)
""", "0 times NaN or infinity is NaN: choose with `torch.where` instead of multiplying with the flag"),
        Mistake("zeros for what is not finite", UNSCALE, "            gradient.div_(self.scale * micros).nan_to_num_(0, 0, 0)\n",
                "zeros in place of infinities make a step from the rest of the gradient, and nobody notices the overflow: skip "
                "the whole step"),
        Mistake("the count goes on after an overflow", COUNT,
                COUNT.replace("bad, 0, self.good + 1", "bad, self.good, self.good + 1"),
                "good steps count in a row: an overflow sets the count to 0"),
        Mistake("the count goes on after the scale grew", RESET, RESET.replace("self.good = ", "_ = "),
                "a scale that grew is on trial: its count begins at 0 again, and so does the count after an overflow"),
        Mistake("weights in float16", MOVE, MOVE.replace("rate * new))", "rate * new).half())"),
                "most updates are smaller than half a step of float16, and get lost: the weights stay in float32, and only the "
                "copies for the loss are float16"),
        Mistake("new weights under old names", MOVE,
                "            self.weights[name] = torch.where(bad, weight, weight - rate * new)\n",
                "the tensors that you were given do not change: copy the new values into them, `weight.copy_(...)`"),
        Mistake("the rate within the momentum", NEW + KEEP + MOVE,
                (NEW + KEEP + MOVE).replace("mul_(factor)", "mul_(factor * rate)").replace("rate * new", "new"),
                "the velocity adds up gradients alone, and the rate multiplies it when a weight moves: here old gradients keep "
                "the rate of their step"),
        Mistake("the host looks at the flag", FACTOR, FACTOR + """        if bad:
            self.good, self.scale = torch.tensor(0), self.scale / 2
            return
""", "an `if` on the flag waits for the device in each step: compute both outcomes, and choose with `torch.where`",
                by=("stall",)),
        Mistake("a cast for each micro-batch", CAST + ZEROS + MICRO,
                (CAST + ZEROS + MICRO).replace("weight.half()", "weight.detach()").replace(
                    "(halves,", "({name: half.half() for name, half in halves.items()},"),
                "each micro-batch casts all weights again: cast them once before, and add up the gradients of these copies in "
                "float32", by=("once",)),
        Mistake("a copy of the old state", FACTOR, FACTOR +
                "        old = [tensor.clone() for tensor in (*self.weights.values(), *self.velocities.values())]\n",
                "too much is alive at once: copies of the old state, new values of all parameters, gradients of several "
                "micro-batches, or float16 copies during the update. Go through the parameters one by one, with `torch.where`",
                by=("small",)),
    ),
}
