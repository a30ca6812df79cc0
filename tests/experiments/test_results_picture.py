"""README's picture of the recorded results shows the numbers of the files."""

from experiments import results_picture


def test_every_bar_is_a_recorded_number():
    figure = results_picture.draw()
    for axis, values in zip(figure.axes, (results_picture.one_gpu(), results_picture.baselines()), strict=False):
        assert [bar.get_width() for bar in axis.patches] == list(values.values())
    third = [bar.get_width() for bar in figure.axes[2].patches]
    assert third == [pair[i] for i in (0, 1) for pair in results_picture.four().values()]
    assert all(0 < share < 1 for share in third)


def test_rows_of_most_gpus_count():
    assert results_picture.row("tp", "symmetric")["gpus"] == 4 and results_picture.row("dp", "bucketed")["bucket_mb"] == 25
