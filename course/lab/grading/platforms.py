"""Find the learner and attempt of a submitted file from the name that its learning platform gave it.

    Brightspace  11111-222 - Mia Muster - 3 March, 2026 1015 AM/FILE     a folder for each attempt, or that and the file's name
    Blackboard   Lab 0_mmuster_attempt_2026-03-03-10-15-00_FILE          a file for each attempt
    Gradescope   submission_123/FILE                                     submission_metadata.yml beside it names the learner
    Canvas       mustermia_LATE_4711_815_FILE, anon_LATE_a1B2c_815_FILE  user and attachment, whose number grows over time
    Moodle       Mia Muster_123_assignsubmission_file_/FILE              or that and the file's name in one

Dates in names decide which attempt is the last: file dates may all be those of the download.

A platform writes its own part first, then the learner's file name. That name can look like another platform's, or another
learner's. So the leftmost match counts, and only for the pattern that most files in the folder match.
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
NOTEBOOKS = (".ipynb", ".py", ".result.json")        # suffixes of the files that reveal a folder's platform
CLOCK_TOLERANCE = 86400.0                            # seconds that clocks and time zones may differ by
METADATA = "submission_metadata.yml"                 # Gradescope's file
MAX_BYTES = 20_000_000                               # maximum size of METADATA
ATTEMPT_WORDS = "attempt try version versuch abgabe"  # words before a number
ATTEMPT_NUMBER = re.compile(rf"(?:{'|'.join(ATTEMPT_WORDS.split())})[ _-]*(\d{{1,4}})", re.IGNORECASE)
CLOCK = re.compile(r"(\d{1,2})[:.]?(\d\d)(?:[:.](\d\d))?\s*([AaPp])?\.?[Mm]?")
# the first letters of months in the platforms' languages; June and July need four
MONTHS = ["jan ene gen", "feb fév fev", "mar mär mrt maa", "apr avr abr", "may mai mei mag", "jun juin giu", "jul juil lug",
          "aug aoû aou ago", "sep set", "oct okt ott out", "nov", "dec dez déc dic"]


class Attempt(NamedTuple):
    """What a file's name and its folders say about the attempt."""

    learner: str = ""                                # "": unknown
    submitted_at: float = 0.0                        # timestamp; 0: unknown
    number: int = 0                                  # grows with each attempt
    ambiguity: int = 0                               # of two files for one learner, the lower ambiguity wins
    head: str = ""                                   # Blackboard: the name before the attempt, assignment and user


@dataclass(frozen=True)
class Platform:
    """The platform of a folder, found from all names: one alone cannot tell a learner's number from an assignment's."""

    learner_number: str = ""                         # Brightspace: which number identifies learners, first, second or none
    uncertain_heads: frozenset[str] = frozenset()    # Blackboard: heads (see `Attempt`) whose user is ambiguous
    submitters: Mapping[str, tuple[str, float]] = field(default_factory=dict)  # Gradescope: folder -> (learner, timestamp)
    problem: str = ""                                # why METADATA cannot be used
    kind: str | None = None                          # platform of most files; "": none; None: decide for each name
    mixed: bool = False                              # some files do not match it

    @classmethod
    def of(cls, folder: Path, lesson_of: Any) -> "Platform":
        """Find the platform of a folder; lesson_of: file path -> lesson in its name."""
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
        """Read the attempt from a file's path below the folder."""
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
    """The platform whose pattern more than half of the names match, or "", and whether some do not match."""
    names = list(names)
    fitting = {kind: sum(bool(read(name)) for name in names) for kind, read in READERS.items()}
    kind = max(fitting, key=lambda kind: fitting[kind])
    return (kind, fitting[kind] < len(names)) if 2 * fitting[kind] > len(names) else ("", False)


def brightspace(name: str, inside: bool = False) -> dict[str, str] | None:
    """Parse Brightspace's name of a file, or of its folder if `inside`; None if it is no such name.

    A folder's name ends with the date. In a file's name, the first date is Brightspace's and the rest the learner's. A part
    that only looks like a date, such as `Class 2026`, may belong to the learner's name.
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
    """Parse Blackboard's name of a file, by its first attempt mark; None if it is no such name."""
    mark = BLACKBOARD.search(name)
    assignment, _, user = name[:mark.start()].rpartition("_") if mark else ("", "", "")
    if not mark or not assignment or not user:
        return None
    return {"head": f"{assignment}_{user}", "user": user, "date": mark["date"], "file": name[mark.end():].removeprefix("_")}


