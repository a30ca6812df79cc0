"""Parse a batch script as the shell and sbatch read it: its options, commands and variables.

The parser handles quotes, continued lines, comments and here-documents, and reads files that the script sources from its own
folder. It executes nothing, and knows a variable's value only if the script assigns it directly. Sources: sbatch(1) and srun(1)
of Slurm 22.05 and 23.11, bash(1).
"""

import os
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from course.utils.errors import CourseError

SHORT_OPTIONS = {"A": "account", "a": "array", "c": "cpus-per-task", "C": "constraint", "d": "dependency", "D": "chdir",
                 "e": "error",
         "G": "gpus", "i": "input", "J": "job-name", "L": "licenses", "M": "clusters", "m": "distribution", "n": "ntasks",
         "N": "nodes", "o": "output", "p": "partition", "q": "qos", "t": "time", "w": "nodelist", "x": "exclude"}
FLAG_OPTIONS = ["contiguous", "exclusive", "get-user-env", "hold", "ignore-pbs", "kill-on-bad-exit", "label", "no-kill",
                "no-requeue",
         "oversubscribe", "overcommit", "overlap", "parsable", "propagate", "quiet", "reboot", "requeue", "spread-job",
         "test-only", "unbuffered", "use-min-nodes", "verbose", "wait"]
SHORT_FLAGS = {"K": "kill-on-bad-exit", "l": "label", "u": "unbuffered", "H": "hold", "Q": "quiet", "v": "verbose", "W": "wait"}
SEPARATORS = set(";&|()")
PREFIX_WORDS = {"if", "then", "else", "elif", "do", "while", "until", "!", "{", "time", "exec", "nohup", "env", "builtin"}
ASSIGNING_COMMANDS = {"export", "local", "declare", "readonly", "typeset"}
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)\+?=(.*)", re.DOTALL)
NUMBER = re.compile(r"[0-9]{1,9}")                   # longer ones are mistakes


class Command(NamedTuple):
    """A simple shell command: its words without quotes and redirections, and whether its output is piped."""

    line: int
    words: tuple[str, ...]
    piped: bool = False

    @property
    def name(self) -> str:
        """The program, without its folder; "" if there are only redirections."""
        return Path(self.words[0]).name if self.words else ""

    @property
    def options(self) -> dict[str, str]:
        """The options of an srun command, by long name."""
        return dict(parse_options(self.words[1:])[0])


