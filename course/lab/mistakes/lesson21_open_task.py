"""Known wrong answers of lesson 21's open task, and correct ones that miss a level."""

from course.lab.checks.exercise import Mistake

START = "holders = [{rank for rank in ranks if expert in before[rank]} for expert in range(len(tokens))]"
MEAN = "    ranks, mean = range(len(before)), sum(tokens) / len(before)\n"
WHILE = "    while max(load) > 1.03 * mean:\n"
RETURN = "    return [[expert for expert, there in enumerate(holders) if rank in there] for rank in ranks]"
SQUARES = "sum(old * old - new * new for old, new in zip(load, after(change), strict=True)) / sent"

HOT = ("an expert with more tokens than two ranks' mean is too much for any rank. It needs copies, which share its tokens: of c "
       "copies, each computes 1 / c of them")

MISTAKES = {
    "place-experts": (
        Mistake("nothing moves", WHILE, "    while False:\n",
                "the busiest rank is as busy as before: the tokens have changed, so some experts have to move"),
        Mistake("the ranks of each expert", RETURN, "    return [sorted(there) for there in holders]",
                "the list has the ranks of expert 0, of expert 1, and so on; wanted are the experts of rank 0, of rank 1",
                stops="InvalidReturn"),
        Mistake("no slot for an expert without tokens", RETURN,
                RETURN.replace("if rank in there]", "if rank in there and tokens[expert]]"),
                "an expert that got no tokens lately can get some in the next step: keep one copy of it, too", by=("missing",)),
        Mistake("no limit", "if len(held[to]) < slots:", "if True:",
                "a slot is memory for one expert, also for a cold one: a rank with `slots` experts is full, however few tokens "
                "it has", by=("slots",)),
        Mistake("free slots are filled", RETURN,
                RETURN.replace("return ", "after = ") + "\n    return [(row + row)[:slots] for row in after]",
                "a second copy on the same rank takes no token off it: a free slot may stay free, or hold an expert of another "
                "rank", by=("twice",)),
        Mistake("as many experts everywhere", MEAN, "    tokens = [1] * len(tokens)\n" + MEAN,
                "this balances how many experts a rank has. It computes tokens, and some experts get many times as many as "
                "others"),
        Mistake("each copy gets all tokens", " / len(there)", "", HOT),
        Mistake("no copies", "copied, moved = holders[expert] | {to}, ", "copied = moved = ", HOT),
        Mistake("no exchange", "if busy not in rest:", "if False:",
                "where no slot is free and no copy can go, nothing can move alone: exchange an expert of the busiest rank for a "
                "colder one of another rank"),
        Mistake("the maximum decides", SQUARES, "(max(load) - max(after(change))) / sent",
                "often two ranks are about as busy, and no single change lowers the maximum. The sum of squares falls with each "
                "rank that comes nearer to the mean"),
        Mistake("it stops within 20%", "1.03 * mean", "1.2 * mean",
                "this placement is correct, but a few changes more bring the busiest rank within a few percent of the mean"),
        Mistake("a new placement", START, "holders = [{expert % len(before)} for expert in range(len(tokens))]",
                "this is a new placement, so nearly all experts move. Most can stay where they are: begin with `before`",
                by=("few",)),
    ),
}
