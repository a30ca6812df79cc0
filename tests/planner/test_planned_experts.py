"""Models with experts: active parameters, FLOPs, dispatch on each link, the host's waits, and layouts that spread experts."""

from dataclasses import replace

import pytest

from course.cli import plan, presets
from course.config import load
from course.config.validation import refusal
from course.planner import activation_memory, block_time, collectives, experts_time, flops, hardware, peak_memory, step_time
from course.planner.rank_workload import workload_of
from course.planner.search import find_layouts
from course.utils.errors import CourseError

H100, H200 = (hardware.load(name) for name in ("h100-80", "h200"))
MOE = ["model.shared_experts=0", "model.moe_every=1", "train.global_batch=32", "train.micro_batch=4"]

pytestmark = pytest.mark.usefixtures("rules")


def moe(*settings):
    return load("gpt-moe-8x350m", [*MOE, *settings])


def work(c, gpus, h=H200):
    return workload_of(c, h, gpus)


def test_mixtral_has_12_9_of_46_7_billion_parameters_active():
    """As Jiang et al. 2024, arXiv:2401.04088, section 1, say, "47B" and "13B"."""
    assert presets.sizes(load("gpt-moe-8x7b")) == ("46.7B", "12.9B")
    assert presets.sizes(load("gpt-moe-8x7b", ["parallel.ep=8", "parallel.tp=2"])) == ("46.7B", "12.9B")
    assert flops.idle_parameters(load("gpt-7b").model) == 0


def test_qwen3_has_3_3_of_30_5_billion_parameters_active():
    """As Qwen's model card says, which cuts off the second digit; of its 128 experts each token takes 8."""
    assert presets.sizes(load("gpt-moe-30b-a3b")) == ("30.5B", "3.35B")


def test_wide_and_normed_heads_take_the_time_of_their_numbers():
    """Heads twice as wide have twice the scores' products; a norm of heads is memory-bound work."""
    plain, wide, normed = (work(load("gpt-1.3b", ["parallel.dp=1", "train.micro_batch=1", *more]), 1)
                           for more in ([], ["model.head_dim=256"], ["model.qk_norm=true"]))
    assert block_time.block_time(normed)["memory"] > 1.02 * block_time.block_time(plain)["memory"]
    same = [part for part in block_time.block_time(plain) if part not in ("memory", "forward", "backward")]
    assert all(block_time.block_time(normed)[part] == block_time.block_time(plain)[part] for part in same)
    assert flops.step(wide.m, 1) - flops.step(plain.m, 1) == 3 * 24 * (4 * 2048 * 2048 * 2048 + 2 * 2048 * 4 * 2048 * 2048)
    assert block_time.block_time(wide)["attention"] > 1.5 * block_time.block_time(plain)["attention"]


def test_matmuls_are_the_model_flops_of_the_active_experts():
    """At the rule's efficiency, without attention's scores and the router, which multiplies in 32 bits."""
    c = moe("model.dim=4096", "model.heads=32", "parallel.dp=1")
    m = c.model
    others = 32 * 3 * m.depth * (4 * m.context**2 * m.dim + 2 * m.context * m.dim * m.experts)
    router = m.depth * 8 * 3 * work(c, 1).kernels.matmul(4 * m.context, m.dim, m.experts, "fp32")
    expected = (flops.step(m, 32) - others) / (0.68 * 989e12) + router
    assert step_time.predict(c, H200).matmul == pytest.approx(expected, rel=0.01)


def test_other_formats_multiply_expert_by_expert():
    kernels = work(moe("parallel.dp=1"), 1).kernels
    assert kernels.grouped(8, 1024, 4096, 4096, "bf16") == kernels.matmul(8192, 4096, 4096, "bf16")
    assert kernels.grouped(8, 1, 4096, 4096, "bf16") > 8 * 2 * 4096**2 / 4.8e12         # all experts' weights are read
    assert kernels.grouped(8, 1024, 4096, 4096, "tf32") == 8 * kernels.matmul(1024, 4096, 4096, "tf32")


def test_dispatch_takes_as_long_as_its_bytes_on_each_link():
    """Two GPUs of a node, and two nodes with one each: rows of 16-bit numbers there and back, half of them to the other rank."""
    c = moe("parallel.ep=2", "parallel.imbalance=1")
    rows = 4 * c.model.context * 2
    for h in (H200, replace(H200, links=(replace(H200.links[0], span=1), *H200.links[1:]))):
        local = work(c, 2, h)
        link = next(link for link in h.links if link.span != 1)
        moved = rows * c.model.dim * 2 * 2 / 2
        expected = 2 * (collectives.CALL + link.latency) + moved / (0.78 * link.bandwidth)
        there, back = experts_time.exchange_time(local)
        assert back == pytest.approx(expected)
        numbers = collectives.CALL + link.latency + 8 * 8 / 2 / (0.78 * link.bandwidth)         # of rows, for each of 8 experts
        assert there - back == pytest.approx(numbers + experts_time.WAIT)
    for settings, waits in (([], 0), (["precision=tf32"], 2), (["precision=fp8"], 0)):
        assert experts_time.exchange_time(work(moe(*settings), 2)) == (waits * experts_time.WAIT, 0.0)


