"""The planner's rules are those of the library: what it refuses a run refuses, what it lets pass a run takes."""

import random
from collections import Counter
from dataclasses import replace

import pytest
import torch

from course.config import FP8, Config, Parallel, Train, load, validation
from course.config.validation import refusal
from course.convert import reshard
from course.data.order import my_slice
from course.fp8 import native
from course.models import DiTConfig, GPTConfig, ViTConfig, build_model
from course.parallel import World, build_mesh, parallelize
from course.parallel.pipeline_parallel.schedules import passes_of
from course.planner import peak_memory
from course.planner.search_space import divisors
from course.utils.errors import CourseError


def any_model(draw):
    heads = draw.choice([2, 3, 4, 6, 8])
    dim, depth, ratio = heads * draw.choice([4, 8, 16]), draw.randint(1, 9), draw.choice([4.0, 4.0, 3.0, 2.5])
    match draw.choice(["vit", "gpt", "gpt", "dit"]):
        case "vit":
            return ViTConfig(grid=(8, 16), channels=draw.choice([2, 4]), patch=4, dim=dim, depth=depth, heads=heads,
                             mlp_ratio=ratio)
        case "dit":
            return DiTConfig(latent=(4, 8, 8), dim=dim, depth=depth, heads=heads, mlp_ratio=ratio)
        case _:
            groups = draw.choice([0, 0, *divisors(heads)])
            return GPTConfig(vocab=draw.choice([64, 66, 96]), context=16, dim=dim, depth=depth, heads=heads, kv_heads=groups,
                             mlp=draw.choice(["gelu", "swiglu"]), mlp_ratio=ratio, bias=draw.choice([True, False]),
                             head_dim=draw.choice([0, 0, 8, 12]), qk_norm=draw.choice([False, True]))


def any_config(draw):
    """A small configuration in a layout of up to 16 ranks, sensible or not."""
    p = Parallel(pp=draw.choice([1, 1, 2, 3, 4]), dp=draw.choice([0, 1, 2, 3]), cp=draw.choice([1, 1, 2, 3]),
                 tp=draw.choice([1, 2, 3, 4]), sp=draw.choice([True, False]), overlap=draw.choice(["none", "nccl", "symmetric"]),
                 context=draw.choice(["gather", "ring", "all_to_all"]), schedule=draw.choice(["gpipe", "1f1b", "interleaved"]),
                 zero=draw.choice([0, 1, 2, 3]), chunks=draw.choice([1, 1, 2, 3]),
                 data=draw.choice(["bucketed"] * 6 + ["ddp", "naive"]), order=draw.choice(["pp-dp-cp-tp", "tp-cp-dp-pp"]))
    if draw.random() < 0.7 and (p.schedule == "interleaved") != (p.chunks > 1):         # most of them make sense
        p = replace(p, chunks=2 if p.schedule == "interleaved" else 1)
    if p.pp == 1 and draw.random() < 0.7:
        p = replace(p, schedule="1f1b", chunks=1)
    keep = draw.choice([FP8().keep, FP8().keep, ("head.*",), ("*.attn.*", "head.*", "embed.*"), ("blocks.0.*", "head.*")])
    precision = draw.choice(["bf16", "fp32", "fp8"])
    if precision == "fp8" and draw.random() < 0.7:
        p = replace(p, overlap="none")
    return Config(model=any_model(draw), parallel=p, precision=precision, fp8=FP8(keep=keep),
                  train=Train(global_batch=draw.choice([4, 6, 8, 12, 24]), micro_batch=draw.choice([0, 1, 1, 2])))


def a_run(c):
    """What a run does before its first step, on the last of its ranks, as if the others were here. Raises what it raises."""
    validation.check(c)
    size = reshard.ranks_of(c)
    with reshard.pretended(size - 1, size):
        world = World(size - 1, size, torch.device("cpu"))
        mesh = build_mesh(replace(c.parallel, dp=max(c.parallel.dp, 1)), world)
        model = build_model(c.model)
        scaling = native.convert(model, c, mesh)
        native.prepare(model, parallelize(model, mesh, c.parallel), scaling)
        mine = my_slice(c.train.global_batch, mesh.dp.size, mesh.dp.rank)
        if mesh.pp.size > 1:
            share = mine.stop - mine.start
            micro = c.train.micro_batch or share
            for rank in range(mesh.pp.size):
                passes_of(c.parallel.schedule, mesh.pp.size, rank, -(-share // micro), c.parallel.chunks)


def test_what_no_run_can_do_is_a_sentence():
    with pytest.raises(CourseError, match=r"as many micro-batches as parallel.pp=4, and there are 3"):
        passes_of("interleaved", 4, 0, 3, 2)
    with pytest.raises(CourseError, match=r"train.micro_batch=-1 is negative"):
        load("gpt-demo", ["train.micro_batch=-1"])
    assert "parallel.dp=-2 is negative" in refusal(replace(load("gpt-demo"), parallel=Parallel(dp=-2)))


@pytest.mark.parametrize("seed", [0])
def test_a_pipelines_fullest_rank_is_one_of_the_first_two_or_the_last(seed):
    """So that `peak_memory.predict` looks at these alone, and a planner has an answer for 64 stages as soon as for 2."""
    draw, stages = random.Random(seed), Counter()
    for _ in range(1200):
        c = any_config(draw)
        if c.parallel.pp > 1 and not refusal(c):
            ranks = [peak_memory.of_rank(rank) for rank in peak_memory.ranks(c)]
            assert peak_memory.predict(c) == max(ranks, key=lambda one: one.total)
            stages[peak_memory.predict(c).stage] += 1
    assert {0, 1} < stages.keys() and sum(stages.values()) > 100


def refused(c):
    try:
        a_run(c)
    except CourseError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("seeds", [[0], pytest.param([*range(1, 7)], marks=pytest.mark.slow)])
def test_refuses_what_a_run_refuses_and_nothing_else(seeds):
    seen = Counter()
    for draw in map(random.Random, seeds):
        for _ in range(60):
            c = any_config(draw)
            mine, real = refusal(c), refused(c)
            assert bool(mine) == bool(real), f"{c}\nplanner: {mine or 'takes it'}\nrun: {real or 'takes it'}"
            seen[mine.split("=")[0] if mine else ""] += 1
    assert seen[""] > 10 and len(seen) > 5           # takes some, and refuses for several reasons
