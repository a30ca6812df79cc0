import json
import math
from itertools import product

import pytest

from course.planner import hardware, kernel_efficiency
from course.planner.kernel_efficiency import Grid, Kernels, from_table
from course.utils.errors import CourseError

H200 = hardware.load("h200")


def made_up(share, sides=(64, 256, 1024, 4096), points=(1e6, 1e8, 1e10)):
    """A table of a GPU whose efficiency of matmuls is a known function of the shape, and 0.5 of memory."""
    peak = H200.peak("bf16")
    seconds = [2 * m * k * n / share(m, k, n) / peak for m, k, n in product(sides, sides, sides)]
    return {"matmul": {"bf16": {"axes": [list(sides)] * 3, "seconds": seconds}},
            "memory": {"copy": {"axes": [list(points)], "seconds": [x / 0.5 / H200.bandwidth for x in points]}},
            "all_reduce": {"2": [[1e6, 1e-4], [1e8, 1e-3]], "4": [[1e6, 2e-4]]}}


RULES = Kernels(H200, {})


def slope(m, k, n):
    """Linear in the logarithms, what the interpolation gives exactly."""
    return 0.1 + 0.05 * math.log(m / 64) + 0.02 * math.log(k / 64) + 0.03 * math.log(n / 64)


def test_interpolation_is_exact_for_what_is_linear_in_the_logarithms():
    found = from_table(made_up(slope), H200, H200)
    for m, k, n in ((64, 64, 64), (100, 300, 1000), (4096, 65, 4000)):
        assert found.grids["matmul bf16"].at((m, k, n)) == pytest.approx(slope(m, k, n))
    big = 3000, 2000, 4000
    assert found.matmul(*big, "bf16") == pytest.approx(2 * math.prod(big) / slope(*big) / H200.peak("bf16"))


def test_beyond_the_border_efficiency_is_that_of_the_border():
    grid = from_table(made_up(slope), H200, H200).grids["matmul bf16"]
    assert grid.at((1, 64, 10**6)) == pytest.approx(slope(64, 64, 4096))