def moodle(name: str, inside: bool = False) -> dict[str, str] | None:
    """Parse Moodle's name of a file, by its first mark, or of its folder if `inside`, which ends with the mark; or None."""
    marks = [mark for mark in MOODLE.finditer(name) if mark.start() and (not inside or name[mark.end():] in ("", "_"))]
    return {"name": name[:marks[0].start()], "user": marks[0]["user"]} if marks else None


def canvas(name: str) -> dict[str, str] | None:
    """Parse Canvas's name of a file; None if it is no such name."""
    if not (match := CANVAS.fullmatch(name)):
        return None
    return {"name": match["name"] or match["anon"], "user": match["user"] or match["code"], "number": match["number"]}


READERS: Mapping[str, Callable[[str], dict[str, str] | None]] = {
    "brightspace": brightspace, "blackboard": blackboard, "moodle": moodle, "canvas": canvas}


def unless_future(when: float) -> float:
    """The timestamp, or 0 if it is in the future, where it would beat every later attempt."""
    return when if when <= time.time() + CLOCK_TOLERANCE else 0.0


def distinguishing_number(names: Iterable[str], folders: Iterable[str] = ()) -> str:
    """Which of Brightspace's two numbers identifies learners: "first", "second", or "" if neither does.

    It compares learners' names up to the first " - ": the rest may belong to an odd file name.
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
    """Blackboard's heads whose user may contain an underscore: several with the same ending submitted the same lesson."""
    users = defaultdict[tuple[str, str], set[str]](set)
    for name in names:
        if parts := blackboard(name):
            users[parts["user"], lesson_of(Path(parts["file"]))].add(parts["head"])
    return frozenset(head for (_, lesson), heads in users.items() if lesson and len(heads) > 1 for head in heads)


def read_submitters(path: Path) -> dict[str, tuple[str, float]]:
    """Folder -> (learner, timestamp) of a Gradescope export; empty without METADATA. Raises `CourseError` if it is damaged."""
    if not path.is_file() or path.is_symlink():
        return {}
    if path.stat().st_size > MAX_BYTES:
        raise CourseError(f"it has more than {MAX_BYTES // 1_000_000} MB; remove everything that is not about submitters")
    submitters_by_folder: dict[str, tuple[str, float]] = {}
    try:
        for folder, about in yaml.safe_load(path.read_bytes()).items():
            people = [f"{text_field(one, ':name')}_{text_field(one, ':sid') or text_field(one, ':email')}".rstrip("_")
                      for one in about[":submitters"][:20]]
            submitters_by_folder[str(folder)] = ", ".join(people), parse_date(text_field(about, ":created_at"))
    except (OSError, yaml.YAMLError, ValueError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise CourseError(f"it is not a Gradescope export, or it is damaged ({type(error).__name__}); export it again") from error
    return submitters_by_folder


def text_field(about: Mapping[str, Any], name: str) -> str:
    """A field as string, if it is a string, number or date: nested YAML aliases could expand without end."""
    value = about.get(name)
    return str(value)[:200] if isinstance(value, str | int | date) else ""


def parse_date(text: str) -> float:
    """Parse a date in a name to a timestamp, in this machine's time zone; 0 if it cannot be read.

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
    """The month from 1 to 12; 0 if the word is no month."""
    low = word.casefold()
    known = [(beginning, number) for number, names in enumerate(MONTHS, 1) for beginning in names.split()]
    return max(((len(beginning), number) for beginning, number in known if low.startswith(beginning)), default=(0, 0))[1]


def normalize(text: str) -> str:
    """Normalize a file name to Unicode NFC, whatever the locale and the archive's encoding."""
    raw = os.fsencode(text)
    for encoding in ("utf-8", "cp1252", "latin-1"):
        with suppress(UnicodeDecodeError):
            return unicodedata.normalize("NFC", raw.decode(encoding))
    return text


def normalize_path(path: Path) -> Path:
    """Normalize all names of a path."""
    return Path(normalize(str(path)))
