"""Known wrong answers of lesson 06."""

from course.lab.checks.exercise import Mistake

WARMING = "        if self.calls <= self.warm:\n            with warming(self.device):\n                return self.step(batch)\n"
REFUSAL = """        if kinds(batch) != kinds(self.batch):
            raise CourseError(f"the step was captured with {kinds(self.batch)}, and this batch has {kinds(batch)}")
"""
SHAPES = "{name: t.shape for name, t in batch.items()} != {name: t.shape for name, t in self.batch.items()}"
REPLAY = "        self.fill(batch)\n        self.graph.replay()\n"
UPDATE = "state.weight.copy_(torch.where(good, state.weight - rate * gradient, state.weight))"
CHOICE = "torch.where(good, state.weight - rate * gradient, state.weight)"

MISTAKES = {
    "static-buffers": (
        Mistake("inputs replaced", "        for name, tensor in self.batch.items():\n            tensor.copy_(batch[name])",
                "        self.batch = dict(batch)",
                "replays read the tensors that were captured, wherever `self.batch` points: copy_ the new values into them"),
        Mistake("results not copied", "return tuple(result.clone() for result in self.results)", "return self.results",
                "the next replay writes over these tensors, and whoever kept a loss then holds another: return copies"),
        Mistake("no warm-up", f"{WARMING}        if self.calls == self.warm + 1:", "        if self.calls == 1:",
                "the first calls have to run eagerly: an optimizer that makes its states inside the capture makes them anew in "
                "every replay"),
        Mistake("captured on what was given", "tensor.clone() for name, tensor in batch.items()",
                "tensor for name, tensor in batch.items()",
                "the batch that you captured on is not yours, and every later one is copied over it: capture on clones"),
        Mistake("capturing taken for running", "            self.capture(batch)\n",
                "            self.capture(batch)\n            return self.results\n",
                "capturing computes nothing: the call that captures has to fill and replay as well"),
        Mistake("results of the capture", "            self.capture(batch)\n",
                "            self.capture(batch)\n            return tuple(result.clone() for result in self.results)\n",
                "when the capture ends nobody has computed the results yet: replay in this call too, then copy them"),
        Mistake("captured and run", "            self.capture(batch)\n",
                "            self.capture(batch)\n            return self.step(batch)\n",
                "after the capture Python runs the step once more here: let a replay do this call's step, as all later ones"),
        Mistake("three calls, whatever is asked", "self.device = step, warm, device", "self.device = step, 3, device",
                "how many calls come before the capture is `self.warm`; 3 is only what it is if nobody says"),
        Mistake("warmed up where it stands", "with warming(self.device):", "if True:",
                "run the step of the warm-up inside `with warming(self.device):`, on the stream that a capture needs"),
        Mistake("any shape", REFUSAL, "",
                "copy_ spreads one sample over all rows, and converts types, without a word: compare `kinds` first"),
        Mistake("shapes alone", "kinds(batch) != kinds(self.batch)", SHAPES,
                "a batch in another number format is converted by copy_ without a word: compare types as well as shapes"),
        Mistake("captured again and again", "if self.calls == self.warm + 1:", "if True:",
                "this captures in every call, so Python runs in every call: capture once"),
        Mistake("always eager", "if self.calls <= self.warm:", "if True:",
                "this runs the step in every call: after the warm-up it has to be captured once, and replayed"),
        Mistake("one batch behind", REPLAY, "        self.graph.replay()\n        self.fill(batch)\n",
                "the replay works on what lies in the captured tensors when it starts: fill them before it"),
        Mistake("warmed up on one batch", "                return self.step(batch)\n",
                "                for _ in range(self.warm):\n                    results = self.step(batch)\n"
                "            self.calls = self.warm\n            return results\n",
                "steps of the warm-up change the weights: run one for each call, on that call's batch"),
        Mistake("one call too many", "if self.calls <= self.warm:", "if self.calls <= self.warm + 1:",
                "count the calls once more: `warm` of them run eagerly, and the one after them is captured"),
    ),
    "decided-on-device": (
        Mistake("an if on the loss", f"        {UPDATE}", "        if good:\n            state.weight -= rate * gradient",
                "no `if`, min() or .item() on a tensor in a capture: compute both outcomes, choose with torch.where, write the "
                "choice in place"),
        Mistake("the name moved on", UPDATE, f"state.weight = {CHOICE}.requires_grad_()",
                "this makes a new tensor, and replays read the old one for ever: write into `state.weight`, with copy_"),
        Mistake("infinity is a number", "loss.isfinite()", "~loss.isnan()",
                "an infinite loss has no gradient to follow either: isfinite is false for infinity, and for what is no number"),
        Mistake("the graph is kept", "return loss.detach()", "return loss",
                "the returned loss still refers to its graph, which the step on the host lets go of: loss.detach()"),
        Mistake("a new count", "state.count += 1", "state.count = state.count + 1",
                "this makes a new tensor in every step, and replays add 1 to the old one: count in place"),
        Mistake("zero times NaN", CHOICE, "state.weight - good * rate * gradient",
                "one bad batch, and all weights are NaN for good: choose the old ones with torch.where (0 times NaN is NaN)"),
        Mistake("the wrong one of two", CHOICE, "torch.where(good, state.weight, state.weight - rate * gradient)",
                "the first of the two is taken where the condition holds: that is the new weight, where the loss is finite"),
        Mistake("a skipped step is no step", "state.count += 1", "state.count += good",
                "the step on the host counts every step, skipped or not"),
        Mistake("counts the good ones", "state.skipped += ~good", "state.skipped += good",
                "`skipped` is to count the steps whose loss is not finite"),
        Mistake("the same inputs dropped", 'batch["x"], state.count)', 'batch["x"], torch.zeros_like(state.count))',
                "dropout is the same in every step: draw it from the count, which is a tensor already"),
        Mistake("no warm-up of the rate", "PEAK * ((state.count + 1) / RAMP).clamp(max=1.0)", "PEAK",
                "a learning rate that is a number is what it was in the capture: compute it from `state.count`"),
        Mistake("grows for ever", ".clamp(max=1.0)", "", "the warm-up ends at PEAK: the smaller of the ratio and 1"),
        Mistake("the rate is late", "(state.count + 1) / RAMP", "state.count / RAMP",
                "the first step, when the count is 0, has the rate PEAK / RAMP already: the ratio is (count + 1) / RAMP"),
    ),
    "graph-gain": (
        Mistake("a launch for each", "return once + sum(works)", "return once * len(works) + sum(works)",
                "a graph is launched once for all of its kernels"),
        Mistake("no gaps", " + gap * (len(works) - 1)", "",
                "the GPU takes a moment from one kernel to the next in a graph too: add the gaps"),
        Mistake("one gap too many", "gap * (len(works) - 1)", "gap * len(works)",
                "there are gaps between kernels alone, one less than there are kernels"),
        Mistake("as if it were beside", "return once + sum(works)", "return max(once, sum(works))",
                "the GPU cannot begin before the graph has been launched: the two come one after the other"),
        Mistake("a difference", "< (1 + least) * graphed_time(scaled, once, gap)", "- graphed_time(scaled, once, gap) < least",
                "what counts is how many times as long: compare with (1 + least) times the graphed step"),
        Mistake("launches that grow", "[launch] * len(works)", "[batch * launch] * len(works)",
                "a launch takes the same whatever the batch: its work grows, not its launch"),
        Mistake("the largest", "            return batch\n    return 0", "            found = batch\n    return found",
                "the smallest batch is asked for: return the first that you find"),
        Mistake("the last that gains", "            return batch", "            return batch - 1",
                "this is the largest batch that still gains enough: the next one is asked for"),
        Mistake("nothing where nothing is found", "\n    return 0", "",
                "where none of a thousand batches gains that little the loop ends, and a function without a `return` returns "
                "None: return 0"),
        Mistake("a hundred batches", "range(1, 1001)", "range(1, 101)",
                "batches up to 1000 are asked for: range(1, 1001)"),
        Mistake("a share of the eager step", "(1 + least) * graphed_time(scaled, once, gap)",
                "graphed_time(scaled, once, gap) / (1 - least)",
                "this takes `least` as a share of the eager step: it is one of the graphed step, (1 + least) times as long"),
    ),
}
