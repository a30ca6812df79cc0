import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from course import config
from course.config import Config, Train
from course.models import DiTConfig, GPTConfig, ViTConfig, build_model
from course.parallel import World, build_mesh, initialize_serial
from course.planner import flops
from course.training import assemble
from course.training.activation_checkpointing import checkpoint_activations

MODELS = [
    ViTConfig(grid=(8, 16), channels=3, patch=2, dim=24, depth=2, heads=3, mlp_ratio=2.0),
    ViTConfig(grid=(16, 16), channels=5, patch=4, dim=32, depth=3, heads=4, residual=True, dropout=0.1),
    ViTConfig(grid=(16, 16), channels=5, patch=4, dim=32, depth=3, heads=4, drop_path=0.2),
    GPTConfig(vocab=37, context=11, dim=24, depth=2, heads=3, mlp_ratio=2.0),
    GPTConfig(vocab=37, context=11, dim=24, depth=2, heads=3, loss_chunk=0, dropout=0.1),
    GPTConfig(vocab=37, context=11, dim=24, depth=2, heads=3, loss_chunk=7, mlp="gelu_tanh"),
    GPTConfig(vocab=40, context=8, dim=32, depth=3, heads=4, tied=False),
    GPTConfig(vocab=40, context=8, dim=32, depth=2, heads=4, kv_heads=2, mlp="swiglu", mlp_width=24, norm="rms", bias=False,
              position="rotary"),
    GPTConfig(vocab=40, context=8, dim=32, depth=2, heads=4, kv_heads=1, mlp="swiglu", position="rotary", loss_chunk=10),
    GPTConfig(vocab=40, context=8, dim=32, depth=2, heads=4, kv_heads=2, head_dim=12, qk_norm=True, norm="rms",
              position="rotary"),
    DiTConfig(latent=(3, 8, 4), patch=2, dim=24, depth=2, heads=3, mlp_ratio=2.0, classes=5),
    DiTConfig(latent=(4, 8, 8), patch=4, dim=32, depth=3, heads=4, objective="flow"),
]
# PyTorch's counter does not know the attention of CPUs; its shapes are those of the GPU's, and so are its formulas
CPU_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *rest, **more: sdpa_flop_count(q, k, v),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward:
        lambda grad, q, k, v, *rest, **more: sdpa_backward_flop_count(grad, q, k, v)}


def counted(config, samples: int, how: str = "none", fused: bool = False) -> FlopCounterMode:
    """PyTorch's counter, after one training step of `samples` samples."""
    model = initialize_serial(build_model(config), 0, torch.device("cpu"))
    batch = model.prepare(model.example(samples, torch.device("cpu")), torch.tensor(0))
    checkpoint_activations(model, how)
    with (FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as counter,
          sdpa_kernel(SDPBackend.FLASH_ATTENTION if fused else SDPBackend.MATH)):
        total, _ = model.loss(model(batch), batch)
        total.backward()
    return counter


@pytest.mark.parametrize("config", MODELS)
def test_model_flops_equal_pytorchs_counter_exactly(config):
    assert flops.step(config, 3) == counted(config, 3).get_total_flops()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("how", ["none", "selective", "full"])
@pytest.mark.parametrize("config", MODELS)
def test_executed_flops_equal_pytorchs_counter_exactly(config, how, fused):
    settings = Config(model=config, train=Train(recompute=how), attention="flash" if fused else "math")
    assert flops.executed(settings, 3) == counted(config, 3, how, fused).get_total_flops()


@pytest.mark.parametrize("how", ["none", "selective", "full"])
@pytest.mark.parametrize("preset", ["vit-demo", "dit-demo", "gpt-python"])
def test_executed_flops_with_fp8(preset, how):
    """The second step of a training, in which all scales are there."""
    c = config.load(preset, ["precision=fp8", "data.source=mock", "train.device=cpu", f"train.recompute={how}", "attention=math",
                             "train.global_batch=2", "train.micro_batch=0", "model.depth=2"])
    training = assemble.assemble(c, build_mesh(c.parallel, World(device=torch.device("cpu"))))
    batch = training.model.example(2, torch.device("cpu"))
    training.step(batch)
    with FlopCounterMode(display=False) as counter:
        training.step(batch)
    assert flops.executed(c, 2) == counter.get_total_flops()


DIT = DiTConfig(latent=(3, 8, 4), patch=2, dim=24, depth=2, heads=3, mlp_ratio=2.0, classes=5)


def test_parts_of_dit_equal_pytorchs_counter_module_by_module():
    """What has no gradient of its input, the counter tells apart only from the rest: the two maps that come first."""
    counter = counted(DIT, 1)
    found = {name.removeprefix("DiT."): sum(flops.values()) for name, flops in counter.get_flop_counts().items()}
    blocks = {name: sum(found[f"blocks.{i}.{name}"] for i in range(DIT.depth)) for name in ("attn", "attn.qkv", "attn.out", "mlp",
                                                                                            "ada")}
    maps = blocks["attn.qkv"] + blocks["attn.out"]
    parts = flops.dit_parts(DIT)
    first = {name: parts.pop(name) for name in ("patches in", "time, first map")}
    assert parts == {"attention's maps": maps, "scores": blocks["attn"] - maps, "MLP": blocks["mlp"], "modulation": blocks["ada"],
                     "head's modulation": found["head.ada"], "patches out": found["head.proj"],
                     "time, second map": found["embed.time.down"]}
    assert sum(first.values()) == counter.get_total_flops() - sum(parts.values())


def source_terms(c: DiTConfig, last: str = "h") -> dict[str, float]:
    return {name: term * c.tokens * c.depth * c.dim**2 for name, term in flops.source_terms(c, last).items()}


@pytest.mark.parametrize("c", [DIT, DiTConfig(), DiTConfig(latent=(4, 64, 64)), DiTConfig(latent=(4, 8, 8), patch=4, dim=32)])
def test_what_each_term_of_the_sources_formula_stands_for(c):
    """Equal to ours where it is right; where it is not, by just what is said to be wrong."""
    terms, parts = source_terms(c), flops.dit_parts(c)
    for name in ("attention's maps", "scores", "MLP", "modulation"):
        assert terms[name] == pytest.approx(parts[name], rel=1e-12), name
    assert terms["head's modulation"] == pytest.approx(c.tokens * parts["head's modulation"], rel=1e-12)
    assert terms["patches out"] * c.latent[0] == pytest.approx(4 * parts["patches out"], rel=1e-12)
    assert 2 * terms["time, first map"] == pytest.approx(parts["time, first map"], rel=1e-12)
    assert 3 * terms["time, second map"] == pytest.approx(parts["time, second map"], rel=1e-12)
    assert terms["time, second map"] / source_terms(c, "l")["time, second map"] == pytest.approx(c.dim / c.depth)
    assert set(parts) - set(terms) == {"patches in"}


def test_peak_is_unknown_on_a_cpu():
    assert flops.peak_tflops(torch.device("cpu"), "bf16") is None


@pytest.mark.parametrize(("name", "precision", "peak"), [
    ("NVIDIA H200", "bf16", 989.0), ("NVIDIA H20", "bf16", 148.0), ("NVIDIA A100-SXM4-40GB", "tf32", 156.0),
    ("Tesla K80", "bf16", None),
    ("NVIDIA H200", "fp32", None)])
def test_peaks_go_by_the_devices_name(monkeypatch, name, precision, peak):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert flops.peak_tflops(torch.device("cuda", 0), precision) == peak
