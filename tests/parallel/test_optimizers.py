"""Optimizers beside SGD train in every layout as in one process, in float64."""

import pytest

from tests.parallel.test_parity import assert_equal_to_serial, layout, slow

# a large eps, because Adam divides gradients that are zero up to rounding by their own size
ADAMW = ("optim.name=adamw", "optim.weight_decay=0.1", "optim.lr=0.01", "optim.eps=1e-3", "optim.clip=0.05")


@pytest.mark.parametrize("spec", ["dp=2 zero=true bucket_mb=0.01", "dp=2 zero=3", *slow(["dp=2 tp=2 sp=true zero=2", "pp=2"])])
def test_adamw_trains_as_in_one_process(spec):
    assert_equal_to_serial(*layout(spec), ADAMW)
