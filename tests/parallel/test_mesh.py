import math
import os
from dataclasses import replace
from itertools import permutations
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from course.config import Parallel
from course.models import ViTConfig, build_model
from course.parallel import Axis, World, build_mesh, join, parallelize
from course.parallel.mesh import AXES, check_nodes, groups, lay_out, nodes, split_joint
from course.parallel.placement import box_shape
from course.ranks.notebook_ranks import ranks
from course.utils.errors import CourseError


def test_alone_every_axis_is_trivial():
    mesh = build_mesh(Parallel(), World())
    assert mesh.dp == Axis("dp") and mesh.all == Axis("all") and mesh.tp.size == 1


@pytest.mark.parametrize(("parallel", "size", "words"), [
    (Parallel(tp=2), 1, "tp=2 = 2, but there is 1 process: start 2 with torchrun .`torchrun --standalone --nproc-per-node=2 -m"),
    (Parallel(dp=2, pp=2), 8, "pp=2 x dp=2 x cp=1 x tp=1 = 4, but there are 8 processes"),
    (Parallel(tp=3), 4, "= 3, but there are 4 processes"),
])
def test_sizes_that_do_not_multiply_are_refused(parallel, size, words):
    with pytest.raises(CourseError, match=words):
        build_mesh(parallel, World(size=size))


@pytest.mark.parametrize(("environment", "expected"), [
    ({}, (0, 1, 0)),
    ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, (3, 4, 1)),
    ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "7"}, (2, 4, 0)),
    ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_JOB_ID": "7"}, (0, 1, 0)),      # the batch script itself, without srun
])
def test_a_process_knows_who_it_is(monkeypatch, environment, expected):
    from course.parallel import mesh

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_JOB_ID",
                 "SLURM_NTASKS", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert mesh._identity() == expected


@pytest.mark.parametrize(("nodes", "known", "address"), [
    ("gpu[003-004,017]", True, "gpu003"), ("login1,gpu[03-04]", True, "login1"), ("gpu7,gpu9", True, "gpu7"),
    ("gpu[003-004]", False, "192.0.2.10"), ("gpu003", True, "127.0.0.1")])
def test_ranks_meet_where_rank_0_is_whoever_called_srun(monkeypatch, nodes, known, address):
    from course.parallel import mesh

    def look_up(host, port):
        if not known:
            raise OSError(f"{host} is not known")

    for name, value in {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_JOB_ID": "7",
                        "SLURM_STEP_NODELIST": nodes, "SLURM_LAUNCH_NODE_IPADDR": "192.0.2.10"}.items():
        monkeypatch.setenv(name, value)
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")                 # remembered, to be put back
        monkeypatch.delenv(name)
    monkeypatch.setattr(mesh.socket, "getaddrinfo", look_up)
    mesh._identity()
    assert os.environ["MASTER_ADDR"] == address


def test_symmetric_memory_is_refused_where_it_would_go_over_nodes(monkeypatch):
    """12 processes on two nodes of 6: tp=4 has 4, 5 | 6, 7; 4 of two dealt out by turns. On one node it is fine."""
    from course.parallel import mesh

    class Built(Exception):
        pass

    def built(*_, **__):
        raise Built

    def on(each, size, turns=False):
        names = [f"n{rank % (size // each) if turns else rank // each}" for rank in range(size)]
        monkeypatch.setattr(mesh, "nodes", lambda size: names)
        return World(size=size, device=torch.device("cuda"))

    monkeypatch.setattr(mesh, "new_axis", built)
    layout = Parallel(tp=4, sp=True, overlap="symmetric")
    with pytest.raises(CourseError, match=r"some of parallel.tp=4 are on several \(rank 4 on n0, .*n1, .* multiple of 4"):
        build_mesh(layout, on(6, 12))
    with pytest.raises(CourseError, match=r"parallel.order=tp-pp-dp-cp"):
        build_mesh(replace(layout, order="tp-pp-dp-cp"), on(4, 8))
    with pytest.raises(CourseError, match=r"rank 0 on n0, rank 1 on n1, .*--distribution=block"):
        build_mesh(layout, on(4, 8, turns=True))
    for fine, each in ((layout, 4), (layout, 12), (replace(layout, overlap="nccl"), 6)):
        with pytest.raises(Built):
            build_mesh(fine, on(each, 12))


