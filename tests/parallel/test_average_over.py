"""Parameters are averaged over the axis that their placement names, which may be one rank's own beside others'."""

import pytest

from course.ranks.notebook_ranks import ranks


def averaged(method, low):
    """Of a parameter that both ranks share and of one that each has for itself: gradients, then values after a step of SGD."""
    from dataclasses import replace

    import torch
    from torch import nn

    from course.config import Parallel
    from course.models.layers import Linear
    from course.parallel import Axis, build_mesh, join, serial_placements
    from course.parallel.data_parallel import METHODS

    mesh = build_mesh(Parallel(dp=2), join("cpu"))
    model = nn.ModuleDict({"shared": Linear(2, 3, bias=False), "own": Linear(2, 3, bias=False)})
    for module in model.values():
        nn.init.ones_(module.weight)
    placements = serial_placements(model, average_over=mesh.dp)
    own = model["own"].weight
    placements[own] = replace(placements[own], average_over=Axis("expert_dp"))
    gradients = METHODS[method](model, placements, 25.0, torch.bfloat16 if low else None)
    optimizer = torch.optim.SGD(gradients.optimizer_parameters, lr=0.5)
    found = []
    for _ in range(2):
        gradients.begin(1)
        (sum(module.weight.float().sum() for module in model.values()) * (mesh.world.rank + 1)).backward()
        gradients.finish()
        optimizer.step()
        gradients.clear()
        gradients.after_optimizer_step()
        gradients.wait_parameters()
        found.append([module.weight.float().mean().item() for module in model.values()])
    masters = gradients.full_master_weights()
    return found, [round(masters[module.weight].mean().item(), 6) for module in model.values() if module.weight in masters]


@pytest.mark.parametrize(("method", "low"), [("naive", False), ("bucketed", False), ("zero1", False), ("zero1", True)])
def test_each_over_its_own(method, low):
    for rank, (values, masters) in enumerate(ranks(2)(averaged, method, low)):
        assert values == [[0.25, 1 - 0.5 * (rank + 1)], [-0.5, 1 - rank - 1]]
        assert masters == (values[1] if low else [])
