"""What the host needs for a step: fitted to four steps, and put together from rows."""

import json
from dataclasses import astuple, replace
from itertools import product
from statistics import median

import pytest
import torch
from typer.testing import CliRunner

from course.bench import host_overhead_table, layout_harness
from course.cli import main
from course.config import load
from course.parallel import World
from course.planner import hardware, host_overhead, step_time
from course.planner.host_overhead import Cost, Host
from course.planner.rank_workload import workload_of
from course.utils.errors import CourseError

CPU = World(device=torch.device("cpu"))
FEW = ["data.source=mock", "train.global_batch=8", "train.micro_batch=2"]


def made_up():
    """A host whose rows are all known numbers: a row's settings cost 2, 4, 8 ... blocks more, its recomputation 100s of them."""
    rows = {}
    for gpus in (1, 2):
        for name in host_overhead_table.rows_of(gpus):
            words = name.split(", ")
            extra = sum(2.0 ** (1 + list(host_overhead.SETTINGS).index(word)) for word in words if word in host_overhead.SETTINGS)
            again = 100 * host_overhead.RECOMPUTE.index(words[-1]) if words[-1] in host_overhead.RECOMPUTE else 0
            kind = {"vit": 1e5, "gpt": 2e5, "dit": 3e5}[words[0]]
            rows[name] = Cost(0.0, 0.0, kind + extra + again + 5e4 * ("compiled" in words))
    return Host(rows, 1e-3)


def blocks_of(settings, preset="gpt-124m", dp=1):
    """Plain steps of one block of one micro-batch."""
    return made_up().seconds(load(preset, [*FEW, *settings]), dp, 1, 1) / 1e-3


def bit(name):
    return 2.0 ** (1 + list(host_overhead.SETTINGS).index(name))


@pytest.mark.parametrize("known", [Cost(2.0, 3.0, 0.5), Cost(2.0, 3.0, 0.5, 0.25)])
def test_four_steps_make_a_cost_and_a_fifth_that_of_buckets(known):
    sizes = [(*size, 1) for size in product((2, 8), (1, 3))] + [(8, 1, 90)] * bool(known.bucket)
    steps = {size: known.of(*size) for size in sizes}
    assert steps[8, 3, 1] == 2 + 3 * (3 + 8 * 0.5)
    found = host_overhead_table.fitted(steps)
    assert astuple(found) == pytest.approx(astuple(known))


def test_the_committed_table_has_every_row_and_no_row_costs_nothing():
    known = host_overhead.read(host_overhead.RESULTS / host_overhead.REFERENCE)
    assert known.rows.keys() == host_overhead_table.rows_of(1).keys() | host_overhead_table.rows_of(2).keys()
    lists = [json.loads((host_overhead.RESULTS / f"heldout_{number}_h200.json").read_text())["rows"] for number in (3, 4)]
    assert known.plain_step == median(row["plain_step"] for rows in lists for row in rows)              # of many machines
    for name, cost in known.rows.items():
        assert cost.block > 0.2 and cost.of(2, 1) > 1, name


def test_a_configuration_pays_for_what_it_is_set_to():
    assert blocks_of([]) == pytest.approx(2e5)
    assert blocks_of(["train.recompute=full"]) == pytest.approx(2e5 + 200)
    assert blocks_of(["model.position=rotary", "model.norm=rms"]) == pytest.approx(2e5 + bit("rotary") + bit("rms"))
    assert blocks_of(["model.qk_norm=true"]) > blocks_of([]) == blocks_of(["model.head_dim=16"])
    assert blocks_of(["model.qk_norm=true", "compile=true"]) == blocks_of(["compile=true"])
    assert blocks_of(["precision=fp8"], "vit-mp") == pytest.approx(1e5 + bit("fp8"))
    assert blocks_of(["parallel.tp=2", "parallel.sp=true"]) == pytest.approx(2e5 + bit("nccl"))
    assert blocks_of(["parallel.tp=2", "parallel.sp=true", "parallel.overlap=none"]) == pytest.approx(2e5 + bit("sp"))


def test_what_is_compiled_is_fused_or_was_measured_compiled_or_is_the_same():
    assert blocks_of(["compile=true", "model.position=rotary"]) == pytest.approx(2.5e5)
    assert blocks_of(["compile=true", "parallel.tp=2"]) == pytest.approx(2.5e5 + bit("tp"))
    assert blocks_of(["compile=true"], dp=2) == pytest.approx(2.5e5 + bit("dp"))


