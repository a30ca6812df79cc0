"""Answers to exercises of lessons 02 to 04 that are not the library's own."""

RIGHT = {
    "named-parts": '''
import torch

class part:
    def __init__(self, name):
        self.name = name
        self.record = torch.profiler.record_function(name)

    def __enter__(self):
        self.gpu = torch.cuda.is_initialized()
        if self.gpu:
            torch.cuda.nvtx.range_push(self.name)
        self.record.__enter__()

    def __exit__(self, *error):
        self.record.__exit__(*error)
        if self.gpu:
            torch.cuda.nvtx.range_pop()
        return False
''',
    "busy-time": '''
def busy(intervals):
    """Count how many are under way from mark to mark."""
    marks = sorted([(begin, 1) for begin, _ in intervals] + [(end, -1) for _, end in intervals])
    total, under_way = 0.0, 0
    for (moment, change), (after, _) in zip(marks, marks[1:]):
        under_way += change
        if under_way:
            total += after - moment
    return total
''',
    "exposed-time": '''
def busy(intervals):
    total, end = 0.0, float("-inf")
    for a, b in sorted(intervals):
        if b > end:
            total, end = total + b - max(a, end), b
    return total

def exposed(communication, computation):
    shared = []
    for a, b in communication:
        shared += [(max(a, c), min(b, d)) for c, d in computation if max(a, c) < min(b, d)]
    return busy(communication) - busy(shared)
''',
    "launch-bound": '''
import itertools

def replay(launches, works):
    there = list(itertools.accumulate(launches))
    done = 0.0
    for launched, work in zip(there, works):
        done = max(done, launched) + work
    return done, done - sum(works)
''',
    "memory-peak": '''
import itertools

def alive_at_peak(events):
    """Find the moment by running totals; then replay up to it."""
    totals = list(itertools.accumulate(size if action == "alloc" else -size for action, _, size, _ in events))
    if not totals or max(totals) <= 0:
        return {}
    alive = []
    for action, address, size, line in events[:totals.index(max(totals)) + 1]:
        if action == "alloc":
            alive.append((address, size, line))
        else:
            alive = [block for block in alive if block[0] != address]
    return {line: sum(size for _, size, other in alive if other == line) for _, _, line in alive}
''',
    "sharded-sampler": '''
import itertools
from course.data.order import samples_at

def train_batches(seed, n, global_batch, ranks, rank, consumed):
    mine = global_batch // ranks
    for step in itertools.count():
        first = consumed + step * global_batch + rank * mine
        yield [int(sample) for sample in samples_at(seed, n, first, first + mine)]
''',
    "read-ahead": '''
import queue
import threading

def ahead(batches, depth):
    """A thread that fills a queue; it holds one batch itself while the queue is full."""
    full, stop, end = queue.Queue(depth - 1), threading.Event(), object()

    def put(what):
        while not stop.is_set():
            try:
                return full.put(what, timeout=0.01)
            except queue.Full:
                pass

    def read():
        try:
            for batch in batches:
                put((batch, None))
                if stop.is_set():
                    return
            put((end, None))
        except Exception as error:
            put((end, error))

    thread = threading.Thread(target=read)
    thread.start()
    try:
        while True:
            batch, error = full.get()
            if error is not None:
                raise error
            if batch is end:
                return
            yield batch
    finally:
        stop.set()
        thread.join()
''',
    "loss-scaler": '''
import torch
from course.ops.number_formats import GROW_AFTER

def next_scale(precision, scale, good, bad):
    if precision != "fp16":
        return scale, good
    worked = 1 - (bad > 0).long()
    good = (good + 1) * worked
    full = (good == GROW_AFTER).long()
    return scale * (1 + full) / (2 - worked), good * (1 - full)
''',
    "loss-scaler, in place": '''
import torch
from course.ops.number_formats import GROW_AFTER

def next_scale(precision, scale, good, bad):
    if precision == "fp16":
        good.copy_(torch.where(bad > 0, 0, good + 1))
        scale *= torch.where(bad > 0, 0.5, torch.where(good == GROW_AFTER, 2.0, 1.0))
        good %= GROW_AFTER
    return scale, good
''',
    "fp8-cast": '''
import torch

def to_fp8(x, scale, kind):
    largest = torch.full_like(x, torch.finfo(kind).max)
    return torch.maximum(torch.minimum(x.mul(scale), largest), -largest).to(dtype=kind)
''',
    "amax-history": '''
import torch

def remember(history, amax):
    moved = torch.roll(history, 1, dims=1)
    moved[:, 0] = amax
    return moved
''',
    "delayed-scale": '''
import torch

def delayed_scale(history, largest):
    top = torch.linalg.vector_norm(history, float("inf"), dim=1)
    return (largest / top).nan_to_num(posinf=1.0)
''',
}

SCALER = '''
import torch
from course.ops.number_formats import GROW_AFTER

def next_scale(precision, scale, good, bad):
    if precision != "fp16":
        return scale, good
    worked = 1 - (bad > 0).long()
    count = good + worked
    scale = scale * torch.where(bad > 0, 0.5, torch.where(count >= GROW_AFTER, 2.0, 1.0))
    return scale, torch.where(count >= GROW_AFTER, 0, count)
'''

ROLLED = '''
import torch

def remember(history, amax):
    moved = torch.roll(history, 1, dims=1)
    moved[:, -1] = amax
    return moved
'''

SCALED = '''
import torch

def delayed_scale(history, largest):
    return largest / history.max(1).values.clamp(min=1e-12)
'''

WRONG = [
    ("loss-scaler", SCALER, "it must not continue from where it was"),
    ("loss-scaler", SCALER.replace("good + worked", "(good + 1) * worked").replace(
        "torch.where(count >= GROW_AFTER, 0, count)", "count"), "each later good step doubles once more"),
    ("amax-history", ROLLED, "in column 0, write the new amax"),
    ("amax-history", ROLLED.replace(", dims=1", ""), "without a dim"),
    ("delayed-scale", SCALED, "the scale must be 1 there"),
    ("delayed-scale", SCALED.replace("history.max(1).values.clamp(min=1e-12)", "history.max()"),
     "amax(1) is the largest of each row"),
    ("delayed-scale", SCALED.replace("largest / history.max(1).values.clamp(min=1e-12)",
                                     "torch.full_like(history[:, 0], largest / history.max().item() if history.any() else 1.0)"),
     "each tensor has its own scale"),
]
