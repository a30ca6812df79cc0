"""Answers to exercises of lesson 20 that are not the library's own: in other words, or wrong in other ways."""

UNIT = '''
import torch
from torch import nn
from course.lab.exercises.lesson20_fully_sharded import views

class ShardedUnit:
    def __init__(self, parameters, axis):
        self.parameters, self.axis = parameters, axis
        count = sum(p.numel() for p in parameters)
        self.whole = torch.cat([*(p.detach().flatten() for p in parameters), parameters[0].new_zeros(-count % axis.size)])
        for parameter, view in zip(parameters, views(self.whole, parameters)):
            parameter.data = view
        self.share = nn.Parameter(self.part(self.whole).clone())
        self.free()

    def part(self, flat):
        return flat.chunk(self.axis.size)[self.axis.rank]

    def gather(self):
        self.whole.untyped_storage().resize_(self.whole.numel() * self.whole.element_size())
        torch.distributed.all_gather(list(self.whole.chunk(self.axis.size)), self.share.detach(), group=self.axis.group)

    def free(self):
        for parameter in self.parameters:
            parameter.untyped_storage().resize_(0)
'''

REDUCE = '''
import torch
import torch.nn.functional as F

def reduce_gradients(unit):
    pieces = [p.new_zeros(p.numel()) if p.grad is None else p.grad.flatten() for p in unit.parameters]
    flat = torch.cat(pieces)
    flat = F.pad(flat, (0, len(unit.whole) - len(flat))) / unit.axis.size
    if unit.share.grad is None:
        unit.share.grad = torch.zeros_like(unit.share)
    mine = torch.empty_like(unit.share)
    torch.distributed.reduce_scatter(mine, list(flat.chunk(unit.axis.size)), group=unit.axis.group)
    unit.share.grad += mine
    for p in unit.parameters:
        p.grad = None
'''

RIGHT = {
    "sharded-unit": UNIT,
    "reduce-gradients": REDUCE,
    "step-events": '''
def step_events(units):
    """The reduce before the free; the computes in one list."""
    computes = [*range(units), *reversed(range(units))]
    events = [("gather", 0)]
    for number, unit in enumerate(computes):
        following = computes[number + 1] if number + 1 < len(computes) else unit
        if number == units - 1 and units > 1:
            following = unit
        if following != unit:
            events.append(("gather", following))
        if number < units:
            events.append(("forward", unit))
        else:
            events += [("backward", unit), ("reduce", unit)]
        if number != units - 1:
            events.append(("free", unit))
    return events
'''}

WRONG = [
    ("sharded-unit", UNIT.replace("self.axis.rank]", "0]"), "rank r keeps the numbers from r * size on"),
    ("sharded-unit", UNIT.replace("parameter.untyped_storage().resize_(0)", "pass"),
     "stay in memory between the uses"),
    ("reduce-gradients", REDUCE.replace(" / unit.axis.size", ""), "divide by axis.size"),
    ("reduce-gradients", REDUCE.replace("unit.share.grad += mine", "unit.share.grad = mine"), "earlier micro-batches are lost"),
    ("reduce-gradients", REDUCE.replace("(0, len(unit.whole) - len(flat))", "(len(unit.whole) - len(flat), 0)"),
     "padding comes at the end"),
    ("reduce-gradients", REDUCE.replace("p.new_zeros(p.numel())", "p.new_empty(p.numel())"), "memory from `empty`"),
    ("step-events", '''
def step_events(units):
    events = []
    for unit in range(units):
        events += [("gather", unit), ("forward", unit)] + [("free", unit)] * (unit < units - 1)
    for unit in range(units)[::-1]:
        events += [("gather", unit)] * (unit < units - 1) + [("backward", unit), ("free", unit), ("reduce", unit)]
    return events
''', "every compute waits for it"),
    ("step-events", '''
def step_events(units):
    """Nothing but the forward pass."""
    return [("gather", 0)] + [("forward", unit) for unit in range(units)]
''', ""),
]
