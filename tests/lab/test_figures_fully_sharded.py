"""The timeline draws each span and the memory of weights as they were recorded."""

import pytest

from course.lab.figures import fully_sharded
from course.lab.instruments.fully_sharded_timeline import ShardedTimeline


def test_every_span_is_a_bar_in_its_row():
    recorded = ShardedTimeline(forward=[(0, 0.001, 0.003)], backward=[(0, 0.004, 0.008)], gathers=[(0, 0.0, 0.001)],
                               reduces=[(0, 0.008, 0.01)], memory=[(0.0, 4_000_000), (0.008, 0)], share_bytes=1_000_000)
    spans, memory = fully_sharded.timeline(recorded, 4_000_000).axes
    bars = [(bar.get_y() + bar.get_height() / 2, bar.get_x(), bar.get_width()) for bar in spans.patches]
    assert bars == [pytest.approx(bar) for bar in ((0, 0, 1), (1, 1, 2), (1, 4, 4), (2, 8, 2))]
    assert [text.get_text() for text in spans.texts] == ["0"] * 4
    assert memory.lines[0].get_ydata().tolist() == pytest.approx([1, 5, 1]) and recorded.peak == 5_000_000
