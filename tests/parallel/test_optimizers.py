"""Optimizers beside SGD train in every layout as in one process, in float64."""

import pytest

from tests.parallel.test_parity import assert_equal_to_serial, layout, slow

# a large eps, because Adam divides gradients that are zero up to rounding by their own size
ADAMW = ("optim.name=adamw", "optim.weight_decay=0.1", "optim.lr=0.01", "optim.eps=1e-3", "optim.clip=0.05")


@pytest.mark.parametrize("spec", ["dp=2 zero=true bucket_mb=0.01", "dp=2 zero=3", *slow(["dp=2 tp=2 sp=true zero=2", "pp=2"])])
def test_adamw_trains_as_in_one_process(spec):
    assert_equal_to_serial(*layout(spec), ADAMW)


MUON = ("optim.name=muon", *ADAMW[1:])
KINDS = [("vit", "dp=2 zero=2"), ("llama", "dp=2 tp=2 sp=true zero=3"), ("dit", "pp=2"), ("gpt", "dp=2 cp=2 zero=true")]


@pytest.mark.parametrize("spec", ["dp=2", "dp=2 zero=true bucket_mb=0.01", "dp=2 zero=3", "tp=2 sp=true", *slow([
    "dp=2 zero=2", "dp=2 tp=2 zero=3", "dp=2 tp=2 sp=true zero=1", "pp=2", "cp=2", "dp=4 zero=3 shard=2",
    "pp=2 dp=2 tp=2 zero=2"])])
def test_muon_trains_as_in_one_process(spec):
    assert_equal_to_serial(*layout(spec), MUON)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "spec"), KINDS)
def test_muon_trains_other_models_as_in_one_process(kind, spec):
    assert_equal_to_serial(*layout(spec), (*MUON, "optim.clip=0"), kind)
