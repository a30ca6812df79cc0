"""Answers to lesson 22, the capstone, in other words than the library's."""

IN_A_LOOP = '''
import torch
import torch.distributed as dist

def gradient_norm(parameters, layout):
    total = torch.zeros((), dtype=torch.float64)
    for parameter in parameters:
        if parameter.grad is not None and layout.placements[parameter].owner:
            total += parameter.grad.double().square().sum()
    if layout.mesh.all.size > 1:
        dist.all_reduce(total, group=layout.mesh.all.group)
    return total.sqrt().float()
'''
FLAT = '''
import torch
import torch.distributed as dist

def gradient_norm(parameters, layout):
    where = layout.placements
    pieces = [p.grad.flatten() for p in parameters if p.grad is not None and where[p].owner]
    square = torch.cat(pieces).double().dot(torch.cat(pieces).double()) if pieces else torch.tensor(0.0).double()
    square = square.reshape(1)
    dist.all_reduce(square)
    return square.sqrt()[0].to(torch.float32)
'''
SEARCHED = '''
def settings():
    import itertools
    from course.lab.exercises.lesson22_train_it import MEMORY, predict
    from course.utils.errors import CourseError
    best = None
    for dp, tp, pp, zero, micro in itertools.product((1, 2, 4), (1, 2, 4), (1, 2, 4), (0, 1, 3), (1, 2)):
        if dp * tp * pp == 4:
            chosen = [f"parallel.dp={dp}", f"parallel.tp={tp}", f"parallel.pp={pp}", f"parallel.zero={zero}",
                      f"train.micro_batch={micro}"]
            try:
                memory, seconds = predict(*chosen)
            except CourseError:
                continue
            if memory < 0.95 * MEMORY and (best is None or seconds < best[0]):
                best = seconds, chosen
    return [*best[1], "optim.lr=7e-3", "checkpoint.every=8"]
'''
RIGHT = {"gradient-norm": (IN_A_LOOP, FLAT)}


def settings(*chosen: str) -> str:
    """An answer to `train-it`."""
    return f"def settings():\n    return {list(chosen)!r}\n"


SCORED = [
    ("train-it", SEARCHED, ("correct", "fast", "safe", "learned"), ""),
    ("train-it", settings("parallel.dp=4", "parallel.zero=3", "checkpoint.every=20"), ("correct",), "the numbers are right"),
    ("train-it", settings("parallel.pp=4", "train.micro_batch=1", "checkpoint.every=5"), ("correct", "fast", "safe"),
     "the numbers are right"),
    ("train-it", settings("parallel.pp=2", "parallel.tp=2", "train.micro_batch=4", "checkpoint.every=10", "optim.lr=8e-3"),
     ("correct", "safe", "learned"), "the numbers are right"),
]
WRONG = [
    ("train-it", settings("parallel.dp=4", "checkpoint.every=10", "optim.lr=1e-2"), "the numbers are right"),
    ("train-it", settings("parallel.dp=4", "parallel.zero=1", "train.micro_batch=2", "checkpoint.every=0"),
     "the numbers are right"),
    ("gradient-norm", IN_A_LOOP.replace(".square()", ".abs()"), ""),
    ("gradient-norm", IN_A_LOOP.replace(" and layout.placements[parameter].owner",
                                        " and (layout.placements[parameter].axis or layout.mesh.all.rank == 0)"), ""),
    ("gradient-norm", IN_A_LOOP.replace("owner", "flat is None"), ""),
    ("gradient-norm", IN_A_LOOP.replace("total.sqrt().float()", "(total / layout.mesh.dp.size).sqrt().float()"), ""),
]
