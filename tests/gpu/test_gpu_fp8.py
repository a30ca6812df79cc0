"""FP8 on a GPU that has it: the kernel's bits are the emulation's, the products within the stated bound, training follows."""

import importlib.util
import statistics

import pytest
import torch

from course import config
from course.bench import timing
from course.fp8 import native, transformer_engine
from course.fp8.native import E4M3, E5M2, multiply, quantize, quantize_plain
from course.lab.instruments import loss_curves
from course.models.layers import Block
from course.parallel import World, build_mesh
from course.utils.errors import CourseError
from tests.fp8.test_fp8_native import assemble, steps

HAS = torch.cuda.is_available() and torch.cuda.get_device_capability() >= native.LEAST
pytestmark = pytest.mark.skipif(not HAS, reason="needs a GPU with FP8")
NO_TE = importlib.util.find_spec("transformer_engine") is None
GPU = torch.device("cuda")


@pytest.mark.parametrize("shape", [(1, 16), (37, 48), (128, 128), (129, 4096), (4050, 384), (16384, 1152)])
@pytest.mark.parametrize("given", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("kind", [E4M3, E5M2])
def test_the_kernel_gives_the_emulations_bits(shape, given, kind):
    """Values from the smallest numbers of the format to far beyond the largest."""
    x = (torch.randn(shape, device=GPU) * torch.exp2(torch.randint(-24, 16, shape, device=GPU))).to(given)
    for scale in (1.0, 0.37, 2.0**11):
        amaxes = [torch.zeros((), device=GPU) for _ in range(2)]
        q, qt = quantize(x, torch.tensor(scale, device=GPU), amaxes[0], kind, True, True)
        expected, transposed = quantize_plain(x, torch.tensor(scale, device=GPU), amaxes[1], kind, True, True)
        assert torch.equal(q.view(torch.uint8), expected.view(torch.uint8))
        assert torch.equal(qt.view(torch.uint8), transposed.view(torch.uint8))
        assert torch.equal(*amaxes)


@pytest.mark.parametrize("numbers", [16, 4096 * 3 + 48, 2**24 + 2**12])
def test_a_share_of_a_weight_is_cast_however_large(numbers):
    """ZeRO-3 casts shares, which are flat: as one row, more than 2^23 numbers would need more tiles than a launch may have."""
    cast = native.Matmul("a", config.load("gpt-demo", ["precision=fp8"]).fp8, GPU)
    share = torch.randn(numbers, device=GPU)
    assert torch.equal(cast.shrink(share).view(torch.uint8), share.to(E4M3).view(torch.uint8))
    assert cast.amaxes[1] == share.abs().max()


@pytest.mark.parametrize("kind", [E4M3, E5M2])
def test_the_kernel_casts_every_16_bit_number_as_the_cpu_does(kind):
    """All 65536 bf16 numbers, NaNs and infinities among them; what is no number stays none."""
    x = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256)
    one, nothing = torch.ones(()), torch.zeros(())
    expected, _ = quantize(x, one, nothing, kind, False, False)
    found, _ = quantize(x.cuda(), one.cuda(), nothing.cuda(), kind, False, False)
    assert torch.equal(found.cpu().float().nan_to_num(1e9), expected.float().nan_to_num(1e9))


@pytest.mark.parametrize("fast", [True, False])
@pytest.mark.parametrize(("m", "k", "n"), [(256, 64, 128), (512, 4096, 512), (2048, 16384, 256)])
def test_products_are_within_the_stated_bound_of_the_emulation(m, k, n, fast, record_property):
    """Sums on the tensor cores have fewer bits than the emulation's: see the docstring of course.fp8.native."""
    one, note = torch.ones((), device=GPU), torch.zeros((), device=GPU)
    for first in (E4M3, E5M2):
        a, _ = quantize(torch.randn(m, k, device=GPU), one, note, first, False, False)
        b, _ = quantize(torch.randn(n, k, device=GPU), one, note, E4M3, False, False)
        found = multiply(a, b.t(), one, one, torch.float32, fast=fast).cpu()
        emulated = multiply(a.cpu(), b.cpu().t(), one.cpu(), one.cpu(), torch.float32)
        size = a.cpu().float().abs() @ b.cpu().float().abs().t()                        # Σ|a·b|
        worst = ((found - emulated).abs() / size).max().item()
        record_property(f"{first} fast={fast} K={k}", worst)
        print(f"{first} fast={fast} K={k}: {worst:.1e} of the sum of magnitudes")
        assert worst <= (2**-6 if fast else 2**-8)


