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
                "an exception skips the code after `yield`: pop the range in a `finally`"),
        Mistake("no range for nsys", "nvtx = torch.cuda.is_initialized()", "nvtx = False",
                "nsys sees only NVTX ranges: push one with torch.cuda.nvtx.range_push(name) where CUDA is in use"),
        Mistake("nothing for the profiler", "with record_function(name):", "if True:",
                "PyTorch's profiler sees the code inside `record_function(name)`: put the `yield` inside it"),
        Mistake("never closed", "range_pop()", "range_push(name)", "every range that is pushed has to be popped, range_pop()"),
        Mistake("NVTX without a GPU", "nvtx = torch.cuda.is_initialized()", "nvtx = True",
                "without CUDA there is no NVTX to call, and is_available says only that there is a GPU: ask "
                "torch.cuda.is_initialized() first"),
        Mistake("asked twice", "        if nvtx:\n            torch.cuda.nvtx.range_pop()",
                "        if torch.cuda.is_initialized():\n            torch.cuda.nvtx.range_pop()",
                "the block may be the first code that uses CUDA, and then this pops a range that nobody pushed: remember "
                "whether you pushed one"),
        Mistake("one name for all", "record_function(name)", 'record_function("part")',
                "the trace has to name the range: pass the name on to record_function"),
        Mistake("swallowed", "    finally:", "    except Exception:\n        pass\n    finally:",
                "the exception has to leave the block: remove the `except`"),
        Mistake("over before it begins", "with record_function(name):\n            yield", "with record_function(name):\n"
                "            pass\n        yield",
                "the range lasts as long as the block: `yield` inside `with record_function(name)`"),
    ),
    "busy-time": (
        Mistake("sorted in place", "in sorted(intervals)", "in intervals.sort() or intervals",
                "`sort` reorders the caller's list; `sorted(intervals)` makes a new list"),
        Mistake("a sum", "max(0.0, end - max(begin, reached))", "end - begin",
                "this adds up all lengths, but time that two intervals share counts once"),
        Mistake("not sorted", "sorted(intervals)", "intervals",
                "the intervals come in any order: sort them by their start first"),
        Mistake("forgets the longer one", "reached = max(reached, end)", "reached = end",
                "an interval may end before an earlier one does: the latest end so far must never decrease"),
        Mistake("less than nothing", "max(0.0, end - max(begin, reached))", "end - max(begin, reached)",
                "an interval inside another one adds nothing: clamp the difference at 0"),
        Mistake("back to the shorter one", "total += max(0.0, end - max(begin, reached))\n        reached = max(reached, end)",
                "total += end - max(begin, reached)\n        reached = end",
                "an interval inside a longer one subtracts time here: continue from the larger of the two ends, not from the "
                "last one"),
        Mistake("from first to last", "return total", "return reached - min(intervals)[0] if intervals else 0.0",
                "the gaps between intervals do not count"),
        Mistake("sorted by their ends", "sorted(intervals)", "sorted(intervals, key=lambda interval: interval[1])",
                "sort by the starts: sorted by the ends, a long interval comes after those inside it"),
    ),
    "exposed-time": (
        Mistake("all of it", EXPOSED, "return busy(communication)",
                "this is all communication, but communication that overlaps with computation costs no time"),
        Mistake("put together in place", EXPOSED, "communication.extend(computation)\n    return busy(communication) - "
                "busy(computation)", "`extend` changes the caller's list; [*communication, *computation] is a new one"),
        Mistake("a difference of sums", EXPOSED, "return max(0.0, busy(communication) - busy(computation))",
                "the lengths do not say when the intervals run: compare the time that is busy with both to the time that is "
                "busy with one"),
        Mistake("a negative difference", EXPOSED, "return busy(communication) - busy(computation)",
                "this is negative where computation takes longer than communication: subtract only the computation that "
                "overlaps with it"),
        Mistake("shared time twice", EXPOSED, f"return busy(communication) - sum(max(0.0, {SHARED}) {PAIRS})",
                "this adds up shared time pair by pair, so a moment that several pairs share counts several times"),
        Mistake("shared time twice, and cut off", EXPOSED,
                f"return max(0.0, busy(communication) - sum(max(0.0, {SHARED}) {PAIRS}))",
                "this subtracts too much, and clamping at 0 only hides it: time where several pairs overlap counts once"),
        Mistake("shared time below nothing", EXPOSED, f"return busy(communication) - sum({SHARED} {PAIRS})",
                "two intervals that do not overlap share 0 seconds, not a negative time: clamp each difference at 0"),
        Mistake("message by message", EXPOSED, f"return sum(max(0.0, b - a - sum(max(0.0, {SHARED}) for c, d in computation)) "
                "for a, b in communication)",
                "messages overlap with each other too, and this counts each one by itself: call `busy` once for all of them"),
        Mistake("lengths of computation", "- busy(computation)", "- sum(end - begin for begin, end in computation)",
                "kernels overlap: subtract the time in which at least one runs, not the sum of their lengths"),
        Mistake("computing alone", "- busy(computation)", "- busy(communication)",
                "this is the computation without communication beside it: it is the other way round"),
        Mistake("the hidden part", EXPOSED,
                "return busy(communication) + busy(computation) - busy([*communication, *computation])",
                "this is the hidden part, where both run: the exposed part is the rest of the communication"),
        Mistake("everything", " - busy(computation)", "",
                "this is the time in which anything runs: subtract the time in which something is computed"),
    ),
    "launch-bound": (
        Mistake("the host waits", "gpu = max(host, gpu) + work", "gpu = host = max(host, gpu) + work",
                "the host does not wait for a kernel to finish: it launches the next one meanwhile"),
        Mistake("the GPU alone", "gpu = max(host, gpu) + work", "gpu += work",
                "a kernel cannot start before its launch: the GPU may have to wait for the host"),
        Mistake("the host alone", "gpu = max(host, gpu) + work", "gpu = host + work",
                "a kernel also waits for the previous one: it starts when it is launched and the GPU is free"),
        Mistake("all at once", "host += launch", "host = launch",
                "the host launches one kernel after the other: their launches add up"),
        Mistake("the first wait forgotten", "idle += max(0.0, host - gpu)", "idle += max(0.0, host - gpu) if gpu else 0.0",
                "the GPU is also idle until its first kernel starts"),
        Mistake("waits that are negative", "idle += max(0.0, host - gpu)", "idle += host - gpu",
                "where the host is ahead, the GPU waits 0 seconds, not a negative time: clamp the difference at 0"),
        Mistake("all but the work", "return gpu, idle", "return host, idle",
                "the step ends when the GPU finishes, not when the host has launched the last kernel"),
        Mistake("a share", "return gpu, idle", "return gpu, idle / gpu",
                "this is the fraction of the time in which the GPU is idle: return the idle time itself, in seconds"),
        Mistake("the larger of two sums",
                "return gpu, idle",
                "return max(host + works[-1], sum(works)), idle",
                "the host may be ahead at some kernels and behind at others, and the larger of two sums misses that: go "
                "from kernel to kernel"),
        Mistake("launches or work",
                "return gpu, idle",
                "return max(host, sum(works)), idle",
                "neither the sum of the launches nor that of the work is the end: a kernel starts when it is launched and "
                "the one before is done"),
        Mistake("what is left after the last launch",
                "return gpu, idle",
                "return gpu, gpu - host",
                "this is how long the GPU still works after the last launch: add up how long it waits before each kernel"),
    ),
    "memory-peak": (
        Mistake("the end", "if now > most:", "if True:",
                "this is what is alive at the end: keep what is alive whenever the total is higher than ever before"),
        Mistake("all allocations", "alive.pop(address, None)", "pass",
                "this also counts blocks that were freed before: take a freed block out of those that are alive"),
        Mistake("the free of an older block is left out", "alive.pop(address, None)\n            now -= size",
                "if alive.pop(address, None):\n                now -= size",
                "a block from before the recording is part of the memory too: its free lowers the total"),
        Mistake("an address that was never seen", "alive.pop(address, None)", "alive.pop(address)",
                "some frees are of blocks from before the recording: their addresses are not among those that you keep",
                stops="KeyError"),
        Mistake("only the first of a line", "lines[line] += size", "lines[line] = size",
                "several blocks come from one line: add up their bytes"),
        Mistake("most of each line", "    lines = Counter[str]()\n    for line, size in held:\n        lines[line] += size\n"
                "    return dict(lines)",
                "    now, most = Counter(), Counter()\n    where = {}\n    for action, address, size, line in events:\n"
                "        if action == 'alloc':\n            where[address] = line\n            now[line] += size\n"
                "            most[line] = max(most[line], now[line])\n        elif address in where:\n"
                "            now[where.pop(address)] -= size\n    return dict(most)",
                "each line is at its highest at another moment: find the moment at which all together are, and what is alive "
                "then"),
        Mistake("the most blocks", "if now > most:\n            most, held = now,",
                "if len(alive) > most:\n            most, held = len(alive),",
                "the most blocks need not be the most bytes: compare totals of bytes"),
        Mistake("an address has one line", "    now = most = 0\n    for action, address, size, line in events:\n"
                "        if action == \"alloc\":\n            alive[address] = line, size",
                "    now = most = 0\n    first = {}\n    for action, address, size, line in events:\n"
                "        if action == \"alloc\":\n            alive[address] = first.setdefault(address, line), size",
                "a freed address is given again, to another line"),
        Mistake("before the last one came", "most, held = now, list(alive.values())",
                "most, held = now, list(alive.values())[:-1]",
                "the block that makes the total highest is alive at that moment too"),
        Mistake("blocks, not bytes", "lines[line] += size", "lines[line] += 1",
                "this counts blocks: add up their bytes"),
    ),
}
