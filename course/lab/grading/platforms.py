"""Whose a file is and which attempt, by the names that learning platforms give to what learners hand in.

    Brightspace  11111-222 - Mia Muster - 3 March, 2026 1015 AM/FILE     a folder for each attempt, or that and the file's name
    Blackboard   Lab 0_mmuster_attempt_2026-03-03-10-15-00_FILE          a file for each attempt
    Gradescope   submission_123/FILE                                     whose it is says submission_metadata.yml beside it
    Canvas       mustermia_LATE_4711_815_FILE, anon_LATE_a1B2c_815_FILE  user and attachment; of the latter later ones are higher
    Moodle       Mia Muster_123_assignsubmission_file_/FILE              or that and the file's name in one

Dates in names say which attempt is the last: those of unpacked files may all be of the download.

A platform writes its own part first, and then the name that the learner chose for the file. That name can look like another
platform's, or another learner's, so the leftmost reading counts, and only the pattern that most files in the folder fit.
"""

import os
import re
import time
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import date, datetime
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from course.utils.errors import CourseError

BRIGHTSPACE = re.compile(r"(?P<first>\d+)-(?P<second>\d+) - (?P<rest>.+)", re.DOTALL)
DATED = re.compile(r"(?:\d{4}-\d\d?-\d\d?|[^-]*\d{4})[^-]*")  # a part of Brightspace's name
BLACKBOARD = re.compile(r"_attempt_(?P<date>\d{4}(?:-\d\d){5})(?=_|\.txt$|$)")
GRADESCOPE = re.compile(r"submission_\d+")
CANVAS = re.compile(r"(?:(?P<name>[^_]+)(?:_(?i:LATE))?_(?P<user>\d+)"
                    r"|(?P<anon>anon)(?:_(?i:LATE))?_(?P<code>[A-Za-z0-9]{5}))_(?P<number>\d+)_(?P<file>.+)", re.DOTALL)
MOODLE = re.compile(r"_(?P<user>\d+)_assignsubmission_(?:file|onlinetext)")
NOTEBOOKS = (".ipynb", ".py", ".result.json")        # how the names end that say of which platform a folder is
CLOCK_TOLERANCE = 86400.0                            # seconds by which clocks and time zones may differ
METADATA = "submission_metadata.yml"                 # of Gradescope
MAX_BYTES = 20_000_000                               # bytes of it
ATTEMPT_WORDS = "attempt try version versuch abgabe"  # words before a number
ATTEMPT_NUMBER = re.compile(rf"(?:{'|'.join(ATTEMPT_WORDS.split())})[ _-]*(\d{{1,4}})", re.IGNORECASE)
CLOCK = re.compile(r"(\d{1,2})[:.]?(\d\d)(?:[:.](\d\d))?\s*([AaPp])?\.?[Mm]?")
# how months begin in the languages that platforms are set to; of July and June four letters
MONTHS = ["jan ene gen", "feb fév fev", "mar mär mrt maa", "apr avr abr", "may mai mei mag", "jun juin giu", "jul juil lug",
          "aug aoû aou ago", "sep set", "oct okt ott out", "nov", "dec dez déc dic"]


class Attempt(NamedTuple):
    """What the names of a file and its folders say."""

    learner: str = ""                                # "": nothing
    submitted_at: float = 0.0                        # when it was handed in, as a timestamp; 0: they do not say
    number: int = 0                                  # of two attempts the later has the higher one
    ambiguity: int = 0                               # of two files that name one learner, the one with less doubt is theirs
    head: str = ""                                   # Blackboard's name up to the attempt: assignment and user


