"""A search among thousands of layouts: what is left out could not be among the first, and how much is predicted to find these.
By the measured tables, unlike test_plan.py."""

import random
import time
from dataclasses import replace
from itertools import product

import pytest

from course.cli import plan
from course.config import load
from course.config.validation import refusal
from course.planner import hardware, peak_memory, search, search_space, step_time
from course.planner.search import find_layouts
from course.utils.errors import CourseError

H100 = hardware.load("h100-80")


@pytest.mark.slow
def test_a_few_thousand_predictions_for_thousands_of_layouts(monkeypatch):
    """15,120 has 80 divisors, and so has each rank's share of as many samples: 150,000 variants before their ways vary."""
    asked, predict = [], step_time.predict
    monkeypatch.setattr(step_time, "predict", lambda *words: asked.append(words) or predict(*words))
    found = find_layouts(load("gpt-7b", ["train.global_batch=15120"]), H100, 15120)
    print(f"{len(asked)} predictions; {len(found.layouts)} layouts, {found.slower} left out")
    assert len(asked) < 8000 and found.slower > 1000 and len(found.layouts) >= search.REFINED
    assert f"{found.slower:,} more layouts are slower than these" in " ".join(plan.rest_of(found, 10))


def test_what_is_refused_in_every_variant_is_asked_about_once(monkeypatch):
    """Of 11,200 ways to write 15,120 GPUs a batch of 1,024 lets 195 be: the others are not to be varied."""
    asked = []
    monkeypatch.setattr(search_space, "refusal", lambda config: asked.append(config) or refusal(config))
    request = search_space.SearchRequest(load("gpt-7b", ["train.global_batch=1024"]), H100, 15120, frozenset(), ("bf16",))
    starts, refused = search_space.trainable_layouts(request)
    assert len(starts) == 195 and sum(refused.values()) == 11005 and len(asked) < 11200
    eight = replace(request, precisions=("fp8",))   # the reason is the sizes, not what else would be refused of the first variant
    assert set(search_space.trainable_layouts(eight)[1]) >= {one for one in refused if "does not divide" in one}


@pytest.mark.parametrize(("preset", "settings", "gpus", "precisions"), [
    pytest.param("gpt-1.3b", ["train.global_batch=960"], 240, ["bf16"], marks=pytest.mark.slow),
    pytest.param("gpt-7b", ["compile=true", "train.global_batch=256"], 64, ["bf16", "fp8"], marks=pytest.mark.slow),
    ("vit-mp", ["data.source=mock", "train.global_batch=96"], 96, ["bf16"]),
    pytest.param("gpt-7b", ["model.context=65536"], 32, ["bf16"], marks=pytest.mark.slow)])
def test_what_is_left_out_changes_nothing_of_the_first(preset, settings, gpus, precisions, monkeypatch):
    asked = load(preset, settings), H100, gpus, (), precisions
    found = []
    for many in (10**9, 0):
        monkeypatch.setattr(search, "MANY", many)
        found.append(find_layouts(*asked))
    whole, some = found
    assert some.slower > 0 == whole.slower and some.layouts[:search.REFINED] == whole.layouts[:search.REFINED]
    assert len(some.layouts) + len(some.misfits) + some.slower == len(whole.layouts) + len(whole.misfits)


def test_no_step_is_below_the_least():
    """And no smaller micro-batch's work, for each sample, much below the largest one's."""
    draw, seen, worst = random.Random(0), 0, 1.0
    for preset, settings in (("gpt-1.3b", []), ("gpt-7b", ["compile=true"]), ("dit-xl", ["compile=true"]),
                             ("vit-mp", ["kernels=triton"])):
        base = load(preset, ["data.source=mock", "train.global_batch=240", *settings])
        request = search_space.SearchRequest(base, H100, 48, frozenset(), ("bf16",))
        for start in draw.sample(search_space.trainable_layouts(request)[0], 8):
            work = {micro: search.work_of(request, start, micro) for micro in search_space.micro_batch_sizes(request, start)}
            worst = min([worst, *(work[a] / a / (work[b] / b) for a, b in product(work, work) if a < b)])
            for chunks, micro, how in product(search_space.schedule_choices(request, start), work, search_space.RECOMPUTE):
                one = search_space.changed(start, {**chunks, "train.micro_batch": micro, "train.recompute": how})
                if not refusal(one):
                    time = step_time.predict(one, H100, 48)
                    assert time == step_time.predict(one, H100, 48, request.known)
                    assert time.step >= search.least_step_time(start, one.parallel.chunks, micro, work[micro])
                    assert time.step >= search.lower_bound(request, start)
                    seen += 1
    print(f"{seen} variants; for a sample at least {worst:.2f} of the largest micro-batch's work")
    assert seen > 300 and worst >= search.LEAST_SAMPLE_TIME


