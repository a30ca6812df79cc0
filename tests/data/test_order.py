import numpy as np
import pytest

from course.data import order
from course.utils.errors import CourseError


def test_each_epoch_visits_every_sample_once_in_its_own_order():
    first, second = order.samples_at(0, 50, 0, 50), order.samples_at(0, 50, 50, 100)
    assert sorted(first) == sorted(second) == list(range(50))
    assert not np.array_equal(first, second)
    assert not np.array_equal(first, order.samples_at(1, 50, 0, 50))


def test_any_cut_of_the_stream_gives_the_same_stream():
    whole = order.samples_at(3, 17, 0, 100)
    parts = [order.samples_at(3, 17, start, start + 8) for start in range(0, 96, 8)]
    assert np.array_equal(np.concatenate(parts), whole[:96])


def take(batches, count):
    return [next(batches) for _ in range(count)]


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_take_contiguous_slices_of_the_same_global_batch(ranks):
    serial = take(order.train_batches(0, 30, 8, 1, 0, consumed=0), 10)
    shards = [take(order.train_batches(0, 30, 8, ranks, rank, consumed=0), 10) for rank in range(ranks)]
    assert [[sample for shard in shards for sample in shard[k]] for k in range(10)] == serial


def test_resuming_goes_on_with_the_next_sample():
    whole = take(order.train_batches(0, 30, 8, 2, 1, consumed=0), 10)
    assert take(order.train_batches(0, 30, 8, 2, 1, consumed=5 * 8), 5) == whole[5:]


def test_evaluation_sees_each_sample_once_and_pads_the_rest():
    seen = [sample for rank in range(2) for batch in order.eval_batches(11, 4, 2, rank) for sample in batch]
    assert sorted(s for s in seen if s >= 0) == list(range(11)) and seen.count(-1) == 1
    assert len(seen) == 12


def test_a_batch_that_does_not_divide_is_refused():
    with pytest.raises(CourseError, match="multiple of 4"):
        next(order.train_batches(0, 30, 6, 4, 0, consumed=0))