@dataclass(frozen=True)
class Platform:
    """What the names in a folder say together: one alone does not tell the number of a learner from that of an assignment."""

    learner_number: str = ""                         # Brightspace's number that tells learners apart: first, second, or none
    uncertain_heads: frozenset[str] = frozenset()    # Blackboard's names up to the attempt, of which the user is not certain
    submitters: Mapping[str, tuple[str, float]] = field(default_factory=dict)  # Gradescope's, and when they handed it in
    problem: str = ""                                # why Gradescope's file cannot be used, if it is there
    kind: str | None = None                          # whose pattern most files fit; "": nobody's; None: look at each name
    mixed: bool = False                              # some files do not fit it

    @classmethod
    def of(cls, folder: Path, lesson_of: Any) -> "Platform":
        """That of what lies in a folder; lesson_of: which lesson a file's name says."""
        paths = [path for path in folder.iterdir() if not path.name.startswith((".", "__MACOSX")) and not path.is_symlink()]
        names = sorted(normalize(path.name) for path in paths)
        try:
            submitters_found, problem = read_submitters(folder / METADATA), ""
        except CourseError as error:
            submitters_found, problem = {}, str(error)
        folders = {normalize(path.name) for path in paths if path.is_dir()}
        files = [name for name in names if name not in folders and name.lower().endswith(NOTEBOOKS)]
        kind, mixed = most_common_platform(files) if files else most_common_platform(folders)
        heads = uncertain_names(names, lesson_of) if kind == "blackboard" else frozenset[str]()
        return cls(distinguishing_number(names, folders), heads, submitters_found, problem, kind, mixed)

    def attempt(self, path: Path) -> Attempt:
        """What a file's path, below the folder, says."""
        first, inside = path.parts[0], len(path.parts) > 1
        later = max((int(parts[1]) for part in path.parts[1:-1] for parts in [ATTEMPT_NUMBER.search(part)] if parts), default=0)
        if first in self.submitters:
            whose, when = self.submitters[first]
            return Attempt(whose, unless_future(when), later)
        kinds = set(READERS) if self.kind is None else {self.kind} | ({"brightspace", "moodle"} if inside else set())
        doubt = int(self.mixed and not inside)
        if "brightspace" in kinds and (parts := brightspace(first, inside)):
            learner = f"{parts['name']}_{parts[self.learner_number]}" if self.learner_number else parts["name"]
            return Attempt(learner, unless_future(parse_date(parts["date"])), later, doubt)
        if "blackboard" in kinds and (parts := blackboard(first)):
            learner = parts["head"] if parts["head"] in self.uncertain_heads else parts["user"]
            return Attempt(learner, unless_future(parse_date(parts["date"])), later, doubt, parts["head"])
        if "moodle" in kinds and (parts := moodle(first, inside)):
            twice = 0 if inside else 2 * (len({mark["user"] for mark in MOODLE.finditer(first)}) > 1)
            return Attempt(f"{parts['name']}_{parts['user']}", 0.0, later, max(doubt, twice))
        if inside:
            return Attempt(first, 0.0, later)
        if "canvas" in kinds and (parts := canvas(first)):
            return Attempt(f"{parts['name']}_{parts['user']}", 0.0, int(parts["number"]), doubt)
        return Attempt()


def most_common_platform(names: Iterable[str]) -> tuple[str, bool]:
    """The platform whose pattern more than half of the names fit, or "", and whether some do not fit it."""
    names = list(names)
    fitting = {kind: sum(bool(read(name)) for name in names) for kind, read in READERS.items()}
    kind = max(fitting, key=lambda kind: fitting[kind])
    return (kind, fitting[kind] < len(names)) if 2 * fitting[kind] > len(names) else ("", False)


def brightspace(name: str, inside: bool = False) -> dict[str, str] | None:
    """The parts of Brightspace's name for a file, or for the folder that it is inside; None if it is none.

    A folder's name ends with the date. In a file's the first date is Brightspace's, the rest is the learner's; a part that only
    looks like a date, such as `Class 2026`, may belong to the name.
    """
    if not (match := BRIGHTSPACE.fullmatch(name)):
        return None
    parts = match["rest"].split(" - ")
    dates = [index for index in range(1, len(parts)) if DATED.fullmatch(parts[index])]
    if not dates:
        return None
    ends = inside and dates[-1] == len(parts) - 1
    date = dates[-1] if ends else next((index for index in dates if parse_date(parts[index])), dates[0])
    return {"first": match["first"], "second": match["second"], "name": " - ".join(parts[:date]), "date": parts[date]}


def blackboard(name: str) -> dict[str, str] | None:
    """The parts of Blackboard's name for a file, up to the first attempt in it; None if it is none."""
    mark = BLACKBOARD.search(name)
    assignment, _, user = name[:mark.start()].rpartition("_") if mark else ("", "", "")
    if not mark or not assignment or not user:
        return None
    return {"head": f"{assignment}_{user}", "user": user, "date": mark["date"], "file": name[mark.end():].removeprefix("_")}


def moodle(name: str, inside: bool = False) -> dict[str, str] | None:
    """The parts of Moodle's name for a file, by its first mark, or for the folder that it is inside, which ends with the mark."""
    marks = [mark for mark in MOODLE.finditer(name) if mark.start() and (not inside or name[mark.end():] in ("", "_"))]
    return {"name": name[:marks[0].start()], "user": marks[0]["user"]} if marks else None


