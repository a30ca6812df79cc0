"""The benchmark of one GPU runs, on tiny models and the CPU; its numbers mean nothing here."""

import json

import pytest
import torch
import torch._dynamo
from torch._dynamo.utils import counters

from course import config
from course.bench import one_gpu
from course.bench.one_gpu_configs import BENCHMARKS
from course.utils.errors import CourseError


@pytest.mark.slow
def test_configurations_run_in_processes_of_their_own(tmp_path, capsys):
    names = ["bf16, on the device", "one sample: in a graph"]
    one_gpu.main("vit", tmp_path / "vit.json", names, small=True)
    done, refused = json.loads((tmp_path / "vit.json").read_text())["rows"]
    assert done["configuration"] == names[0] and done["samples_per_s"] > 0 and 0 < done["first_s"] < 60
    assert done["ms"] == pytest.approx(2000 / done["samples_per_s"])
    assert done["settings"] == ["precision=bf16", "data.source=mock"]
    assert "graphs=true needs a GPU" in refused["error"] and "samples/s" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "names"), [("gpt", ["124M: bf16, compiled", "124M: Hugging Face's GPT-2, bf16, compiled"]),
                                             ("dit", ["256 px: bf16", "512 px: fp8, current scaling, compiled, narrow stream"])])
def test_the_benchmarks_of_gpt_and_dit_run(tmp_path, kind, names):
    rows = one_gpu.main(kind, tmp_path / "rows.json", names, small=True)
    assert [row["configuration"] for row in rows] == names and all(row["samples_per_s"] > 0 for row in rows)
    assert all(("tokens_per_s" in row) == (kind == "gpt") for row in rows)


def test_small_compiles_nothing_and_says_what_it_is(tmp_path, monkeypatch, capsys):
    """Nor the library's configurations nor Hugging Face's, and none is started twice."""
    programs = []

    def start(program, gpu, **environment):
        programs.append(program)
        assert program[-1] == "--small"
        return {"samples_per_s": 1.0, "mfu": None, "memory_gb": 0.0, "first_s": 0.0, "kernels": 0}

    monkeypatch.setattr(one_gpu.gpu_pool, "start", start)
    one_gpu.main("vit", tmp_path / "vit.json", [one_gpu.AGAIN], small=True)
    said = capsys.readouterr().out
    assert len(programs) == 1 and said.startswith(one_gpu.TOYS) and "\ntoy of bf16, compiled" in said
    assert one_gpu.TOYS in json.loads((tmp_path / "vit.json").read_text())["meaning"]
    torch._dynamo.reset()
    counters.clear()
    for chosen in ("124M: bf16, compiled", "124M: Hugging Face's GPT-2, bf16, compiled"):
        assert one_gpu.measure("gpt", chosen, small=True, only_first=False)["samples_per_s"] > 0
    assert not counters["frames"] and not counters["stats"]


def test_every_benchmark_configuration_loads():
    for kind in BENCHMARKS.values():
        for chosen in kind.configs.values():
            config.load(chosen.preset, [*chosen.settings, *kind.tiny])
    vit = BENCHMARKS["vit"].configs.values()
    assert {config.load(chosen.preset, chosen.settings).model.tokens for chosen in vit} == {4050, 256}
    for name, chosen in BENCHMARKS["gpt"].configs.items():
        train = config.load(chosen.preset, chosen.settings).train
        assert train.micro_batch == (train.global_batch / 2 if "two micro-batches" in name else 0)


def test_what_it_cannot_do_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(CourseError, match=r"course bench vit needs a GPU.*--small"):
        one_gpu.main("vit", tmp_path / "vit.json", [], small=False)
    with pytest.raises(CourseError, match="no configuration 'fp4'"):
        one_gpu.main("vit", tmp_path / "vit.json", ["fp4"], small=True)
