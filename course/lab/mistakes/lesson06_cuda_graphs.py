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
                "replays read the captured tensors, whatever `self.batch` refers to: copy_ the new values into them"),
        Mistake("results not copied", "return tuple(result.clone() for result in self.results)", "return self.results",
                "the next replay overwrites these tensors, so a loss that the caller keeps would change: return copies"),
        Mistake("no warm-up", f"{WARMING}        if self.calls == self.warm + 1:", "        if self.calls == 1:",
                "the first calls have to run eagerly: an optimizer that creates its states inside the capture creates them "
                "again in every replay"),
        Mistake("captured on what was given", "tensor.clone() for name, tensor in batch.items()",
                "tensor for name, tensor in batch.items()",
                "the capture batch belongs to the caller, and every later batch is copied over it: capture on clones"),
        Mistake("capturing taken for running", "            self.capture(batch)\n",
                "            self.capture(batch)\n            return self.results\n",
                "a capture computes nothing: the call that captures has to fill and replay too"),
        Mistake("results of the capture", "            self.capture(batch)\n",
                "            self.capture(batch)\n            return tuple(result.clone() for result in self.results)\n",
                "the capture itself does not compute the results: replay in this call too, then copy them"),
        Mistake("captured and run", "            self.capture(batch)\n",
                "            self.capture(batch)\n            return self.step(batch)\n",
                "after the capture, Python runs the step once more here: let a replay do this call's step, as in all later "
                "calls"),
        Mistake("three calls, whatever is asked", "self.device = step, warm, device", "self.device = step, 3, device",
                "`self.warm` says how many calls come before the capture; 3 is only its default"),
        Mistake("warmed up where it stands", "with warming(self.device):", "if True:",
                "run the step of the warm-up inside `with warming(self.device):`, on the stream that a capture needs"),
        Mistake("any shape", REFUSAL, "",
                "copy_ broadcasts one sample to all rows and converts types without an error: compare `kinds` first"),
        Mistake("shapes alone", "kinds(batch) != kinds(self.batch)", SHAPES,
                "copy_ converts a batch of another number format without an error: compare types as well as shapes"),
        Mistake("captured again and again", "if self.calls == self.warm + 1:", "if True:",
                "this captures in every call, so Python runs in every call: capture once"),
        Mistake("always eager", "if self.calls <= self.warm:", "if True:",
                "this runs the step in every call: capture it once after the warm-up, then replay it"),
        Mistake("one batch behind", REPLAY, "        self.graph.replay()\n        self.fill(batch)\n",
                "the replay reads the captured tensors when it starts: fill them before"),
        Mistake("warmed up on one batch", "                return self.step(batch)\n",
                "                for _ in range(self.warm):\n                    results = self.step(batch)\n"
                "            self.calls = self.warm\n            return results\n",
                "the warm-up steps change the weights: run one step per call, on the batch of that call"),
        Mistake("one call too many", "if self.calls <= self.warm:", "if self.calls <= self.warm + 1:",
                "count the calls again: `warm` calls run eagerly, and the next one captures", stops="CourseError"),
        Mistake("a name that is missing",
                "kinds(batch) != kinds(self.batch)",
                "any(name not in self.batch or kinds({name: tensor}) != kinds({name: self.batch[name]}) for name, tensor "
                "in batch.items())",
                "this looks only at the names that the new batch has, and one that it lacks goes unnoticed: compare "
                "`kinds` of both batches as a whole", by=("refused",)),
    ),
    "decided-on-device": (
        Mistake("an if on the loss", f"        {UPDATE}", "        if good:\n            state.weight -= rate * gradient",
                "a capture must not contain an `if`, min() or .item() on a tensor: compute both outcomes, choose with "
                "torch.where, write the result in place", stops="CourseError"),
        Mistake("the name moved on", UPDATE, f"state.weight = {CHOICE}.requires_grad_()",
                "this makes a new tensor, and replays keep reading the old one: write into `state.weight` with copy_"),
        Mistake("infinity is a number", "loss.isfinite()", "~loss.isnan()",
                "an infinite loss has no usable gradient either: isfinite is false for infinity and for NaN"),
        Mistake("the graph is kept", "return loss.detach()", "return loss",
                "the returned loss still refers to its graph, which the eager step releases: loss.detach()"),
        Mistake("a new count", "state.count += 1", "state.count = state.count + 1",
                "this makes a new tensor in every step, and replays add 1 to the old one: count in place"),
        Mistake("zero times NaN", CHOICE, "state.weight - good * rate * gradient",
                "after one bad batch all weights stay NaN: choose the old weights with torch.where (0 times NaN is NaN)"),
        Mistake("the wrong one of two", CHOICE, "torch.where(good, state.weight, state.weight - rate * gradient)",
                "torch.where takes its second argument where the condition holds: that is the new weight, where the loss is "
                "finite"),
        Mistake("a skipped step is no step", "state.count += 1", "state.count += good",
                "the eager step counts every step, skipped or not"),
        Mistake("counts the good ones", "state.skipped += ~good", "state.skipped += good",
                "`skipped` counts the steps whose loss is not finite"),
        Mistake("the same inputs dropped", 'batch["x"], state.count)', 'batch["x"], torch.zeros_like(state.count))',
                "dropout is the same in every step: derive it from the count, which is already a tensor"),
        Mistake("no warm-up of the rate", "PEAK * ((state.count + 1) / RAMP).clamp(max=1.0)", "PEAK",
                "a learning rate that is a Python number keeps its value from the capture: compute it from `state.count`"),
        Mistake("grows for ever", ".clamp(max=1.0)", "", "the warm-up ends at PEAK: take the smaller of the ratio and 1"),
        Mistake("the rate is late", "(state.count + 1) / RAMP", "state.count / RAMP",
                "in the first step, when the count is 0, the rate is already PEAK / RAMP: the ratio is (count + 1) / RAMP"),
        Mistake("counted too early",
                '(state.count + 1) / RAMP).clamp(max=1.0)         # ()\n    x = dropout(batch["x"], state.count)',
                '(state.count + 2) / RAMP).clamp(max=1.0)\n    x = dropout(batch["x"], state.count + 1)',
                "the rate and dropout see a count that is 1 too high: add 1 at the end of the step, as the host does"),
        Mistake("zeros for NaN",
                "torch.where(good, state.weight - rate * gradient, state.weight)",
                "state.weight - rate * gradient.nan_to_num(0.0)",
                "nan_to_num turns NaN into 0, but infinity into the largest number there is: after an infinite loss, "
                "choose the old weights with torch.where"),
    ),
    "graph-gain": (
        Mistake("a launch for each", "return once + sum(works)", "return once * len(works) + sum(works)",
                "a graph is launched once for all of its kernels"),
        Mistake("no gaps", " + gap * (len(works) - 1)", "",
                "a graph also has gaps between its kernels: add them"),
        Mistake("one gap too many", "gap * (len(works) - 1)", "gap * len(works)",
                "gaps lie only between kernels: there is one gap less than there are kernels"),
        Mistake("as if it were beside", "return once + sum(works)", "return max(once, sum(works))",
                "the GPU cannot start before the graph is launched: add the two times"),
        Mistake("a difference", "< (1 + least) * graphed_time(scaled, once, gap)", "- graphed_time(scaled, once, gap) < least",
                "the ratio counts: compare with (1 + least) times the graphed step"),
        Mistake("launches that grow", "[launch] * len(works)", "[batch * launch] * len(works)",
                "a launch takes the same time for every batch: only the GPU's work grows"),
        Mistake("the largest", "            return batch\n    return 0",
                "            largest = batch\n    return locals().get('largest', 0)",
                "the smallest batch is asked for: return the first one that you find"),
        Mistake("the last that gains", "            return batch", "            return batch - 1",
                "this is the largest batch that still gains enough: return the next one"),
        Mistake("nothing where nothing is found", "\n    return 0", "",
                "if none of the thousand batches gains that little, the loop ends, and a function without `return` returns "
                "None: return 0", stops="InvalidReturn"),
        Mistake("a hundred batches", "range(1, 1001)", "range(1, 101)",
                "the batches go up to 1000: range(1, 1001)"),
        Mistake("a share of the eager step", "(1 + least) * graphed_time(scaled, once, gap)",
                "graphed_time(scaled, once, gap) / (1 - least)",
                "this takes `least` as a share of the eager step, but it is a share of the graphed step: (1 + least) times as "
                "long"),
        Mistake("all of it beside the launch",
                "return once + sum(works) + gap * (len(works) - 1)",
                "return max(once, sum(works) + gap * (len(works) - 1))",
                "the GPU cannot start before the graph is launched: add the launch to its work and gaps"),
        Mistake("powers of two",
                "range(1, 1001)",
                "[2**k for k in range(10)]",
                "the smallest batch may lie between two powers of two: try every batch from 1 to 1000"),
    ),
}
