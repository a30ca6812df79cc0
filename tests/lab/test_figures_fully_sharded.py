"""The timeline draws each span and the memory of weights as they were recorded."""

import pytest

from course.lab.figures import fully_sharded
from course.lab.instruments.fully_sharded_timeline import ShardedTimeline
from course.lab.instruments.simulated_sharding import Unit, simulate


def test_every_span_is_a_bar_in_its_row():
    recorded = ShardedTimeline(forward=[(0, 0.001, 0.003)], backward=[(0, 0.004, 0.008)], gathers=[(0, 0.0, 0.001)],
                               reduces=[(0, 0.008, 0.01)], memory=[(0.0, 4_000_000), (0.008, 0)], share_bytes=1_000_000)
    spans, memory = fully_sharded.timeline(recorded, 4_000_000).axes
    bars = [(bar.get_y() + bar.get_height() / 2, bar.get_x(), bar.get_width()) for bar in spans.patches]
    assert bars == [pytest.approx(bar) for bar in ((0, 0, 1), (1, 1, 2), (1, 4, 4), (2, 8, 2))]
    assert [text.get_text() for text in spans.texts] == ["0"] * 4
    assert memory.lines[0].get_ydata().tolist() == pytest.approx([1, 5, 1]) and recorded.peak == 5_000_000


STEP = [("gather", 0), ("gather", 1), ("forward", 0), ("forward", 1), ("backward", 1), ("free", 1), ("reduce", 1),
        ("backward", 0), ("free", 0), ("reduce", 0)]


def test_a_simulated_step_waits_for_the_link_and_for_memory():
    """Two units of 10 and 20 bytes, a link of 10 bytes/s. With unit 1 whole
    again, the last backward pass waits until 20 bytes of gradients are gone."""
    units = [Unit(10, 1.0), Unit(20, 2.0)]
    step = simulate(units, 50, 10, STEP)
    assert [span[:2] for span in step.computing] == [("forward", 0), ("forward", 1), ("backward", 1), ("backward", 0)]
    assert [span[2:] for span in step.computing] == [(1, 2), (3, 5), (5, 9), (9, 11)]
    assert [span[2:] for span in step.sending] == [(0, 1), (1, 3), (9, 11), (11, 12)]
    assert (step.wrong, step.seconds, step.gathered) == ("", 12, 30) and max(used for _, used in step.memory) == 50
    tight = simulate(units, 50, 10, [*STEP[:7], ("gather", 1), ("backward", 0)])
    assert tight.computing[-1][2] == 11
    spans, memory = fully_sharded.simulated(step, 50).axes
    assert len(spans.patches) == 8 and [text.get_text() for text in spans.texts] == list("01100110")
    assert memory.lines[0].get_ydata().max() == pytest.approx(50e-6)


@pytest.mark.parametrize(("limit", "events", "wrong", "at"), [
    (49, STEP, "limit", 4), (50, STEP[1:], "there", 1), (50, [*STEP[:3], *STEP[4:]], "order", 3), (50, STEP[:-1], "left", 9),
    (50, [("gather", 0), *STEP], "there", 1), (50, [*STEP, ("reduce", 0)], "there", 10)])
def test_a_simulation_names_the_first_event_that_cannot_be(limit, events, wrong, at):
    step = simulate([Unit(10, 1.0), Unit(20, 2.0)], limit, 10, events)
    assert (step.wrong, step.at) == (wrong, at)
