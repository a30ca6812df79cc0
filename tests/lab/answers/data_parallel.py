"""Answers to exercises of lesson 07, and of 12, 15 and 17, that are not the library's own: in other words, or by another rule."""

RING = '''
import torch
import torch.distributed as dist

def ring_all_reduce(x, axis):
    """A list of what each rank holds, in two rounds."""
    n, me = axis.size, axis.rank
    right, left = axis.ranks[(me + 1) % n], axis.ranks[(me - 1) % n]
    held = [piece.clone() for piece in x.reshape(-1).tensor_split(n)]
    for added, first in ((True, me), (False, me + 1)):
        for step in range(n - 1):
            goes, comes = (first - step) % n, (first - step - 1) % n
            coming = torch.empty_like(held[comes])
            EXCHANGE
            held[comes] = held[comes] + coming if added else coming
    return torch.cat(held).view_as(x)
'''
BOTH = """sending, receiving = dist.isend(held[goes], right, group=axis.group), dist.irecv(coming, left, group=axis.group)
            receiving.wait()
            sending.wait()"""

BUCKETS = '''
def partition_into_buckets(parameters, size):
    """Indices where buckets begin."""
    begins, held = [], 0
    for number, parameter in enumerate(parameters):
        other = number and parameter.dtype != parameters[number - 1].dtype
        held += parameter.numel() * parameter.element_size()
        if not number or other or held > size:
            begins.append(number)
            held = parameter.numel() * parameter.element_size()
    return [list(parameters[a:b]) for a, b in zip(begins, [*begins[1:], len(parameters)])]
'''

TIMES = '''
def collective_times(ready, seconds):
    ends = []
    for at, lasts in zip(ready, seconds):
        ends.append(max([at, *ends[-1:]]) + lasts)
    return [(end - lasts, end) for end, lasts in zip(ends, seconds)]
'''

OVERLAP = '''
import torch.distributed as dist

def gradient_ready(ddp, bucket, index):
    bucket.take(index)
    bucket.waiting[index] -= 1
    for nxt in ddp.early[ddp.started:]:
        if sum(nxt.waiting):
            break
        ddp.start(nxt)
        ddp.started += 1

def start_mean(bucket, axis):
    bucket.flat /= axis.size
    bucket.work = dist.all_reduce(bucket.flat, group=axis.group, async_op=True)

def finish_mean(bucket, axis):
    bucket.work.wait()
'''

RIGHT = {
    "ring-all-reduce": [
        RING.replace("EXCHANGE", BOTH),
        RING.replace("EXCHANGE", """works = dist.batch_isend_irecv([dist.P2POp(dist.isend, held[goes], right, axis.group),
                                            dist.P2POp(dist.irecv, coming, left, axis.group)])
            for work in works:
                work.wait()"""),
        RING.replace("EXCHANGE", """turns = [lambda: dist.send(held[goes], right, axis.group),
                     lambda: dist.recv(coming, left, axis.group)]
            for turn in turns[::-1] if me % 2 else turns:
                turn()""")],
    "in-buckets": BUCKETS,
    "collective-times": TIMES,
    "overlap": OVERLAP,
    "guidance, of 0 with the unknown class alone": """
import torch
from course.inference.diffusion_sampler import predictor

def guided(model, labels, scale, channels=0, precision="fp32"):
    unknown = torch.full_like(labels, model.c.classes)
    if scale in (0, 1) and not (channels and scale == 0):
        return predictor(model, labels if scale else unknown, precision)
    ask = predictor(model, torch.cat([labels, unknown]), precision)

    def led(x, time):
        with_class, without = ask(torch.cat([x, x]), torch.cat([time, time])).tensor_split(2)
        out = without.lerp(with_class, scale)
        return torch.cat([out[:, :channels], with_class[:, channels:]], 1) if channels else out

    return led
""",
}

