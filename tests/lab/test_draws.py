"""What exercises draw depends on every bit of a seed of 128."""

import pytest
import torch

from course.lab.checks import random_inputs
from course.lab.checks.exercise import all_exercises

EXERCISES = all_exercises()
LONG = ("place-experts", "order-step")                # each draw takes about a second
SEEDS = [5, 6, 2**31 + 7, 2**100 + 3, 2**127 + 11, 2**127 - 2]


def test_small_seeds_draw_what_pytorch_draws():
    for seed in (0, 1, 2**31 - 1, 2**32 - 1):
        one, other = (torch.rand(700, generator=made)
                      for made in (random_inputs.generator(seed), torch.Generator().manual_seed(seed)))
        assert torch.equal(one, other) and random_inputs.number(seed) == seed % 2**31


def test_every_bit_of_a_seed_changes_what_is_drawn():
    whole = 2**128 - 1
    seeds = [whole, *(whole ^ 1 << bit for bit in range(128))]
    # past a refill
    drawn = torch.stack([torch.randint(2**40, (650,), generator=random_inputs.generator(seed)) for seed in seeds])
    assert len({*drawn[:, 0].tolist()}) == len({*drawn[:, -1].tolist()}) == len(seeds)
    assert len({random_inputs.number(seed) for seed in seeds}) == len(seeds)
    assert all(0 <= random_inputs.number(seed) < 2**63 for seed in seeds)


def test_numbers_of_a_large_seed_are_spread_evenly():
    numbers = torch.rand(100_000, generator=random_inputs.generator(2**127 + 1), dtype=torch.float64)
    assert abs(numbers.mean() - 1 / 2) < 0.004 and abs(numbers.var() - 1 / 12) < 0.002
    assert torch.histc(numbers, 10, 0, 1).sub(10_000).abs().max() < 500


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in LONG else []) for name in EXERCISES])
def test_seeds_that_share_their_low_64_bits_draw_apart(name, hidden):
    """Whatever differs between a seed and the next one differs between seeds 2**64 apart."""
    def changed(by):
        """The inputs that are others, for some seed, of another seed."""
        return {key for seed in SEEDS for key, tensor in drawn(seed).items()
                if key not in drawn(seed + by) or not torch.equal(tensor, drawn(seed + by)[key])}

    def drawn(seed):
        if seed not in known:
            known[seed] = EXERCISES[name].draw(seed, hidden)
        return known[seed]

    known = {}
    assert changed(1) and changed(1) <= changed(2**64)
