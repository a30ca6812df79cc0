"""The figures of experts show what they are given, and the small model of lesson 21 does what its pictures say."""

import pytest
import torch

from course.lab.exercises.lesson21_experts import balance_loss, route
from course.lab.figures import experts
from course.lab.instruments.tiny_experts import TinyExperts, evaluate, train


class Text:
    """Samples of a pattern that repeats: easy to learn."""

    def __len__(self):
        return 64

    def __getitems__(self, samples):
        return {"tokens": torch.stack([(torch.arange(17) * 3 + sample) % 32 for sample in samples])}


def small(**settings):
    return TinyExperts(route, **{"experts": 4, "width": 16, "vocab": 32, "context": 16, "dim": 16, "heads": 2} | settings)


def test_loads_are_drawn_to_their_sum():
    figure = experts.loads({"a": [[0.5, 0.5], [1.0, 0.0]], "b": [[0.2, 0.8], [0.4, 0.6]]}, "loads")
    assert [axis.get_title() for axis in figure.axes] == ["a", "b"]
    tops = [max(y for _, y in area.get_paths()[0].vertices) for area in figure.axes[0].collections]
    assert tops == [1.0, 1.0]                       # the first expert has all at the second step, and both always all


def test_each_token_has_the_color_of_its_expert():
    figure = experts.tokens([[("def", 0), (" f", 1)], [("\n", 0)]], 2, "tokens")
    texts = figure.axes[0].texts
    assert [text.get_text() for text in texts] == ["def", "·f", "⏎"]
    colors = [text.get_bbox_patch().get_facecolor() for text in texts]
    assert colors[0] == colors[2] != colors[1]


def test_each_rank_has_a_bar_of_its_experts_shares():
    figure = experts.placements([80, 20, 0], {"before": [[0], [1, 2]], "after": [[0], [1, 2, 0]]}, "placements")
    heights = [[bar.get_height() for bar in axis.patches] for axis in figure.axes]
    assert heights == [[80, 20, 0], [40, 20, 0, 40]]
    assert [axis.get_title()[-4:] for axis in figure.axes] == ["1.60", "1.20"]
    assert [text.get_text() for text in figure.axes[1].texts] == ["0", "1", "0"]


def test_the_mixture_is_the_gated_sum_of_its_experts():
    from course.lab.instruments import tiny_experts

    model = small()
    x = torch.randn(5, 16)
    y, probabilities, chosen = tiny_experts.mixture(model, x)
    every = torch.stack([torch.nn.functional.gelu(x @ up.T) @ down.T for up, down in zip(model.up, model.down, strict=True)], 1)
    gates = probabilities.gather(1, chosen)
    expected = (every.gather(1, chosen[..., None].expand(-1, -1, 16)) * (gates / gates.sum(1, keepdim=True))[..., None]).sum(1)
    assert torch.allclose(y, expected, atol=1e-6)


@pytest.mark.parametrize("experts", [1, 4])
def test_the_small_model_learns(experts):
    model = small(experts=experts)
    before = evaluate(model, Text(), 2)
    record = train(model, Text(), 60)
    assert evaluate(model, Text(), 2) < before / 2 and len(record.losses) == len(record.loads) == 60
    assert all(abs(sum(loads) - 1) < 1e-6 for loads in record.loads)


def test_the_balance_loss_wakes_experts_up():
    shares = {}
    for name, balance in (("broken", None), ("mended", balance_loss)):
        model = small()
        with torch.no_grad():
            model.router.bias[:2] += 3
        shares[name] = sum(train(model, Text(), 150, balance, weight=0.1).loads[-1][2:])
    assert shares["broken"] < 0.1 and shares["mended"] > 0.3
