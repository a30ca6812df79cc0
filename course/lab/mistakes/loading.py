"""Known wrong answers of lesson 03."""

from course.lab.exercise import Mistake

MISTAKES = {
    "sharded-sampler": (
        Mistake("every rank reads everything", "[mine].tolist()", ".tolist()",
                "each rank takes its own part of the global batch, my_slice(...): else all compute the same"),
        Mistake("on by its own share", "consumed += global_batch", "consumed += global_batch // ranks",
                "a step consumes the whole global batch, not this rank's part of it"),
        Mistake("the same batch again and again", "consumed += global_batch", "pass",
                "each batch begins where the one before ended: count what has been consumed"),
        Mistake("every n-th sample", "[mine]", "[rank::ranks]",
                "a rank takes neighbouring samples of the batch (my_slice): then its part is the same however batches are cut"),
        Mistake("each rank shuffles for itself", "samples_at(seed,", "samples_at(seed + rank,",
                "all ranks must shuffle alike, or some samples are seen twice in an epoch and others never"),
        Mistake("from the beginning", "    while True:", "    consumed = 0\n    while True:",
                "it begins after `consumed` samples: a run that goes on must not see the first ones again"),
    ),
    "read-ahead": (
        Mistake("one ahead", "range(depth)", "range(1)",
                "only one is read ahead: submit `depth` reads before the first batch is due"),
        Mistake("asked for too late", "            waiting.append(pool.submit(next, source, END))\n            yield batch",
                "            yield batch\n            waiting.append(pool.submit(next, source, END))",
                "ask for the next read before you hand out a batch: after `yield` means when the batch has been worked on"),
        Mistake("everything at once", "source = iter(batches)", "source = iter(list(batches))",
                "list() reads all batches before the first one is handed out"),
        Mistake("the end is handed out", "            if batch is END:\n                return\n", "",
                "after the last batch comes END: return then"),
        Mistake("errors end it quietly", "batch = waiting.popleft().result()",
                "first = waiting.popleft()\n            batch = END if first.exception() else first.result()",
                ".result() raises what reading raised: let it"),
        Mistake("one too many", "range(depth)", "range(depth + 1)",
                "one more than `depth` is read ahead (a thread that waits to put a batch into a full queue has one in its hand)"),
        Mistake("many threads", "ThreadPoolExecutor(1)", "ThreadPoolExecutor(depth)",
                "an iterator cannot be asked by two, and order would be left to chance: let one thread read", silent=True),
    ),
}
