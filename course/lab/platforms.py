"""Whose a file is and which attempt, by the names that learning platforms give to what learners hand in.

    Brightspace  11111-222 - Mia Muster - 3 March, 2026 1015 AM/FILE     a folder for each attempt, or that and the file's name
    Blackboard   Lab 0_mmuster_attempt_2026-03-03-10-15-00_FILE          a file for each attempt
    Gradescope   submission_123/FILE                                     whose it is says submission_metadata.yml beside it
    Canvas       mustermia_LATE_4711_815_FILE, anon_LATE_a1B2c_815_FILE  user and attachment; of the latter later ones are higher
    Moodle       Mia Muster_123_assignsubmission_file_/FILE              or that and the file's name in one

Dates in names say which attempt is the last: those of unpacked files may all be of the download.
"""

import re
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from course.errors import CourseError

BRIGHTSPACE = re.compile(r"(?P<first>\d+)-(?P<second>\d+) - (?P<name>.+) - (?P<date>(?:\d{4}-\d\d?-\d\d?|[^-]*\d{4})[^-]*?)"
                         r"(?: - (?P<file>.+))?")
BLACKBOARD = re.compile(r"(?P<head>.+_(?P<user>[^_]+))_attempt_(?P<date>\d{4}(?:-\d\d){5})(?:_(?P<file>.+))?(?:\.txt)?")
GRADESCOPE = re.compile(r"submission_\d+")
CANVAS = re.compile(r"(?P<name>[^_]+)(?:_(?i:LATE))?_(?P<user>\d+)_(?P<number>\d+)_(?P<file>.+)")
ANONYMOUS = re.compile(r"(?P<name>anon)(?:_(?i:LATE))?_(?P<user>[A-Za-z0-9]{5})_(?P<number>\d+)_(?P<file>.+)")
MOODLE = re.compile(r"(?P<name>.+)_(?P<user>\d+)_assignsubmission_(?:file|onlinetext)_?(?P<file>.*)")
METADATA = "submission_metadata.yml"                 # of Gradescope
LARGEST = 20_000_000                                 # bytes of it
DEEPEST = 50                                         # lists and tables in one another there
TRIES = "attempt try version versuch abgabe"         # words before a number
AGAIN = re.compile(rf"(?:{'|'.join(TRIES.split())}|v|late|resubmission|resubmitted|resubmit|final|new|copy|kopie)\d*")
TRY = re.compile(rf"(?:{'|'.join(TRIES.split())})[ _-]*(\d{{1,4}})", re.IGNORECASE)
DAY = re.compile(r"\(\d+\)|\d{4}-\d\d-\d\d(?:[T _-]\d\d[-:h_]?\d\d(?:[-:_]?\d\d)?)?")
CLOCK = re.compile(r"(\d{1,2})[:.]?(\d\d)(?:[:.](\d\d))?\s*([AaPp])?\.?[Mm]?")
# how months begin in the languages that platforms are set to; of July and June four letters
MONTHS = ["jan ene gen", "feb fév fev", "mar mär mrt maa", "apr avr abr", "may mai mei mag", "jun juin giu", "jul juil lug",
          "aug aoû aou ago", "sep set", "oct okt ott out", "nov", "dec dez déc dic"]


class Attempt(NamedTuple):
    """What the names of a file and its folders say."""

    learner: str = ""                                # "": nothing
    moment: float = 0.0                              # when it was handed in, as a timestamp; 0: they do not say
    number: int = 0                                  # of two attempts the later has the higher one
    name: str = ""                                   # the learner's, without what may be the attempt's number


@dataclass(frozen=True)
class Platform:
    """What the names in a folder say together: one alone does not tell the number of a learner from that of an assignment."""

    numbered: str = ""                               # Brightspace's number that tells learners apart: first, second, or none
    heads: frozenset[str] = frozenset()              # Blackboard's names up to the attempt, of which the user is not certain
    submitters: Mapping[str, tuple[str, float]] = field(default_factory=dict)    # Gradescope's, and when they handed it in
    problem: str = ""                                # why Gradescope's file cannot be used, if it is there

    @classmethod
    def of(cls, folder: Path, lesson_of: Any) -> "Platform":
        """That of what lies in a folder; lesson_of: which lesson a file's name says."""
        names = sorted(path.name for path in folder.iterdir())
        try:
            found, problem = submitters(folder / METADATA), ""
        except CourseError as error:
            found, problem = {}, str(error)
        return cls(distinct(names), uncertain(names, lesson_of), found, problem)

    def attempt(self, path: Path) -> Attempt:
        """What a file's path, below the folder, says."""
        first = path.parts[0]
        later = max((int(found[1]) for part in path.parts[1:-1] for found in [TRY.search(part)] if found), default=0)
        if found := BRIGHTSPACE.fullmatch(first):
            learner = f"{found['name']}_{found[self.numbered]}" if self.numbered else found["name"]
            return Attempt(learner, moment(found["date"]), later, found["name"])
        if found := BLACKBOARD.fullmatch(first):
            learner = found["head"] if found["head"] in self.heads else found["user"]
            return Attempt(learner, moment(found["date"]), later, found["user"])
        if first in self.submitters:
            return Attempt(*self.submitters[first], later, self.submitters[first][0])
        moodle = MOODLE.fullmatch(first)
        if moodle and (len(path.parts) == 1 or not moodle["file"]):
            return Attempt(f"{moodle['name']}_{moodle['user']}", 0.0, later)
        if len(path.parts) > 1:
            return Attempt(first, 0.0, later)
        if canvas := CANVAS.fullmatch(first) or ANONYMOUS.fullmatch(first):
            return Attempt(f"{canvas['name']}_{canvas['user']}", 0.0, int(canvas["number"]))
        return Attempt()