WRONG = [
    ("ring-all-reduce", RING.replace("EXCHANGE", BOTH.replace("            receiving.wait()\n", "")), "before you add or copy"),
    ("ring-all-reduce", RING.replace("EXCHANGE", BOTH.replace("\n            sending.wait()", "")), "wait for it too"),
    ("ring-all-reduce", RING.replace("EXCHANGE", BOTH).replace("(False, me + 1)", "(False, me)"), "look at both rounds"),
    ("ring-all-reduce", RING.replace("EXCHANGE", BOTH).replace("(False, me + 1)", "(False, me - 1)"), "right only for two ranks"),
    ("in-buckets", BUCKETS.replace("parameter.numel() * parameter.element_size()", "parameter.numel()"), "in bytes"),
    ("in-buckets", BUCKETS.replace("begins.append(number)\n            held = parameter.numel() * parameter.element_size()",
                                   "begins.append(number)\n            held = 0"), ""),
    ("collective-times", TIMES.replace("[at, *ends[-1:]]", "[at, *ready[:len(ends)]]"), ""),
    ("collective-times", TIMES.replace("*ends[-1:]", "sum(seconds[:len(ends)])"), ""),
    ("overlap", OVERLAP.replace("bucket.flat /= axis.size\n", "pass\n"), "divide by axis.size"),
    ("overlap", OVERLAP.replace("all_reduce(bucket.flat,", "all_reduce(bucket.flat.clone(),"), "nobody reads"),
    ("overlap", OVERLAP.replace("group=axis.group, async_op=True)", "group=axis.group, async_op=True)\n    bucket.work.wait()"),
     "the backward pass stops"),
    ("1f1b", """
from course.parallel.pipeline_parallel.schedules import Pass

def alternate(forward, backward, ahead):
    return list(forward) + list(backward)

def one_forward_one_backward(p, rank, m, v=1):
    return alternate([Pass("F", 0, i) for i in range(m)], [Pass("B", 0, i) for i in range(m)], 0)
""", "GPipe again"),
    ("1f1b", """
from course.parallel.pipeline_parallel.schedules import Pass

def alternate(forward, backward, ahead):
    order, back = list(forward[:ahead]), list(backward)
    for work in forward[ahead:]:
        order += [work, back.pop(0)]
    return order + back[::-1]

def one_forward_one_backward(p, rank, m, v=1):
    return alternate([Pass("F", 0, i) for i in range(m)], [Pass("B", 0, i) for i in range(m)], min(p - 1 - rank, m))
""", "backward passes are reversed"),
    ("1f1b", """
from course.parallel.pipeline_parallel.schedules import Pass

def alternate(forward, backward, ahead):
    order, back = list(forward[:ahead]), list(backward)
    for work in forward[ahead:]:
        order += [back.pop(0), work]
    return order + back

def one_forward_one_backward(p, rank, m, v=1):
    return alternate([Pass("F", 0, i) for i in range(m)], [Pass("B", 0, i) for i in range(m)], min(p - 1 - rank, m))
""", "the forward pass comes first"),
    ("agrees", """
def agrees(candidate, references, length):
    n = len(candidate) // length
    own = candidate[:n * length].reshape(n, length).mean(1)
    seeds = references[:, :n * length].reshape(len(references), n, length).mean(2)
    off, apart = ((own - seeds[0]) / seeds[0]).abs(), seeds.std(0) / seeds[0]
    return off.mean(), apart.mean(), bool(2 * (off <= apart).sum() > n)
""", "inside"),
    ("guidance", """
import torch
from course.inference.diffusion_sampler import predictor

def guided(model, labels, scale, channels=0, precision="fp32"):
    if scale <= 1:
        return predictor(model, labels, precision)
    ask = predictor(model, torch.cat([labels, torch.full_like(labels, model.c.classes)]), precision)

    def led(x, time):
        known, unknown = ask(torch.cat([x, x]), torch.cat([time, time])).tensor_split(2)
        out = unknown + scale * (known - unknown)
        return torch.cat([out[:, :channels], known[:, channels:]], 1) if channels else out

    return led
""", "exactly 1"),
    ("pipeline-seconds", """
def pipeline_seconds(stages, micros, chunks):
    slow = stages[-1] if stages[-1] > stages[0] else stages[0]
    return micros * slow + (sum(stages) - slow) / chunks
""", "in the middle"),
    ("all-reduce-seconds", """
def all_reduce_seconds(size, ranks, latency, bandwidth):
    return 0 if ranks == 1 else 2 * (ranks - 1) * latency + 1.5 * size / bandwidth
""", ""),
]
