"""Pictures of lesson 05, and the counts that it shows: operators, graphs, kernels."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from course import config, models, parallel
from course.lab.figures import fusion
from course.lab.instruments import kernel_counter


def test_every_trip_is_an_arrow():
    chain = [("norm", ["x"], ["n"]), ("multiply", ["n", "s"], ["y"])]
    figure = fusion.trips({"apart": chain, "fused": [("both", ["x", "s"], ["y"])]})
    apart, fused = figure.axes
    assert apart.get_title(loc="left") == "apart: 5 trips" and fused.get_title(loc="left") == "fused: 3 trips"
    assert [text.get_text() for text in apart.texts if text.get_text()] == ["norm", "x", "n", "multiply", "n", "s", "y", "memory"]
    assert apart.get_xlim() == fused.get_xlim()


def test_operators_are_those_that_compute():
    x = torch.randn(4, 6, requires_grad=True)
    assert kernel_counter.operators(lambda: F.gelu(x.t().reshape(4, 6)[None]) + 1) == ["clone", "gelu", "add"]
    assert "gelu_backward" in kernel_counter.operators(lambda: F.gelu(x).sum().backward())


def test_graphs_are_recorded_call_by_call():
    def f(x: Tensor) -> Tensor:
        return x.exp() * 2

    def broken(x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x - 1

    x = torch.ones(3)
    assert kernel_counter.graphs(f, (x,), (x,)) == [["exp", "mul"]]
    assert len(kernel_counter.graphs(f, (x,), (torch.ones(4),), (torch.ones(5),))) == 2        # the second is for any length
    assert len(kernel_counter.graphs(broken, (x,), (-x,))) == 3


def test_modules_stay_as_they_were_where_a_call_fails():
    module = nn.Linear(3, 3)
    with pytest.raises(RuntimeError):
        kernel_counter.graphs(module, (torch.ones(4),), modules=[module])
    assert module._compiled_call_impl is None


@pytest.mark.slow
def test_blocks_share_one_graph_and_stay_as_they_were():
    c = config.load("vit-demo", ["model.depth=5"])
    model = parallel.initialize_serial(models.build_model(c.model), 0, torch.device("cpu"), torch.float32)
    batch = model.prepare(model.example(2, torch.device("cpu")), torch.zeros((), dtype=torch.int64))
    with torch.no_grad():
        assert len(kernel_counter.graphs(lambda: model(batch), modules=list(model.blocks.values()))) == 1
    assert all(block._compiled_call_impl is None for block in model.blocks.values())


def test_calls_in_generated_code():
    code = '''
def other():
    cpp_fused_add_0(x)
def call(args):
    buf0 = empty_strided_cpu((2,), (1,), torch.float32)
    cpp_fused_add_native_layer_norm_0(a, b)
    extern_kernels.addmm(bias, reinterpret_tensor(x), out=buf1)
    buf5 = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v)
    triton_poi_fused_gelu_1.run(buf1, 12, stream=stream0)
'''
    assert kernel_counter.called_kernels(code) == ["cpp_fused_add_native_layer_norm_0", "addmm",
                                           "_scaled_dot_product_flash_attention_for_cpu",
                                     "triton_poi_fused_gelu_1"]


@pytest.mark.slow
@pytest.mark.skipif(not kernel_counter.compiler(), reason="no compiler of C++")
def test_a_chain_becomes_one_kernel():
    norm = nn.LayerNorm(16)
    with torch.no_grad():
        found, = kernel_counter.generated(lambda: torch.compile(lambda x: norm(x) * 2 + 1)(torch.randn(8, 16)))
    assert len(found) == 1 and found[0].startswith("cpp_fused")
