"""Known wrong answers of lesson 03."""

from course.lab.checks.exercise import Mistake

MISTAKES = {
    "sharded-sampler": (
        Mistake("every rank reads everything", "[mine].tolist()", ".tolist()",
                "each rank takes its own part of the global batch, my_slice(...): otherwise all ranks compute the same"),
        Mistake("on by its own share", "consumed += global_batch", "consumed += global_batch // ranks",
                "a step consumes the whole global batch, not this rank's part of it"),
        Mistake("the same batch again and again", "consumed += global_batch", "pass",
                "each batch begins where the previous one ended: count the consumed samples"),
        Mistake("every n-th sample", "[mine]", "[rank::ranks]",
                "a rank takes consecutive samples of the batch (my_slice): then its samples do not depend on the micro-batches"),
        Mistake("each rank shuffles for itself", "samples_at(seed,", "samples_at(seed + rank,",
                "all ranks must shuffle alike, or an epoch repeats some samples and misses others"),
        Mistake("from the beginning", "    while True:", "    consumed = 0\n    while True:",
                "it begins after `consumed` samples: a resumed run must not repeat the first ones"),
        Mistake("on from a whole batch", "    while True:", "    consumed -= consumed % global_batch\n    while True:",
                "`consumed` counts samples and may end inside a batch, because an earlier run may have used another batch size. "
                "Begin exactly there"),
        Mistake("a batch too late", "    while True:", "    consumed += global_batch\n    while True:",
                "the first batch begins at `consumed`: count it when it has been handed out, not before"),
        Mistake("the rest of an epoch is dropped", "    while True:",
                "    while True:\n        if consumed % n + global_batch > n:\n            consumed += n - consumed % n",
                "the samples at the end of an epoch that do not fill a batch are not dropped: samples_at continues in the next "
                "epoch"),
        Mistake("the same order in every epoch", "samples_at(seed, n, consumed, consumed + global_batch)",
                "np.concatenate([samples_at(seed, n, i % n, i % n + 1) for i in range(consumed, consumed + global_batch)])",
                "each epoch has its own order, which samples_at derives from the position in the whole stream: do not take the "
                "position modulo n"),
    ),
    "read-ahead": (
        Mistake("one ahead", "range(depth)", "range(1)",
                "only one is read ahead: submit `depth` reads before the first batch is due"),
        Mistake("asked for too late", "            waiting.append(pool.submit(next, source, END))\n            yield batch",
                "            yield batch\n            waiting.append(pool.submit(next, source, END))",
                "submit the next read before you yield a batch (the code after `yield` runs only after the batch was used), and "
                "submit `depth` reads at the start"),
        Mistake("waits for what it asks for",
                "            waiting.append(pool.submit(next, source, END))\n            yield batch",
                "            waiting.append(pool.submit(next, source, END))\n            waiting[-1].exception()\n"
                "            yield batch",
                "it waits for the read that it has just submitted, so reading and computing alternate again: yield first"),
        Mistake("asked like an iterator", "source = iter(batches)", "source = batches",
                "`batches` may be a list, and `next` does not accept a list: take iter(batches) first", silent=True),
        Mistake("equal to the end", "if batch is END:", "if batch == END:",
                "`==` may compare the numbers of an array one by one: `is END` compares the object itself", silent=True),
        Mistake("everything at once", "source = iter(batches)", "source = iter(list(batches))",
                "list() reads all batches before the first one is yielded"),
        Mistake("the end is handed out", "            if batch is END:\n                return\n", "",
                "END comes after the last batch: return then"),
        Mistake("errors end it quietly", "batch = waiting.popleft().result()",
                "first = waiting.popleft()\n            batch = END if first.exception() else first.result()",
                ".result() raises the error of the read: do not catch it"),
        Mistake("a batch that counts as nothing", "if batch is END:", "if batch is END or not batch:",
                "a batch may be 0 or empty and still be a batch: compare it with END (`is END`)"),
        Mistake("the latest first", "waiting.popleft()", "waiting.pop()",
                "the first batch that was requested is yielded first: popleft() takes the oldest, pop() the newest"),
        Mistake("one too many", "range(depth)", "range(depth + 1)",
                "it reads one more than `depth` ahead (a thread that waits for a place in a full queue already holds a batch)"),
        Mistake("many threads", "ThreadPoolExecutor(1)", "ThreadPoolExecutor(depth)",
                "two threads cannot share an iterator, and the order would be random: let one thread read", silent=True),
    ),
}
