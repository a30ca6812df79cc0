"""Known wrong answers of lesson 07's open task, and correct ones that miss a level."""

from course.lab.checks.exercise import Mistake

START = "sent.append((dist.all_reduce(flat, group=self.axis.group, async_op=True), flat))"
FLUSH = "        while len(sent) < len(self.buckets):         # some gradient did not come\n            start()\n"
READY = "while len(sent) < len(self.buckets) and missing.isdisjoint(self.buckets[len(sent)]):"
ZEROS = "torch.zeros_like(p) if p.grad is None else p.grad"
SPLIT = ("for p, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):\n"
         "                p.grad = part.view_as(p)")
FULL = "if self.buckets[-1] and sum(q.nbytes for q in [*self.buckets[-1], p]) > bucket_bytes:"
TRAINABLE = "[p for p in parameters if p.requires_grad]"
LAST = "        if not last:\n            loss.backward()\n            return\n"
HOOKS = "        hooks = [p.register_post_accumulate_grad_hook(arrived) for p in missing]\n"
ONCE = ("a gradient is complete after the last micro-batch: before, send nothing. Add up on each rank first, then send each "
        "gradient once")
COPY = ("there is a second copy of all gradients. Let each `p.grad` become a view of its bucket's tensor, and flatten no more "
        "than a bucket at a time")
LATE = ("all-reduces begin only when most of backward is over. Gradients come from the last parameter to the first: fill buckets "
        "in this order, and start each one in the hook of its last gradient")
MEAN = "the mean over the axis is the sum divided by `axis.size`, which need not be the number of all processes"
SAME = "all ranks must start the same buckets in the same order, whichever gradient comes first"

MISTAKES = {
    "data-parallel": (
        Mistake("a sum for the mean", "            flat /= self.axis.size\n", "",
                "the all-reduce adds up: divide by the number of ranks of the axis"),
        Mistake("divided by the world's size", "flat /= self.axis.size", "flat /= dist.get_world_size()", MEAN),
        Mistake("the group forgotten", "group=self.axis.group, ", "",
                "the ranks of the axis are not always all ranks: every collective takes `group=axis.group`"),
        Mistake("never waited for", "            work.wait()\n", "",
                "the sum may not be there yet: wait for each all-reduce before you divide and return"),
        Mistake("one bucket is waited for", "        for work, flat in sent:\n            work.wait()\n",
                "        sent[-1][0].wait()\n        for _, flat in sent:\n",
                "every all-reduce has to be waited for, not only the last one"),
        Mistake("earlier micro-batches are lost", ZEROS, "torch.zeros_like(p) if p in missing else p.grad",
                "a parameter that the last micro-batch does not use may have a gradient from an earlier one: only None counts as "
                "zeros"),
        Mistake("the last micro-batch alone", HOOKS, HOOKS + "        for p in missing:\n            p.grad = None\n",
                "gradients of a step's micro-batches add up: do not clear them in between"),
        Mistake("a copy is sent", "dist.all_reduce(flat,", "dist.all_reduce(flat.clone(),",
                "the sum goes into a copy that nobody reads: all-reduce the tensor whose views the gradients are"),
        Mistake("gradients are not replaced", SPLIT, "pass",
                "the mean is in the bucket, but the parameters still have their own gradients: copy it back, or let `p.grad` be "
                "a view of the bucket"),
        Mistake("started too early", READY, "while len(sent) < len(self.buckets):",
                "a bucket starts before its gradients are there: wait until none of them is missing"),
        Mistake("frozen parameters", TRAINABLE, "list(parameters)",
                "a parameter with requires_grad=False gets no gradient and takes no hook: leave it out", stops="RuntimeError"),
        Mistake("buckets that are never complete", FLUSH, "",
                "a bucket with a missing gradient never starts, nor do those after it: after the last backward pass, start what "
                "is left"),
        Mistake("no gradient, no place", f"({ZEROS}).flatten() for p in bucket",
                "p.grad.flatten() for p in bucket if p.grad is not None", SAME, silent=True),
        Mistake("whichever comes first", READY, "for bucket in self.buckets[len(sent):]:\n"
                "                if not missing.isdisjoint(bucket):\n                    continue\n"
                "                self.buckets.remove(bucket)\n                self.buckets.insert(len(sent), bucket)",
                SAME, silent=True),
        Mistake("every micro-batch is sent", LAST, "", ONCE, by=("sent",)),
        Mistake("one all-reduce per gradient", FULL, "if self.buckets[-1]:",
                "each gradient travels alone and pays the latency of a message: put neighbors into buckets of up to "
                "`bucket_bytes`", by=("few",)),
        Mistake("the separate gradients stay", SPLIT,
                "self.old = [*getattr(self, 'old', []), *(p.grad for p in bucket)]\n            " + SPLIT, COPY, by=("lean",)),
        Mistake("sent after backward", READY, "while False:", LATE, by=("begins",)),
        Mistake("in the order of the parameters", f"reversed({TRAINABLE})", TRAINABLE, LATE),
        Mistake("waited for at once", START, START + "\n            sent[-1][0].wait()",
                "backward stops until an all-reduce is over: keep its handle, and wait after the backward pass",
                by=("patient",)),
    ),
}
