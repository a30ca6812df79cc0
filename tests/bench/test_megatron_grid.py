import json

import pytest
import torch

from course import config
from course.bench import layouts, megatron_core
from course.bench.megatron_grid import CASES, scaled
from course.models import build_model


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_case_is_a_configuration_whose_batch_divides(case):
    c = config.load("gpt-124m", case.settings)
    dp, tp, pp = case.layout
    assert (c.parallel.dp, c.parallel.tp, c.parallel.pp) == (dp, tp, pp) and case.gpus == dp * tp * pp
    assert c.train.global_batch % (dp * case.micro_batch) == 0
    assert c.model.heads % tp == c.model.vocab % tp == c.model.hidden % tp == 0 and c.model.depth >= pp


def test_the_source_has_sixteen_cases_of_five_shapes():
    models = {(c.dim, c.depth): sum(p.numel() for p in build_model(c).parameters())
              for c in (config.load("gpt-124m", case.settings).model for case in CASES)}
    assert len(CASES) == len({case.name for case in CASES}) == 16
    for (D, depth), count in models.items():        # per block 12 D² and 13 D; embeddings; the last norm
        assert count == depth * (12 * D * D + 13 * D) + (50304 + 2048) * D + 2 * D
    assert models == {(1536, 16): 533_720_064, (768, 12): 125_262_336, (3072, 16): 1_973_409_792, (3072, 32): 3_785_988_096,
                      (2304, 24): 1_650_166_272}


@pytest.mark.parametrize(("name", "gpus", "expected"), [
    ("1x1x1_2_1536x16", 1, "1x1x1_2_1536x16"), ("1x1x1_2_1536x16", 2, None), ("8x1x1_16_1536x16", 4, "4x1x1_8_1536x16"),
    ("1x8x1_16_1536x16", 4, "1x4x1_16_1536x16"), ("4x2x1_16_1536x16", 4, "2x2x1_8_1536x16"),
    ("2x8x2_512_2304x24", 4, "1x2x2_256_2304x24"), ("2x4x4_512_2304x24", 4, "1x1x4_256_2304x24"),
    ("2x4x4_512_2304x24", 2, None), ("32x1x1_64_1536x16", 2, "2x1x1_4_1536x16")])
def test_cases_scale_down_to_fewer_gpus(name, gpus, expected):
    """The same model and samples for each data-parallel rank; stages stay, then as much tp as fits."""
    found = scaled(next(case for case in CASES if case.name == name), gpus)
    assert (found and found.name) == expected
    if found:
        assert found.gpus == gpus and int(found.name.split("_")[1]) % (found.layout[0] * found.micro_batch) == 0


@pytest.mark.slow
def test_the_grid_runs_beside_megatron_cores_layers(tmp_path, capfd):
    layouts.everywhere("grid", tmp_path / "grid.json", small=True, profile=False)
    rows = json.loads((tmp_path / "grid.json").read_text())["rows"]
    steps = {row["case"]: row for row in rows if not row["case"].endswith("layers")}
    assert {"1x1x1_8_768x12", "2x1x1_4_1536x16", "1x1x2_256_2304x24"} <= steps.keys()
    assert all(row["ms"] > 0 and row["tokens_per_s"] > 0 and row["by"] == "course" for row in steps.values())
    theirs = [row for row in rows if row.get("by") == "megatron-core"]
    assert len(theirs) > 8 and all(row.get("ms", 0) > 0 for row in theirs), theirs
    assert "efficient" not in capfd.readouterr().out


def test_pytorchs_attention_in_megatron_cores_layout():
    q, k, v = torch.randn(3, 5, 2, 4, 8)             # T, B, h, d
    found = megatron_core.Attention()(q, k, v)            # T, B, h * d
    scores = (q[:, 1, 3] @ k[:, 1, 3].T / 8**0.5).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    one = scores.softmax(1) @ v[:, 1, 3]
    torch.testing.assert_close(found[:, 1, 24:], one)