def test_points_held_back_are_found_within_a_few_percent():
    """Of a smooth saturation, as real matmuls have it, every second point is taken away."""
    def smooth(m, k, n):
        return 0.7 * m / (m + 100) * k / (k + 150) * n / (n + 100)

    every = (64, 128, 256, 512, 1024, 2048, 4096)
    grid = from_table(made_up(smooth, every[::2]), H200, H200).grids["matmul bf16"]
    errors = sorted(abs(grid.at(point) / smooth(*point) - 1) for point in product(every, every, every))
    assert errors[len(errors) // 2] < 0.05 and errors[-1] < 0.25


def test_other_hardware_scales_by_peak_and_bandwidth():
    h20, table = hardware.load("h20"), made_up(slope)
    here, there = from_table(table, H200, H200), from_table(table, H200, h20)
    big = 4096, 4096, 4096
    assert there.matmul(*big, "bf16") / here.matmul(*big, "bf16") == pytest.approx(989 / 148)
    assert there.memory("copy", 1e9) / here.memory("copy", 1e9) == pytest.approx(4.8 / 4.0)


def test_curves_of_collectives():
    (two, curve), (four, _) = from_table(made_up(slope), H200, H200).curves
    assert (two, four) == (2, 4)
    assert curve[0] == pytest.approx((1e6, 1e6 / 1e-4)) and curve[1] == pytest.approx((1e8, 1e8 / 1e-3))


def with_norms(shares):
    """The same table with compiled norms of known efficiencies by width, backward half of forward's, DiT's a third."""
    axes, part = [[1e6, 1e9], list(shares)], {"": 1, "backward": 2, "ada": 3}
    norms = {which: {"axes": axes, "seconds": [size * math.prod(part[word] for word in which.split() if word in part) / share /
                                               H200.bandwidth for size in axes[0] for share in shares.values()]}
             for which in kernel_efficiency.NORMS}
    return {**made_up(slope), "norms": norms}


@pytest.mark.parametrize(("ada", "backward", "times"), [(False, False, 1), (False, True, 2), (True, False, 3), (True, True, 6)])
def test_norms_by_width(ada, backward, times):
    found = from_table(with_norms({1024: 0.8, 1152: 0.2, 2048: 0.6}), H200, H200)
    for width, share in ((1024, 0.8), (1152, 0.2), (4096, 0.6), (64, 0.8), (math.sqrt(1152 * 2048), 0.4)):
        assert found.norm([1e8, 2e8], width, ada, backward) == pytest.approx(times * 3e8 / share / H200.bandwidth)
    few = [1.0, 2.0]                                # fewer bytes than were measured, of which the others know more
    assert found.norm(few, 1152, ada, backward) == sum(found.memory("fused", size) for size in few)
    assert found.norm([0.0], 1152, ada, backward) == 0


def test_norms_without_a_measurement_are_fused_kernels():
    found = from_table({**made_up(slope), "memory": {"fused": made_up(slope)["memory"]["copy"]}}, H200, H200)
    for some in (found, RULES):
        assert some.norm([1e8, 2e8], 1152, True, True) == some.memory("fused", 1e8) + some.memory("fused", 2e8)


def test_damaged_norms_get_a_sentence(tmp_path):
    file, whole = tmp_path / "table.json", with_norms({1024: 0.8, 1152: 0.2})
    for norms in (None, {}, [], {"forward": whole["norms"]["forward"]}, {**whole["norms"], "forward ada": {"axes": [[1e6, 1e9]]}},
                  {**whole["norms"], "backward": {"axes": [[1e6, 1e9], [1152, 1024]], "seconds": [1, 1, 1, 1]}},
                  {**whole["norms"], "backward": {"axes": [[1e6, 1e9], [1024, 1152]], "seconds": [1, 0, 1, 1]}},
                  {**whole["norms"], "backward": {"axes": [[1e6, 1e9], [1024, 1152]], "seconds": [1, 1, 1]}}):
        file.write_text(json.dumps({**whole, "norms": norms}))
        with pytest.raises(CourseError, match=r"is no table of kernels .*make one with `course bench kernels"):
            kernel_efficiency.read(file, H200, H200)


def test_a_grid_of_one_dim_and_its_corners():
    grid = Grid(((1.0, 100.0),), (0.0, 1.0))
    assert [grid.at((x,)) for x in (0.5, 1, 10, 100, 1e9)] == pytest.approx([0, 0, 0.5, 1, 1])


@pytest.mark.parametrize("row", json.loads((kernel_efficiency.RESULTS / "beginning_h200.json").read_text())["attention"],
                         ids=lambda row: str(row["shape"]))
def test_attention_without_a_table(row):
    """TFLOP/s of attention forward and backward on an H200, cuDNN."""
    batch, heads, tokens, width = row["shape"]
    heads, causal, measured = batch * heads, row["causal"], row["cudnn"]
    seconds = sum(RULES.attention(heads, tokens, tokens, width, causal, "bf16", backward=back) for back in (False, True))
    assert 14 * heads * tokens**2 * width * (0.5 if causal else 1) / seconds / 1e12 == pytest.approx(measured, rel=0.08)


@pytest.mark.parametrize(("shape", "precision", "ms"), [
    ((16384, 4096, 12288), "bf16", 2.45), ((16384, 4096, 16384), "bf16", 3.25), ((16384, 4096, 16384), "fp8", 1.75),
    ((16384, 4096, 4096), "fp8", 0.45)])
def test_matmuls_without_a_table(shape, precision, ms):
    """Sustained, in results/fp8_h200.json: of the three matmuls of a linear the middle one."""
    assert RULES.matmul(*shape, precision) * 1e3 == pytest.approx(ms, rel=0.06)


def test_small_and_thin_kernels_are_bound_by_launch_and_memory():
    assert RULES.matmul(1, 1, 1, "bf16") == kernel_efficiency.LEAST
    assert RULES.matmul(8, 65536, 8192, "bf16") == pytest.approx(2 * 65536 * 8192 / (0.88 * 4.8e12), rel=0.01)
    assert RULES.memory("copy", 0) == 0
    assert RULES.memory("copy", 4.224e9) == pytest.approx(1e-3, rel=0.01)


def test_unfused_attention_pays_for_its_scores():
    fused, plain = (RULES.attention(64, 4096, 4096, 64, False, "bf16", by) for by in ("cudnn", "math"))
    assert plain > 3 * fused


def test_an_own_table_and_one_that_is_not_there(tmp_path):
    file = tmp_path / "ours.json"
    file.write_text(json.dumps(made_up(slope)))
    own = hardware.Hardware("own", 1e11, 4.8e12, {"bf16": 989e12}, H200.links, str(file))
    assert kernel_efficiency.kernels_of(own).grids["matmul bf16"].at((64, 64, 64)) == pytest.approx(0.1)
    file.write_text("[]")
    with pytest.raises(CourseError, match="no table of kernels"):
        kernel_efficiency.kernels_of(hardware.Hardware("other", 1e11, 4.8e12, {"bf16": 989e12}, H200.links, str(file)))
    with pytest.raises(CourseError, match="there is no table nowhere"):
        kernel_efficiency.kernels_of(hardware.Hardware("third", 1e11, 4.8e12, {"bf16": 989e12}, H200.links, "nowhere.json"))
