"""What `parallel.context=auto` takes: from heads, mask and attention kernel alone."""

from dataclasses import replace
from itertools import product

import pytest

from course import config
from course.bench import results
from course.config.context_choice import context_choice, context_method
from course.config.validation import refusal
from course.convert.reshard import pretended
from course.models import build_model
from course.parallel import World, build_mesh, parallelize
from course.parallel.context_parallel.attention import METHODS
from course.planner import hardware, peak_memory
from course.planner.step_time import predict
from course.training.trainer import context_note
from experiments import context_steps

GROUPED = ["model.heads=8", "model.kv_heads=2", "model.dim=64"]


@pytest.mark.parametrize(("preset", "settings", "how"), [
    ("gpt-demo", ["parallel.cp=2"], "all_to_all"), ("gpt-demo", ["parallel.cp=3"], "ring"),
    ("gpt-demo", ["parallel.cp=2", "parallel.tp=4"], "ring"), ("dit-demo", ["parallel.cp=2"], "gather"),
    ("dit-demo", ["parallel.cp=4"], "all_to_all"), ("dit-demo", ["parallel.cp=3"], "gather"),
    ("vit-demo", ["parallel.cp=3"], "gather"), ("vit-demo", ["parallel.cp=2"], "gather"),
    ("gpt-demo", [*GROUPED, "parallel.cp=2"], "all_to_all"), ("gpt-demo", [*GROUPED, "parallel.cp=4"], "ring"),
    ("gpt-demo", [*GROUPED, "parallel.cp=2", "attention=efficient", "precision=bf16"], "ring"),
    ("gpt-demo", ["parallel.cp=2", "parallel.context=gather"], "gather")])
def test_auto_takes_a_method_by_heads_and_mask(preset, settings, how):
    c = config.load(preset, settings)
    assert refusal(c) == "" and context_method(c) == how


def test_auto_takes_the_method_whose_whole_steps_were_the_fastest():
    rows = results.load("context_steps_2xh200")["rows"]
    for name, case in context_steps.CASES.items():
        times = {row["context"]: row["ms"] for row in rows if row["case"] == name and row["gpus"] == 2 and row["graphs"]}
        c = config.load(case.preset, [*case.settings, "parallel.cp=2", f"train.global_batch={case.samples}"])
        assert set(times) == {*METHODS} and times[context_method(c)] == min(times.values()), name


def test_auto_takes_no_method_that_is_refused():
    """Over heads, groups, axes, pipelines, formats and kernels: where auto is refused, so is every method."""
    refused = 0
    for groups, cp, tp, sp, pp, precision, attention in product((0, 1, 2), (2, 3, 4), (1, 2, 4), ("true", "false"), (1, 2),
                                                                ("bf16", "fp8"), ("default", "efficient")):
        def why(how, c):
            return refusal(replace(c, parallel=replace(c.parallel, context=how)))

        base = config.load("gpt-demo", ["model.heads=4", "model.dim=128"])
        p = replace(base.parallel, cp=cp, tp=tp, sp=sp == "true", overlap="none", pp=pp)
        c = replace(base, model=replace(base.model, kv_heads=groups), parallel=p, precision=precision, attention=attention)
        if why("auto", c):
            refused += 1
            assert all(why(how, c) for how in METHODS), (groups, p, precision, attention)
    assert 0 < refused < 200


def test_files_keep_auto_and_older_ones_their_method(tmp_path):
    """So a run goes on with another cp, which its method might not take."""
    config.save(config.load("gpt-demo", ["parallel.cp=2"]), tmp_path / "config.yaml")
    again = config.load(str(tmp_path / "config.yaml"), ["parallel.cp=3"])
    assert again.parallel.context == "auto" and context_method(again) == "ring"
    (tmp_path / "old.yaml").write_text("base: gpt-demo\nparallel: {cp: 2, context: ring}\n")
    assert context_method(config.load(str(tmp_path / "old.yaml"))) == "ring"


@pytest.mark.parametrize(("cp", "how"), [(2, "all_to_all"), (3, "ring")])
def test_surgery_puts_what_auto_takes_at_the_seams(cp, how):
    c = config.load("gpt-demo", [f"parallel.cp={cp}", "parallel.dp=1"])
    model = build_model(c.model)
    with pretended(0, cp):
        parallelize(model, build_mesh(c.parallel, World(0, cp)), c.parallel)
    assert {type(block.attn.core) for block in model.blocks.values()} == {METHODS[how]}


def test_the_planner_predicts_what_auto_takes():
    """And while the GPU is busy it is at most 8% slower than the best."""
    h200 = hardware.load("h200")
    for preset, settings in (("gpt-1.3b", ["model.context=16384"]), ("dit-xl", []), ("gpt-1.3b", ["model.context=65536"])):
        for cp, tp in ((2, 1), (4, 1), (4, 2)):
            layout = [*settings, "precision=bf16", "graphs=true", "compile=true", f"parallel.cp={cp}", f"parallel.tp={tp}",
                      "parallel.dp=1", "train.global_batch=4", "train.micro_batch=0"]
            auto, *each = (config.load(preset, [*layout, f"parallel.context={how}"]) for how in ("auto", *METHODS))
            taken = next(c for c in each if c.parallel.context == context_method(auto))
            assert predict(auto, h200) == predict(taken, h200) and peak_memory.predict(auto) == peak_memory.predict(taken)
            assert predict(auto, h200).step < 1.08 * min(predict(c, h200).step for c in each), (preset, cp, tp)


def test_a_run_says_what_auto_took_and_why():
    c = config.load("gpt-demo", ["parallel.cp=3"])
    method, why = context_choice(c)
    assert context_note(c) == f"\nparallel.context=auto takes {method}: {why}"
    assert why == "parallel.cp=3 does not divide the 4 heads of a rank, and attention is causal"
    assert context_note(config.load("gpt-demo", ["parallel.cp=3", "parallel.context=ring"])) == ""
    assert context_note(config.load("gpt-demo")) == ""
