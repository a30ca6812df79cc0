"""Answers to exercises of lesson 08 that are not the library's own."""

RIGHT = {
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

BISECTED = '''
import math
import numpy as np

def samples_to(target, steps, losses, batch):
    if min(losses) > target:
        return math.inf
    return float(np.interp(-target, [-loss for loss in losses], steps)) * batch
'''

# for the first three the host would wait for the device
WRONG = [
    ("learning-rate", AN_IF, "torch.where"),
    ("learning-rate", AN_IF.replace("step < o.warmup", "step.item() < o.warmup"), "torch.where"),
    ("learning-rate", AN_IF.replace("if o.warmup and step < o.warmup", "if False").replace("torch.tensor(o.lr)", "step"),
     "dtype=torch.float32"),
    ("samples-to-target", BISECTED, "take the first time"),
]
