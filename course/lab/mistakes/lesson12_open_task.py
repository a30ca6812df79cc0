"""Known wrong answers of lesson 12's open task, and correct ones that miss a level."""

from course.lab.checks.exercise import Mistake

AHEAD = """            coming = receive(following)               # it travels while this pass computes
        if arriving is not None:
            arriving.wait()
"""
SEND = "sending.append((dist.isend(result, axis.ranks[target], axis.group, tag=ord(work.kind)), result))"
FREED = ("activations live longer than necessary. Remove input and output when the backward pass uses them (`dict.pop`), return "
         "losses after `.detach()`, and leave out `retain_graph=True`")
ONCE = ("more bytes leave than the results need. `shape` is known, so a message needs no header. Only the rank that "
        "`after` names needs a result, and nobody else needs the loss")
LATER = ("a receive is posted only when its pass needs the message, so the message travels while nothing computes. Post "
         "the receive of the next pass with `dist.irecv` before this pass computes, and wait for it in the next turn")
RETURNED = ("the gradient for the previous stage is that of this stage's *input*, `x.grad`, not the one that came from the "
            "next stage")

MISTAKES = {
    "run-schedule": (
        Mistake("the gradient goes through", "result = None if x is None else x.grad",
                "result = None if x is None else given if given is not None else x.grad", RETURNED),
        Mistake("parameters get no gradient",
                "            out.backward(given)\n            result = None if x is None else x.grad\n",
                "            result = None if x is None else torch.autograd.grad(out, x, given)[0]\n",
                "`torch.autograd.grad` returns the gradient of the input and leaves the parameters without theirs: call "
                "`out.backward(...)`, which fills `.grad` of all leaves"),
        Mistake("the loss is averaged again", "out.backward(given)",
                "(out if given is not None else out * 2 / len(passes)).backward(given)",
                "`forward` returns a loss that is already weighted: back-propagate it as it is, without dividing by the number "
                "of micro-batches"),
        Mistake("all forward passes first", "coming = receive(passes[0])",
                'passes = sorted(passes, key=lambda work: "FB".index(work.kind))\n    coming = receive(passes[0])',
                "this runs another schedule: the passes have to run in the order of the list, or the memory is GPipe's"),
        Mistake("chunks forgotten", "before(work, axis.rank, axis.size, chunks)", "before(work, axis.rank, axis.size, 1)",
                "with several chunks a rank has several stages. The input of chunk 1 on the first rank comes from the last rank: "
                "give `before` and `after` the number of chunks", stops="RuntimeError"),
        Mistake("kept by micro-batch alone", "kept[work.chunk, work.micro] = x, out", "kept[0, work.micro] = x, out",
                "with several chunks, one micro-batch has an input and an output for each of them: keep them by (chunk, micro)",
                stops="KeyError"),
        Mistake("the input has no gradient", "given.requires_grad_()", "given",
                "the received activation must require a gradient, or the backward pass finds none to send: `requires_grad_()`",
                stops="AttributeError"),
        Mistake("no gradient for the output", "out.backward(given)", "out.backward()",
                "only the loss is back-propagated without an argument. Every other output needs the gradient that the next stage "
                "sent: `out.backward(given)`", stops="RuntimeError"),
        Mistake("losses of every rank", "if result.dim() == 0 else []", "if True else []",
                "only the last stage's output is a loss: on other ranks return an empty list", stops="InvalidReturn"),
        Mistake("no tags", ", tag=ord(work.kind)", "",
                "activations and gradients between the same two ranks have to be told apart: with two ranks and two chunks they "
                "travel in the same direction. Use the same `tag` in send and receive"),
        Mistake("the rank in the pipeline", "axis.ranks[target]", "target",
                "`dist.isend` takes a global rank, and `after` names a rank in the pipeline: `axis.ranks[target]`", silent=True),
        Mistake("a send that waits", SEND, "dist.send(result, axis.ranks[target], axis.group, tag=ord(work.kind))",
                "two neighbors both wait until their message is received, and neither receives: begin every send with `isend`",
                silent=True, waits=True),
        Mistake("everything is kept", "kept.pop((work.chunk, work.micro))", "kept[work.chunk, work.micro]", FREED, by=("alive",)),
        Mistake("the graph is retained", "out.backward(given)", "out.backward(given, retain_graph=True)", FREED),
        Mistake("losses with their graph", "losses += [result]", "losses += [out]", FREED),
        Mistake("the loss goes to all", "    return losses", "    total = sum(losses, torch.zeros((), dtype=torch.float64))\n"
                "    dist.all_reduce(total, group=axis.group)\n    return losses", ONCE, by=("sent",)),
        Mistake("received when it is needed", AHEAD,
                "            coming = following, None\n        if given is None and arriving:\n"
                "            arriving, given = receive(arriving)\n        if arriving:\n            arriving.wait()\n",
                LATER, by=("overlap",)),
    ),
}
