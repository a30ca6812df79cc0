import pytest

from course import config
from course.models import build_model
from course.perf.grid import CASES


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
