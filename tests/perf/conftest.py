"""What tests of predictions share."""

import pytest

from course.perf import kernels


@pytest.fixture
def rules(monkeypatch):
    """Without a measured table, whether there is one by now or not: these tests state what the rules give."""
    monkeypatch.setattr(kernels, "REFERENCE", ("h200", "none.json"))
    kernels.kernels_of.cache_clear()
    yield
    kernels.kernels_of.cache_clear()


@pytest.fixture(params=["rules", "table"])
def rates(request):
    """Both that a prediction may stand on: rules, and the H200's table, by the data sheets, as `course plan` takes it."""
    if request.param == "rules":
        request.getfixturevalue("rules")
    return request.param
