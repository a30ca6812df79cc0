"""Lesson 15: the adaLN block, guidance, the FLOPs of a DiT step, and whether two loss curves agree.

`dit_flops` and `agrees` are the answers to the exercises written inside cells of the lesson.
"""

from functools import partial
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from course.inference import diffusion_sampler
from course.lab.checks import random_inputs, return_values
from course.lab.checks.exercise import Exercise, Tensors
from course.lab.checks.return_values import InvalidReturn
from course.models import DiTConfig, build_model, dit
from course.parallel import initialize_serial

Shaken = TypeVar("Shaken", bound=nn.Module)
WROTE = "it changed what it was given"


def dit_flops(tokens: int, dim: int, hidden: int, depth: int, patch: int) -> int:
    """Model FLOPs of one sample of DiT, forward and backward. Only matmuls count: (m, k) by (k, n) takes 2·m·k·n.

    hidden: the MLP's width. patch: the values of a patch, in and out. The time enters as 256 waves.
    """
    maps = 2 * tokens * (4 * dim * dim + 2 * dim * hidden)              # qkv, out, up, down
    scores = 2 * 2 * tokens * tokens * dim                              # queries with keys, weights with values
    blocks = depth * (maps + scores + 2 * dim * 6 * dim)                # and the modulation, once a sample
    head = 2 * dim * 2 * dim + 2 * tokens * dim * patch
    first = 2 * tokens * patch * dim + 2 * 256 * dim                    # their inputs need no gradient
    return 3 * (blocks + head + 2 * dim * dim) + 2 * first


def agrees(candidate: Tensor, references: Tensor, length: int) -> tuple[Tensor, Tensor, Tensor]:
    """(gap, spread, whether the candidate agrees), from its losses (steps,) and those of several seeds (seeds, steps).

    A window is the mean of `length` losses. gap: how far the candidate is from the first reference, which has its seed.
    spread: the standard deviation over the seeds. Both are relative to the first reference, then averaged over the windows.
    """
    means = references.unfold(1, length, length).mean(2)                # (seeds, windows)
    own = candidate.unfold(0, length, length).mean(1)                   # (windows,)
    gap = ((own - means[0]).abs() / means[0]).mean()
    spread = (means.std(0) / means[0]).mean()
    return gap, spread, gap <= spread


def draw_block(seed: int, hidden: bool) -> Tensors:
    """Tokens, conditions, shifts, scales, and a latent of a DiT."""
    generator = random_inputs.generator(seed)
    B, T, D = (4, 7, 24) if hidden else (3, 5, 16)

    numbers = partial(random_inputs.normal, generator)
    return {"x": numbers(B, T, D), "c": numbers(B, D), "shift": numbers(B, D), "scale": numbers(B, D), "grad": numbers(B, T, D),
            "latent": numbers(B, 2, 4, 8 if hidden else 4), "seed": torch.tensor(random_inputs.number(seed))}


