"""Known wrong answers of lesson 03's open task, and correct ones that miss a level."""

from course.lab.checks.exercise import Mistake

FILL = """                while following < len(self.order) and len(waiting) <= self.depth:
                    waiting.append(pool.submit(self.read, self.order[following]))
                    following += 1
"""
RAISES = "                waiting[0].result()                   # raises what reading raised; then its sample is not done\n"
HAND = "                self.position += 1\n                yield waiting.popleft().result()\n"
EMPTY = "                if not waiting:\n                    return\n"
SHUT = "        finally:\n            pool.shutdown(cancel_futures=True)"
LESS = ("while the training works on a sample, `depth` others should be read. Ask for the next read before you hand out a "
        "sample, and do not count the one that is handed out")

START = ("a new loader begins with the first sample: count `position` up with every sample that is handed out, and begin at "
         "`position`")
CLOSE = ("after the generator was closed, reads begin or threads live on. `pool.shutdown(cancel_futures=True)` in a `finally` "
         "waits for the reads that run, and cancels those in the queue")
FAR = ("reads are asked for too early, so too many samples may lie in memory: ask for `depth` beyond the one that is handed out, "
       "and not more")
CROWD = "`threads` is the number of reads that the disk serves at once; how far the loader reads ahead is `depth`"

MISTAKES = {
    "loader": (
        Mistake("the position of what was asked for", HAND,
                HAND.replace("self.position += 1", "self.position = following"),
                "`position` counts samples that were handed out. Those that are read ahead are lost if the run ends, so a new "
                "loader has to read them again"),
        Mistake("the position counts a failed read", RAISES + "                self.position += 1\n",
                "                self.position += 1\n" + RAISES,
                "a sample whose read failed was not handed out: count it after `.result()`, which raises"),
        Mistake("the position stays", "                self.position += 1\n", "", START),
        Mistake("always from the start", "following = self.position", "following, self.position = 0, 0", START),
        Mistake("an error is skipped", RAISES, "                if waiting[0].exception():\n"
                "                    waiting.popleft()\n                    continue\n",
                "an error must come out, or training goes on without that sample and nobody hears of it"),
        Mistake("an error ends quietly", RAISES, "                if waiting[0].exception():\n                    return\n",
                "an error must come out: this ends the epoch as if the data had ended"),
        Mistake("the last samples are left", EMPTY, EMPTY.replace("not waiting", "following == len(self.order)"),
                "after the last read was asked for, samples still wait in the queue: stop when it is empty"),
        Mistake("more threads than allowed", "ThreadPoolExecutor(self.threads)", "ThreadPoolExecutor(2 * self.threads)", CROWD),
        Mistake("a thread a sample ahead", "ThreadPoolExecutor(self.threads)", "ThreadPoolExecutor(self.depth + 1)", CROWD),
        Mistake("waiting reads begin while closing", "pool.shutdown(cancel_futures=True)", "pool.shutdown()", CLOSE),
        Mistake("nobody ends the threads", SHUT, "        finally:\n            self.pool = pool", CLOSE),
        Mistake("one thread", "ThreadPoolExecutor(self.threads)", "ThreadPoolExecutor(1)",
                "one read runs at a time: a sample that takes long holds up all others. Let `threads` reads run at once",
                by=("together",)),
        Mistake("one less ahead", "len(waiting) <= self.depth", "len(waiting) < self.depth", LESS, by=("meanwhile",)),
        Mistake("all are asked for", " and len(waiting) <= self.depth", "", FAR, by=("ahead",)),
        Mistake("one more ahead", "len(waiting) <= self.depth", "len(waiting) <= self.depth + 1", FAR, by=("ahead", "kept")),
        Mistake("samples are kept", HAND, "                self.position += 1\n"
                "                self.seen = [*getattr(self, 'seen', []), waiting.popleft().result()]\n"
                "                yield self.seen[-1]\n",
                "a sample is kept after it was handed out: hold no reference to it, in no list and in no future", by=("kept",)),
    ),
}
