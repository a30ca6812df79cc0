"""Pictures that several lessons share."""

from course.lab.figures import style


def test_bars_show_measurements_and_marks_predictions():
    groups = {"small": {"eager": 50.0, "in a graph": 250.0}, "large": {"eager": 3.0}}
    figure = style.grouped_bars(groups, "samples/s", predicted={"in a graph": 400.0})
    one, two = figure.axes
    assert [bar.get_width() for bar in one.patches] == [50, 250] and [bar.get_width() for bar in two.patches] == [3]
    assert [text.get_text() for text in one.texts] == ["50", "250,  5.00×"] and two.texts[0].get_text() == "3"
    assert one.lines[0].get_xdata()[0] == 400 and one.get_xlim() == two.get_xlim() and one.get_xlim()[1] > 400
    assert len(figure.legends) == 1 and not style.grouped_bars({"": {"eager": 1.0}}, "ms").legends


def test_stacked_bars_have_parts_end_to_end_totals_and_limits():
    figure = style.stacked({"a": {"x": 1.0, "y": 2.0}, "b": {"y": 3.0}, "c": {"x": 4.0}}, "GB", limits={"here": 5.0})
    axis, = figure.axes
    assert [(bar.get_x(), bar.get_width()) for bar in axis.patches] == [(0, 1), (0, 0), (0, 4), (1, 2), (0, 3), (4, 0)]
    assert [text.get_text().strip() for text in axis.texts] == ["3", "3", "4", "here"]
    assert axis.yaxis_inverted() and axis.get_xlim()[1] > 5
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["x", "y"]


def test_curves_have_marks_of_their_own_and_lines_to_compare_with():
    axis, = style.curves({"one": ([1, 2], [0.0, 1.0]), "two": ([1, 2], [0.0, -1.0])}, "step", "%", levels={"seen": 0.5}).axes
    assert len({line.get_marker() for line in axis.lines[:2]}) == 2 and axis.lines[2].get_ydata() == [0.5, 0.5]
    assert [text.get_text() for text in axis.get_legend().get_texts()] == ["one", "two", "seen"]