def refused_by_turns() -> str:
    """What a rank hears that says it is on a node of its own."""
    here = dist.get_rank()
    with mock.patch.dict(os.environ, {"SLURMD_NODENAME": f"n{here}"}), pytest.raises(CourseError) as error:
        check_nodes([[0, 1]], nodes(2), "pp-dp-cp-tp")
    return str(error.value)


def test_ranks_tell_each_other_where_they_are():
    first, second = ranks(2)(refused_by_turns)
    assert first == second and "(rank 0 on n0, rank 1 on n1;" in first


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(CourseError, match="no GPU"):
        join("cuda")


def test_every_parameter_knows_its_place():
    model = build_model(ViTConfig())
    placements = parallelize(model, build_mesh(Parallel(), World()), Parallel()).placements
    for name, parameter in model.named_parameters():
        place = placements[parameter]
        assert place.name == name and math.prod(place.global_shape) == parameter.numel() and place.owner
        assert box_shape(place.box) == place.global_shape
    assert placements[model.blocks["0"].attn.qkv.weight].global_shape == (3, 8, 48, 384)         # heads can be cut


@pytest.mark.parametrize(("order", "tp", "pp"), [
    ("pp-dp-cp-tp", [[0, 1], [2, 3], [4, 5], [6, 7]], [[0, 4], [1, 5], [2, 6], [3, 7]]),
    ("tp-dp-cp-pp", [[0, 4], [2, 6], [1, 5], [3, 7]], [[0, 1], [4, 5], [2, 3], [6, 7]]),
])
def test_ranks_are_laid_out_in_the_order_asked_for(order, tp, pp):
    grid = lay_out({"pp": 2, "dp": 2, "cp": 1, "tp": 2}, order)
    assert grid.shape == (2, 2, 1, 2)
    assert groups(grid, 3).tolist() == tp and groups(grid, 0).tolist() == pp


@pytest.mark.parametrize("order", ["-".join(order) for order in permutations(AXES)])
def test_a_rank_is_at_the_same_place_of_an_axis_and_of_its_process_group(order, monkeypatch):
    """A process group numbers its ranks in ascending order, in whatever order it is given them."""
    made = []
    monkeypatch.setattr(dist, "new_group", lambda line: made.append(line))
    grid = lay_out({"pp": 2, "dp": 4, "cp": 2, "tp": 1}, order)
    for rank in range(16):
        axes = split_joint(grid, 4, ("a", "b"), World(rank, 16))
        assert [axis.size for axis in axes] == [4, 2]
        assert all(axis.ranks[axis.rank] == rank for axis in axes)
    assert len(made) == 16 * (4 + 8) and all(line == sorted(line) for line in made)


def places(order: str) -> list[tuple[int, ...]]:
    """Where this rank is along each axis: by the axis, by its process group, and by its list of ranks."""
    mesh = build_mesh(Parallel(dp=2, cp=2, order=order), join("cpu"))
    return [(axis.rank, dist.get_rank(axis.group), axis.ranks.index(mesh.world.rank), *axis.ranks)
            for axis in (*mesh.axes.values(), mesh.dp_cp, mesh.shard, mesh.all) if axis.size > 1]


def test_dp_cp_has_ascending_ranks_where_cp_is_slower_than_dp():
    for found in ranks(4)(places, "pp-cp-dp-tp"):
        assert all(axis == group == position for axis, group, position, *_ in found)
        assert found[-1][3:] == found[-2][3:] == found[-3][3:] == (0, 1, 2, 3)


def which_groups(settings: dict) -> list[bool]:
    """Whether dp, cp, tp and dp x cp have the process group of all ranks."""
    mesh = build_mesh(Parallel(**settings), join("cpu"))
    return [axis.group is dist.group.WORLD for axis in (mesh.dp, mesh.cp, mesh.tp, mesh.dp_cp)]


@pytest.mark.parametrize(("settings", "shared"), [
    ({"dp": 2}, [True, False, False, True]), ({"tp": 2}, [False, False, True, False]),
    ({"cp": 2}, [False, False, False, True])])
def test_axes_of_all_ranks_share_a_process_group_but_cp_does_not_queue_behind_gradients(settings, shared):
    assert ranks(2)(which_groups, settings) == [shared] * 2
