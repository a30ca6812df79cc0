"""Right answers to the exercises of lesson 08, written in other ways than the library's, pass too; looking at a step does not."""

import pytest

from course.lab import cells, check, present
from course.lab.exercise import find

VARIANTS = {
    "noise-scale": '''
def noise_scale(small, large, b, B):
    trace = (small - large) * b * B / (B - b)
    return trace / (large - trace / B)
''',
    "scaled-rate": '''
import torch

def scaled_rate(lr, batch, new_batch, rule):
    power = {"linear": 1.0, "sqrt": 0.5}[rule]
    return lr * torch.tensor(new_batch / batch) ** power
''',
    "learning-rate": '''
import math
import torch

def learning_rate(step, config):
    o, at = config.optim, step.float()
    rate = torch.full((), o.lr)
    if o.schedule == "cosine":
        angle = math.pi * ((at - o.warmup) / max(1, config.train.steps - o.warmup)).clamp(0, 1)
        rate = o.min_lr + (o.lr - o.min_lr) * (1 + angle.cos()) / 2
    return torch.where(at < o.warmup, rate.clamp(max=o.lr) * (at + 1) / o.warmup, rate) if o.warmup else rate
''',
    "samples-to-target": '''
import math

def samples_to(target, steps, losses, batch):
    for k, loss in enumerate(losses):
        if loss <= target:
            if k == 0:
                return batch * steps[0]
            slope = (steps[k] - steps[k - 1]) / (losses[k - 1] - loss)
            return batch * (steps[k - 1] + (losses[k - 1] - target) * slope)
    return math.inf
''',
}

AN_IF = '''
import math
import torch

def learning_rate(step, config):
    o = config.optim
    if o.warmup and step < o.warmup:
        return o.lr * (step + 1) / o.warmup
    if o.schedule == "constant":
        return torch.tensor(o.lr)
    angle = math.pi * ((step - o.warmup) / max(1, config.train.steps - o.warmup)).clamp(0, 1)
    return o.min_lr + (o.lr - o.min_lr) * (1 + angle.cos()) / 2
'''


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_a_right_answer_written_differently_passes(name):
    found = check.examine(find(name), cells.whole(VARIANTS[name]), 5, hidden=True)
    assert found.passed, present.text(found, colour=False)


@pytest.mark.slow
@pytest.mark.parametrize(("source", "hint"), [
    (AN_IF, "torch.where"),
    (AN_IF.replace("step < o.warmup", "step.item() < o.warmup"), "torch.where"),
    (AN_IF.replace("if o.warmup and step < o.warmup", "if False").replace("torch.tensor(o.lr)", "step"), "dtype=torch.float32"),
])
def test_a_rate_for_which_the_host_waits_is_told(source, hint):
    found = check.examine(find("learning-rate"), cells.whole(source), 5)
    assert not found.passed and hint in found.hint, present.text(found, colour=False)
