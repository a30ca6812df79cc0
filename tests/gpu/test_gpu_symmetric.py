"""Exchanges through each other's memory (`course/parallel/tensor_parallel/symmetric_memory.py`) give exact answers, in whole
numbers: eager, hidden and not, in two CUDA graphs that share rooms, and eager between their replays, with half of the GPUs late.
A GPU that is late when its room is made would write zeros over what a faster one has put there, its signal that it has come
included."""

import subprocess
import sys

import pytest
import torch

from course.config import Parallel
from course.parallel import build_mesh, joined
from course.parallel.mesh import Axis
from course.parallel.tensor_parallel import overlapped_linear, symmetric_memory
from course.parallel.tensor_parallel.overlap_choice import choose_overlap

GPUS = torch.cuda.device_count()
SHAPES = ((3, 8, 16), (1, 8, 16), (2, 4, 1152))    # samples, tokens of a sample, width


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("n", [n for n in (2, 4, 8) if n <= GPUS] or [2])
def test_what_is_exchanged_is_exact(n):
    run = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}", __file__],
                         capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-4000:]


@pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
@pytest.mark.parametrize(("precision", "says"), [("bf16", "parallel.overlap=auto takes symmetric"),
                                                 ("fp8", "parallel.overlap=none: native FP8 multiplies whole tensors")])
def test_a_run_takes_the_fastest_overlap_by_default(precision, says, tmp_path):
    run = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m", "course.cli",
                          "train", "gpt-demo", "data.source=mock", f"precision={precision}", "parallel.tp=2", "parallel.sp=true",
                          "train.steps=3", f"log.dir={tmp_path}"], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0 and run.stdout.count(says) == 1, run.stdout[-2000:] + run.stderr[-4000:]


@pytest.mark.skipif(not GPUS, reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("n", "samples", "tokens", "width"), [(2, 3, 5, 1000), (4, 1, 1, 2047), (8, 2, 3, 683), (4, 2, 1, 1)])
def test_the_kernels_sum_is_the_plain_one(dtype, n, samples, tokens, width):
    """Of whole numbers that their format has, and whose partial sums it has not: rounded once. A rank's own place is not read."""
    generator = torch.Generator().manual_seed(0)
    all_of_x = torch.randint(250, 260, (samples, n * tokens, width), generator=generator).to("cuda", dtype)
    pieces = torch.randint(0, 3, (n, samples, tokens, width), generator=generator).to("cuda", dtype)
    for rank, own in enumerate(all_of_x.chunk(n, 1)):
        given = pieces.clone()
        given[rank] = torch.nan
        wanted = symmetric_memory.sum_pieces_plain(own.cpu(), given.cpu(), rank)
        assert torch.equal(torch.ops.course.add_up(own, given, rank).cpu(), wanted)


def numbers(samples: int, tokens: int, width: int, rank: int, time: int) -> torch.Tensor:
    """(B, T, D) of a rank at a time, in whole numbers, of which bf16 has the sum of 8 ranks'."""
    sample, token, column = torch.meshgrid(*(torch.arange(n, device="cuda") for n in (samples, tokens, width)), indexing="ij")
    return (7 * sample + 3 * token + column + 5 * rank + time).remainder(31).to(torch.bfloat16)


class Case:
    """A gather and a scatter of one shape, of inputs that stay where they are, as a CUDA graph needs them."""

    def __init__(self, axis: Axis, shape: tuple[int, int, int], hidden: bool):
        self.axis, self.shape, self.hidden = axis, shape, hidden
        samples, tokens, width = shape
        self.piece = torch.empty(samples, tokens // axis.size, width, device="cuda", dtype=torch.bfloat16)
        self.wide = torch.empty(samples, tokens, 2 * width, device="cuda", dtype=torch.bfloat16)
        self.whole, self.sums = torch.empty_like(self.wide[..., :width]), torch.empty_like(self.piece)

    def fill(self, time: int) -> None:
        """Give each rank its numbers of a time: to gather a piece of them, to scatter all, not contiguous."""
        mine = numbers(*self.shape, self.axis.rank, time)
        self.piece.copy_(mine.chunk(self.axis.size, 1)[self.axis.rank])
        self.wide[..., :self.shape[2]] = mine

    def __call__(self) -> None:
        """Three exchanges of each kind, so that a place is used twice; what comes is copied before the next begins."""
        for _ in range(3):
            whole = overlapped_linear.gather(self.piece, self.axis, self.shape[1], direct=True, hidden=self.hidden)()
            self.whole.copy_(whole)
            with torch.autocast("cuda", torch.bfloat16):                # as a step has it, whose sums are in float32
                sums = overlapped_linear.scatter(self.wide[..., :self.shape[2]], self.axis, direct=True, hidden=self.hidden)()
            self.sums.copy_(sums)
            assert whole.dtype == sums.dtype == torch.bfloat16

    def check(self, time: int) -> None:
        """Of a gather: each rank's piece is where it belongs. Of a scatter: this rank's tokens of the sum."""
        of = [numbers(*self.shape, rank, time) for rank in range(self.axis.size)]
        n = self.axis.size
        assert torch.equal(self.whole, torch.cat([x.chunk(n, 1)[rank] for rank, x in enumerate(of)], 1)), (self.shape, time)
        assert torch.equal(self.sums, torch.stack(of).sum(0).chunk(n, 1)[self.axis.rank]), (self.shape, time)


def captured(case: Case) -> torch.cuda.CUDAGraph:
    """The exchanges of a case as a graph."""
    graph = torch.cuda.CUDAGraph()
    symmetric_memory.new_graph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        case()
    return graph


def late(axis: Axis) -> None:
    """Let every other rank's GPU be a few milliseconds behind."""
    if axis.rank % 2:
        torch.cuda._sleep(10_000_000)


def main() -> None:
    """On each rank."""
    with joined("cuda") as world:
        settings = Parallel(dp=1, tp=world.size, sp=True)
        mesh, times = build_mesh(settings, world), iter(range(1000))
        assert choose_overlap(mesh, settings).how == "symmetric" == choose_overlap(mesh, settings).how
        axis = mesh.tp
        for shape in SHAPES:
            cases = [Case(axis, shape, hidden) for hidden in (False, True)]

            def once(case: Case, run) -> None:
                time = next(times)
                case.fill(time)
                late(axis)
                run()
                case.check(time)

            for case in cases:
                once(case, case)
                once(case, case)
            graphs = [captured(case) for case in cases]
            for _ in range(3):
                for case, graph in zip(cases, graphs, strict=True):
                    once(case, graph.replay)
                    once(case, case)                # as a validation does between steps
                    once(case, graph.replay)
                    once(case, graph.replay)
            many = next(times)
            for case in cases:
                case.fill(many)
            for step in range(50):                  # ranks drift apart as far as barriers let them
                if step % 10 == 0:
                    late(axis)
                graphs[step % 2].replay()
            for case in cases:
                case.check(many)


if __name__ == "__main__":
    main()
