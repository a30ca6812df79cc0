"""Pictures of predictions, and the planner with sliders: each value redraws, and what does not go together gets a sentence."""

import random
from dataclasses import replace

import pytest
from matplotlib.figure import Figure

from course.lab.figures import performance_model, widgets
from course.planner import peak_memory, step_time
from course.utils.errors import CourseError

FIRST = {name: performance_model.START.get(name, values[0]) for name, values in performance_model.SLIDERS.items()}
ALONE = {name: value for name, value in FIRST.items() if name != "hardware"}


def texts(figure: Figure) -> str:
    """All words of a figure, its subfigures' too."""
    from matplotlib.text import Text

    return "\n".join(text.get_text() for text in figure.findobj(Text))


def test_scattered_points_are_ratios():
    figure = performance_model.scatter({"a": [(10.0, 12.0), (100.0, 90.0)], "b": [(1.0, 1.0)]}, "ms", "title")
    axis = figure.axes[0]
    drawn = {line.get_label(): list(line.get_ydata()) for line in axis.lines}
    assert drawn["a (2)"] == pytest.approx([1.2, 0.9]) and drawn["b (1)"] == [1.0]
    assert axis.get_xscale() == "log" and axis.get_title() == "title"


def test_large_errors_are_marked():
    axis = performance_model.errors({"x": {"small": 0.1, "large": -0.3}}, limit=0.25).axes[0]
    marks = {line.get_xdata()[0]: line.get_marker() for line in axis.lines if line.get_marker() not in ("None", "")}
    assert marks == pytest.approx({10.0: "o", -30.0: "s"}) or marks == {10.0: "o", -30.0: "s"}
    assert [label.get_text() for label in axis.get_yticklabels()] == ["x: small", "x: large"]
    assert {"+10%", "-30%"} <= {text.get_text() for text in axis.texts}


def test_bars_of_time_add_up_to_the_step():
    config = performance_model.config_of(**ALONE | {"gpus": 8, "tp": 2, "pp": 2, "batch": 64, "micro_batch": 4})
    time = step_time.predict(config, performance_model.presets.load("h200"))
    axis = performance_model.times({"one": time}, {"one": 5.0}).axes[0]
    assert sum(bar.get_width() for bar in axis.patches) == pytest.approx(1e3 * time.step, rel=5e-3)
    assert 5.0 in [line.get_xdata()[0] for line in axis.lines]


def test_every_part_of_time_and_memory_has_a_color():
    """No part is left out of a bar, none is in two."""
    for kinds, found in ((performance_model.TIME, step_time.Time().parts),
                         (performance_model.BYTES, {*peak_memory.TENSORS, "reserve"})):
        parts = [part for _, parts, _, _ in kinds for part in parts]
        assert sorted(parts) == sorted(found)
        assert len({(color, hatch) for _, _, color, hatch in kinds}) == len(kinds)


# ---- the widget

def test_a_recorded_configuration_shows_what_was_measured():
    words = texts(performance_model.explore_step(**FIRST))
    assert "measured 263 ms" in words and "fits" in words and "DOES NOT" not in words
    assert "measured" not in texts(performance_model.explore_step(**FIRST | {"hardware": "h100-80"})).replace("measured,", "")
    assert "measured" not in texts(performance_model.explore_step(**FIRST | {"batch": 16}))


@pytest.mark.parametrize(("model", "values", "files"), [
    ("GPT 1.3B", {"precision": "fp8"}, {"gpt_"}), ("DiT-XL/2, 512 px", {"batch": 32, "micro_batch": 256}, {"dit_"}),
    ("ViT, width 1024", {"batch": 16, "micro_batch": 16, "gpus": 2, "tp": 2, "sp": "sp"}, {"tp_vit_"}),
    ("8 layers of 4096, no update", {"batch": 4, "gpus": 2, "tp": 2}, {"tp_"}),
    ("16 layers of 4096, no update", {"batch": 16, "micro_batch": 1, "gpus": 4, "pp": 4}, {"pp_"})])
def test_recorded_runs_of_every_kind_are_found(model, values, files):
    config = performance_model.config_of(**ALONE | {"model": model} | values)
    found = performance_model.measured_steps().get(performance_model.signature(config, performance_model.MODELS[model].kind), [])
    assert {step.file for step in found} == files


