"""Converted checkpoints against an independent small implementation of that repository's formulas, over its names."""

import math
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from course.convert import dit
from course.convert.weight_files import Weights
from course.models import DiTConfig, build_model
from course.parallel import initialize_serial
from course.utils.errors import CourseError

CONFIG = DiTConfig(latent=(3, 8, 8), patch=2, dim=24, depth=2, heads=3, mlp_ratio=2.0, classes=5)


def shapes(c: DiTConfig, outputs: int) -> dict[str, tuple[int, ...]]:
    """Every parameter of a DiT of theirs, without the positions; outputs: channels of the output."""
    D, p, M = c.dim, c.patch, int(c.dim * c.mlp_ratio)
    found = {"x_embedder.proj": (D, c.latent[0], p, p), "t_embedder.mlp.0": (D, 256), "t_embedder.mlp.2": (D, D),
             "final_layer.linear": (p * p * outputs, D), "final_layer.adaLN_modulation.1": (2 * D, D)}
    for i in range(c.depth):
        found |= {f"blocks.{i}.{name}": shape for name, shape in {
            "attn.qkv": (3 * D, D), "attn.proj": (D, D), "mlp.fc1": (M, D), "mlp.fc2": (D, M),
            "adaLN_modulation.1": (6 * D, D)}.items()}
    weights = {f"{name}.weight": shape for name, shape in found.items()}
    biases = {f"{name}.bias": shape[:1] for name, shape in found.items()}
    return weights | biases | {"y_embedder.embedding_table.weight": (c.classes + 1, D)}


def positions_there(c: DiTConfig) -> torch.Tensor:
    """(1, T, D): for each patch sine, then cosine of its column, then of its row, at D/4 frequencies."""
    q, side = c.dim // 4, c.latent[1] // c.patch
    rows = [[f(at / 10000 ** (k / q)) for at in (column, row) for f in (math.sin, math.cos) for k in range(q)]
            for row in range(side) for column in range(side)]
    return torch.tensor(rows, dtype=torch.float64)[None]


def state_of(c: DiTConfig = CONFIG, outputs: int = 6, seed: int = 0) -> dict[str, torch.Tensor]:
    rng = np.random.default_rng(seed)
    return {name: torch.from_numpy(0.3 * rng.standard_normal(shape)) for name, shape in shapes(c, outputs).items()} | {
        "pos_embed": positions_there(c)}


