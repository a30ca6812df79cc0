"""The picture of the time limit, and of what checkpoints cost."""

from course.lab.figures import cluster


def test_the_limit_tells_its_story_in_order():
    axis, = cluster.time_limit().axes
    said = [text.get_text() for text in axis.texts]
    assert {"USR1", "save", "75", "requeues", "load"} <= set(said)
    assert [label.get_text() for label in axis.get_yticklabels()] == list(cluster.LANES)
    ends = {what: stop for _, _, stop, what, _ in cluster.BARS if what in ("save", "requeues")}
    assert ends["save"] <= next(start for _, start, _, what, _ in cluster.BARS if what == "requeues")


def test_shares_have_a_line_marks_and_a_star_for_each():
    lines = {"a": ([10, 100], [0.2, 0.3]), "b": ([10, 100], [0.1, 0.2])}
    axis, = cluster.shares(lines, {"a": ([20], [0.25])}, {"a": (15, 0.2), "b": (12, 0.1)}, "t").axes
    assert [line.get_linestyle() for line in axis.get_lines()] == ["-", "None", "None", "-", "None"]
    assert axis.get_xscale() == "log" and axis.get_title() == "t" and axis.get_ylim()[0] == 0
    assert [text.get_text() for text in axis.get_legend().get_texts()] == ["a", "b"]
