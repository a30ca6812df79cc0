"""Sampling: with the cache the same tokens as without it, and drawn with the model's probabilities."""

from dataclasses import replace

import pytest
import torch

from course import config
from course.inference import kv_cache_decoding
from course.models import GPTConfig, build_model
from course.parallel import build_mesh, initialize_serial, join
from course.ranks.notebook_ranks import ranks
from course.training.assemble import assemble
from course.utils.errors import CourseError

LLAMA = {"kv_heads": 2, "norm": "rms", "mlp": "swiglu", "position": "rotary", "bias": False, "tied": False}
KINDS = {"gpt2": {}, "llama": LLAMA, "qwen": {**LLAMA, "head_dim": 12, "qk_norm": True, "experts": 4, "expert_width": 16}}


def make(kind="gpt2"):
    c = GPTConfig(vocab=50, context=24, dim=32, depth=2, heads=4, dropout=0.1, **KINDS[kind])
    model = initialize_serial(build_model(c), 0, torch.device("cpu"), torch.float64)
    with torch.no_grad():
        for p in model.parameters():
            p *= 8 if p.dim() > 1 else 1            # far from uniform, so that every position and key matters
    return model


def prompts(rows=3, length=5):
    return torch.randint(50, (rows, length), generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("how", [{"temperature": 0.0}, {}, {"temperature": 0.7, "top_k": 5, "seed": 3}])
def test_the_cache_changes_no_token(kind, how):
    model = make(kind)
    cores = [block.attn.core for block in model.blocks.values()]
    kept = kv_cache_decoding.generate(model, prompts(), 19, **how)
    again = kv_cache_decoding.generate(model, prompts(), 19, cache=False, **how)
    assert torch.equal(kept, again) and kept.shape == (3, 24) and torch.equal(kept[:, :5], prompts())
    assert kept[:, 5:].unique().numel() > 3         # it does not repeat one token
    assert model.training and [block.attn.core for block in model.blocks.values()] == cores


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_model_in_training_with_kernels_by_hand_can_be_heard(precision):
    """Its attention has queries, keys and values packed, and in bf16 its weights are in 16 bits; the cache changes no token."""
    c = config.load("gpt-124m", ["model.vocab=50", "model.context=24", "model.dim=32", "model.depth=2", "model.heads=2",
                                 f"precision={precision}", "train.device=cpu", "train.global_batch=2", "train.micro_batch=0"])
    found = []
    for kernels in ("triton", "pytorch"):
        training = assemble(replace(c, kernels=kernels), build_mesh(c.parallel, join("cpu")))
        with torch.no_grad():
            for p in training.model.parameters():
                p *= 8 if p.dim() > 1 else 1
        kept, again = (kv_cache_decoding.generate(training.model, prompts(), 12, 0.0, cache=cache) for cache in (True, False))
        assert torch.equal(kept, again) or precision == "bf16"          # where sums of other lengths are rounded otherwise
        found.append(kept)
    assert {p.dtype for p in training.model.parameters()} == {torch.float32} and found[0].unique().numel() > 8
    assert torch.equal(*found) or precision == "bf16"


def test_with_the_cache_each_token_is_computed_once(monkeypatch):
    model, seen = make(), []
    forward = type(model.embed).forward
    monkeypatch.setattr(type(model.embed), "forward", lambda self, batch: (seen.append(batch["tokens"].shape[1]),
                                                                           forward(self, batch))[1])
    kv_cache_decoding.generate(model, prompts(), 4)
    assert seen == [5, 1, 1, 1]


def test_rows_are_drawn_apart_and_the_seed_decides():
    model, same = make(), prompts(1).expand(3, -1)
    first, other = kv_cache_decoding.generate(model, same, 10, seed=1), kv_cache_decoding.generate(model, same, 10, seed=2)
    assert torch.equal(first, kv_cache_decoding.generate(model, same, 10, seed=1)) and not torch.equal(first, other)
    assert not torch.equal(first[0], first[1])


def test_tokens_come_with_their_probabilities():
    """Of 20,000 rows: a standard deviation of a frequency is at most 0.0036; four of them."""
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 3.0]).expand(20_000, -1)
    for temperature, top_k in ((1.0, 0), (0.5, 0), (2.0, 3)):
        expected = logits[0] / temperature
        if top_k:
            expected = expected.where(torch.tensor([True, True, False, False, True]), -torch.inf)
        drawn = kv_cache_decoding.sample_token(logits, temperature, top_k, 0, 7)
        frequency = drawn.bincount(minlength=5) / len(drawn)
        assert (frequency - expected.softmax(0)).abs().max() < 4 * 0.0036
    assert (kv_cache_decoding.sample_token(logits, 0.0, 0, 0, 7)
            == 4).all() and (kv_cache_decoding.sample_token(logits, 1.0, 1, 0, 7) == 4).all()


def test_of_equal_logits_no_more_than_top_k_are_drawn():
    assert len(kv_cache_decoding.sample_token(torch.zeros(1000, 10), 1.0, 3, 0, 7).unique()) == 3


def cut_in_two():
    """What is said of generating with a model that tensor parallelism has cut."""
    c = config.load("gpt-demo", ["parallel.tp=2", "train.device=cpu"])
    with pytest.raises(CourseError) as error:
        kv_cache_decoding.generate(assemble(c, build_mesh(c.parallel, join("cpu"))).model, prompts(), 3)
    return str(error.value)


def test_a_model_that_is_cut_writes_nothing():
    assert "load the checkpoint with parallel.tp=1" in ranks(2)(cut_in_two)[1]


@pytest.mark.parametrize("temperature", [1e-3, 1e-38, 1e-45, 1e-300])
@pytest.mark.parametrize("sign", [1, -1])
def test_however_small_a_temperature_it_is_the_most_probable_token(temperature, sign):
    logits = torch.tensor([[2.0, 9.0, 10.0, -9.0]]) * sign
    assert kv_cache_decoding.sample_token(logits, temperature, 0, 0, 7) == logits.argmax()


@pytest.mark.parametrize(("length", "count", "how", "words"), [
    (5, 20, {}, "5 tokens and 20 new ones are more than model.context=24"), (0, 3, {}, "at least one token"),
    (5, 3, {"temperature": -1.0}, "temperature=-1.0"), (5, 3, {"temperature": float("nan")}, "temperature=nan"),
    (5, 3, {"temperature": float("inf")}, "temperature=inf")])
def test_what_cannot_be_sampled_is_a_sentence(length, count, how, words):
    with pytest.raises(CourseError, match=words):
        kv_cache_decoding.generate(make(), prompts(2, length), count, **how)
