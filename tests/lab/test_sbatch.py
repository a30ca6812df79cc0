"""Each rule of lint-sbatch on a script that is wrong in one way; the script that is mended has no finding."""

import re
from pathlib import Path

import pytest

from course.lab.slurm import lint, script_parser
from course.utils.errors import CourseError

SUBMIT = Path(__file__).parents[2] / "submit"
GOOD = r"""#!/usr/bin/env bash
# Trains on two nodes. A comment may name python train.py, srun, --image and port 29500.
#SBATCH --job-name=mine            # comments after options are comments
#SBATCH -N 2
#SBATCH --gpus-per-node=4 --ntasks-per-node 4
#SBATCH -c8
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --requeue
#SBATCH -t 01:00:00
#SBATCH --signal=B:USR1@60
set -euo pipefail

cat <<'END' > notes.txt
#SBATCH --gpus-per-node=1
python train.py $@; MASTER_PORT=29500
END
echo "python train.py # 'no srun' $(date)" | tee --append notes.txt  # python train.py
MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 12000))
srun --kill-on-bad-exit=1 --cpu-bind=cores \
    --cpus-per-task="$SLURM_CPUS_PER_TASK" \
    python -m course.cli train vit-short "$@" &
ranks=$!
trap 'kill -USR1 "$ranks"; scontrol requeue "$SLURM_JOB_ID"' USR1
wait "$ranks"
"""
SRUN = "srun --kill-on-bad-exit=1 --cpu-bind=cores \\\n    --cpus-per-task=\"$SLURM_CPUS_PER_TASK\" \\\n    python -m course.cli"
MEET = '--nnodes=2 --rdzv-backend=c10d --rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT"'
WRONG = [
    ("unread", "-euo pipefail\n", "-euo pipefail\n#SBATCH --exclusive\n"),
    ("unread", "#SBATCH --requeue", "# SBATCH --exclusive\n#SBATCH --requeue"),
    ("unread", "#SBATCH --requeue", "#SBATCh --exclusive\n#SBATCH --requeue"),
    ("unread", "--job-name=mine", "--job-name=$USER"),
    ("time", "#SBATCH -t 01:00:00\n", ""),
    ("signal", "#SBATCH --signal=B:USR1@60\n", ""),
    ("signal", "-t 01:00:00", "-t 00:01:00"),
    ("signal", "-t 01:00:00", "-t 1"),
    ("signal", "-t 01:00:00", "-t 0:59"),
    ("signal", "B:USR1@60", "B:USR1@3600"),
    ("signal", "-t 01:00:00\n#SBATCH --signal=B:USR1@60", "-t 0-1\n#SBATCH --signal=B:USR1@7200"),
    ("trap", "trap 'kill", "echo 'kill"),
    ("trap", "B:USR1@60", "B:TERM@60"),
    ("trap", 'wait "$ranks"\n', ""),
    ("output", "%x-%j.log", "train.log"),
    ("output", "--job-name=mine", "--error=%x.err"),
    ("output", "#SBATCH --output=%x-%j.log", "#SBATCH --array=1-4\n#SBATCH --output=%x-%A.log"),
    ("folder", "%x-%j.log", "nowhere/logs/%j.log"),
    ("requeued", "#SBATCH --open-mode=append\n", ""),
    ("kill", "--kill-on-bad-exit=1 ", ""),
    ("kill", "--kill-on-bad-exit=1", "--kill-on-bad-exit=0"),
    ("tasks", "--ntasks-per-node 4", "--ntasks-per-node 1"),
    ("tasks", "--ntasks-per-node 4", ""),
    ("tasks", "--gpus-per-node=4 --ntasks-per-node 4", "--gres=gpu:a100:4 -n 4"),
    ("tasks", "python -m course.cli", f"torchrun {MEET} --nproc-per-node=4 -m course.cli"),
    ("tasks", "python -m course.cli", f"bash -c 'source env.sh; python -m torch.distributed.run {MEET} train.py'"),
    ("tasks", "--ntasks-per-node 4", "--ntasks=7"),
    ("memory", "--job-name=mine", "--mem=64"),
    ("devices", "set -euo pipefail", "set -euo pipefail\nexport CUDA_VISIBLE_DEVICES=0,1,2,3"),
    ("bind", "--job-name=mine", "--gpu-bind=closest"),
    ("bind", "--cpu-bind=cores", "--cpu-bind=cores --gpu-bind=single:1"),
    ("bind", "--gpus-per-node=4", "--gpus-per-task=1"),
    ("srun", SRUN, "python -m course.cli"),
    ("srun", SRUN, 'if true; then exec "$python" -m course.cli'),
    ("port", "MASTER_PORT=$((20000 + SLURM_JOB_ID % 12000))", "MASTER_PORT=29500"),
    ("port", "train vit-short", "train --rdzv-endpoint=$MASTER_ADDR:29400"),
    ("host", '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)', "node017"),
    ("host", '$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)', "localhost"),
    ("host", "train vit-short", "train --master_addr 10.1.2.3"),
    ("cores", '    --cpus-per-task="$SLURM_CPUS_PER_TASK" \\\n', ""),
    ("cores", '#SBATCH -c8\n', "export X=1\n"),
    ("cores", "--cpu-bind=cores", "--cpu-bind=none"),
    ("set", "set -euo pipefail", "set -x"),
    ("pipe", "set -euo pipefail", "set -eu"),
    ("arguments", '"$@"', "$@"),
    ("arguments", 'vit-short "$@"', "vit-short $args"),
]


