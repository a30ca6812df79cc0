"""Known wrong answers of lesson 12."""

from course.lab.checks.exercise import Mistake

BACKWARD = '[Pass("B", 0, i) for i in range(m)]'
BOTH = f'[Pass("F", 0, i) for i in range(m)] + {BACKWARD}'
ALL = ("this is GPipe again, which keeps all micro-batches: a rank is ahead by as many as there are ranks behind it, and then "
       "does one forward and one backward pass in turn")
TURN = ("in each turn the forward pass comes first, also where a rank is not ahead: the last rank has nothing to go back "
        "through before it")

MISTAKES = {
    "gpipe": (
        Mistake("one micro-batch after another", BOTH, '[Pass(kind, 0, i) for i in range(m) for kind in ("F", "B")]',
                "each micro-batch comes back before the next one enters, so one rank works at a time: all forward passes first"),
        Mistake("no backward passes", f" + {BACKWARD}", "",
                "these are the forward passes alone: after them come as many backward passes"),
        Mistake("the rank for the chunk", '", 0, i)', '", rank, i)',
                "the second field counts the chunks of *this* rank, and there is one: its number is 0"),
        Mistake("as many micro-batches as ranks", "range(m)", "range(p)",
                "there are m micro-batches, however many ranks: p says how many ranks there are"),
        Mistake("counted from 1", "range(m)", "range(1, m + 1)",
                "the micro-batches are 0 to m - 1, which is range(m): count from 0"),
        Mistake("chunk and micro-batch changed over", '", 0, i)', '", i, 0)',
                "the fields are kind, chunk and micro-batch, in this order: the chunk is always 0, the micro-batch counts"),
        Mistake("the last micro-batch forgotten", "range(m)", "range(m - 1)",
                "the micro-batches are 0 to m - 1, which is range(m): one is missing"),
        Mistake("backward passes first", BOTH, f'{BACKWARD} + [Pass("F", 0, i) for i in range(m)]',
                "a backward pass needs the activations of its own forward pass, so it cannot come before it"),
        Mistake("the last one back first", BACKWARD, '[Pass("B", 0, i) for i in reversed(range(m))]',
                "the first micro-batch comes first both times: backward, too, goes from 0 to m - 1 (the last one first takes as "
                "long, but is another schedule)"),
        Mistake("another order on some ranks", BACKWARD, '[Pass("B", 0, i) for i in range(m)][::1 if rank % 2 else -1]',
                "neighbours disagree on the order of the backward passes: a rank takes the gradient that comes first for the one "
                "that it awaits first"),
        Mistake("micro-batches of its own", "range(m)", "range(rank, m, p)",
                "every micro-batch goes through every rank: these are those that data parallelism would give this one"),
        Mistake("begins later", "range(m)", "range(rank, m)",
                "every rank does all m micro-batches: that it has to wait for the first one is not in the list, but follows "
                "from it"),
        Mistake("a share of the micro-batches", "range(m)", "range(m // p)",
                "a pipeline cuts the model, not the batch: every rank does all m micro-batches"),
    ),
    "1f1b": (
        Mistake("one too many ahead", "min(p - rank - 1, m)", "min(p - rank, m)",
                "where messages take no time it is as fast, but keeps one micro-batch more than it must: the last rank should be "
                "no forward pass ahead"),
        Mistake("one too few ahead", "min(p - rank - 1, m)", "min(max(p - rank - 2, 0), m)",
                "the ranks behind this one run dry: p - rank - 1 micro-batches must follow the first one to keep them busy until "
                "its gradient comes back"),
        Mistake("the same on every rank", "min(p - rank - 1, m)", "min(p - 1, m)",
                "only the first rank is p - 1 forward passes ahead; each rank behind it has a shorter way to the end, by one"),
        Mistake("counted from the wrong end", "min(p - rank - 1, m)", "min(rank, m)",
                "the first rank is the farthest from the loss, so it runs ahead the most: count from the last rank, not from the "
                "first"),
        Mistake("nobody ahead", "min(p - rank - 1, m)", "0",
                "no rank is ahead, so all wait in every turn until the micro-batch is back: all but the last have to run ahead"),
        Mistake("all ahead", "min(p - rank - 1, m)", "m",
                ALL),
        Mistake("passes of its own", "    return forward[:ahead]", "    forward, backward = ([Pass(kind, 0, i) for i in "
                "range(len(forward))] for kind in (\"F\", \"B\"))\n    return forward[:ahead]",
                "`alternate` makes passes of its own: interleaving gives it those of several chunks, so use what you are given"),
        Mistake("more ahead than there are", "ahead=min(p - rank - 1, m)", "ahead=p - rank - 1",
                "with fewer micro-batches than ranks no rank can be p - rank - 1 ahead: at most m"),
        Mistake("backward first in each turn", "zip(forward[ahead:], backward, strict=False)",
                "zip(backward, forward[ahead:], strict=False)", TURN),
        Mistake("the pipeline is not drained", " + backward[len(forward) - ahead:]", "",
                "when there are no forward passes left, `ahead` backward passes are: append them"),
        Mistake("minus nothing is everything", "backward[len(forward) - ahead:]", "backward[-ahead:]",
                "with ahead = 0 the slice backward[-0:] is the whole list: count from the front instead"),
        Mistake("too much of the rest", "backward[len(forward) - ahead:]", "backward[ahead:]",
                "the turns have done len(forward) - ahead backward passes: what is left begins there"),
        Mistake("the lists used up", "    return forward[:ahead] + turns + backward[len(forward) - ahead:]",
                "    made = forward[:ahead] + turns + backward[len(forward) - ahead:]\n    del forward[ahead:]\n    return made",
                "the two lists are the caller's, who may need them once more: take from them by slices, which copy, not by pop "
                "or del"),
        Mistake("the turns start over", "zip(forward[ahead:], backward, strict=False)", "zip(forward, backward, strict=False)",
                "the first `ahead` forward passes have been done: the turns go on with forward[ahead:]"),
        Mistake("drained from the end", "backward[len(forward) - ahead:]", "backward[len(forward) - ahead:][::-1]",
                "the drain is reversed: the micro-batch that went forward first comes back first, also among the last `ahead`"),
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
                "the first gradient that comes is that of the *first* micro-batch: the turns go backward from backward[0] on"),
        Mistake("twice as far ahead", "min(p - rank - 1, m)", "min(2 * (p - rank - 1), m)",
                "where messages take no time, twice as many keep nobody busier, and have to be kept: a gradient is back after "
                "p - rank - 1 more forward passes"),
        Mistake("no turns", "[both for pair in zip(forward[ahead:], backward, strict=False) for both in pair]",
                "[*forward[ahead:], *backward[:len(forward) - ahead]]", ALL),
    ),
}
