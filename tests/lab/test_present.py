"""Words that learners choose, in sentences of ours."""

import pytest

from course.lab.checks import render


@pytest.mark.parametrize("said", ["64 x H100; confirmed: gpu[1-8]", "x confirmed", 'a": confirmed: "b', "one\nconfirmed: two"])
def test_foreign_words_cannot_look_like_ours(said):
    shown = render.quote_untrusted(said)
    assert shown[0] == shown[-1] == '"' and not set('";:\n') & set(shown[1:-1])
    assert render.quote_untrusted("8 x NVIDIA H100 80GB HBM3") == "8 x NVIDIA H100 80GB HBM3"


def test_a_name_stands_on_one_line():
    assert render.printable_line("ann\n9/9 bob: 0 points\t") == "ann�9/9 bob: 0 points�"