@dataclass
class Script:
    """A parsed batch script."""

    path: Path
    text: str                                                    # with Unix line endings
    options: dict[str, str] = field(default_factory=dict)        # sbatch's, by long name; the last one counts
    option_lines: dict[str, int] = field(default_factory=dict)   # their lines; 0: on the command line
    comments: list[tuple[int, str]] = field(default_factory=list)       # (line, text) of full comment lines
    ignored_lines: list[int] = field(default_factory=list)       # #SBATCH lines that sbatch ignores
    command_lines: list[tuple[int, str]] = field(default_factory=list)  # (line, code) of logical lines
    commands: list[Command] = field(default_factory=list)
    variables: dict[str, tuple[int, str]] = field(default_factory=dict)  # assigned variables: (line, value)

    def number(self, *names: str) -> int | None:
        """The first of these options whose value is an integer; None if there is none."""
        return next((int(self.options[name]) for name in names if NUMBER.fullmatch(self.options.get(name, ""))), None)

    @property
    def nodes(self) -> int:
        """The minimum number of nodes; 1 by default."""
        first = NUMBER.match(self.options.get("nodes", "1"))
        return max(1, int(first[0])) if first else 1

    @property
    def gpus(self) -> int | None:
        """GPUs per node; 0 if the script asks for none, None if unknown."""
        if gpus := [item for item in self.options.get("gres", "").split(",") if re.match(r"(gres[/:])?gpu(:|=|$)", item)]:
            return count_gpus(gpus)
        name = next((name for name in ("gpus-per-node", "gpus", "gpus-per-task") if name in self.options), None)
        if name is None:
            return 0
        total = count_gpus(self.options[name].split(","))
        if total is None or name == "gpus-per-node":
            return total
        if name == "gpus-per-task":
            return total * (self.tasks or 1)
        return None if total % self.nodes else total // self.nodes

    @property
    def tasks(self) -> int | None:
        """The largest number of tasks on a node; None if unspecified."""
        if (each := self.number("ntasks-per-node")) is not None:
            return each
        every = self.number("ntasks")
        return None if every is None else max(1, -(-every // self.nodes))

    @property
    def uneven(self) -> bool:
        """Whether some nodes have fewer tasks than others."""
        every = self.number("ntasks")
        return every is not None and every % self.nodes > 0

    def in_step(self, command: Command) -> "Script":
        """The options of a job step: the script's, overridden by those of its srun."""
        return Script(self.path, "", options={**self.options, **command.options})

    @property
    def sruns(self) -> list[Command]:
        """The srun commands, in order."""
        return [command for command in self.commands if command.name == "srun"]


def read_script(path: Path, options: Sequence[str] = ()) -> Script:
    """Parse a script and the options for sbatch's command line. Raises `CourseError` if the file cannot be read."""
    try:
        text = path.read_bytes().decode("utf-8", "replace").replace("\r\n", "\n")
    except OSError as error:
        raise CourseError(f"cannot read {path}: {error.strerror}; give the file that you would give to sbatch") from error
    script = Script(path, text)
    for number, code in sourced_lines(path, text):
        if not code.startswith("#"):
            script.command_lines.append((number, code))
            parse_line(script, number, code)
        elif not code.startswith("#SBATCH"):
            script.comments.append((number, code))
        elif script.command_lines:
            script.ignored_lines.append(number)
        else:
            add_options(script, split_words(code.removeprefix("#SBATCH")), number)
    add_options(script, options, 0)
    return script


def count_gpus(items: Sequence[str]) -> int | None:
    """Sum GPU requests: 4, a100:4, gpu:1g.10gb:2, gpu (one); None if the number of one is unknown."""
    total = 0
    for item in items:
        last = re.split(r"[:=]", item.partition("(")[0])[-1]
        if not NUMBER.fullmatch(last) and not item.startswith(("gpu", "gres")):
            return None
        total += int(last) if NUMBER.fullmatch(last) else 1
    return total


def add_options(script: Script, words: Sequence[str], number: int) -> None:
    """Add sbatch options, short or long, with or without `=`, from line `number`."""
    for name, value in parse_options(words)[0]:
        script.options[name] = value
        script.option_lines[name] = number


def parse_options(words: Sequence[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Options of sbatch or srun as (long name, value), and the remaining words. Skips an array among the options."""
    options, remaining = [], list(words)
    while remaining and (remaining[0].startswith("-") or "[@]" in remaining[0]):
        word = remaining.pop(0)
        if word[0] != "-" or word in ("-", "--"):
            continue
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            if not equals and name not in FLAG_OPTIONS and remaining and not remaining[0].startswith("-"):
                value = remaining.pop(0)
        else:
            name, value = SHORT_OPTIONS.get(word[1], SHORT_FLAGS.get(word[1], word[1])), word[2:].removeprefix("=")
            if word[1] in SHORT_OPTIONS and not value and remaining:
                value = remaining.pop(0)
        options.append((name, value))
    return options, remaining


def split_words(text: str) -> list[str]:
    """The words of a #SBATCH line; a line with an open quote is split at spaces."""
    try:
        return shlex.split(text, comments=True)
    except ValueError:
        return text.split()


def sourced_lines(path: Path, text: str, seen: tuple[Path, ...] = ()) -> list[tuple[int, str]]:
    """(line number, code) of a script's logical lines. Code sourced from its own folder gets the number of the source line."""
    lines = []
    for number, code in logical_lines(text):
        lines.append((number, code))
        for word in re.findall(r"(?:^|[;&|]\s*)(?:source|\.)\s+(\S+)", code.strip()):
            other = path.parent / Path(word.strip("\"'")).name
            if os.path.isfile(other) and other not in (*seen, path):
                inside = other.read_text(encoding="utf-8", errors="replace")
                lines += [(number, code) for _, code in sourced_lines(other, inside, (*seen, path)) if not code.startswith("#")]
    return lines


# an escaped character, a quoted string (the end may be missing), a here-string, the start of a here-document, any character
TOKEN = re.compile(r"""\\.?|'[^']*'?|"(?:\\.|[^"\\])*\\?"?|<<<|<<(?P<dash>-?)\s*\\?(['"]?)(?P<word>[A-Za-z_][\w.-]*)\2|.""",
                   re.DOTALL)


def logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """(line number, code) of each command line, with continued lines joined, and of each full comment line.

    It leaves out other comments and the text of here-documents.
    """
    code, start, line_begin, i = "", 1, 0, 0
    here_documents: list[tuple[str, str]] = []       # whose text begins after this line
    while match := TOKEN.match(text, i):
        token, begin, i = match[0], i, match.end()
        if token == "#" and (not code or code[-1] in " \t;&|()"):
            i = end if (end := text.find("\n", i)) >= 0 else len(text)
            if not code:
                yield start, text[begin:i]
        elif match["word"] and code.count("((") == code.count("))"):
            here_documents.append((r"\t*" if match["dash"] else "", re.escape(match["word"])))
        elif match["word"]:                          # a left shift in $((...))
            code, i = code + "<", begin + 1
        elif token == "\n":
            for tabs, word in here_documents:
                last = re.compile(rf"\n{tabs}{word}(?=\n|\Z)").search(text, begin)
                begin = last.end() if last else len(text)
            if code.strip():
                yield start, code
            i = begin + 1
            start, line_begin = start + text.count("\n", line_begin, i), i
            code, here_documents = "", []
        else:
            code += token if token[0] == "'" else re.sub(r"\\(?s:.)", lambda pair: "" if pair[0] == "\\\n" else pair[0], token)
    if code.strip():
        yield start, code


INSIDE = "[^()]*"                                     # text inside parentheses, nested up to four levels
for _ in range(4):
    INSIDE = rf"(?:[^()]|\({INSIDE}\))*"
SUBSTITUTION = re.compile(rf"[$<>]\({INSIDE}\)")     # $(...), $((...)), <(...)
ARRAY = re.compile(rf"(?<=\w)\+?=\(({INSIDE})\)")


def parse_line(script: Script, number: int, code: str) -> None:
    """Split a logical line into simple commands and assignments.

    The output of `$(...)` is unknown and becomes `$_`. An array variable holds its words.
    """
    code = SUBSTITUTION.sub("$_", code)
    code = ARRAY.sub(lambda array: "=" + shlex.quote(array[1]), code)
    lexer = shlex.shlex(code, posix=True, punctuation_chars=";&|()<>")
    lexer.whitespace_split, lexer.commenters = True, ""
    words: list[str] = []
    try:
        tokens = list(lexer)
    except ValueError:                               # an open quote: bash would not run it either
        tokens = code.split()
    tokens.append(";")
    drop = False
    for token in tokens:
        if token and set(token) <= SEPARATORS:
            if words:
                add_command(script, Command(number, tuple(words), token in ("|", "|&")))
            words = []
        elif set(token) <= set("<>&") and token:
            drop = True                              # a redirection: the next word is its file
            if words and words[-1].isdecimal():
                words.pop()
        elif drop:
            drop = False
        elif words or token not in PREFIX_WORDS:
            words.append(token)


def add_command(script: Script, command: Command) -> None:
    """Record a command and the assignments before it; words that are known variables are replaced by their values."""
    words = list(command.words)
    if words[0] in ASSIGNING_COMMANDS:
        words = [word for word in words[1:] if ASSIGNMENT.match(word)]
    while words and (match := ASSIGNMENT.match(words[0])):
        script.variables[match[1]] = (command.line, match[2])
        words.pop(0)
    if command.words[0] in ASSIGNING_COMMANDS or not words:
        return
    expanded: list[str] = []
    for word in words:
        name = re.fullmatch(r"\$\{?(\w+)(?:\[[@*]\])?\}?", word)
        known = script.variables.get(name[1], (0, ""))[1] if name else ""
        expanded += known.split() if known and "$" not in known else [word]
    script.commands.append(command._replace(words=tuple(expanded)))


def launched_program(command: Command) -> str:
    """The program that a command launches: "torchrun", "python" or "" for others, also inside a container or `bash -c`."""
    words = " ".join(parse_options(command.words[1:])[1]).split() if command.name == "srun" else list(command.words)
    names = [Path(word).name for word in words]
    if "torchrun" in names or any("torch.distributed" in word for word in words):
        return "torchrun"
    return "python" if any(re.fullmatch(r"python[\d.]*|course|\$\{?(python|PYTHON)\}?", name) for name in names) else ""