@pytest.mark.parametrize(("preset", "settings"), [("gpt-1.3b", ["compile=true", "optim.name=sgd"]), *(
    pytest.param(*one, marks=pytest.mark.slow) for one in (("gpt-7b", []), ("dit-xl", []),
                                                           ("gpt-7b", ["precision=fp8", "parallel.overlap=none"])))])
def test_the_tightest_variant_is_among_the_few(preset, settings):
    """1f1b keeps the least of all schedules, and all overlaps keep as much. Full recomputation need not keep the least."""
    base = load(preset, ["train.global_batch=48", *settings])
    request = search_space.SearchRequest(base, H100, 48, frozenset(), (base.precision,))
    for start in random.Random(1).sample(search_space.trainable_layouts(request)[0], 12):
        every = [search_space.changed(start, {**chunks, **others, "train.micro_batch": 1, "train.recompute": "full"})
                 for chunks,
                 others in product(search_space.schedule_choices(request, start), search_space.other_choices(request, start))]
        needs = [peak_memory.predict(one).total for one in every if not refusal(one)]
        few = [peak_memory.predict(one).total for one in search_space.least_memory_variants(request, start)]
        assert min(few) <= min(needs) and len(few) <= 36
        fit = [peak_memory.fits(one, min(needs)) for one in search_space.least_memory_variants(request, start)]
        assert fit == [one <= min(needs) for one in few]


@pytest.mark.slow
def test_as_many_layouts_are_listed_as_are_asked_for():
    """Of thousands, of which the search else looks for the 32 fastest; those are the same."""
    asked = load("gpt-7b", ["train.global_batch=15120"]), H100, 15120
    few, many = find_layouts(*asked), find_layouts(*asked, top=100)
    assert len(few.layouts) < 100 <= len(many.layouts) and many.slower > 0
    assert many.layouts[:search.REFINED] == few.layouts[:search.REFINED]


@pytest.mark.parametrize("settings", [["model.depth=8648640"], *(pytest.param(one, marks=pytest.mark.slow)
                                                                 for one in ([], ["precision=fp8"]))])
def test_ten_million_blocks_take_no_longer_than_a_hundred(settings):
    """The last number has 448 divisors: a rank's chunks were all of them, each with its schedule. And no block is gone through by
    name. Seconds of a core, of which there are 3 here: with all chunks it took minutes."""
    c = load("gpt-1.3b", ["model.depth=10000000", *settings])
    begin = time.process_time()
    with pytest.raises(CourseError, match=r"no layout fits 8 x h100-80: .*: take more or larger GPUs, or a smaller model"):
        find_layouts(c, H100, 8)
    took = time.process_time() - begin
    print(f"{took:.1f} s of a core")
    assert took < 30


def test_a_rank_has_no_more_chunks_than_do_it_good():
    """As many as there are of models that exist; what the user says stays."""
    deep, some = (load("gpt-1.3b", [f"model.depth={depth}", "parallel.pp=2"]) for depth in (10_000_000, 96))
    request = search_space.SearchRequest(deep, H100, 8, frozenset(), ("bf16",))
    assert max(choice["parallel.chunks"] for choice in search_space.schedule_choices(request, deep)) == search_space.CHUNKS
    request = replace(request, config=some)
    assert {choice["parallel.chunks"] for choice in search_space.schedule_choices(request, some)} == {1, 2, 3, 4, 6, 8, 12, 16,
                                                                                                      24, 48}
    own = search_space.changed(some, {"parallel.chunks": 100, "model.depth": 400})
    request = replace(request, config=own, fixed=frozenset({"parallel.chunks"}))
    assert search_space.schedule_choices(request, own) == [{"parallel.schedule": "interleaved", "parallel.chunks": 100}]


REQUESTS = [("gpt-7b", ["train.global_batch=8192"], 16384, "h100-80", ()),
            ("gpt-7b", ["train.global_batch=1024"], 15120, "h100-80", ()),
            ("gpt-7b", ["train.global_batch=1024"], 16384, "h100-80", ("bf16", "fp8")),
            ("gpt-7b", ["train.global_batch=15120"], 15120, "h100-80", ()),
            ("gpt-7b", ["train.global_batch=16384", "compile=true"], 16384, "b200", ("bf16", "fp8"))]


@pytest.mark.slow
@pytest.mark.parametrize(("preset", "settings", "gpus", "name", "precisions"), REQUESTS)
def test_ten_seconds_for_tens_of_thousands_of_gpus(preset, settings, gpus, name, precisions):
    begin = time.process_time()
    found = find_layouts(load(preset, settings), hardware.load(name), gpus, precisions=precisions)
    took = time.process_time() - begin
    print(f"{len(found.layouts)} layouts of {gpus} GPUs in {took:.1f} s of a core")
    assert took < 10 and len(found.layouts) >= search.REFINED
