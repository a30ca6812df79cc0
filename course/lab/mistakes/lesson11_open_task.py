"""Known wrong answers of lesson 11's open task, and correct ones that miss a level."""

from course.lab.checks.exercise import Mistake

MASK = "scores += torch.full_like(scores, -torch.inf).triu(1)\n"
FORWARD = f"            if source == axis.rank:\n                {MASK}"
BACKWARD = f"                if turn == 0:\n                    {MASK}"
MERGED = "out * (lse - both).exp()[..., None] + (scores - both[..., None]).exp() @ pair[1]"
OF_SCORES = "of_scores = weights * (grad @ pair[1].mT - delta) * scale"
NEIGHBORS = "axis.ranks[axis.rank - 1], axis.ranks[(axis.rank + 1) % axis.size]"
WAITED = ("            for work in works:\n                work.wait()\n"
          "            if source > 0:\n                pair = coming\n        ctx.save")
RETURNED = "return dq, own[0], own[1], None, None"
RECEIVED = "                works.append(dist.irecv(coming, left, axis.group))\n            scores"

MISTAKES = {
    "causal-attention": (
        Mistake("no mask", FORWARD, "",
                "within a rank's own tokens, a query must not see later keys: the scores above the diagonal become -inf"),
        Mistake("no mask on the way back", BACKWARD, "",
                "the backward pass computes the weights anew: hide the later keys of a rank's own block there too"),
        Mistake("one key of the future", "triu(1)", "triu(2)",
                "each query sees one key too many: everything above the diagonal is hidden"),
        Mistake("answers are added", MERGED, "out + scores.softmax(-1) @ pair[1]",
                "each block's answer is divided by its own sum: weigh the answers by exp(their log-sum-exp - that of both)"),
        Mistake("the weights of a block", "weights = (scores - lse[..., None]).exp()", "weights = scores.softmax(-1)",
                "a block's weights are exp(scores - lse) with the log-sum-exp of *all* keys that a query sees: the softmax of "
                "one block is too large"),
        Mistake("the softmax's sum is constant", OF_SCORES, OF_SCORES.replace(" - delta", ""),
                "the softmax's denominator depends on the scores too: subtract sum(grad * out) of the query before you multiply "
                "by the weights"),
        Mistake("the gradient without the scale", OF_SCORES, OF_SCORES.replace(" * scale", ""),
                "the scores were multiplied by d**-0.5, so the gradients of q and k are too"),
        Mistake("gradients of one's own use alone", "                own += theirs\n", "",
                "later ranks used these keys and values too: add the gradients that they send"),
        Mistake("queries of one block", "dq += of_scores @ pair[0]", "dq += of_scores @ pair[0] if turn == 0 else 0",
                "the gradient of a query is a sum over the blocks of all keys that it saw"),
        Mistake("keys and values changed over", RETURNED, "return dq, own[1], own[0], None, None",
                "the gradients of k and v are exchanged: of_scoresᵀ q belongs to k, weightsᵀ grad to v"),
        Mistake("a mean of gradients", RETURNED, "return dq, own[0] / axis.size, own[1] / axis.size, None, None",
                "the gradients from all ranks are summed: do not divide"),
        Mistake("sends alone are waited for", WAITED, WAITED.replace("in works:", "in works[:axis.rank + 1 < axis.size]:"),
                "the next keys may not be there yet: wait for a receive before you use what comes"),
        Mistake("the rank in the axis", NEIGHBORS, "axis.rank - 1, (axis.rank + 1) % axis.size",
                "`dist.isend` takes a global rank: `axis.ranks[...]`", silent=True),
        Mistake("all pieces as long as mine", "lengths[source - 1], pair.shape[4])", "pair.shape[3], pair.shape[4])",
                "ranks have unequal numbers of tokens: receive into a tensor of the source's length", silent=True),
        Mistake("sums of all ranks", "        ctx.axis, ctx.lengths = axis, lengths\n",
                "        ctx.axis, ctx.lengths = axis, lengths\n"
                "        mappings = __import__('course.parallel.mappings', fromlist=['all_gather'])\n"
                "        ctx.sums = mappings.all_gather(lse[..., None], 2, axis, sum(lengths))\n",
                "it sends more than later ranks need. A piece goes to the ranks after its own only, once forward and once "
                "backward, and each of these ranks sends the piece's gradients back once", by=("sent",)),
        Mistake("pieces of others are kept", "        ctx.save_for_backward(q, k, v, out, lse)\n",
                "        ctx.save_for_backward(q, k, v, out, lse)\n        ctx.others = [x.clone() for x in 3 * (q, k, v)]\n",
                "a rank keeps more than its own q, k, v, output and log-sum-exp: let the keys and values travel again in the "
                "backward pass, and compute the weights anew", by=("kept",)),
        Mistake("all scores at once", "torch.zeros_like(q), q.new_full(",
                "q.new_zeros(*q.shape[:3], sum(lengths))[..., :q.shape[-1]] * 0, q.new_full(",
                "some tensor covers the keys of all tokens: hold one block of keys at a time, and merge the answers",
                by=("small",)),
        Mistake("received when it is needed", RECEIVED,
                RECEIVED.replace("scores", "while works:\n                works.pop().wait()\n            scores"),
                "the next keys travel while nothing computes: post the receive before a block is computed, and wait after it",
                by=("overlap",)),
    ),
}
