"""What `parallel.overlap=auto` takes, on stand-ins for GPUs. tests/gpu/test_gpu_symmetric.py decides on real ones."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from course import config
from course.config import Parallel
from course.convert.reshard import pretended
from course.models import build_model
from course.parallel import Axis, World, build_mesh, join, parallelize
from course.parallel.layout import Layout
from course.parallel.mesh import Mesh
from course.parallel.tensor_parallel import overlap_choice, symmetric_memory
from course.parallel.tensor_parallel.overlap_choice import Overlap, Place, choose_overlap, obstacle
from course.ranks.notebook_ranks import ranks
from course.training.trainer import overlap_note
from course.utils.errors import CourseError

NEAR = [Place("n0", f"g{rank}", frozenset(f"g{other}" for other in range(4) if other != rank)) for rank in range(4)]
PAIRS = [[0, 1], [2, 3]]


def test_gpus_of_one_node_that_reach_each_other_have_no_obstacle():
    assert obstacle(PAIRS, NEAR) == obstacle([[0, 1, 2, 3]], NEAR) == ""


def test_an_obstacle_names_the_ranks():
    far = [*NEAR[:3], replace(NEAR[3], node="n1")]
    assert "ranks 2 and 3 of a tensor-parallel group are on different nodes (n0, n1)" in obstacle(PAIRS, far)
    alone = [*NEAR[:3], replace(NEAR[3], reached=frozenset({"g0", "g1"}))]
    assert "the GPU of rank 3 does not reach the memory of rank 2's" in obstacle(PAIRS, alone)
    assert obstacle([[0, 2], [1]], [NEAR[0], far[3], NEAR[2]]) == ""   # groups of other ranks need not share a node


def chosen(refused: str, node: str) -> Overlap:
    """What a rank of two chooses whose stand-in GPU reaches the other's. refused: what making a buffer says on rank 1."""
    settings = Parallel(dp=1, tp=2, sp=True)
    mesh = build_mesh(settings, join("cpu"))
    mesh = replace(mesh, world=replace(mesh.world, device=torch.device("cuda", 0)))
    here = dist.get_rank()
    place = Place(node if here else "n0", f"g{here}", frozenset({f"g{1 - here}"}))

    def buffer(*_):
        if here and refused:
            raise CourseError("no") from RuntimeError(f"{refused}\nand more")

    with (mock.patch.object(overlap_choice, "place_of", lambda device: place),
          mock.patch.object(symmetric_memory, "double_buffer", buffer)):
        return choose_overlap(mesh, settings)


@pytest.mark.parametrize(("refused", "node", "how", "why"), [
    ("", "n0", "symmetric", "the 2 GPUs of each tensor-parallel group reach each other's memory"),
    ("", "n1", "nccl", "no symmetric memory, because ranks 0 and 1 of a tensor-parallel group are on different nodes (n0, n1)"),
    ("pidfd_open is forbidden", "n0", "nccl", "no symmetric memory, because pidfd_open is forbidden")])
def test_all_ranks_choose_alike_where_one_has_an_obstacle(refused, node, how, why):
    assert ranks(2)(chosen, refused, node) == [Overlap(how, why)] * 2


@pytest.mark.parametrize(("settings", "how"), [
    (Parallel(tp=2), "none"), (Parallel(sp=True), "none"), (Parallel(tp=2, sp=True, overlap="none"), "none"),
    (Parallel(tp=2, sp=True, overlap="nccl"), "nccl"), (Parallel(tp=2, sp=True, overlap="symmetric"), "symmetric")])
def test_what_the_configuration_says_needs_no_choice(settings, how):
    """No rank asks another one, which would fail without process groups."""
    with_gpu = mock.Mock(spec=Mesh, world=World(0, 2, torch.device("cuda")))
    assert choose_overlap(with_gpu, settings) == Overlap(how)


def test_ranks_without_gpus_take_nccls_way():
    without = choose_overlap(mock.Mock(spec=Mesh, world=World(0, 2)), Parallel(tp=2, sp=True))
    assert without == Overlap("nccl", "there are no GPUs, so no symmetric memory")


def test_a_missing_symmetric_memory_is_a_reason():
    with mock.patch.object(symmetric_memory, "double_buffer", side_effect=ImportError("no module")):
        assert overlap_choice.failure(Axis("tp", 2)) == "no module"


def test_the_layout_has_the_choice_and_its_linears_follow_it():
    c = config.load("gpt-demo", ["parallel.tp=2", "parallel.sp=true", "parallel.dp=1"])
    with mock.patch("course.parallel.choose_overlap", return_value=Overlap("symmetric", "of a test")), pretended(0, 2):
        layout = parallelize(build_model(c.model), build_mesh(c.parallel, World(0, 2)), c.parallel)
    assert layout.overlap == Overlap("symmetric", "of a test") and layout.tokens.symmetric


def test_a_run_says_what_auto_took_and_why():
    fp8 = config.load("vit-mp", ["precision=fp8", "parallel.tp=2", "parallel.sp=true"])
    layout = mock.Mock(spec=Layout, overlap=Overlap("nccl", "no symmetric memory, because of a test"))
    assert overlap_note(replace(fp8, precision="bf16"), layout) == (
        "\nparallel.overlap=auto takes nccl: no symmetric memory, because of a test")
    layout.overlap = Overlap("none")
    assert "native FP8 multiplies whole tensors" in overlap_note(fp8, layout)
    assert overlap_note(config.load("vit-mp", ["parallel.tp=2"]), layout) == ""
