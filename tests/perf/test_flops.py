import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from course import random
from course.models import DiTConfig, GPTConfig, ViTConfig, build_model
from course.parallel import place_serial
from course.perf import flops


@pytest.mark.parametrize("config", [
    ViTConfig(grid=(8, 16), channels=3, patch=2, dim=24, depth=2, heads=3, mlp_ratio=2.0),
    ViTConfig(grid=(16, 16), channels=5, patch=4, dim=32, depth=3, heads=4, residual=True),
    GPTConfig(vocab=37, context=11, dim=24, depth=2, heads=3, mlp_ratio=2.0),
    GPTConfig(vocab=40, context=8, dim=32, depth=3, heads=4, tied=False),
    GPTConfig(vocab=40, context=8, dim=32, depth=2, heads=4, kv_heads=2, mlp="swiglu", mlp_width=24, norm="rms", bias=False,
              position="rotary"),
    DiTConfig(latent=(3, 8, 4), patch=2, dim=24, depth=2, heads=3, mlp_ratio=2.0, classes=5),
    DiTConfig(latent=(4, 8, 8), patch=4, dim=32, depth=3, heads=4),
])
def test_model_flops_equal_pytorchs_counter_exactly(config):
    model = random.initialize(place_serial(build_model(config)), 0, torch.device("cpu"))
    batch = model.prepare(model.example(3, torch.device("cpu")), torch.tensor(0))
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        total, _ = model.loss(model(batch), batch)
        total.backward()
    assert flops.step(config, 3) == counter.get_total_flops()


def test_peak_is_unknown_on_a_cpu():
    assert flops.peak_tflops(torch.device("cpu"), "bf16") is None


@pytest.mark.parametrize(("name", "precision", "peak"), [
    ("NVIDIA H200", "bf16", 989.0), ("NVIDIA H20", "bf16", 148.0), ("NVIDIA A100-SXM4-40GB", "tf32", 156.0),
    ("Tesla K80", "bf16", None),
    ("NVIDIA H200", "fp32", None)])
def test_peaks_go_by_the_devices_name(monkeypatch, name, precision, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert flops.peak_tflops(torch.device("cuda", 0), precision) == peak