def found(tmp_path: Path, text: str, *options: str) -> set[str]:
    path = tmp_path / "mine.sh"
    path.write_text(text)
    return {finding.rule for finding in lint.lint(script_parser.read_script(path, options))}


def test_a_good_script_has_no_finding(tmp_path):
    assert found(tmp_path, GOOD) == set()


@pytest.mark.parametrize(("rule", "right", "wrong"), WRONG, ids=[f"{rule}-{i}" for i, (rule, *_) in enumerate(WRONG)])
def test_a_script_that_is_wrong_in_one_way_has_that_finding_alone(tmp_path, rule, right, wrong):
    assert right in GOOD
    text = GOOD.replace(right, wrong)
    if rule == "cores" and "export X" in wrong:      # neither asks for CPUs
        text = text.replace("export X=1\n", "").replace('    --cpus-per-task="$SLURM_CPUS_PER_TASK" \\\n', "")
    if rule == "pipe":
        text = text.replace('"$@" &', '"$@" | tee log &')
    if "$args" in wrong:
        text = text.replace("ranks=$!", 'args="$@"\nranks=$!')
    assert found(tmp_path, text) == {rule}


def test_a_finding_says_where_and_what_to_do(tmp_path):
    path = tmp_path / "mine.sh"
    path.write_text(GOOD.replace("--kill-on-bad-exit=1 ", ""))
    (finding,) = lint.lint(script_parser.read_script(path))
    assert path.read_text().splitlines()[finding.line - 1].startswith("srun") and "--kill-on-bad-exit=1" in finding.text


def test_options_of_the_command_line_count_and_win(tmp_path):
    assert found(tmp_path, GOOD, "--ntasks-per-node=2") == {"tasks"}
    assert found(tmp_path, GOOD, "-N", "1", "--gpus-per-node=2", "--ntasks-per-node=2") == set()


def test_what_a_variable_or_an_environment_variable_says_is_known(tmp_path):
    text = GOOD.replace("--kill-on-bad-exit=1 --cpu-bind=cores", '"${options[@]}"')
    assert found(tmp_path, text) == {"kill"}
    assert found(tmp_path, text.replace("\nsrun", "\noptions=(--kill-on-bad-exit --label)\nsrun", 1)) == set()
    handed = GOOD.replace('    --cpus-per-task="$SLURM_CPUS_PER_TASK" \\\n', "")
    assert found(tmp_path, handed.replace("set -euo", "export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK\nset -euo")) == set()
    assert found(tmp_path, GOOD.replace("--kill-on-bad-exit=1 ", "").replace("set -euo", "export SLURM_KILL_BAD_EXIT=1\nset -euo")
                 ) == set()


def test_torchrun_under_srun_is_right_with_one_task_a_node(tmp_path):
    text = GOOD.replace("python -m course.cli", f"torchrun {MEET} --nproc-per-node=4 -m course.cli")
    assert found(tmp_path, text.replace("--ntasks-per-node 4", "--ntasks-per-node 1")) == set()


def test_of_an_unknown_array_no_binding_is_missed(tmp_path):
    assert found(tmp_path, GOOD.replace("srun --kill", 'srun "${binding[@]}" --kill'), "--gpu-bind=closest") == set()
    assert lint.lint(script_parser.read_script(SUBMIT / "train.sh", ["--gpus-per-node=1", "--gpu-bind=closest"])) == []


@pytest.mark.parametrize(("words", "rules"), [
    ("--gpus-per-node=4 --ntasks-per-node=2", {"tasks"}), ("--gpus-per-node=4", {"tasks"}), ("--gpus-per-node=1", set()),
    ("--gpus-per-node=4 --exclusive", set()), ("--nodes=2 --gpus-per-node=4 --ntasks=8", set())])
@pytest.mark.parametrize("name", ["train.sh", "check.sh"])
def test_tasks_that_the_common_functions_would_refuse_are_seen_before(name, words, rules):
    assert {finding.rule for finding in lint.lint(script_parser.read_script(SUBMIT / name, words.split()))} == rules


