"""What choosing the algorithms of products gains: what is asked about, and whole steps with and without."""

import json

import pytest
import torch

from course import cublaslt
from course.perf import products
from course.perf.rungs import LADDERS
from course.products import product_plain, weight_gradient_plain


def test_the_shapes_are_those_of_the_models():
    gpt, halved, dit = (products.shapes(LADDERS[kind].rungs[name]) for kind, name in
                        (products.RUNGS[0], products.RUNGS[1], products.RUNGS[4]))
    assert gpt == {"qkv": (65536, 768, 2304), "out": (65536, 768, 768), "up": (65536, 768, 3072), "down": (65536, 3072, 768),
                   "head": (4096, 768, 50304)}
    assert halved["up"] == (32768, 768, 3072)
    assert dit == {"qkv": (16384, 1152, 3456), "out": (16384, 1152, 1152), "up": (16384, 1152, 4608), "down": (16384, 4608, 1152)}


def test_pytorchs_choice_is_nobodys_elses():
    one = cublaslt.Found(waves=0.5), cublaslt.Found(waves=0.6), cublaslt.Found(waves=3.0)
    before = cublaslt.product, cublaslt.weight_gradient, cublaslt.in_one_wave
    with products.as_pytorch_chooses():
        assert (cublaslt.product, cublaslt.weight_gradient) == (product_plain, weight_gradient_plain)
        assert cublaslt.in_one_wave(type("", (), {"offered": one})) == [one[0]]
        assert cublaslt.in_one_wave(type("", (), {"offered": one[2:]})) == []
    assert (cublaslt.product, cublaslt.weight_gradient, cublaslt.in_one_wave) == before


@pytest.mark.slow
def test_steps_are_measured_by_turns(tmp_path, monkeypatch):
    monkeypatch.setattr(products, "RUNGS", (products.RUNGS[0], products.RUNGS[4]))
    products.main(tmp_path / "products.json", small=True)
    found = json.loads((tmp_path / "products.json").read_text())
    assert [(row["rung"], row["turn"], row["chosen"]) for row in found["steps"]] == [
        (name, turn, chosen) for _, name in products.RUNGS for turn in (0, 1) for chosen in (False, True)]
    assert all(row["ms"] > 0 and ("tokens_per_s" in row) == row["rung"].startswith("124M") for row in found["steps"])
    assert found["products"] == [] and not torch.cuda.is_available()