def test_a_gpu_trains_as_the_emulation_does():
    """The same weights and batches in bf16 around the same eight bits, over 20 steps: within bf16's rounding."""
    cpu, gpu = (steps(assemble("model.dim=64", f"train.device={device}"), 20) for device in ("cpu", "cuda"))
    assert gpu == pytest.approx(cpu, rel=1e-2)


@pytest.mark.parametrize("recipe", ["delayed", "current"])
@pytest.mark.parametrize("more", [[], ["train.micro_batch=2"], ["train.recompute=full"], ["train.recompute=selective"],
                                  ["compile=true"]])
def test_every_way_of_running_follows_bf16(recipe, more):
    """Slowly: at three times the learning rate the emulation, too, is 7% off after these steps, here 0.2%."""
    def losses(*settings: str) -> list[float]:
        training = assemble("model.dim=64", "train.device=cuda", "optim.lr=0.003", *settings)
        batch = training.model.example(4, GPU)
        return [training.step(batch)[0].item() for _ in range(20)]

    torch._dynamo.reset()
    assert losses(f"fp8.recipe={recipe}", *more) == pytest.approx(losses("precision=bf16"), rel=0.01)


def test_no_step_waits_for_the_gpu():
    training = assemble("train.device=cuda", "train.micro_batch=2")
    batch = training.model.example(4, GPU)
    steps(training, 2)                              # the first in bf16, the second compiles the kernel
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        training.step(batch)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_step_can_be_captured_in_a_graph():
    """Forward, backward and the scales' update: the replayed graph moves the histories on in place."""
    torch.manual_seed(0)
    c = config.Config(precision="fp8", fp8=config.FP8(history=4))
    model = torch.nn.ModuleDict({"block": Block(256, 4, 1024, "block")}).cuda()
    scaling = native.convert(model, c, build_mesh(c.parallel, World(device=GPU)))
    x, good = torch.randn(2, 64, 256, device=GPU, requires_grad=True), torch.zeros((), device=GPU)

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            y = model["block"](x, {})
        y.float().square().mean().backward()
        scaling.update(good)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    before = scaling.history.clone()
    with torch.no_grad():
        x.mul_(2)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(scaling.history[:, 1:], before[:, :-1]) and (scaling.history[:, 0] > 0).all()


def test_the_cast_is_bound_by_memory():
    """A bf16 tensor of 16384 x 4096 in one pass: 268 MB at 60% or more of what a plain copy reaches."""
    x = torch.randn(16384, 4096, device=GPU, dtype=torch.bfloat16)
    scale, amax = torch.ones((), device=GPU), torch.zeros((), device=GPU)
    cast = statistics.median(timing.seconds(lambda: quantize(x, scale, amax, E4M3, True, True), GPU) for _ in range(3))
    reached, copy = 4 * x.numel() / cast, 2e6 * 268 / timing.copy(268, GPU)
    print(f"cast {reached / 1e12:.2f} TB/s, copy {copy / 1e12:.2f} TB/s")
    assert reached > 0.6 * copy


@pytest.mark.parametrize("by", ["native", pytest.param("te", marks=pytest.mark.skipif(NO_TE, reason="needs Transformer Engine"))])
@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
def test_loss_curves_lie_on_bf16s(by, recipe):
    """The curves of `course.lab.instruments.loss_curves` on the GPU, over 300 steps."""
    if by == "native" and recipe == "block":
        pytest.skip("Transformer Engine's")
    reference = loss_curves.losses(("precision=bf16",), GPU)
    gap = loss_curves.gap(loss_curves.losses(("precision=fp8", f"fp8.by={by}", f"fp8.recipe={recipe}"), GPU), reference)
    print(f"{by} {recipe}: {gap:.3f}")
    assert gap < 0.06


@pytest.mark.skipif(NO_TE, reason="needs Transformer Engine")
def test_transformer_engine_starts_where_the_course_does():
    """Same weights, first step: by hand, by Transformer Engine and bf16 have one loss, to FP8's rounding."""
    first = {}
    for name, more in {"bf16": ["precision=bf16"], "native": ["precision=fp8"], "te": ["precision=fp8", "fp8.by=te"]}.items():
        training = assemble("train.device=cuda", *more, preset="vit-demo", base=[*loss_curves.VIT])
        first[name] = training.step(training.model.example(8, GPU))[0].item()
    assert first["native"] == pytest.approx(first["bf16"], rel=1e-2) and first["te"] == pytest.approx(first["bf16"], rel=1e-2)


@pytest.mark.skipif(NO_TE, reason="needs Transformer Engine")
def test_a_recipe_that_the_gpu_lacks_is_a_sentence():
    if torch.cuda.get_device_capability() < (10, 0):
        with pytest.raises(CourseError, match=r"fp8\.recipe=mxfp8 does not run on"):
            transformer_engine.load(GPU, "mxfp8")