def distinct(names: Iterable[str]) -> str:
    """Which of Brightspace's two numbers differs from learner to learner: "first", "second", or "" where neither does."""
    found = [match for match in map(BRIGHTSPACE.fullmatch, names) if match]
    for number in ("first", "second"):
        learners = defaultdict[str, set[str]](set)
        for match in found:
            learners[match[number]].add(match["name"])
        if all(len(those) == 1 for those in learners.values()):
            return number
    return ""


def uncertain(names: Iterable[str], lesson_of: Any) -> frozenset[str]:
    """Blackboard's names in which the user's may have an underscore: two that end alike have handed in the same lesson."""
    users = defaultdict[tuple[str, str], set[str]](set)
    for name in names:
        if match := BLACKBOARD.fullmatch(name):
            users[match["user"], lesson_of(Path(match["file"] or ""))].add(match["head"])
    return frozenset(head for (_, lesson), heads in users.items() if lesson and len(heads) > 1 for head in heads)


class Plain(yaml.SafeLoader):
    """YAML without what makes much of little: an alias stands for a text or number alone, and lists lie at most so deep."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """A node, if it is no alias of a list or table."""
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) and not isinstance(self.anchors.get(event.anchor), yaml.ScalarNode):
            raise yaml.YAMLError("an alias that is no text")
        self.depth += 1
        if self.depth > DEEPEST:
            raise yaml.YAMLError("too deep")
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def submitters(path: Path) -> dict[str, tuple[str, float]]:
    """Who handed in each folder of a Gradescope export, and when; nothing if it is none, `CourseError` if it is damaged."""
    if not path.is_file() or path.is_symlink():
        return {}
    size, date = path.stat().st_size, path.stat().st_mtime_ns
    if size > LARGEST:
        raise CourseError(f"it has more than {LARGEST // 1_000_000} MB; leave out of it what is not about submitters")
    return exported(path, size, date)


@lru_cache(maxsize=4)
def exported(path: Path, size: int, date: int) -> dict[str, tuple[str, float]]:
    """The same of the file of this size and date, parsed once a run: with many submissions it is long."""
    found: dict[str, tuple[str, float]] = {}
    try:
        for folder, told in yaml.load(path.read_bytes(), Plain).items():
            people = [f"{text(one, ':name')}_{text(one, ':sid') or text(one, ':email')}".rstrip("_")
                      for one in told[":submitters"][:20]]
            found[str(folder)] = ", ".join(people), moment(str(told.get(":created_at", ""))[:100])
    except (OSError, yaml.YAMLError, ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise CourseError(f"it is no export of Gradescope's, or damaged ({type(error).__name__}); export it anew") from error
    return found


def text(about: Mapping[str, Any], name: str) -> str:
    """What a table says under a name, if that is a text or number."""
    told = about.get(name)
    return str(told)[:200] if isinstance(told, str | int) else ""


def moment(text: str) -> float:
    """A date in a name as a timestamp of this machine's clock; 0 if it cannot be read.

    2026-03-03-10-15-00; 3 March, 2026 1015 AM; Mar 3, 2026 10:15 PM; 14 september, 2020 1219 PM.
    """
    day: tuple[int, int, int] | None = None
    rest = text
    if found := re.search(r"(\d{4})-(\d\d?)-(\d\d?)", text):
        day, rest = (int(found[1]), int(found[2]), int(found[3])), text[found.end():].lstrip("T -_").replace("-", ":")
    elif (word := re.search(r"[^\W\d_]{3,}", text)) and (month := month_of(word[0])):
        around = text[:word.start()] + " " + text[word.end():]
        if (year := re.search(r"\b\d{4}\b", around)) and (number := re.search(r"\b\d{1,2}\b", around[:year.start()])):
            day, rest = (int(year[0]), month, int(number[0])), around[year.end():]
    if day is None:
        return 0.0
    clock = CLOCK.search(rest)
    hour, minute, second = (int(part or 0) for part in clock.groups()[:3]) if clock else (0, 0, 0)
    if clock and clock[4]:
        hour = hour % 12 + 12 * (clock[4] in "Pp")
    try:
        return datetime(*day, hour, minute, second).timestamp()
    except (ValueError, OverflowError):
        return 0.0


def month_of(word: str) -> int:
    """1 to 12, 0 if it is none."""
    low = word.casefold()
    known = [(beginning, number) for number, names in enumerate(MONTHS, 1) for beginning in names.split()]
    return max(((len(beginning), number) for beginning, number in known if low.startswith(beginning)), default=(0, 0))[1]


def likeness(name: str) -> tuple[str, ...]:
    """The words of a learner's name in one order and case, without what says that it is another attempt."""
    plain = "".join(char for char in unicodedata.normalize("NFKD", DAY.sub(" ", name)) if not unicodedata.combining(char))
    words, kept = re.findall(r"[^\W_]+", plain.casefold()), list[str]()
    for before, word in zip(["", *words], words, strict=False):
        if not AGAIN.fullmatch(word) and not (before in TRIES.split() and word.isdecimal()):
            kept.append(word)
    return tuple(sorted(kept))
