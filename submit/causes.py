"""Pass on what the ranks of a job print (`srun --label`), and of those that fail first what the first one says.

When a rank fails, the others lose the connection to it and fail, too, each with a traceback of its own. From the first one on,
what failing ranks say is held back until the job has ended, or for HOLD seconds. Then comes the cause; then the rest, one line of
each rank that only lost the connection.
Needs no more than Python 3.6 and reads only its standard input.
"""

import io
import os
import re
import select
import signal
import sys
import time

HOLD = 30.0                                          # seconds: a traceback that ends nothing must not silence its rank
BEGINS = re.compile(r"(\[rank\d+\]: )?(Traceback \(most recent call last\)|course: |another rank has failed)"
                    r"|\[rank\d+\]:\[[WE]\d+ \S+ \w+\.cpp:\d+\]")                 # PyTorch's C++, when the store is gone
LOST = re.compile(r"[Cc]onnection (closed|reset|refused)|Broken pipe|another rank has failed|DistBackendError|DistNetworkError")
OF_A_RANK = re.compile(r" *(\d+): ?(.*)")            # as srun --label writes it
ENDED = re.compile(r"srun: error: (\S+): tasks? ([\d,-]+): (.*)")
GONE = re.compile(r"course: rank (\d+) \(process \d+ of (\S+)\) is gone")         # as course/resilience/stall_watchdog.py says it


class Causes:
    """Takes lines one by one; holds those of ranks that fail."""

    def __init__(self, out):
        self.out = out
        self.held = {}                               # rank -> its lines, in the order in which the ranks began to fail
        self.ends = []                               # what srun says of tasks, in order
        self.since = None                            # when the first line was held

    def take(self, line):
        match = OF_A_RANK.fullmatch(line.rstrip("\n"))
        rank, text = match.groups() if match else (None, line)
        failing = bool(self.held or self.ends)
        if ENDED.match(line) and line.rstrip().endswith("Exited with exit code 75"):
            return                                   # no failure: a signal stopped it, and all is saved
        if ENDED.match(line) or (failing and (line.startswith("srun: ") or text.startswith("slurmstepd"))):
            self.ends.append(line)
        elif rank in self.held or (rank and BEGINS.match(text)):
            self.held.setdefault(rank, []).append(line)
        else:
            self.out.write(line)
            self.out.flush()
            return
        self.since = self.since or time.monotonic()

    def late(self):
        return self.since is not None and time.monotonic() - self.since > HOLD

    def release(self, over=True):
        """Print what is held: the cause, then the rest. over: whether the job has ended; before, nothing need have failed."""
        first, order = self.cause()
        if over or self.ends:
            self.out.write(first)
        for rank in order:
            lines = self.held[rank]
            consequence = LOST.search(lines[-1]) and not (rank == order[0] and first.endswith(":\n"))
            self.out.writelines(lines[-1:] if consequence else lines)
        self.out.writelines(self.ends)
        self.out.flush()
        self.held, self.ends, self.since = {}, [], None

    def cause(self):
        """A headline, and the ranks in the order in which they are shown."""
        order = sorted(self.held, key=lambda rank: any("another rank has failed" in line for line in self.held[rank][:1]))
        gone = next((match.groups() for lines in self.held.values() for match in map(GONE.search, lines) if match), None)
        if gone:                                     # srun may hear first of those that gave way
            ends = [match.groups() for match in map(ENDED.match, self.ends) if match]
            host, ranks, how = next((end for end in ends if gone[0] in numbers(end[1])), (gone[1], gone[0], "it is gone"))
            return f"== first failed rank {ranks} on {host}: {how}\n", order
        told = ENDED.match(self.ends[0]) if self.ends else None
        if told and not set(numbers(told.group(2))) & set(self.held):
            # it ended without a word: killed, or out of memory; what the others say is a consequence
            return f"== first failed rank {told.group(2)} on {told.group(1)}: {told.group(3)}\n", order
        if told and order and order[0] not in numbers(told.group(2)):
            ended = [rank for rank in order if rank in numbers(told.group(2))]
            order = ended + [rank for rank in order if rank not in ended]
        return (f"== first failed rank {order[0]}:\n" if order else ""), order


def numbers(text):
    """`0-2,5` as ["0", "1", "2", "5"]."""
    found = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += [str(number) for number in range(int(first), int(last or first) + 1)]
    return found


def main():
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):      # the ranks are stopped, and still have something to say:
        signal.signal(number, signal.SIG_IGN)                           # it ends when there is no more to read
    # bytes that are no text, and text that the locale has no letters for, go through as they are
    causes, rest = Causes(io.TextIOWrapper(sys.stdout.buffer, encoding="utf-8", errors="surrogateescape", newline="")), b""
    while True:
        if select.select([0], [], [], 1.0)[0]:
            data = os.read(0, 1 << 16)
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                causes.take(line.decode("utf-8", "surrogateescape") + "\n")
        if causes.late():
            causes.release(over=False)
    if rest:
        causes.take(rest.decode("utf-8", "surrogateescape") + "\n")
    causes.release()


if __name__ == "__main__":
    main()