def test_steps_of_kernels_by_hand_stand_for_themselves():
    """PyTorch's and the course's own differ by a tenth: no key of recorded steps has both."""
    for steps in performance_model.measured_steps().values():
        assert len({step.config.kernels for step in steps}) == 1, [step.name for step in steps]


def test_what_fits_leaves_as_much_free_as_the_planner_does(monkeypatch):
    """97% of a GPU are too much, 94% are not."""
    for share, words in ((0.97, "DOES NOT FIT with 5% free"), (0.94, "fits with 5% free")):
        needs = peak_memory.predict(performance_model.config_of(**ALONE)).total
        small = replace(performance_model.presets.load("h200"), memory=needs / share)
        monkeypatch.setattr(performance_model.presets, "load", lambda name, small=small: small)
        assert words in texts(performance_model.explore_step(**FIRST))
        monkeypatch.undo()


def test_what_does_not_fit_is_said():
    assert "DOES NOT FIT" in texts(performance_model.explore_step(**FIRST | {"model": "GPT 7B", "hardware": "a100-40"}))


@pytest.mark.parametrize(("values", "words"), [
    ({"tp": 8, "gpus": 4}, "tp=8 x cp=1 x pp=1 = 8 does not divide 4 GPUs"),
    ({"model": "GPT 124M", "tp": 8, "gpus": 8}, "does not divide the 12 heads"),
    ({"gpus": 16}, "does not divide train.global_batch=8"),
    ({"model": "ViT, width 384", "sequence": 1024}, "no two squares of patches"),
    ({"model": "DiT-XL/2, 256 px", "sequence": 2048}, "no square of patches"),
    ({"precision": "fp8", "hardware": "v100-16"}, "has no matmuls in fp8"),
    ({"model": "8 layers of 4096, no update", "pp": 16, "gpus": 16, "batch": 64}, "needs 16 blocks")])
def test_what_does_not_go_together_gets_a_sentence(values, words):
    with pytest.raises(CourseError, match=words):
        performance_model.explore_step(**FIRST | values)


def test_sequences_are_as_long_as_chosen():
    for model, tokens in (("GPT 7B", 8192), ("DiT-XL/2, 256 px", 4096), ("ViT, width 384", 8192)):
        m = performance_model.config_of(**ALONE | {"model": model, "sequence": tokens}).model
        assert (m.context if model.startswith("GPT") else m.tokens) == tokens


@pytest.mark.slow
def test_sliders_redraw_and_refuse_without_a_browser(monkeypatch):
    monkeypatch.setattr("IPython.display.display", lambda bundle, raw, metadata: None)
    box = widgets.explore(performance_model.explore_step, alt="bars", start=performance_model.START, **performance_model.SLIDERS)
    sliders = {slider.description: slider for column in box.children[0].children for slider in column.children}
    sentence, image = box.children[1:3]
    first = bytes(image.value)
    assert list(sliders) == list(performance_model.SLIDERS) and first[:4] == b"\x89PNG"
    sliders["gpus"].value = 4
    assert bytes(image.value) != first and not sentence.value
    second = bytes(image.value)
    sliders["tp"].value = 8                          # of 4 GPUs
    assert "does not divide 4 GPUs" in sentence.value and image.layout.display == "none"
    sliders["tp"].value = 2
    assert not sentence.value and image.layout.display == "" and bytes(image.value) not in (first, second)


@pytest.mark.slow
def test_any_position_of_the_sliders_is_predicted_or_refused_in_a_sentence():
    """Nothing else is raised, whatever is chosen; predictions are of positive numbers."""
    generator, drawn = random.Random(3), 0
    for _ in range(80):
        values = {name: generator.choice(options) for name, options in performance_model.SLIDERS.items()}
        chosen = performance_model.presets.load(values.pop("hardware"))
        try:
            config = performance_model.config_of(**values)
            found = performance_model.time_of(config, chosen, performance_model.MODELS[values["model"]].kind)
        except CourseError as error:
            assert ":" in str(error) or "choose" in str(error), error
            continue
        drawn += 1
        assert found.step > 0 and peak_memory.predict(config).total > 0
    assert drawn > 5