def test_times_are_those_that_sbatch_takes():
    """As sbatch of Slurm 22.05 answered."""
    taken = "60 1:00 1:00:00 1-0 1-0:30 1-0:30:10 infinite UNLIMITED -1 0 1-"
    refused = ["2d", "2h", "90m", "1d", "1-1:1:1:1", "1:2:3:4", "02:00:00s", "", " 60", "1.5", "1-a"]
    assert all(lint.TIME.fullmatch(word) for word in taken.split()) and not any(map(lint.TIME.fullmatch, refused))


@pytest.mark.parametrize(("time", "seconds"), [
    ("60", 3600), ("1:30", 90), ("1:02:03", 3723), ("1-0", 86_400), ("1-2:30", 95_400), ("1-", 86_400), ("0", 0), ("-1", 0),
    ("UNLIMITED", 0), ("2d", 0)])
def test_a_time_limit_in_seconds_is_that_of_slurm(time, seconds):
    assert lint.limit_seconds(time) == seconds


@pytest.mark.parametrize("words", ["--nodes=1", "--nodes=2 --gpus-per-node=4 --ntasks-per-node=4 --cpus-per-task=8"])
@pytest.mark.parametrize("script", sorted(path.name for path in SUBMIT.glob("*.sh") if "\n#SBATCH" in path.read_text()))
def test_our_own_scripts_have_no_finding(script, words):
    assert lint.lint(script_parser.read_script(SUBMIT / script, words.split())) == []


def test_of_our_own_scripts_what_they_source_is_read(tmp_path):
    """The rules see the srun of common.sh: without its flag train.sh is wrong, at the line that sources it."""
    for name in ("train.sh", "common.sh"):
        (tmp_path / name).write_text((SUBMIT / name).read_text().replace("--kill-on-bad-exit=1", ""))
    (finding,) = lint.lint(script_parser.read_script(tmp_path / "train.sh"))
    lines = (tmp_path / "train.sh").read_text().splitlines()
    assert finding.rule == "kill" and lines[finding.line - 1].startswith("source")


def test_what_is_no_script_is_refused_in_a_sentence(tmp_path):
    with pytest.raises(CourseError, match="cannot read"):
        script_parser.read_script(tmp_path / "none.sh")


@pytest.mark.parametrize("encoding", ["utf-8", "latin-1"])
def test_comments_are_in_any_encoding(tmp_path, encoding):
    path = tmp_path / "mine.sh"
    path.write_bytes(GOOD.replace("set -euo pipefail", "# für alle\nset -euo pipefail").encode(encoding))
    assert not lint.lint(script_parser.read_script(path))


@pytest.mark.parametrize("words", ["--gpus-per-node=a100:4", "--gpus-per-node a100-sxm4-80gb:4", "--gres=gpu:a100_80gb:4,nvme:1",
                                   "--gres=gpu:a100-sxm4:4", "--gres=nvme:1,gpu:1g.10gb:4", "--gpus-per-node=a100:2,h100:2",
                                   "--gres=gpu:a100:2,gpu:h100:2", "--gpus=8", "--gpus=a100:8", "--gpus-per-node=1g.10gb:4"])
def test_typed_gpus_are_counted(tmp_path, words):
    path = tmp_path / "mine.sh"
    path.write_text(GOOD.replace("--gpus-per-node=4", words))
    script = script_parser.read_script(path)
    assert script.gpus == 4 and not lint.lint(script)


def test_the_shell_is_read_as_the_shell_reads_it():
    text = "a \\\n b 'c\n#d' # e \\\nf <<-X\n\tg\n\tX\nh ${#x} $# '#' i#j <<<k\n$((1 << 2))\n#l\nm"
    assert list(script_parser.logical_lines(text)) == [(1, "a  b 'c\n#d' "), (4, "f "), (7, "h ${#x} $# '#' i#j <<<k"),
                                                (8, "$((1 << 2))"), (9, "#l"), (10, "m")]


def test_every_rule_has_a_test_and_a_reason():
    source = Path(lint.__file__).read_text()
    assert {rule for rule, *_ in WRONG} == set(re.findall(r'Finding\((?:[^"\n]|"\w+"\])*?, "([a-z]+)",', source))
    assert all(rule.__doc__ for rule in lint.RULES)


def test_the_command_prints_findings_and_fails_or_says_that_there_are_none(tmp_path, capsys):
    path = tmp_path / "mine.sh"
    path.write_text(GOOD)
    assert lint.main(path, []) and "nothing wrong" in capsys.readouterr().out
    assert not lint.main(path, ["--ntasks-per-node=2"])
    told = capsys.readouterr().out
    assert told.startswith(f"{path}:") and told.endswith("[tasks]\n") and "--ntasks-per-node=4" in told