def canvas(name: str) -> dict[str, str] | None:
    """The parts of Canvas's name for a file; None if it is none."""
    if not (match := CANVAS.fullmatch(name)):
        return None
    return {"name": match["name"] or match["anon"], "user": match["user"] or match["code"], "number": match["number"]}


READERS: Mapping[str, Callable[[str], dict[str, str] | None]] = {
    "brightspace": brightspace, "blackboard": blackboard, "moodle": moodle, "canvas": canvas}


def unless_future(when: float) -> float:
    """A date, or 0 if it lies in the future: such a one would outdo every later attempt."""
    return when if when <= time.time() + CLOCK_TOLERANCE else 0.0


def distinguishing_number(names: Iterable[str], folders: Iterable[str] = ()) -> str:
    """Which of Brightspace's two numbers differs from learner to learner: "first", "second", or "" where neither does.

    A name counts up to its first hyphen: what comes after it may be an odd file's.
    """
    names_parts = [parts for name in names if (parts := brightspace(name, name in folders))]
    for number in ("first", "second"):
        learners = defaultdict[str, set[str]](set)
        for parts in names_parts:
            learners[parts[number]].add(parts["name"].split(" - ")[0])
        if all(len(those) == 1 for those in learners.values()):
            return number
    return ""


def uncertain_names(names: Iterable[str], lesson_of: Any) -> frozenset[str]:
    """Blackboard's names in which the user's may have an underscore: two that end alike have handed in the same lesson."""
    users = defaultdict[tuple[str, str], set[str]](set)
    for name in names:
        if parts := blackboard(name):
            users[parts["user"], lesson_of(Path(parts["file"]))].add(parts["head"])
    return frozenset(head for (_, lesson), heads in users.items() if lesson and len(heads) > 1 for head in heads)


def read_submitters(path: Path) -> dict[str, tuple[str, float]]:
    """Who handed in each folder of a Gradescope export, and when; nothing if it is none, `CourseError` if it is damaged."""
    if not path.is_file() or path.is_symlink():
        return {}
    if path.stat().st_size > MAX_BYTES:
        raise CourseError(f"it has more than {MAX_BYTES // 1_000_000} MB; leave out of it what is not about submitters")
    submitters_by_folder: dict[str, tuple[str, float]] = {}
    try:
        for folder, about in yaml.safe_load(path.read_bytes()).items():
            people = [f"{text_field(one, ':name')}_{text_field(one, ':sid') or text_field(one, ':email')}".rstrip("_")
                      for one in about[":submitters"][:20]]
            submitters_by_folder[str(folder)] = ", ".join(people), parse_date(text_field(about, ":created_at"))
    except (OSError, yaml.YAMLError, ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise CourseError(f"it is no export of Gradescope's, or damaged ({type(error).__name__}); export it anew") from error
    return submitters_by_folder


def text_field(about: Mapping[str, Any], name: str) -> str:
    """What a table says under a name, if that is a text, a number or a date: a list of aliases could be endless as a text."""
    value = about.get(name)
    return str(value)[:200] if isinstance(value, str | int | date) else ""


def parse_date(text: str) -> float:
    """A date in a name as a timestamp of this machine's clock; 0 if it cannot be read.

    2026-03-03-10-15-00; 3 March, 2026 1015 AM; Mar 3, 2026 10:15 PM; 14 september, 2020 1219 PM.
    """
    day: tuple[int, int, int] | None = None
    rest = text
    if match := re.search(r"(\d{4})-(\d\d?)-(\d\d?)", text):
        day, rest = (int(match[1]), int(match[2]), int(match[3])), text[match.end():].lstrip("T -_").replace("-", ":")
    elif (month_word := re.search(r"[^\W\d_]{3,}", text)) and (month := month_number(month_word[0])):
        around = text[:month_word.start()] + " " + text[month_word.end():]
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


def month_number(word: str) -> int:
    """1 to 12, 0 if it is none."""
    low = word.casefold()
    known = [(beginning, number) for number, names in enumerate(MONTHS, 1) for beginning in names.split()]
    return max(((len(beginning), number) for beginning, number in known if low.startswith(beginning)), default=(0, 0))[1]


def normalize(text: str) -> str:
    """A name of the file system's with umlauts in one piece each, whatever the locale and the encoding of whoever packed it."""
    raw = os.fsencode(text)
    for encoding in ("utf-8", "cp1252", "latin-1"):
        with suppress(UnicodeDecodeError):
            return unicodedata.normalize("NFC", raw.decode(encoding))
    return text


def normalize_path(path: Path) -> Path:
    """The same of all names of a path."""
    return Path(normalize(str(path)))
