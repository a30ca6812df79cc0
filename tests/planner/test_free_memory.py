"""Whether a run fits: what there is, what is refused and with which words, and memory that runs out."""

from pathlib import Path
from unittest import mock

import pytest
import torch

from course import config
from course.cli import main, presets
from course.inference import forecast_scores
from course.planner import free_memory, peak_memory
from course.planner.search_space import changed
from course.ranks.notebook_ranks import ranks
from course.training import trainer
from course.utils.errors import CourseError

CPU = torch.device("cpu")
GB = 10**9
QUIET = ["train.device=cpu", "log.tensorboard=false", "train.steps=1", "train.threads=1"]


def refused(preset, there, *settings, count=1):
    c = changed(config.load(preset, settings), {"parallel.dp": count})
    with pytest.raises(CourseError) as caught:
        free_memory.refuse(c, peak_memory.predict(c), there, count, CPU)
    return str(caught.value)


@pytest.mark.parametrize(("preset", "there"), [("gpt-124m", 16), ("gpt-350m", 16), ("vit-base", 8), ("dit-xl", 19),
                                                ("gpt-774m", 20)])
def test_what_is_named_instead_should_fit(preset, there):
    words = refused(preset, there * GB)
    assert f"and {there}.0 GB are free on this machine" in words and words.endswith("try anyway with train.check_memory=false")
    given = words.partition(": set ")[2].partition(";")[0].split()
    assert given and peak_memory.predict(config.load(preset, given)).total <= there * GB


def test_a_model_that_no_setting_makes_fit_is_told_to_be_smaller_or_on_more_gpus():
    words = refused("gpt-7b", 16 * GB)
    assert "of which optimizer states are 53.3" in words and "take a smaller model" in words
    assert "course plan gpt-7b --gpus 8" in words


def test_processes_of_a_machine_share_its_memory():
    settings = ["train.micro_batch=1", "train.recompute=full", "parallel.zero=true"]
    words = refused("gpt-124m", 6 * GB, *settings, count=8)
    assert "for its 8 processes here" in words and "take fewer processes: one fits as it is" in words
    c = config.load("gpt-124m", settings)
    free_memory.refuse(c, peak_memory.predict(c), 6 * GB, 1, CPU)


@pytest.mark.parametrize("name", config.presets())
def test_what_is_predicted_to_fit_is_never_refused(name):
    c = config.load(name)
    found = peak_memory.predict(c)
    free_memory.refuse(c, found, found.total, 1, CPU)
    free_memory.refuse(c, found, round(0.8 * found.allocated), 1, CPU)         # nor what may be predicted by a fifth too high


def test_a_run_that_cannot_fit_is_refused_before_it_begins(tmp_path):
    settings = [*QUIET, f"log.dir={tmp_path}"]
    with mock.patch.object(free_memory, "free", lambda device: 10**6), pytest.raises(CourseError,
                                                                                      match=r"gpt-demo needs about 0\.0 GB"):
        trainer.main(config.load("gpt-demo", settings))
    assert not list(tmp_path.rglob("config.yaml"))
    with mock.patch.object(free_memory, "free", lambda device: 10**6):
        trainer.main(config.load("gpt-demo", [*settings, "train.check_memory=false"]))


def test_a_run_whose_weights_do_not_fit_is_not_loaded(tmp_path):
    run = trainer.main(config.load("gpt-demo", [*QUIET, f"log.dir={tmp_path}"]))
    settings = config.load(str(run / "config.yaml"))
    assert forecast_scores.load_model(run, settings, CPU)[1] == 1
    with mock.patch.object(free_memory, "free", lambda device: 4 * 200_000), pytest.raises(CourseError, match="weights take"):
        forecast_scores.load_model(run, settings, CPU)


def refused_on_ranks():
    from course import config
    from course.parallel import build_mesh, join
    from course.planner import free_memory

    c = config.load("gpt-demo", ["train.device=cpu", "parallel.dp=2"])
    needs = peak_memory.predict(c)
    with mock.patch.object(free_memory, "free", lambda device: round(1.5 * free_memory.least_bytes(needs, device))):
        try:
            free_memory.check(c, build_mesh(c.parallel, join("cpu")))
        except CourseError as error:
            return str(error)
    return ""


def test_all_ranks_refuse_what_one_of_them_could_have():
    told = ranks(2)(refused_on_ranks)
    assert all("for its 2 processes here" in words for words in told)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), MemoryError(),
                                   RuntimeError("CUDA error: out of memory"),
                                   RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't "
                                                "allocate memory: you tried to allocate 9 bytes. Error code 12"),
                                   RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes.")])
def test_memory_that_runs_out_is_told_with_what_should_fit(error, tmp_path, capsys, monkeypatch):
    c = config.load("gpt-demo", [*QUIET, f"log.dir={tmp_path}", "train.global_batch=64"])

    def failing(*given):
        raise error

    with mock.patch.object(trainer, "fit", failing), pytest.raises(CourseError, match=r"memory of this machine .* ran out") as e:
        trainer.main(c)
    given = str(e.value).partition(": set ")[2].split()
    less = config.load("gpt-demo", ["train.global_batch=64", *given])
    assert given and peak_memory.predict(less).total < peak_memory.predict(c).total
    monkeypatch.setattr(main, "app", failing)         # and outside of training, where nothing is known of settings
    with pytest.raises(SystemExit, match=r"course: memory ran out .*: take fewer samples at a time"):
        main.main()


def test_other_errors_stay_what_they_are(tmp_path):
    def failing(*given):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    with mock.patch.object(trainer, "fit", failing), pytest.raises(RuntimeError, match="cannot be multiplied"):
        trainer.main(config.load("gpt-demo", [*QUIET, f"log.dir={tmp_path}"]))


@pytest.mark.parametrize(("line", "files", "expected"), [
    ("0::/job/step", {"job/memory.max": "8000", "job/memory.current": "5000", "job/memory.stat": "anon 10\ninactive_file 1500\n",
                      "job/step/memory.max": "max", "job/step/memory.current": "5000", "job/step/memory.stat": ""}, [4500]),
    ("4:memory:/slurm/job", {"memory/slurm/job/memory.limit_in_bytes": "7000", "memory/slurm/job/memory.usage_in_bytes": "6000",
                             "memory/slurm/job/memory.stat": "cache 9\ntotal_inactive_file 100\ntotal_active_file 20\n"}, [1120]),
    ("0::/of/the/host", {"memory.max": "900", "memory.current": "1000", "memory.stat": "file 1\n"}, [0]),
    ("3:cpuset:/a", {"memory.max": "900", "memory.current": "1000", "memory.stat": ""}, []), ("0::/", {}, [])])
def test_the_limit_of_a_job_or_container_counts(line, files, expected, tmp_path, monkeypatch):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "self").write_text(f"{line}\n")
    monkeypatch.setattr(free_memory, "GROUPS", tmp_path)
    monkeypatch.setattr(free_memory, "OWN", Path(tmp_path / "self"))
    assert list(free_memory.in_groups()) == expected
    host = free_memory.psutil
    if expected:
        assert free_memory.free(CPU) - host.swap_memory().free - host.Process().memory_info().rss <= expected[0] + 10**8


@pytest.mark.parametrize("preset", ["gpt-124m", "vit-base", "dit-7b"])
def test_the_list_of_presets_has_the_memory_of_their_own_settings(preset):
    alone = presets.alone(config.load(preset))
    needs = peak_memory.predict(config.load(preset)).total
    assert presets.row(preset, alone, needs, False)[3] == f"{needs / 1e9:.1f} " and peak_memory.predict(alone).total == needs
