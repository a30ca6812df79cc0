"""The bisection for the least memory of a run, with a training that needs a known amount."""

from types import SimpleNamespace

import pytest
import torch

from experiments import least_memory


class Training:
    """Its steps fail below `needs` bytes; fewer than `holds` would not keep its weights."""

    def __init__(self, needs):
        self.needs, self.limit, self.cleared = needs, float("inf"), 0
        self.model = SimpleNamespace(zero_grad=self.clear)

    def clear(self):
        self.cleared += 1

    def step(self, batch):
        if self.limit < self.needs:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize("needs", [3.2e9, 7.9e9])
def test_bisection_finds_what_a_run_needs(needs, monkeypatch):
    training = Training(needs)
    monkeypatch.setattr(least_memory.gc, "collect", lambda: None)      # of all that the tests hold: a second each
    monkeypatch.setattr(least_memory, "limit_memory", lambda limit: setattr(training, "limit", limit))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 3e9)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda: 8e9)
    found = least_memory.least(training, None)
    assert needs <= found <= needs + 5e9 / 2**least_memory.TRIALS
    assert training.cleared == least_memory.TRIALS             # what a failed step left does not count in the next
