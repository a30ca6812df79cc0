"""Scripts for machines with GPUs, run here with stand-ins for the programs that they start."""

import importlib
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SUBMIT = Path(__file__).parents[2] / "submit"
SCRIPT = SUBMIT / "profile.sh"


def profiled(tmp_path, *arguments, programs, **environment):
    """What the script started, one line each, with words in brackets."""
    for name in programs:
        file = tmp_path / "bin" / name
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"#!/bin/bash\nprintf '[%s] ' {name} \"$@\" >> {tmp_path}/calls\necho >> {tmp_path}/calls\n")
        file.chmod(0o755)
    done = subprocess.run(["bash", SCRIPT, *arguments], cwd=tmp_path, capture_output=True, text=True,
                          env={"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "COURSE_PYTHON": "python", **environment})
    assert done.returncode == 0, done.stderr
    return (tmp_path / "calls").read_text().splitlines(), done.stdout


NSYS = ("[nsys] [profile] [--capture-range=cudaProfilerApi] [--capture-range-end=stop] [-s] [none] [-t] [nvtx,cuda] "
        "[--cuda-graph-trace=node] [--force-overwrite=true] [-o] ")


def test_nsys_records_the_window_of_a_run_with_its_settings(tmp_path):
    calls, _ = profiled(tmp_path, "vit-opt", "profile.after=50", "log.dir=a b", programs=["nsys", "python"])
    assert calls[0].strip() == (NSYS + "[runs/nsys/vit-opt-rank0] [python] [-m] [course.cli] [profile] [vit-opt] "
                                "[profile.tool=nsys] [profile.after=50] [log.dir=a b]")
    assert calls[1].startswith("[nsys] [stats]") and calls[1].strip().endswith("[runs/nsys/vit-opt-rank0.nsys-rep]")


def test_nsys_stands_in_front_of_each_rank_of_torchrun(tmp_path):
    calls, _ = profiled(tmp_path, "presets/my%q.yaml", "parallel.tp=2", programs=["nsys", "python"], GPUS="2")
    assert calls[0].startswith("[python] [-m] [torch.distributed.run] ")
    assert calls[0].strip().endswith("[--nproc-per-node] [2] [--no-python] " + NSYS + "[runs/nsys/my_q-rank%q{RANK}] [python] "
                                     "[-m] [course.cli] [profile] [presets/my%q.yaml] [profile.tool=nsys] [parallel.tp=2]")
    assert calls[1].strip().endswith("[runs/nsys/my_q-rank0.nsys-rep]")


@pytest.mark.slow
def test_each_rank_of_torchrun_has_a_report_of_its_own(tmp_path):
    """With a stand-in for nsys that fills in %q{RANK} and starts what it is given, as nsys does."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nsys").write_text("""#!/bin/bash
[ "$1" = profile ] || exit 0
while [ "$1" != -o ]; do shift; done
echo "$RANK of $WORLD_SIZE: ${*:4}" > "${2/\\%q{RANK\\}/$RANK}.nsys-rep"
""")
    (tmp_path / "bin" / "nsys").chmod(0o755)
    done = subprocess.run(["bash", SCRIPT, "vit-demo", "profile.steps=5"], cwd=tmp_path, capture_output=True, text=True, env={
        **os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "GPUS": "2", "COURSE_PYTHON": sys.executable})
    assert done.returncode == 0, done.stderr
    assert {file.name: file.read_text() for file in (tmp_path / "runs/nsys").iterdir()} == {
        f"vit-demo-rank{rank}.nsys-rep": f"{rank} of 2: -m course.cli profile vit-demo profile.tool=nsys profile.steps=5\n"
        for rank in range(2)}


def test_without_nsys_pytorch_looks_on_all_gpus(tmp_path):
    (call,), told = profiled(tmp_path, "vit-opt", "parallel.tp=2", programs=["python"], GPUS="2")
    assert call.split() == ["[python]", "[-m]", "[torch.distributed.run]", "[--rdzv-backend=c10d]",
                            "[--rdzv-conf=store_type=file]", "[--local-addr=127.0.0.1]", "[--nproc-per-node]", "[2]",
                            "[--no-python]", "[python]", "[-m]", "[course.cli]", "[profile]", "[vit-opt]", "[parallel.tp=2]"]
    assert "nsys is not installed" in told


def test_everything_of_one_gpu_is_measured_and_a_failure_named(tmp_path):
    """`python` fails here, so that two parts do; the others go on."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, status in {"course": 0, "python": 3, "nvidia-smi": 0}.items():
        (programs / name).write_text(f"#!/bin/bash\necho {name} \"$@\"\nexit {status}\n")
        (programs / name).chmod(0o755)
    done = subprocess.run(["bash", SCRIPT.with_name("bench_one_gpu.sh"), "out", "fp8_speed", "ladder", "loss_curves"],
                          cwd=tmp_path, capture_output=True, text=True, env={**os.environ, "PATH": f"{programs}:/usr/bin:/bin"})
    assert done.returncode == 0 and "fp8_speed failed:" in done.stdout and "loss_curves failed:" in done.stdout
    assert (tmp_path / "out" / "ladder.log").read_text() == "course bench vit --out out/ladder.json\n"
    assert (tmp_path / "out" / "fp8_speed.log").read_text() == "python -m experiments.fp8_speed out/fp8_speed.json\n"
    (programs / "nvidia-smi").write_text("#!/bin/bash\nexit 9\n")
    done = subprocess.run(["bash", SCRIPT.with_name("bench_one_gpu.sh"), "none"], cwd=tmp_path, capture_output=True, text=True,
                          env={**os.environ, "PATH": f"{programs}:/usr/bin:/bin"})
    assert done.returncode == 1 and "there is no GPU here" in done.stdout and not (tmp_path / "none").exists()


def told(*lines: str) -> list[str]:
    """What causes.py makes of the output of a job."""
    done = subprocess.run([sys.executable, SUBMIT / "causes.py"], input="\n".join(lines), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_to_the_whole_job_takes_no_word_from_its_log(number):
    """Ctrl-C in a terminal, or `scancel --full --signal=USR1`: all processes get it."""
    process = subprocess.Popen([sys.executable, SUBMIT / "causes.py"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    process.stdin.write("0: step 1\n")
    process.stdin.flush()
    assert process.stdout.readline() == "0: step 1\n"       # it listens
    process.send_signal(number)
    assert process.communicate("0: stopped\n1: Traceback (most recent call last):\n1: held back\n")[0].splitlines() == [
        "0: stopped", "== first failed rank 1:", "1: Traceback (most recent call last):", "1: held back"]


LOST = ["0: [rank0]: Traceback (most recent call last):", "0:   File x", "0: RuntimeError: Connection closed by peer"]
CAUSE = ["3: Traceback (most recent call last):", "3:   File y", "3: ValueError: the cause"]


def test_the_cause_comes_first_even_if_it_arrived_last():
    end = ["srun: error: n2: task 3: Exited with exit code 1", "srun: error: n1: task 0: Exited with exit code 1"]
    assert told("0: step 1", *LOST, "1: step 1", *CAUSE, *end) == ["0: step 1", "1: step 1", "== first failed rank 3:", *CAUSE,
                                                                    LOST[-1], *end]


def test_of_a_rank_that_was_killed_srun_tells_before_what_the_others_say():
    end = ["srun: error: n2: task 3: Killed", "0: slurmstepd-n1: error: *** STEP 1.0 ***", "srun: error: n1: task 0: Exited"]
    assert told(*LOST, *end) == ["== first failed rank 3 on n2: Killed", LOST[-1], *end]


def test_a_rank_that_the_watch_calls_gone_is_the_first_that_failed_whomever_srun_names_first():
    gave_way, killed = "srun: error: n1: task 1: Exited with exit code 1", "srun: error: n2: tasks 2-3: Killed"
    watch = "0: course: rank 2 (process 6436 of n2) is gone: it was killed at step 5"
    assert told(gave_way, watch, killed) == ["== first failed rank 2-3 on n2: Killed", watch, gave_way, killed]
    assert told(gave_way, watch) == ["== first failed rank 2 on n2: it is gone", watch, gave_way]


def test_one_sentence_for_a_user_is_a_cause_and_a_rank_that_gives_way_is_none():
    gives_way = "0: another rank has failed: this one ends, too"
    assert told(gives_way, "2: course: no such folder") == ["== first failed rank 2:", "2: course: no such folder", gives_way]


def test_a_job_that_goes_well_is_passed_on_as_it_is():
    lines = ["srun: cluster configuration lacks support for cpu binding", " 0: step 1", "11: 3: x", "", "0: course of events"]
    assert told(*lines) == lines


def test_a_run_that_a_signal_stopped_is_no_failure():
    assert told("0: stopped by SIGUSR1", "srun: error: n1: task 0: Exited with exit code 75") == ["0: stopped by SIGUSR1"]


def test_what_the_store_of_pytorch_says_when_rank_0_has_ended_comes_after_what_rank_0_says():
    store = ["2: [rank2]:[W1122 11:16:57.637592805 TCPStore.cpp:125] [c10d] recvValue failed", "2: Exception raised"]
    end = "srun: error: n1: task 0: Exited with exit code 1"
    assert told(*store, "0: course: the cause", end) == ["== first failed rank 0:", "0: course: the cause", *store, end]


def test_a_rank_that_waits_for_the_others_at_the_start_has_not_failed():
    waits = "2: rank 2 waits at 127.0.0.1:20004 for ranks 0, 1 and 3 of 4. They are tasks of the same Slurm step"
    end = "srun: error: n2: task 3: Exited with exit code 1"
    assert told(waits, *CAUSE, end) == [waits, "== first failed rank 3:", *CAUSE, end]


def test_what_is_held_for_long_and_ends_nothing_is_passed_on_without_a_headline(monkeypatch):
    monkeypatch.syspath_prepend(SUBMIT)
    causes = importlib.import_module("causes")
    out = io.StringIO()
    held = causes.Causes(out)
    held.take("1: [rank1]:[W1122 11:16:57.637592805 ProcessGroupNCCL.cpp:125] a warning\n")
    assert not out.getvalue()
    held.release(over=False)
    assert out.getvalue() == "1: [rank1]:[W1122 11:16:57.637592805 ProcessGroupNCCL.cpp:125] a warning\n"


def ranks_of(tmp_path, site: str, script: str = "train.sh", **environment: str) -> list[str]:
    """The words with which a script starts ranks in a job of one node with 2 GPUs; srun and Slurm are stand-ins."""
    stand_ins = {"srun": f"printf '%s\\n' \"$@\" > {tmp_path}/words", "scontrol": "echo node1", "getent": "exit 0"}
    programs = tmp_path / "bin"
    programs.mkdir(exist_ok=True)
    for name, line in stand_ins.items():
        (programs / name).write_text(f"#!/bin/bash\n{line}\n")
        (programs / name).chmod(0o755)
    (tmp_path / "site.sh").write_text(site)
    job = {"SLURM_JOB_ID": "4", "SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS_PER_NODE": "2", "SLURM_GPUS_ON_NODE": "2",
           "SLURM_CPUS_ON_NODE": "16", "SLURM_JOB_NODELIST": "node1", "COURSE_SITE": f"{tmp_path}/site.sh",
           "PATH": f"{programs}:/usr/bin:/bin", **environment}
    done = subprocess.run(["bash", SUBMIT / script, "vit-demo", "log.name=a b"], cwd=tmp_path, env=job,
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("job 4: nodes node1, tasks on each: 2\n")      # the log's first line
    return (tmp_path / "words").read_text().splitlines()


def test_on_gpus_each_has_a_task_with_its_share_of_the_cpus_and_sees_the_others(tmp_path):
    words = ranks_of(tmp_path, "site_settings=('log.dir=/scratch/me')", COURSE_PYTHON=sys.executable)
    assert {"--kill-on-bad-exit=1", "--ntasks=2", "--ntasks-per-node=2", "--cpus-per-task=8", "--cpu-bind=cores",
            "--gpu-bind=none"} <= set(words)
    assert words[words.index(sys.executable):] == [sys.executable, "-m", "course.cli", "train", "vit-demo", "log.dir=/scratch/me",
                                                   "log.name=a b"]


def test_in_a_job_each_rank_has_an_nsys_report_of_its_own(tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nsys").write_text("#!/bin/bash\n")
    (tmp_path / "bin" / "nsys").chmod(0o755)
    words = ranks_of(tmp_path, "", "profile.sh", COURSE_PYTHON=sys.executable)
    nsys = words.index("nsys")
    assert words[nsys + 1] == "profile" and words[words.index("-o") + 1] == "runs/nsys/vit-demo-4-rank%q{SLURM_PROCID}"
    assert words.index(sys.executable) > nsys and words[-1] == "log.name=a b"


def asked(tmp_path, **environment: str) -> tuple[list[str], str]:
    """The words of srun in a job of that environment, and what the script says."""
    for name, line in {"srun": f"printf '%s\\n' \"$@\" > {tmp_path}/words", "scontrol": "echo n1", "getent": "exit 0",
                       "nvidia-smi": "exit 1"}.items():
        (tmp_path / "bin").mkdir(exist_ok=True)
        (tmp_path / "bin" / name).write_text(f"#!/bin/bash\n{line}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "4", "SLURM_JOB_NODELIST": "n[1-9]", "SLURM_CPUS_ON_NODE": "8", "COURSE_PYTHON": sys.executable,
           "PATH": f"{tmp_path}/bin:/usr/bin:/bin", **environment}
    done = subprocess.run(["bash", SUBMIT / "train.sh", "vit-demo"], cwd=tmp_path, env=job, capture_output=True, text=True)
    words = tmp_path / "words"
    return words.read_text().splitlines() if words.exists() else [], done.stdout + done.stderr


@pytest.mark.parametrize("environment, words", [
    ("NTASKS=3 TASKS_PER_NODE=2,1", "nodes=2 ntasks=3 ntasks-per-node=2 cpus-per-task=4"),
    ("NTASKS=3", "nodes=2 ntasks=3 ntasks-per-node=2 cpus-per-task=4"),
    ("NTASKS=3 NTASKS_PER_NODE=2 TASKS_PER_NODE=2,1", "nodes=2 ntasks=3 ntasks-per-node=2 cpus-per-task=4"),
    ("NTASKS=7 TASKS_PER_NODE=2(x3),1 JOB_NUM_NODES=4", "nodes=4 ntasks=7 ntasks-per-node=2"),
    ("NTASKS=5 TASKS_PER_NODE=1,4 JOB_CPUS_PER_NODE=8,4", "nodes=2 ntasks=5 ntasks-per-node=4 cpus-per-task=1"),
    ("NTASKS=4 TASKS_PER_NODE=2(x2) JOB_CPUS_PER_NODE=16(x2)", "nodes=2 ntasks=4 ntasks-per-node=2 cpus-per-task=8"),
    ("TASKS_PER_NODE=8(x2)", "nodes=2 ntasks=2 ntasks-per-node=1"),              # of CPUs: no tasks were asked for
    ("NTASKS_PER_NODE=4 TASKS_PER_NODE=4(x2)", "nodes=2 ntasks=8 ntasks-per-node=4 cpus-per-task=2"),
    ("GPUS_ON_NODE=4", "nodes=2 ntasks=8 ntasks-per-node=4 gpu-bind=none"),
    ("GPUS_ON_NODE=4 GPUS_PER_NODE=a100:4 NTASKS=8 TASKS_PER_NODE=4(x2)", "nodes=2 ntasks=8 ntasks-per-node=4"),
    ("GPUS_PER_NODE=a100:4", "nodes=2 ntasks=8 ntasks-per-node=4"),
    ("GPUS_PER_NODE=a100:2,h100:2", "nodes=2 ntasks=8 ntasks-per-node=4"),
    ("GPUS_ON_NODE=gpu:a100:2(IDX:0-1)", "nodes=2 ntasks=4 ntasks-per-node=2"),
    ("GPUS=a100:3 GPUS_ON_NODE=2 NTASKS=3 TASKS_PER_NODE=2,1", "nodes=2 ntasks=3 ntasks-per-node=2"),
    ("GPUS_PER_TASK=1 GPUS_ON_NODE=2 NTASKS=3 TASKS_PER_NODE=2,1", "nodes=2 ntasks=3 ntasks-per-node=2"),
])
def test_as_many_ranks_as_were_asked_for(tmp_path, environment, words):
    given = dict(word.split("=") for word in environment.split())
    found, said = asked(tmp_path, **{"SLURM_JOB_NUM_NODES": "2"} | {f"SLURM_{name}": value for name, value in given.items()})
    assert {f"--{word}" for word in words.split()} <= set(found), said


@pytest.mark.parametrize("environment, says", [
    ("NTASKS=3 TASKS_PER_NODE=2,1 GPUS_ON_NODE=2", "spread unevenly over its nodes (2 1)"),
    ("NTASKS=4 TASKS_PER_NODE=1,3 GPUS_ON_NODE=2", "has 2 GPUs and 1 tasks"),
    ("NTASKS=4 TASKS_PER_NODE=1,3 JOB_CPUS_PER_NODE=4,2", "has 2 CPUs for 3 tasks"),
    ("HET_SIZE=2 NTASKS=4", "heterogeneous job"),
])
def test_what_cannot_be_as_asked_for_is_refused(tmp_path, environment, says):
    given = dict(word.split("=") for word in environment.split())
    found, said = asked(tmp_path, **{"SLURM_JOB_NUM_NODES": "2"} | {f"SLURM_{name}": value for name, value in given.items()})
    assert says in said and not found


@pytest.mark.parametrize("place", ["my.share", "a.sh.d", "x.sh/y.sh", "Übung 1", "a [b] *.sh"])
@pytest.mark.parametrize("words", ["vit-demo", "vit-demo data.path=/data/of.sh/x log.dir=a.sh"])
def test_the_scripts_find_each_other_in_a_folder_of_any_name(tmp_path, place, words):
    """Slurm runs a copy in its spool, and tells the command that was submitted as one line."""
    submit = tmp_path / place / "submit"
    submit.mkdir(parents=True)
    (submit / "common.sh").write_text('echo "found ${BASH_SOURCE[0]}"; course_on_ranks() { :; }; to_be_continued() { :; }\n')
    (tmp_path / "scontrol").write_text(f"#!/bin/bash\necho '   Command={submit}/train.sh {words}'\n")
    (tmp_path / "scontrol").chmod(0o755)
    spool = tmp_path / "spool" / "slurm_script"
    spool.parent.mkdir()
    for name in ("train", "check", "lab", "sweep", "profile"):
        spool.write_text((SUBMIT / f"{name}.sh").read_text())
        done = subprocess.run(["bash", spool, *words.split()], capture_output=True, text=True, cwd=tmp_path,
                              env={"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "1", "HOME": str(tmp_path)})
        assert f"found {submit}/common.sh" in done.stdout, (name, done.stderr)


@pytest.mark.parametrize("locale", ["C", "POSIX", "C.UTF-8"])
def test_what_ranks_print_is_passed_on_byte_for_byte(locale):
    text = "0: Übung → 李\n".encode() + b"0: caf\xe9\n1: Traceback (most recent call last)\n1: ValueError: \xfc\n"
    done = subprocess.run([sys.executable, SUBMIT / "causes.py"], input=text, capture_output=True,
                          env={"LC_ALL": locale, "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"})
    assert done.returncode == 0 and set(text.splitlines()) <= set(done.stdout.splitlines()), done.stderr


CONTAINERS = {
    "apptainer": ["apptainer", "exec", "--pwd", "{cwd}", "--bind", "{root}", "--bind", "{cwd}", "--bind", "/data", "--nv",
                  "an image"],
    "shifter": ["shifter", "--image=an image", "--module=gpu,nccl-plugin"],
    "podman-hpc": ["podman-hpc", "run", "--rm", "--ipc=host", "--network=host", "--env-host", "--workdir", "{cwd}", "--volume",
                   "{root}:{root}", "--volume", "{cwd}:{cwd}", "--volume", "/data:/data", "--gpu", "--nccl", "an image"],
    "enroot": ["enroot", "start", "--mount", "{root}:{root}", "--mount", "{cwd}:{cwd}", "--mount", "/data:/data",
               "an image"],
    "pyxis": ["--container-image=an image", "--container-mounts={root}:{root},{cwd}:{cwd},/data:/data",
              "--container-workdir={cwd}"],
}


@pytest.mark.parametrize("runtime", CONTAINERS)
def test_a_container_goes_in_front_of_each_rank(tmp_path, runtime):
    site = (f"COURSE_CONTAINER={runtime}\nCOURSE_IMAGE='an image'\nCOURSE_MOUNTS=/data\n"
            "COURSE_SHIFTER_MODULES=gpu,nccl-plugin\nCOURSE_PODMAN_OPTIONS='--gpu --nccl'\n")
    words = ranks_of(tmp_path, site)
    expected = [word.format(cwd=tmp_path, root=SUBMIT.parent) for word in CONTAINERS[runtime]]
    begin = words.index(expected[0])
    assert words[begin:begin + len(expected)] == expected and "python3" in words[begin + len(expected):]


def test_a_site_tells_sbatch_what_it_has_to_know_before_there_is_a_job(tmp_path):
    def said(command: str) -> str:
        done = subprocess.run(["bash", "-c", command], cwd=SUBMIT.parent, capture_output=True, text=True,
                              env={"PATH": os.environ["PATH"], "SBATCH_ACCOUNT": "m1234"})
        return done.stdout + done.stderr

    told = said(". submit/use.sh perlmutter; echo $SBATCH_CONSTRAINT $COURSE_SITE")
    assert told.splitlines() == ["gpu perlmutter", "SBATCH_ACCOUNT=m1234: GPU nodes of Perlmutter are charged to m1234_g"]
    refused = said(". submit/use.sh nowhere && echo as if it were there")
    assert "there is no submit/sites/nowhere.sh" in refused and "as if" not in refused
    assert "source it" in said("bash submit/use.sh perlmutter")


@pytest.mark.slow
def test_without_slurm_the_script_starts_the_ranks_itself(tmp_path):
    """On this machine's CPU, two processes, really; a preset is asked for."""
    command = ["bash", SUBMIT / "train.sh", "vit-demo", "data.source=mock", "train.steps=2", "train.device=cpu", "log.dir=a b",
               "model.grid=[8,16]", "model.dim=16", "model.depth=2", "model.heads=2"]
    settings = {**os.environ, "COURSE_SITE": "workstation", "GPUS": "2", "COURSE_PYTHON": sys.executable}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=settings)
    assert done.returncode == 0 and "2 x CPU" in done.stdout, done.stderr
    assert (tmp_path / "a b" / "vit-demo" / "default" / "metrics.jsonl").is_file()
    asked = subprocess.run(command[:2], cwd=tmp_path, capture_output=True, text=True, env=settings)
    assert asked.returncode != 0 and "which preset?" in asked.stderr
