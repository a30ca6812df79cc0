import json

import pytest
import torch
from typer.testing import CliRunner

from course.bench import kernel_table
from course.cli import bench, main
from course.config import load
from course.planner import block_time, hardware, kernel_efficiency
from course.planner.rank_workload import workload_of
from course.utils.errors import CourseError

CPU = torch.device("cpu")


def once(run):
    run()
    return 1.0


def test_every_kernel_of_the_table_runs_and_moves_about_the_bytes_that_it_says():
    for make in (*kernel_table.kinds(CPU).values(), kernel_table.cast):
        for size in (1e4, 1e6):
            once(make(size, CPU))
    assert kernel_table.rows(4e6, CPU).nbytes == pytest.approx(4e6, rel=0.01)


def test_grids_name_their_axes_and_go_row_by_row():
    seen = []
    grid = kernel_table.matmul_grid("fp32", (2, 3), CPU, lambda run: seen.append(tuple(run().shape)) or float(len(seen)))
    assert grid == {"axes": [[2, 3]] * 3, "seconds": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]}
    assert seen[:4] == [(2, 2), (2, 3), (2, 2), (2, 3)]                 # m slowest, n fastest


def test_attention_forward_and_backward():
    grids = dict(kernel_table.attention_grids([(8, 16), (4,), (8,)], torch.float32, CPU, once))
    assert set(grids) == {"forward", "backward", "forward causal", "backward causal"}
    assert all(len(grid["seconds"]) == 2 for grid in grids.values())


def test_norms_are_by_bytes_and_width_and_of_one_of_a_blocks_two():
    """Samples are whole: of 8 bytes a number 1e5 are 6.1 of width 8 and 4.1 of width 12."""
    sizes, widths = (1e5, 1e6), (8, 12)
    grids = kernel_table.norm_grids({"NORM_BYTES": sizes, "NORM_WIDTHS": widths}, CPU, once)
    assert tuple(grids) == kernel_efficiency.NORMS == tuple(kernel_table.MOVED)
    for name, grid in grids.items():
        assert grid["axes"] == [[size / 8 * kernel_table.MOVED[name] for size in sizes], list(widths)]
    measured = ((1e5, 6 * 256 * 8), (1e5, 4 * 256 * 12), (1e6, 61 * 256 * 8), (1e6, 41 * 256 * 12))     # `once`: in a second
    assert grids["forward"]["seconds"] == pytest.approx([size / 8 / numbers / 2 for size, numbers in measured])
    assert grids["backward ada"]["seconds"] == grids["forward"]["seconds"]


@pytest.mark.parametrize("ada", [False, True])
def test_a_block_without_its_matmuls_is_still_that_block(ada):
    """Forward gives the stream in 16 bits, backward the gradients of all that is there; the stream passes the stand-ins by."""
    forward, backward = (run() for run in kernel_table.between(2, 12, ada, CPU))
    assert forward.shape == (2, 256, 12) and forward.dtype == torch.bfloat16
    assert [tuple(x.shape) for x in backward] == [(2, 256, 12), *([(2, 72)] if ada else [(12,)] * 4)]
    block = kernel_table.stripped(12, ada, CPU)
    seen = []
    block.attn.forward = block.mlp.forward = lambda n, *_: seen.append(n) or torch.zeros_like(n)
    x = torch.randn(2, 256, 12)
    assert torch.equal(block(x, torch.zeros(2, 72) if ada else {}), x)
    normal = torch.nn.functional.layer_norm(x, (12,), eps=block.norm1.eps)              # DiT's is not PyTorch's default
    assert all(torch.allclose(n, normal, atol=1e-4) for n in seen) and len(seen) == 2


@pytest.mark.parametrize("ada", [False, True])
def test_it_is_compiled_whole_and_its_backward_runs_twice(ada):
    block = kernel_table.stripped(12, ada, CPU)
    torch._dynamo.reset()
    compiled = torch.compile(block, dynamic=False, fullgraph=True, backend="aot_eager")
    x = torch.randn(2, 256, 12, requires_grad=True)
    out = compiled(x, torch.zeros(2, 72) if ada else {})
    for _ in range(2):
        grad, = torch.autograd.grad(out, x, torch.ones_like(out), retain_graph=True)
    assert grad.shape == x.shape


def test_on_a_gpu_they_are_captured():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    gpu = torch.device("cuda")
    _, seconds, side = kernel_table.how(gpu, True)
    with side:
        grids = kernel_table.norm_grids({"NORM_BYTES": (1e6,), "NORM_WIDTHS": (96,)}, gpu, seconds)
    assert all(1e-7 < grid["seconds"][0] < 1e-3 for grid in grids.values())


@pytest.mark.parametrize(("preset", "kind"), [("gpt-124m", ""), ("dit-xl", " ada")])
def test_bytes_of_norms_are_those_of_the_model_that_reads_the_table(preset, kind):
    local = workload_of(load(preset, ["stream=narrow", "compile=true", "train.global_batch=32", "parallel.dp=1"]),
                     hardware.load("h200"), 1)
    numbers = local.rest * local.m.dim
    for which, back in (("forward", False), ("backward", True)):
        assert sum(block_time.norm_bytes(local, back)) == kernel_table.MOVED[which + kind] * numbers


@pytest.mark.slow
def test_the_command_writes_a_table_that_the_model_reads(tmp_path):
    file = tmp_path / "table.json"
    assert CliRunner().invoke(main.app, ["bench", "kernels", "--small", "--out", str(file)]).exit_code == 0
    own = hardware.Hardware("own", 1e9, 1e11, {"fp32": 1e12}, hardware.load("h200").links, str(file))
    found = kernel_efficiency.kernels_of(own)
    assert 0 < found.matmul(64, 64, 64, "fp32") < 1 and found.memory("shuffle", 1e5) > 0
    assert {f"norms {which}" for which in kernel_efficiency.NORMS} <= set(found.grids)
    assert found.grids["norms backward ada"].axes == ((2e4, 2e5), (8, 12))
    assert found.grids["attention backward causal in Triton"].axes == ((2, 4), (16, 32), (8, 12))
    assert json.loads(file.read_text())["took_s"] < 300 and [ranks for ranks, _ in found.curves] == [2]


def test_without_a_gpu_it_says_so():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(CourseError, match="measures a GPU, and PyTorch sees none: --small"):
        bench.bench_kernels()
