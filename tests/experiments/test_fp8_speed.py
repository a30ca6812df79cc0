import torch

from course.parallel import World
from experiments import fp8_speed


def test_the_stack_is_measured_in_every_case(monkeypatch):
    """At the smallest size on the CPU, without the compiled cases, which take long: FP8's loss is near bf16's."""
    every = fp8_speed.cases(torch.device("cpu"))
    assert len(every) == 6 and {config.precision for config, _, _ in every.values()} == {"bf16", "fp8"}
    monkeypatch.setattr(fp8_speed, "cases", lambda device: {name: case for name, case in every.items() if not case[1]})
    rows = list(fp8_speed.stacks(World(), (32, 1, 2), 2, 9))
    assert [row["case"] for row in rows] == ["bf16", "native, delayed", "native, current"]
    assert all(row["ms"] > 0 and abs(row["loss off"]) < 0.01 for row in rows)