def test_recomputation_repeats_the_forward_half_of_what_was_not_measured_with_it():
    assert blocks_of(["parallel.tp=2", "train.recompute=full"]) == pytest.approx(2e5 + 200 + 1.5 * bit("tp"))
    assert blocks_of(["train.recompute=full"], dp=2) == pytest.approx(2e5 + 200 + bit("dp"))
    fp8 = blocks_of(["precision=fp8", "train.recompute=full"], "vit-mp")
    assert fp8 == pytest.approx(1e5 + 200 + bit("fp8"))                 # was measured with it


def test_what_a_table_lacks_is_taken_from_the_nearest_row_that_it_has():
    asked = load("vit-mp", [*FEW, "precision=fp8", "compile=true", "train.recompute=full"])
    rows = dict(made_up().rows)
    rows["vit, fp8, compiled, full"] += Cost(block=8e5)
    for row, more in (("vit, fp8, compiled, full", 8e5 + bit("fp8")), ("vit, fp8, compiled", 1.5 * bit("fp8")),
                      ("vit, fp8, full", bit("fp8")), ("vit, fp8", 1.5 * bit("fp8"))):
        assert Host(rows, 1.0).seconds(asked, 1, 1, 1) == pytest.approx(1.5e5 + 200 + more), row
        del rows[row]


def test_what_runs_outside_the_compiled_code_costs_with_recomputation_what_it_costs_eagerly():
    rows = dict(made_up().rows)
    rows["gpt, experts, selective"] += Cost(block=7e5)
    moe = ["model.experts=4", "model.top_k=2", "model.moe_every=1", "compile=true", "train.recompute=selective"]
    asked = load("gpt-124m", [*FEW, *moe])
    assert Host(rows, 1.0).seconds(asked, 1, 1, 1) == pytest.approx(2.5e5 + 100 + bit("experts") + 7e5)


def test_a_row_with_several_settings_counts_what_is_its_own():
    """The rows of shared experts and of ep contain experts, and ep's the average of gradients."""
    moe = ["model.experts=4", "model.top_k=2", "model.moe_every=1"]
    assert blocks_of(moe) == pytest.approx(2e5 + bit("experts"))
    assert blocks_of([*moe, "model.shared_experts=1"]) == pytest.approx(2e5 + bit("shared experts"))
    assert blocks_of([*moe, "parallel.dp=2", "parallel.ep=2"], dp=2) == pytest.approx(2e5 + bit("ep"))


def test_weights_gathered_in_eight_bits_were_measured_with_fp8():
    assert blocks_of(["parallel.zero=3", "precision=fp8"], dp=2) == pytest.approx(2e5 + bit("zero 3 in fp8"))
    assert blocks_of(["parallel.zero=1", "precision=fp8"], dp=2) == pytest.approx(2e5 + bit("zero 1") + bit("fp8"))


def test_each_bucket_of_gradients_costs_the_same():
    cost = Cost(block=1.0, bucket=0.5)
    found = Host({"gpt": Cost(), "gpt, dp": cost}, 2.0)
    asked = load("gpt-124m", FEW)
    assert [found.seconds(asked, 2, 3, 1, buckets) for buckets in (1, 2, 5)] == [6.0, 7.0, 10.0]


@pytest.mark.parametrize(("settings", "gpus", "number"), [
    ([], 1, 1), ([], 2, 19), (["parallel.bucket_mb=1e6"], 2, 1), (["parallel.bucket_mb=0"], 2, 144),
    (["parallel.data=naive"], 2, 1), (["parallel.cp=2", "parallel.context=ring"], 2, 19),
    (["parallel.zero=true", "parallel.bucket_mb=100"], 2, 5)])
def test_buckets_are_counted(settings, gpus, number):
    local = workload_of(load("gpt-124m", [*FEW, *settings]), hardware.load("h200"), gpus)
    assert step_time.buckets_of(local, 124e6) == number


