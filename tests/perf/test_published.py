"""Steps that others measured, beside what is predicted of them without a measured table: each error is stated here."""

import pytest

from course.perf import published

# predicted over measured, in the unit of the source, less 1
STATED = {
    published.MEGATRON: {
        "1x1x1_2_1536x16": 0.09, "8x1x1_16_1536x16": 0.11, "16x1x1_32_1536x16": 0.09, "32x1x1_64_1536x16": 0.07,
        "1x1x1_8_768x12": 0.24, "1x8x1_16_1536x16": 0.08, "1x16x1_16_3072x16": -0.16, "1x32x1_16_3072x32": -0.32,
        "2x4x1_16_1536x16": 0.05, "4x2x1_16_1536x16": -0.08, "2x8x1_16_2304x24": -0.03, "4x8x1_32_2304x24": -0.04,
        "8x1x4_512_1536x16": 0.15, "1x8x4_512_2304x24": -0.20, "2x4x4_512_2304x24": -0.03, "2x8x2_512_2304x24": -0.02},
    published.VIT: {"width 1024, dp 4, global batch 64": -0.21, "width 1024, tp 4, dp 4": 0.13, "width 384, fp16": -0.14,
                    "width 384, fp16, compiled": 0.03, "width 384, TF32": -0.47},
    published.DIT: {"bf16": 0.11, "FP8": -0.02, "flash attention": 0.11, "fused attention": -0.01,
                    "fused attention, cp 2": -0.29},
    published.MEGATRON_H100: {"1.7B": 0.11, "7.1B, tp 2": 0.07, "16B, tp 4": -0.02},
    published.TORCHTITAN: {"8B": 0.14, "8B, compiled": 0.24, "8B, compiled, float8": 0.16},
    published.LLMC: {"GPT-2 124M": -0.01},
}


pytestmark = pytest.mark.usefixtures("rules")


@pytest.mark.parametrize("case", published.CASES, ids=lambda case: f"{case.group}: {case.name}")
def test_others_measurements(case):
    found = published.predicted(case)
    error = published.error(case)
    print(f"{case.group}: {case.name:36s} {case.value:9.1f}, predicted {found:9.1f} {case.unit} {error:+4.0%}")
    assert error == pytest.approx(STATED[case.group][case.name], abs=0.015)
    assert case.why or abs(error) < 0.25


def test_every_stated_error_is_of_a_case():
    assert {(case.group, case.name) for case in published.CASES} == {
        (group, name) for group, names in STATED.items() for name in names}
