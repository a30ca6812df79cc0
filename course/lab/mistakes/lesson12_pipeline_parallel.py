"""Known wrong answers of lesson 12."""

from course.lab.checks.exercise import Mistake

BACKWARD = '[Pass("B", 0, i) for i in range(m)]'
BOTH = f'[Pass("F", 0, i) for i in range(m)] + {BACKWARD}'
ALL = ("this is GPipe again, which keeps all micro-batches. A rank runs ahead by the number of ranks after it, and then "
       "alternates one forward and one backward pass")
TURN = ("in each turn the forward pass comes first, also on a rank that is not ahead: the last rank needs a forward pass "
        "before its first backward pass")

MISTAKES = {
    "gpipe": (
        Mistake("one micro-batch after another", BOTH, '[Pass(kind, 0, i) for i in range(m) for kind in ("F", "B")]',
                "each micro-batch comes back before the next one enters, so only one rank works at a time: do all forward "
                "passes first"),
        Mistake("no backward passes", f" + {BACKWARD}", "",
                "these are the forward passes only: as many backward passes follow them"),
        Mistake("the rank for the chunk", '", 0, i)', '", rank, i)',
                "the second field is the chunk on *this* rank, and a rank has one chunk: its number is 0"),
        Mistake("as many micro-batches as ranks", "range(m)", "range(p)",
                "there are m micro-batches, for any number of ranks: p is the number of ranks"),
        Mistake("counted from 1", "range(m)", "range(1, m + 1)",
                "the micro-batches are 0 to m - 1, which is range(m): count from 0"),
        Mistake("chunk and micro-batch changed over", '", 0, i)', '", i, 0)',
                "the fields are kind, chunk and micro-batch, in this order: the chunk is always 0, and the micro-batch counts"),
        Mistake("the last micro-batch forgotten", "range(m)", "range(m - 1)",
                "the micro-batches are 0 to m - 1, which is range(m): this leaves out one"),
        Mistake("backward passes first", BOTH, f'{BACKWARD} + [Pass("F", 0, i) for i in range(m)]',
                "a backward pass needs the activations of its own forward pass: it cannot come first"),
        Mistake("the last one back first", BACKWARD, '[Pass("B", 0, i) for i in reversed(range(m))]',
                "the first micro-batch comes first both times: the backward passes go from 0 to m - 1 too. The reverse order "
                "takes as long, but it is another schedule"),
        Mistake("another order on some ranks", BACKWARD, '[Pass("B", 0, i) for i in range(m)][::1 if rank % 2 else -1]',
                "neighbors disagree on the order of the backward passes: a rank takes the first gradient that arrives for the "
                "one that it expects first"),
        Mistake("micro-batches of its own", "range(m)", "range(rank, m, p)",
                "every micro-batch passes through every rank: this selects the micro-batches as data parallelism would"),
        Mistake("begins later", "range(m)", "range(rank, m)",
                "every rank does all m micro-batches: it waits for the first one, but the list does not show that wait"),
        Mistake("a share of the micro-batches", "range(m)", "range(m // p)",
                "a pipeline cuts the model, not the batch: every rank does all m micro-batches"),
    ),
    "1f1b": (
        Mistake("one too many ahead", "min(p - rank - 1, m)", "min(p - rank, m)",
                "if messages take no time, this is as fast, but it keeps one micro-batch more than necessary: the last rank "
                "should be no forward pass ahead"),
        Mistake("one too few ahead", "min(p - rank - 1, m)", "min(max(p - rank - 2, 0), m)",
                "the ranks after this one run out of work: p - rank - 1 micro-batches must follow the first one to keep them "
                "busy until its gradient comes back"),
        Mistake("the same on every rank", "min(p - rank - 1, m)", "min(p - 1, m)",
                "only the first rank is p - 1 forward passes ahead: each next rank is one stage closer to the end, so it runs "
                "ahead by one less"),
        Mistake("counted from the wrong end", "min(p - rank - 1, m)", "min(rank, m)",
                "the first rank is the farthest from the loss, so it runs ahead the most: count from the last rank, not from the "
                "first"),
        Mistake("nobody ahead", "min(p - rank - 1, m)", "0",
                "no rank is ahead, so every rank waits in every turn until the micro-batch is back: all ranks but the last "
                "have to run ahead"),
        Mistake("all ahead", "min(p - rank - 1, m)", "m",
                ALL),
        Mistake("passes of its own", "    return forward[:ahead]", "    forward, backward = ([Pass(kind, 0, i) for i in "
                "range(len(forward))] for kind in (\"F\", \"B\"))\n    return forward[:ahead]",
                "`alternate` makes its own passes, but interleaving passes it those of several chunks: use the passes in its "
                "arguments"),
        Mistake("more ahead than there are", "ahead=min(p - rank - 1, m)", "ahead=p - rank - 1",
                "with fewer micro-batches than ranks, no rank can be p - rank - 1 ahead: at most m"),
        Mistake("backward first in each turn", "zip(forward[ahead:], backward, strict=False)",
                "zip(backward, forward[ahead:], strict=False)", TURN),
        Mistake("the pipeline is not drained", " + backward[len(forward) - ahead:]", "",
                "when no forward passes are left, `ahead` backward passes are: append them"),
        Mistake("minus nothing is everything", "backward[len(forward) - ahead:]", "backward[-ahead:]",
                "with ahead = 0 the slice backward[-0:] is the whole list: count from the front instead"),
        Mistake("too much of the rest", "backward[len(forward) - ahead:]", "backward[ahead:]",
                "the turns have done len(forward) - ahead backward passes: the rest begins there"),
        Mistake("the lists used up", "    return forward[:ahead] + turns + backward[len(forward) - ahead:]",
                "    made = forward[:ahead] + turns + backward[len(forward) - ahead:]\n    del forward[ahead:]\n    return made",
                "the two lists belong to the caller, who may use them again: take from them by slices, which copy, not by pop "
                "or del"),
        Mistake("the turns start over", "zip(forward[ahead:], backward, strict=False)", "zip(forward, backward, strict=False)",
                "the first `ahead` forward passes are already done: the turns continue with forward[ahead:]"),
        Mistake("drained from the end", "backward[len(forward) - ahead:]", "backward[len(forward) - ahead:][::-1]",
                "the last `ahead` backward passes are reversed: the micro-batch that went forward first comes back first here "
                "too"),
        Mistake("GPipe as `alternate`", "return forward[:ahead] + turns + backward[len(forward) - ahead:]",
                "return forward + backward",
                ALL),
        Mistake("GPipe itself", "    return alternate(forward, backward, ahead=min(p - rank - 1, m))",
                "    return forward + backward", ALL),
        Mistake("GPipe on all but the last", "ahead=min(p - rank - 1, m)", "ahead=0 if rank == p - 1 else m", ALL),
        Mistake("one more ahead, and backward first",
                "    turns = [both for pair in zip(forward[ahead:], backward, strict=False) for both in pair]\n",
                "    ahead = min(ahead + 1, len(forward))\n"
                "    turns = [both for pair in zip(backward, forward[ahead:], strict=False) for both in pair][:-1]\n", TURN),
        Mistake("back with those ahead", "zip(forward[ahead:], backward, strict=False)",
                "zip(forward[ahead:], backward[ahead:], strict=False)",
                "the first gradient that arrives belongs to the *first* micro-batch: the turns begin with backward[0]"),
        Mistake("twice as far ahead", "min(p - rank - 1, m)", "min(2 * (p - rank - 1), m)",
                "if messages take no time, running twice as far ahead saves no waiting and keeps more micro-batches: a "
                "gradient is back after p - rank - 1 more forward passes"),
        Mistake("no turns", "[both for pair in zip(forward[ahead:], backward, strict=False) for both in pair]",
                "[*forward[ahead:], *backward[:len(forward) - ahead]]", ALL),
    ),
}