@pytest.mark.parametrize(("settings", "dp", "more"), [
    (["parallel.zero=true"], 2, {"zero 1": 1}),
    (["parallel.zero=3"], 2, {"zero 3": 1}),
    (["parallel.cp=2", "parallel.context=gather"], 1, {"causal gather": 1}),
    (["parallel.cp=2", "parallel.zero=true", "parallel.context=all_to_all"], 1, {"all_to_all": 1, "zero 1": 1, "dp": -1}),
    (["parallel.cp=4", "parallel.context=ring"], 1, {"ring": 3, "dp": -2}),
    (["parallel.cp=4"], 1, {"all_to_all": 1, "dp": 0}),
    (["parallel.pp=4", "parallel.chunks=3", "parallel.schedule=interleaved"], 1, {"pp": 3}),
    (["parallel.tp=4", "parallel.sp=true", "parallel.overlap=symmetric"], 1, {"symmetric": 2}),
    (["parallel.tp=4", "parallel.sp=true", "parallel.overlap=symmetric", "model.context=1022"], 1, {"nccl": 1})])
def test_layouts(settings, dp, more):
    assert blocks_of(settings, dp=dp) == pytest.approx(2e5 + sum(times * bit(name) for name, times in more.items()))


def test_a_graph_asks_nothing_of_the_host_and_a_slower_one_takes_longer():
    assert blocks_of(["graphs=true"]) == 0
    found, c = made_up(), load("gpt-124m", FEW)
    assert replace(found, plain_step=3e-3).seconds(c, 1, 12, 4) == pytest.approx(3 * found.seconds(c, 1, 12, 4))
    assert found.seconds(c, 1, 12, 4) == pytest.approx(4 * found.seconds(c, 1, 12, 1))


def test_an_own_table_and_what_it_did_not_measure(tmp_path):
    file = tmp_path / "ours.json"
    file.write_text(json.dumps({"plain_step": 5e-3, "host": {"gpt": [1, 1, 7], "gpt, tp": "RuntimeError: one GPU"}}))
    h200 = hardware.load("h200")
    own = host_overhead.host_of(hardware.Hardware("own", 1e11, 4e12, {"bf16": 1e15}, h200.links, host=str(file)))
    assert host_overhead.source(h200) == "a host like the H200s' (host_h200.json)"
    assert own.plain_step == 5e-3 and own.rows["gpt"] == Cost(1, 1, 7)
    assert own.rows["gpt, tp"] == host_overhead.host_of(h200).rows["gpt, tp"]
    with pytest.raises(CourseError, match=r"there is no table nowhere\.json: measure one with `course bench host"):
        host_overhead.host_of(hardware.Hardware("third", 1e11, 4e12, {"bf16": 1e15}, h200.links, host="nowhere.json"))


@pytest.mark.parametrize("text", ["[]", "{", '{"host": {}}', '{"host": {"gpt": ["a", 1, 2]}, "plain_step": 1}',
                                  '{"host": {"gpt": [1, 2, 3, 4, 5]}, "plain_step": 1}', '{"host": 3, "plain_step": 1}'])
def test_what_is_no_table_gets_a_sentence(tmp_path, text):
    file = tmp_path / "ours.json"
    file.write_text(text)
    with pytest.raises(CourseError, match=r"ours.json is no table of the host .*: make one with `course bench host"):
        host_overhead.read(file)


def test_by_turns_runs_each_in_every_lap():
    seen = []
    runs = {name: lambda name=name: seen.append(name) for name in "ab"}
    found = layout_harness.by_turns(runs, CPU, 3, least=1e-9)
    assert {name: len(laps) for name, laps in found.items()} == {"a": 3, "b": 3}
    assert seen[-6:] == list("ababab")


def test_every_row_is_a_configuration_that_the_library_takes():
    for gpus in (1, 2):
        for name, (kind, overrides) in host_overhead_table.rows_of(gpus).items():
            preset, *size = host_overhead_table.TINY[kind]
            c = load(preset, ["data.source=mock", *size, *overrides])
            p = c.parallel
            assert max(1, p.dp) * p.cp * p.tp * p.pp == gpus, name
            assert host_overhead.row_name(kind, "", c.compile, c.train.recompute) in host_overhead_table.rows_of(1)


@pytest.mark.slow
def test_the_command_writes_a_table_that_the_model_reads(tmp_path):
    file = tmp_path / "host.json"
    done = CliRunner().invoke(main.app, ["bench", "host", "--small", "--out", str(file)])
    assert done.exit_code == 0, done.output
    found = host_overhead.read(file)
    assert set(found.rows) == set(host_overhead_table.SMALL) and found.plain_step > 0
    assert 0.1 < found.rows["gpt"].block < 50 and json.loads(file.read_text())["took_s"] < 120


def test_without_a_gpu_it_says_so():
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(CourseError, match="course bench host needs a GPU, and this machine shows none: --small"):
        host_overhead_table.main(False)
