import json

import pytest
import torch
from typer.testing import CliRunner

from course import cli, cli_bench
from course.errors import CourseError
from course.perf import hardware, kernel_table, kernels

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


@pytest.mark.slow
def test_the_command_writes_a_table_that_the_model_reads(tmp_path):
    file = tmp_path / "table.json"
    assert CliRunner().invoke(cli.app, ["bench", "kernels", "--small", "--out", str(file)]).exit_code == 0
    own = hardware.Hardware("own", 1e9, 1e11, {"fp32": 1e12}, hardware.load("h200").links, str(file))
    found = kernels.kernels_of(own)
    assert 0 < found.matmul(64, 64, 64, "fp32") < 1 and found.memory("shuffle", 1e5) > 0
    assert json.loads(file.read_text())["took_s"] < 300 and [ranks for ranks, _ in found.curves] == [2]


def test_without_a_gpu_it_says_so():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(CourseError, match="measures a GPU, and PyTorch sees none: --small"):
        cli_bench.bench_kernels()