def test_gathered_tokens_are_all_moved_and_need_no_wait():
    """The bytes of all tokens of 4 ranks there and back, and memory for all of their choices."""
    sent, gathered = (moe("parallel.dp=4", "parallel.ep=4", "parallel.imbalance=1", f"parallel.dispatch={how}")
                      for how in ("all_to_all", "gather"))
    there, back = experts_time.exchange_time(work(gathered, 4))
    size = 2 * 4 * 4 * gathered.model.context * gathered.model.dim
    assert there == back == pytest.approx(2 * collectives.all_gather(size, work(gathered, 4).groups["ep"]))
    local = step_time.predict(gathered, H200, 4)
    assert local.matmul == pytest.approx(step_time.predict(sent, H200, 4).matmul)       # of the same rows
    rows = [activation_memory.expert_rows(next(peak_memory.ranks(c))) for c in (sent, gathered)]
    assert rows[1] == 4 * rows[0] == 4 * 4 * 2 * gathered.model.context
    assert peak_memory.predict(gathered).activations > 2 * peak_memory.predict(sent).activations


def test_imbalance_multiplies_the_rows_of_the_fullest_rank():
    for settings, share in ((["parallel.ep=2", "parallel.imbalance=1.5"], 1.5), (["parallel.imbalance=1.5"], 1),
                            (["parallel.ep=2", "parallel.imbalance=8"], 2),
                            (["parallel.ep=4", "parallel.imbalance=3", "model.capacity_factor=1.25"], 1.25)):
        local = work(moe(*settings), 4)
        assert local.choices == 2 * local.tokens and local.rows == share * local.choices
    slow, fast = (step_time.predict(moe("parallel.ep=4", f"parallel.imbalance={x}"), H200, 4) for x in (2, 1))
    assert slow.matmul > 1.3 * fast.matmul and slow.dispatch > 1.5 * fast.dispatch
    full, even = (peak_memory.predict(moe("parallel.dp=4", "parallel.ep=4", f"parallel.imbalance={x}")) for x in (2, 1))
    assert full.activations > 1.1 * even.activations and full.parameters == even.parameters
    with pytest.raises(CourseError, match=r"parallel.imbalance=0.5 must be at least 1"):
        moe("parallel.imbalance=0.5")


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_ranks_average_and_update_a_share_of_the_experts(zero):
    whole, spread = (moe("parallel.dp=4", f"parallel.ep={ep}", f"parallel.zero={zero}", "model.dim=2048") for ep in (1, 4))
    before, after = (step_time.predict(c, H200, 4) for c in (whole, spread))
    assert after.data + after.hidden < before.data + before.hidden
    assert after.optimizer < 0.7 * before.optimizer if zero == 0 else after.optimizer == pytest.approx(before.optimizer, rel=0.05)
    states = [peak_memory.predict(c).states for c in (whole, spread)]
    assert states[1] == pytest.approx(states[0], rel=0.01) if zero else states[1] < 0.5 * states[0]


def test_a_host_that_waits_in_the_forward_pass_runs_ahead_in_the_backward_pass_alone():
    local = work(moe("parallel.dp=1", "train.micro_batch=32", "precision=tf32"), 1)
    host = local.host.seconds(local.config, 1, 24, 1, 1)
    launches = (host - local.host.seconds(local.config, 1, 0, 1, 1)) / 2
    long = 10 * host
    assert step_time.launch_time(local, 24, 1e6, long, 0.0) == pytest.approx(launches)
    assert step_time.launch_time(local, 24, 1e6, long, long) == pytest.approx(host - launches)
    for more in (["train.recompute=full", "precision=tf32"], []):       # the backward pass waits, too; in bf16 nothing waits
        other = work(moe("parallel.dp=1", "train.micro_batch=32", *more), 1)
        assert step_time.launch_time(other, 24, 1e6, long, 0.0) == 0


def test_layouts_spread_experts_and_the_command_says_so():
    settings = ["model.depth=8", "parallel.pp=1", "parallel.tp=1"]
    c = load("gpt-moe-8x7b", settings)
    found = find_layouts(c, H100, 16, plan.fixed(settings))
    p = found.layouts[0].config.parallel
    assert p.ep == 8 and p.cp == 1                  # the GPUs of a node
    assert all(not refusal(one.config) and one.config.model.experts % one.config.parallel.ep == 0 for one in found.layouts)
    words = plan.command("gpt-moe-8x7b", settings, found, found.layouts[0]).split()
    assert "parallel.ep=8" in words and load("gpt-moe-8x7b", words[words.index("gpt-moe-8x7b") + 1:]) == found.layouts[0].config
    assert "experts over 8" in plan.describe(found.layouts[0].config, c)
    assert plan.active(found) == ["A token uses 3.42B of 11.9B parameters. Fullest experts' rank: 1.1 x the mean rows "
                                  "(parallel.imbalance)."]
    settings += ["parallel.ep=2"]
    kept = find_layouts(load("gpt-moe-8x7b", settings), H100, 16, plan.fixed(settings))
    assert {one.config.parallel.ep for one in kept.layouts} == {2}
    assert not plan.active(find_layouts(load("gpt-124m"), H100, 2))
