"""Pictures that several lessons share."""

from course.lab import figures


def test_rungs_are_bars_with_numbers_and_predictions_are_marks():
    groups = {"small": {"eager": 50.0, "in a graph": 250.0}, "large": {"eager": 3.0}}
    figure = figures.rungs(groups, "samples/s", predicted={"in a graph": 400.0})
    one, two = figure.axes
    assert [bar.get_width() for bar in one.patches] == [50, 250] and [bar.get_width() for bar in two.patches] == [3]
    assert [text.get_text() for text in one.texts] == ["50", "250,  5.00×"] and two.texts[0].get_text() == "3"
    assert one.lines[0].get_xdata()[0] == 400 and one.get_xlim() == two.get_xlim() and one.get_xlim()[1] > 400
    assert len(figure.legends) == 1 and not figures.rungs({"": {"eager": 1.0}}, "ms").legends
