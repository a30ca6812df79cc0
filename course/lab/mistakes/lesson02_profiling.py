"""Known wrong answers of lesson 02."""

from course.lab.checks.exercise import Mistake

EXPOSED = "return busy([*communication, *computation]) - busy(computation)"
SHARED, PAIRS = "min(b, d) - max(a, c)", "for a, b in communication for c, d in computation"

MISTAKES = {
    "named-parts": (
        Mistake("left open by an exception",
                "    try:\n        with record_function(name):\n            yield\n    finally:\n        if nvtx:\n"
                "            torch.cuda.nvtx.range_pop()",
                "    with record_function(name):\n        yield\n    if nvtx:\n        torch.cuda.nvtx.range_pop()",
                "an exception jumps over what follows `yield`: pop the range in a `finally`"),
        Mistake("no range for nsys", "nvtx = torch.cuda.is_initialized()", "nvtx = False",
                "nsys sees NVTX ranges alone: push one, torch.cuda.nvtx.range_push(name), where CUDA is in use"),
        Mistake("nothing for the profiler", "with record_function(name):", "if True:",
                "PyTorch's profiler sees what `record_function(name)` surrounds: put the `yield` inside it"),
        Mistake("never closed", "range_pop()", "range_push(name)", "every range that is pushed has to be popped, range_pop()"),
        Mistake("NVTX without a GPU", "nvtx = torch.cuda.is_initialized()", "nvtx = True",
                "without CUDA there is no NVTX to call, and that there is a GPU (is_available) does not say that CUDA is in use: "
                "ask torch.cuda.is_initialized() first"),
        Mistake("asked twice", "        if nvtx:\n            torch.cuda.nvtx.range_pop()",
                "        if torch.cuda.is_initialized():\n            torch.cuda.nvtx.range_pop()",
                "the block may be the first to use CUDA, and then this closes a range that nobody opened: remember whether you "
                "pushed one"),
        Mistake("one name for all", "record_function(name)", 'record_function("part")',
                "the trace is to show which part it was: pass the name on to record_function"),
        Mistake("swallowed", "    finally:", "    except Exception:\n        pass\n    finally:",
                "an exception has to come out of the block again: leave out the `except`"),
        Mistake("over before it begins", "with record_function(name):\n            yield", "with record_function(name):\n"
                "            pass\n        yield",
                "the part lasts as long as the block: `yield` inside `with record_function(name)`"),
    ),
    "busy-time": (
        Mistake("sorted in place", "in sorted(intervals)", "in intervals.sort() or intervals",
                "`sort` puts the caller's list in order; `sorted(intervals)` makes a list of your own"),
        Mistake("a sum", "max(0.0, end - max(begin, reached))", "end - begin",
                "this adds up all lengths: time in which two are under way counts once"),
        Mistake("not sorted", "sorted(intervals)", "intervals",
                "they come in any order: sort them by where they begin before you go through them"),
        Mistake("forgets the longer one", "reached = max(reached, end)", "reached = end",
                "an interval may end before an earlier one does: what has been reached never goes back"),
        Mistake("less than nothing", "max(0.0, end - max(begin, reached))", "end - max(begin, reached)",
                "an interval that lies within another adds nothing: cut the difference off at 0"),
        Mistake("back to the shorter one", "total += max(0.0, end - max(begin, reached))\n        reached = max(reached, end)",
                "total += end - max(begin, reached)\n        reached = end",
                "an interval that lies within a longer one takes time away here: go on from the larger of the two ends, not from "
                "the last one"),
        Mistake("from first to last", "return total", "return reached - min((begin for begin, _ in intervals), default=reached)",
                "between intervals there are gaps, which do not count"),
        Mistake("sorted by their ends", "sorted(intervals)", "sorted(intervals, key=lambda interval: interval[1])",
                "sort by where they begin: sorted by their ends, a long one comes after those within it"),
    ),
    "exposed-time": (
        Mistake("all of it", EXPOSED, "return busy(communication)",
                "this is all communication: what has computation beside it costs no time"),
        Mistake("put together in place", EXPOSED, "communication.extend(computation)\n    return busy(communication) - "
                "busy(computation)", "`extend` makes the caller's list longer; [*communication, *computation] is a new one"),
        Mistake("a difference of sums", EXPOSED, "return max(0.0, busy(communication) - busy(computation))",
                "that one takes longer than the other does not say when they run: look at what is busy with both, and with one"),
        Mistake("a negative difference", EXPOSED, "return busy(communication) - busy(computation)",
                "this is negative where computing takes longer than sending: take away only what runs beside sending, not all of "
                "the computing"),
        Mistake("shared time twice", EXPOSED, f"return busy(communication) - sum(max(0.0, {SHARED}) {PAIRS})",
                "shared time is added up here pair by pair, and a moment that several pairs share is in the sum several times"),
        Mistake("shared time twice, and cut off", EXPOSED,
                f"return max(0.0, busy(communication) - sum(max(0.0, {SHARED}) {PAIRS}))",
                "too much is taken away, and cutting off at 0 only hides it: where several pairs overlap, that time counts once"),
        Mistake("shared time below nothing", EXPOSED, f"return busy(communication) - sum({SHARED} {PAIRS})",
                "two intervals that never meet share nothing, not less than nothing: cut each difference off at 0"),
        Mistake("message by message", EXPOSED, f"return sum(max(0.0, b - a - sum(max(0.0, {SHARED}) for c, d in computation)) "
                "for a, b in communication)",
                "messages run side by side too, and each is counted by itself here: call `busy` for all of them together"),
        Mistake("lengths of computation", "- busy(computation)", "- sum(end - begin for begin, end in computation)",
                "kernels run side by side: take away the time in which at least one is under way, not the sum of their lengths"),
        Mistake("computing alone", "- busy(computation)", "- busy(communication)",
                "this is computation beside which nothing is sent: it is the other way round"),
        Mistake("the hidden part", EXPOSED,
                "return busy(communication) + busy(computation) - busy([*communication, *computation])",
                "this is the part that is hidden, when both are under way: the exposed part is the rest of the communication"),
        Mistake("everything", " - busy(computation)", "",
                "this is the time in which anything is under way: take away that in which something is computed"),
    ),
    "launch-bound": (
        Mistake("the host waits", "gpu = max(host, gpu) + work", "gpu = host = max(host, gpu) + work",
                "the host does not wait until a kernel is done: it launches the next one meanwhile"),
        Mistake("the GPU alone", "gpu = max(host, gpu) + work", "gpu += work",
                "a kernel cannot begin before it has been launched: the GPU may have to wait for the host"),
        Mistake("the host alone", "gpu = max(host, gpu) + work", "gpu = host + work",
                "a kernel waits for the one before it as well: it begins when it is launched and the GPU is free"),
        Mistake("all at once", "host += launch", "host = launch",
                "the host launches one kernel after the other: their launches add up"),
        Mistake("the first wait forgotten", "idle += max(0.0, host - gpu)", "idle += max(0.0, host - gpu) if gpu else 0.0",
                "the GPU has nothing to do, too, until its first kernel is there"),
        Mistake("waits that are negative", "idle += max(0.0, host - gpu)", "idle += host - gpu",
                "where the host is ahead the GPU does not wait less than nothing: cut the difference off at 0"),
        Mistake("all but the work", "return gpu, idle", "return host, idle",
                "the step is over when the GPU is done, not when the host has launched its last kernel"),
        Mistake("a share", "return gpu, idle", "return gpu, idle / gpu",
                "this is the share of the time in which the GPU is idle: return that time itself, in seconds"),
    ),
}
