"""Answers to exercises of lesson 15 that are not the library's own."""

BLOCK = '''
import torch
import torch.nn.functional as F
from torch import nn
from course.models.dit import plain_norm
from course.models.layers import MLP, Attention, Linear

def modulate(x, shift, scale):
    return torch.addcmul(shift.unsqueeze(1), x, scale.unsqueeze(1) + 1)

class AdaLNBlock(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.norm1 = plain_norm(dim)
        self.attn = Attention(dim, heads)
        self.norm2 = plain_norm(dim)
        self.mlp = MLP(dim, hidden, approximate="tanh")
        self.ada = Linear(dim, 6 * dim)

    def forward(self, x, c):
        six = self.ada(F.silu(c)).unflatten(1, (6, 1, -1))
        y = F.layer_norm(x, x.shape[-1:], eps=1e-6) * (1 + six[:, 1]) + six[:, 0]
        x = x + six[:, 2] * self.attn(y)
        y = self.norm2(x)
        y = y + y * six[:, 4] + six[:, 3]
        return x + self.mlp(y) * six[:, 5]
'''

RIGHT = {
    "adaln": BLOCK,
    "guidance": '''
import torch
from course.inference.diffusion_sampler import predictor

def guided(model, labels, scale, channels=0, precision="fp32"):
    if scale == 1:
        return predictor(model, labels, precision)
    ask = predictor(model, torch.cat([labels, labels * 0 + model.c.classes]), precision)

    def led(x, time):
        found = ask(x.repeat(2, 1, 1, 1), time.repeat(2))
        known, unknown = found[:len(x)], found[len(x):]
        out = known.clone()
        some = slice(0, channels or x.shape[1])
        out[:, some] = (1 - scale) * unknown[:, some] + scale * known[:, some]
        return out

    return led
''',
    "dit-flops": '''
def dit_flops(tokens, dim, hidden, depth, patch):
    def matmul(m, k, n, passes=3):
        return 2 * m * k * n * passes

    each = (matmul(tokens, dim, 3 * dim) + matmul(tokens, dim, dim) + matmul(tokens, dim, hidden) + matmul(tokens, hidden, dim)
            + matmul(tokens, dim, tokens) + matmul(tokens, tokens, dim) + matmul(1, dim, 6 * dim))
    return (depth * each + matmul(1, dim, 2 * dim) + matmul(tokens, dim, patch) + matmul(tokens, patch, dim, 2)
            + matmul(1, 256, dim, 2) + matmul(1, dim, dim))
''',
    "agrees": '''
import torch

def agrees(candidate, references, length):
    windows = len(candidate) // length
    own = candidate[:windows * length].reshape(windows, length).mean(1)
    others = references[:, :windows * length].reshape(len(references), windows, length).mean(2)
    gap = sum(abs(a - b) / b for a, b in zip(own.tolist(), others[0].tolist())) / windows
    middle = others.mean(0)
    deviation = ((others - middle).square().sum(0) / (len(others) - 1)).sqrt()
    spread = (deviation / others[0]).mean().item()
    return gap, spread, gap <= spread
''',
}

WRONG = [
    ("adaln", BLOCK.replace("six = self.ada(F.silu(c))", "six = self.ada(F.silu(c[:1]))"), ""),
    ("adaln", BLOCK.replace("x = x + six[:, 2] * self.attn(y)", "a = six[:, 2] * self.attn(y)").replace(
        "return x + ", "return x + a + "), ""),
    ("guidance", RIGHT["guidance"].replace("found = ask(x.repeat(2, 1, 1, 1), time.repeat(2))",
                                            "found = ask(x.repeat(2, 1, 1, 1), time.repeat(2)); "
                                            "ask(x.repeat(2, 1, 1, 1), time.repeat(2))"), ""),
    ("guidance", RIGHT["guidance"].replace("    return led\n", ""), ""),
    ("guidance", RIGHT["guidance"].replace("if scale == 1:", "if 0 < scale <= 1:"), ""),
    ("dit-flops", "def dit_flops(tokens, dim, hidden, depth, patch):\n"
                  "    return 6 * tokens * depth * (10 * dim * dim + 2 * dim * hidden)\n", ""),
    ("agrees", RIGHT["agrees"].replace("gap <= spread", "True"), ""),
    ("agrees", RIGHT["agrees"].replace("return gap, spread, gap <= spread", "return gap"), ""),
]