def theirs(w: dict[str, torch.Tensor], x: torch.Tensor, time: torch.Tensor, label: torch.Tensor, c: DiTConfig = CONFIG):
    """The model as the paper describes it, with the names of that repository: (B, C, H, W) -> (B, outputs, H, W)."""
    def linear(name, x):
        return torch.einsum("...k,nk->...n", x, w[f"{name}.weight"]) + w[f"{name}.bias"]

    def norm(x):
        return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + 1e-6).sqrt()

    def gelu(x):
        return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    h = F.conv2d(x, w["x_embedder.proj.weight"], w["x_embedder.proj.bias"], stride=c.patch).flatten(2).transpose(1, 2)
    h = h + w["pos_embed"]
    angles = time.double()[:, None] * torch.tensor([10000 ** (-k / 128) for k in range(128)], dtype=torch.float64)
    waves = torch.cat([torch.cos(angles), torch.sin(angles)], 1)
    time = linear("t_embedder.mlp.2", F.silu(linear("t_embedder.mlp.0", waves)))
    s = F.silu(time + w["y_embedder.embedding_table.weight"][label])
    for i in range(c.depth):
        b = f"blocks.{i}"
        m = linear(f"{b}.adaLN_modulation.1", s)[:, None].split(c.dim, -1)              # shift, scale, gate; shift, scale, gate
        q, k, v = linear(f"{b}.attn.qkv", norm(h) * (1 + m[1]) + m[0]).unflatten(-1, (3, c.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = torch.softmax(q @ k.transpose(-1, -2) / math.sqrt(c.dim // c.heads), -1) @ v
        h = h + m[2] * linear(f"{b}.attn.proj", mixed.transpose(1, 2).flatten(2))
        h = h + m[5] * linear(f"{b}.mlp.fc2", gelu(linear(f"{b}.mlp.fc1", norm(h) * (1 + m[4]) + m[3])))
    shift, scale = linear("final_layer.adaLN_modulation.1", s)[:, None].split(c.dim, -1)
    out = linear("final_layer.linear", norm(h) * (1 + scale) + shift)                   # (B, T, p·p·outputs)
    side = c.latent[1] // c.patch
    out = out.view(len(x), side, side, c.patch, c.patch, -1)                            # row, column, row in it, column in it
    return out.permute(0, 5, 1, 3, 2, 4).reshape(len(x), -1, *c.latent[1:])


def from_theirs(state, c):
    """Our parameters by name, of a state dict of theirs."""
    with TemporaryDirectory() as folder:
        save_file({name: x.contiguous() for name, x in state.items()}, Path(folder) / "theirs.safetensors")
        given = {key: getattr(c, key) for key in ("heads", "classes", "label_drop", "objective")}
        found, names = dit.source(Path(folder) / "theirs.safetensors", given), [mine for _, mine, _ in dit.names(c.depth)]
        found.check(names)
        return {name: found[name] for name in names}


def to_theirs(parameters, c):
    """A state dict of theirs, of our parameters by name."""
    found = {}
    for _, name, _ in dit.names(c.depth):
        layout, (there,) = dit.rule(c, name)
        found[there], = layout.theirs(c, parameters[name])
    return found | {"pos_embed": dit.positions(c).to(found["x_embedder.proj.weight"].dtype)}


def ours(parameters: dict[str, torch.Tensor], x, time, label, c: DiTConfig = CONFIG):
    model = initialize_serial(build_model(c), 0, torch.device("cpu"), torch.float64)
    model.load_state_dict(parameters)
    return model.fields(model(model.inputs(x, time, label))).detach()


def inputs():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 3, 8, 8, dtype=torch.float64, generator=generator)
    return x, torch.tensor([0, 17, 500, 999]), torch.tensor([0, 4, 5, 2])


@pytest.mark.parametrize("outputs", [3, 6])
def test_a_converted_checkpoint_gives_the_same_noise(outputs):
    state = state_of(outputs=outputs)
    expected = theirs(state, *inputs())[:, :3]
    assert expected.std() > 0.1
    torch.testing.assert_close(ours(from_theirs(state, CONFIG), *inputs()), expected, rtol=1e-10, atol=1e-10)


def test_the_settings_are_those_of_the_shapes():
    assert dit.settings(state_of(), heads=3) == CONFIG
    xl = DiTConfig()
    state = {name: torch.empty(shape, device="meta") for name, shape in shapes(xl, 8).items()}
    assert dit.settings(state | {"pos_embed": torch.empty(1, 256, 1152, device="meta")}) == xl
    with pytest.raises(CourseError, match="no published DiT has width 24"):
        dit.settings(state_of())


def test_there_and_back_is_nothing_and_the_variance_is_zero():
    mine = from_theirs(state_of(), CONFIG)
    written = to_theirs(mine, CONFIG)
    assert {name: tuple(value.shape) for name, value in written.items() if name != "pos_embed"} == shapes(CONFIG, 6)
    again = from_theirs(written, CONFIG)
    assert again.keys() == mine.keys() == {name for name, _ in build_model(CONFIG).named_parameters()}
    assert all(torch.equal(again[name], value) for name, value in mine.items())
    out = theirs(written, *inputs())
    torch.testing.assert_close(out[:, :3], ours(mine, *inputs()), rtol=1e-10, atol=1e-10)
    assert (out[:, 3:] == 0).all()


def test_positions_that_are_not_those_of_the_paper_are_refused():
    state = state_of()
    state["pos_embed"] = state["pos_embed"].flip(-1)
    with pytest.raises(CourseError, match="are not the fixed waves of DiT"):
        from_theirs(state, CONFIG)


@pytest.mark.parametrize(("change", "words"), [
    (lambda s: s.pop("blocks.1.attn.proj.bias"), "lacks the tensor blocks.1.attn.proj.bias"),
    (lambda s: s.update(extra=torch.zeros(1)), "1 tensors that a DiT of 2 layers does not have, such as extra")])
def test_other_models_are_refused(change, words):
    state = state_of()
    change(state)
    with pytest.raises(CourseError, match=words):
        from_theirs(state, CONFIG)


class Bomb:
    def __reduce__(self):
        return print, ("executed",)


@pytest.mark.parametrize(("damage", "words"), [
    ("code", r"holds more than tensors, and the course never unpickles it.*\(it names print\): if you trust the file, save"),
    ("half", r"cannot be read \(RuntimeError\): it is damaged, or no file of PyTorch's since 1\.6; download"),
    ("old", r"it is damaged, or no file of PyTorch's since 1\.6; download"),
    ("list", "holds a list, not tensors")])
def test_files_that_are_not_weights_are_a_sentence(damage, words, tmp_path, capsys):
    file = tmp_path / "theirs.pt"
    torch.save({"code": {"a": Bomb()}, "old": state_of(), "half": state_of(), "list": [1]}[damage], file,
               _use_new_zipfile_serialization=damage != "old")
    if damage == "half":
        file.write_bytes(file.read_bytes()[:3000])
    with pytest.raises(CourseError, match=words):
        Weights(file)
    assert "executed" not in capsys.readouterr().out


def test_a_models_configuration_is_no_weights(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "gpt2"}')
    with pytest.raises(CourseError, match=r"config.json has no weights: give the folder that it is in"):
        Weights(tmp_path / "config.json")


def test_a_width_that_no_ratio_gives_exactly_is_read(tmp_path):
    """1952 / 448 in float64, times 448, is a little less than 1952."""
    c = DiTConfig(latent=(3, 4, 4), patch=2, dim=448, depth=1, heads=7, mlp_ratio=4.357142857142858, classes=2)
    state = state_of(c)
    assert len(state["blocks.0.mlp.fc1.weight"]) == 1952 != int(448 * (1952 / 448))
    found = dit.settings(state, 7)
    assert int(found.dim * found.mlp_ratio) == 1952