def with_random_weights(model: Shaken, seed: int) -> Shaken:
    """With weights of which none is trivial, in float64."""
    generator = random_inputs.generator(seed)
    model.double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(0.3 * torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return model


def small_dit(latent: Tensor, dim: int, seed: int) -> dit.DiT:
    """A small DiT for such latents, with drawn weights."""
    c = DiTConfig(latent=tuple(latent.shape[1:]), patch=2, dim=dim, depth=2, heads=2, mlp_ratio=2.0, classes=5)      # type: ignore[arg-type]
    model = initialize_serial(build_model(c), 0, torch.device("cpu"), torch.float64)
    assert isinstance(model, dit.DiT)
    return with_random_weights(model, seed)


def batch_of(model: dit.DiT, latent: Tensor) -> Tensors:
    """A prepared batch of these latents."""
    sample = torch.arange(len(latent))
    return model.prepare({"latent": latent, "label": sample % model.c.classes, "sample": sample}, torch.tensor(0))


def run_adaln(inputs: Tensors) -> Tensors:
    """modulate alone; a block as it starts and with drawn weights, with gradients; a whole DiT with such blocks."""
    x, c, shift, scale, seed = inputs["x"], inputs["c"], inputs["shift"], inputs["scale"], int(inputs["seed"])
    given = [t.clone() for t in (x, shift, scale, c)]
    shape = tuple(x.shape)
    modulated = return_values.tensor(dit.modulate(given[0], given[1], given[2]), "modulate", shape, torch.float64).clone()
    block = with_random_weights(dit.AdaLNBlock(shape[-1], 2, 2 * shape[-1]), seed)
    tokens, condition = x.clone().requires_grad_(), c.clone().requires_grad_()
    out = return_values.tensor(block(tokens, condition), "AdaLNBlock.forward", shape, torch.float64)
    leaves = [tokens, condition, *block.parameters()]
    grads = torch.autograd.grad(out, leaves, inputs["grad"], allow_unused=True)
    flat = torch.cat([(torch.zeros_like(leaf) if grad is None else grad).flatten()
                      for leaf, grad in zip(leaves, grads, strict=True)])
    nn.init.zeros_(block.ada.weight)
    nn.init.zeros_(block.ada.bias)
    start = return_values.tensor(block(given[0], given[3]), "AdaLNBlock.forward", shape, torch.float64)
    model = small_dit(inputs["latent"], shape[-1], seed)
    batch = batch_of(model, inputs["latent"])
    loss, _ = model.loss(model(batch), batch)
    kept = all(torch.equal(a, b) for a, b in zip(given, (x, shift, scale, c), strict=True))
    return {"modulated": modulated, "start": start.detach(), "out": out.detach(), "grads": flat, "loss": loss.detach(),
            "kept": torch.tensor(float(kept))}


def draw_latents(seed: int, hidden: bool) -> Tensors:
    """Noisy latents, times, labels, scales."""
    generator = random_inputs.generator(seed)
    B, width = (5, 8) if hidden else (3, 4)
    return {"latent": torch.randn(B, 3, 4, width, generator=generator, dtype=torch.float64),
            "time": torch.randint(1, 999, (B,), generator=generator), "label": torch.randint(0, 5, (B,), generator=generator),
            "scale": torch.cat([1.1 + 5 * torch.rand(2, generator=generator), torch.tensor([0.5])]).double(),
            "seed": torch.tensor(random_inputs.number(seed))}


def run_guidance(inputs: Tensors) -> Tensors:
    """Guided predictions of a small DiT, how often and of how many samples it was asked, in which format; and samples drawn."""
    latent, time, label = inputs["latent"], inputs["time"], inputs["label"]
    model = small_dit(latent, 16, int(inputs["seed"])).eval()
    passes: list[float] = []
    casting: list[float] = []                        # whether autocast was on, in each pass

    def look(module: nn.Module, arguments: tuple[Tensors, ...]) -> None:
        passes.append(float(len(arguments[0]["input"])))
        casting.append(float(torch.is_autocast_enabled("cpu")))

    model.register_forward_pre_hook(look)

    def ask(scale: float, channels: int = 0, precision: str = "fp32") -> Tensor:
        predict = return_values.function(diffusion_sampler.guided(model, label, scale, channels, precision), "guided", "predict")
        return return_values.tensor(predict(latent, time), "predict", tuple(latent.shape), torch.float64)

    with torch.no_grad():
        none = ask(1)
        alone = len(passes), sum(passes)
        led = [ask(scale) for scale in inputs["scale"].tolist()]
        some = torch.stack([ask(inputs["scale"][0].item(), channels) for channels in (1, 2)])
        asked = torch.tensor([*alone, len(passes) - alone[0], sum(passes) - alone[1]], dtype=torch.float64)
        led.append(ask(0))                           # for which the unknown class alone would do: passes are not counted
        full, halves = max(casting, default=0.0), []
        for scale in (1, 2):
            casting.clear()
            ask(scale, precision="bf16")
            halves.append(min(casting, default=0.0))
    drawn = diffusion_sampler.sample_latents(model, label, diffusion_sampler.SamplerSettings(steps=2, guidance=2.0, batch=2))
    return {"none": none, "led": torch.stack(led), "channels": some, "passes": asked, "precision": torch.tensor([full, *halves]),
            "drawn": drawn}


def draw_sizes(seed: int, hidden: bool) -> Tensors:
    """tokens, dim, hidden, depth, values of a patch: of a released model, then drawn; and of a model to count."""
    generator = random_inputs.generator(seed)
    cases = torch.stack([torch.randint(low, high, (6 if hidden else 3,), generator=generator)
                         for low, high in ((4, 2000), (8, 3000), (8, 9000), (1, 50), (4, 70))], 1)
    cases[0] = torch.tensor([256, 1152, 4608, 28, 16])
    counted = torch.stack([torch.randint(1, 4, (), generator=generator) for _ in range(5 if hidden else 4)])
    return {"cases": cases, "counted": counted}


def run_dit_flops(inputs: Tensors) -> Tensors:
    """The FLOPs of each case; and whether they are what PyTorch counts in a small model's step."""
    found = [return_values.number(dit_flops(*case), "dit_flops") for case in inputs["cases"].tolist()]
    rows, columns, depth, ratio = inputs["counted"].tolist()[:4]
    c = DiTConfig(latent=(3, 4 * rows, 4 * columns), patch=2, dim=24, depth=depth, heads=3, mlp_ratio=float(ratio), classes=5)
    model = initialize_serial(build_model(c), 0, torch.device("cpu"))
    assert isinstance(model, dit.DiT)
    batch = batch_of(model, torch.zeros(1, *c.latent))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model.loss(model(batch), batch)[0].backward()
    mine = return_values.number(dit_flops(c.tokens, 24, 24 * ratio, depth, 12), "dit_flops")
    return {"flops": torch.tensor(found, dtype=torch.float64),
            "counted": torch.tensor(float(mine == counter.get_total_flops()))}


def dit_flops_cases(inputs: Tensors) -> list[str]:
    """What was asked, in words."""
    return [f"{tokens} tokens, dim {dim}, hidden {hidden}, depth {depth}, {patch} values of a patch"
            for tokens, dim, hidden, depth, patch in inputs["cases"].tolist()]


NARROW, WIDE = 0.001, 0.15                           # spreads that are drawn


def draw_curves(seed: int, hidden: bool) -> Tensors:
    """Falling losses of several seeds, which differ a little and a lot, and candidates for which other rules than the
    exercise's would judge otherwise: a fixed threshold, most windows, each window, the largest one."""
    generator = random_inputs.generator(seed)
    seeds, windows, length = (4, 9, 6) if hidden else (3, 8, 5)

    noise = partial(random_inputs.normal, generator)
    def relative(means: Tensor, spread: float) -> Tensor:
        """Losses of every step with these means of windows, relative to the first's, so that their spread is this one."""
        apart = means - means[0]
        apart *= spread / (apart.std(0)).mean()
        return 1 + apart.repeat_interleave(length, 1)

    fall = torch.linspace(2.0, 0.5, windows * length, dtype=torch.float64)
    first = fall * (1 + 0.1 * noise(len(fall)).tanh())
    drift = noise(seeds, windows).clamp(-1.5, 1.5)
    references = torch.stack([first * relative(drift, spread) for spread in (NARROW, WIDE)])     # (2, seeds, steps)

    def off(*windows_off: float) -> Tensor:
        """The first reference, off by these parts of it in its windows, with noise of its own that has no mean in any."""
        own = noise(windows, length)
        own = 0.05 * (own - own.mean(1, keepdim=True))
        means = first.unflatten(0, (windows, length)).mean(1, keepdim=True)
        return first * (1 + torch.tensor(windows_off, dtype=torch.float64).repeat_interleave(length)) + (means * own).flatten()

    def every(part: float) -> list[float]:
        return [part] * windows

    turns = [0.4 * (-1) ** window for window in range(windows)]
    turns[-1] -= sum(turns)                          # they cancel
    far = windows // 2                               # the window that alone is far out
    few = windows // 2 - 1
    means = references[1].unflatten(1, (windows, length)).mean(2)       # (seeds, windows)
    beyond = 1.15 * means.std(0) / means[0]          # just beyond the seeds, but for the two windows where they differ most
    beyond[beyond.topk(2).indices] = 0
    cases = [(1, off(*every(0.01))), (1, off(*every(0.4))), (1, off(*turns)), (1, off(0, *[0.5] * (windows - 2), 0)),
             (1, off(*every(-0.4))), (1, references[1, 1]), (0, off(*every(0.02))), (1, off(*every(0.1))),
             (1, off(*[0.6 * WIDE * windows * (window == far) for window in range(windows)])),
             (1, off(*[1.6 * WIDE * windows / few * (window < few) for window in range(windows)])),
             (1, off(*every(1.5 * WIDE))), (0, off(*every(0.7 * NARROW))), (1, off(*beyond.tolist())),
             (1, off(*(0.9 * means.std(0) / means[0]).tolist()))]
    rest = torch.full((len(cases), 2), 9.0, dtype=torch.float64)        # steps that fill no window
    return {"candidates": torch.cat([torch.stack([candidate for _, candidate in cases]), rest], 1),
            "beside": torch.tensor([which for which, _ in cases]),
            "references": torch.cat([references, torch.full((2, seeds, 2), 9.0, dtype=torch.float64)], 2),
            "length": torch.tensor(length)}


CURVES = ("a curve that is nearly the reference", "one that is 40% above it throughout",
          "one that is above it in one window, below in the next",
          "one that is 50% above it in the middle, and right at both ends", "one that is 40% below it", "another seed's",
          "one that is 2% above it, where the seeds spread by 0.1%", "one that is 10% above it, where the seeds spread by 15%",
          "one that is far above it in a single window, and right in all others",
          "one that is right in most windows, and far above it in the others",
          "one that is above it by one and a half times the spread", "one that is above it by 0.7 of a narrow spread",
          "one that is a little beyond the seeds in all windows but the two in which they differ most",
          "one that is a little within the seeds in every window", "the reference, where all seeds equal it")


def run_agrees(inputs: Tensors) -> Tensors:
    """Gap, spread and verdict of each candidate."""
    length, rows = int(inputs["length"]), []
    references = inputs["references"].clone()
    tried = [(candidate, references[which]) for candidate, which in
             zip(inputs["candidates"], inputs["beside"].tolist(), strict=True)]
    for candidate, others in [*tried, (references[1, 0], references[1, :1].expand(2, -1))]:        # and nothing but equal curves
        found = return_values.several(agrees(candidate.clone(), others.clone(), length), "agrees",
                                      "(gap, spread, whether it agrees)")
        if len(found) != 3:
            raise InvalidReturn(f"`agrees` returned {len(found)} things; expected three, (gap, spread, whether it agrees)",
                           "return gap, spread, gap <= spread")
        gap, spread, verdict = found
        if not isinstance(verdict, bool) and getattr(verdict, "dtype", None) != torch.bool:
            raise InvalidReturn(f"the third thing that `agrees` returned is {return_values.describe_value(verdict)}; "
                                "expected True or False",
                           "compare the two: gap <= spread")
        rows.append([return_values.number(gap, "agrees"), return_values.number(spread, "agrees"), float(verdict)])
    gaps, spreads, verdicts = torch.tensor(rows, dtype=torch.float64).T
    return {"gaps": gaps, "spreads": spreads, "verdicts": verdicts}


EXERCISES = [
    Exercise("adaln", "15", ("course.models.dit.modulate", "course.models.dit.AdaLNBlock"), draw_block, run_adaln, {
        "modulated": "modulate scales and shifts the features of each sample's tokens",
        "start": "a block whose modulation gives zeros returns its tokens unchanged",
        "out": "a block with other weights: both branches normalized, modulated and gated",
        "grads": "its gradients are right",
        "loss": "the library's DiT has the right loss with your blocks",
        "kept": "your code changes none of its inputs"}, flags={"kept": WROTE}, points=2),
    Exercise("guidance", "15", ("course.inference.diffusion_sampler.guided",), draw_latents, run_guidance, {
        "none": "with a scale of 1 it is the prediction with the class",
        "led": "other scales lead away from the unknown class",
        "channels": "with `channels`, it guides only the first ones, and predicts the others with the class",
        "passes": "it calls the model once for both, and with a scale of 1 for the class alone; calls and samples of one "
                  "prediction with a scale of 1, then of five with others",
        "precision": "the model computes in the requested precision",
        "drawn": "the library's sampler draws with it"}, flags={
        "precision": "it computes in fp32 or bf16 where you want the other"}, points=2),
    Exercise("dit-flops", "15", (f"{__name__}.dit_flops",), draw_sizes, run_dit_flops, {
        "flops": "the FLOPs of one sample, forward and backward",
        "counted": "they match what PyTorch counts in a small model's step"},
        flags={"counted": "PyTorch's counter finds another number"}, cases=dit_flops_cases, points=2),
    Exercise("agrees", "15", (f"{__name__}.agrees",), draw_curves, run_agrees, {
        "gaps": "the gap: means of windows, relative to the reference with the same seed",
        "spreads": "the spread of the seeds",
        "verdicts": "the verdict: 1 if the gap is no larger than the spread, otherwise 0"},
        cases=lambda inputs: list(CURVES), points=2,
        unknown="no known mistake gives these numbers: try two seeds and two windows by hand. If only the verdict is wrong: "
                "compare the gap with the spread, not with a threshold or in single windows"),
]
