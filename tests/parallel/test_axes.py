"""Axes are data: with one more name in the tuple, and a size in `Parallel`, ranks along it train as one process does."""

import pytest

from course.ranks.notebook_ranks import ranks
from tests.parallel.test_parity import layout, serial, train

INERT = "xp"                                         # along which nothing is cut


def with_an_inert_axis(size, overrides):
    """`train` of the parity tests where the mesh has a fifth axis."""
    from unittest import mock

    from course.config import Parallel

    axes = ("pp", "dp", "cp", INERT, "tp")
    with (mock.patch("course.config.validation.AXES", axes), mock.patch("course.parallel.mesh.AXES", axes),
          mock.patch.object(Parallel, INERT, size, create=True)):
        return train([*overrides, f"parallel.order={'-'.join(axes)}"])


@pytest.mark.parametrize(("spec", "size"), [
    ("dp=1", 1), ("dp=1", 2), ("tp=2", 1), *(pytest.param(spec, 2, marks=pytest.mark.slow) for spec in (
        "tp=2 sp=true", "dp=2", "dp=2 zero=1", "dp=2 zero=3", "cp=2 context=ring", "pp=2 micro=2"))])
def test_parity_with_an_inert_axis(spec, size):
    """Losses, the norm, in which each parameter counts once, and parameters."""
    count, overrides = layout(spec)
    (losses, norms, whole), = [serial(())]
    parts = ranks(count * size)(with_an_inert_axis, size, overrides)
    for _, found, pieces in parts:
        assert found == pytest.approx(norms, rel=1e-10)
        for name, held in pieces.items():
            for box, part in held:
                full = whole[name][0][1][tuple(slice(a, b) for a, b in box)]
                assert (part - full).abs().max().item() < 1e-12, name
    assert parts[-1][0] == pytest.approx(losses, rel=1e-10) or "pp" in spec or "cp" in spec


def test_a_new_axis_is_named_where_an_order_lacks_it():
    from unittest import mock

    from course import config
    from course.utils.errors import CourseError

    with (mock.patch("course.config.validation.AXES", ("pp", "dp", "cp", INERT, "tp")),
          pytest.raises(CourseError, match="must name pp, dp, cp, xp and tp once each, such as pp-dp-cp-xp-tp")):
        config.load("vit-demo")
