"""Two attempts are one learner's, and two learners stay two, as each learning platform names them."""

import os
import subprocess
import sys
from datetime import datetime

import pytest

from course.lab.grading import on_cluster, platforms
from course.lab.grading.submissions import collect_submissions
from tests.lab import classroom

FILE = "00_start_here.ipynb"


def collected(folder, *paths, dates=()):
    """(learner, path of what counts) of each, and the notes. The dates of the files say the opposite of the names."""
    for number, path in enumerate(paths):
        file = classroom.hand_in(folder / path, classroom.notebook("00"))
        date = dates[number] if dates else 2e9 - number
        os.utime(file, (date, date))
    found, notes = collect_submissions(folder)
    return {one.learner: str(one.path.relative_to(folder)) for one in found}, "\n".join(notes)


ATTEMPTS = {
    "brightspace": ["11-222 - Mia Muster - 3 March, 2026 1015 AM/" + FILE, "11-222 - Mia Muster - 5 March, 2026 430 PM/" + FILE],
    "brightspace, short months": ["11-222 - Mia Muster - Mar 9, 2026 1159 AM/" + FILE,
                                  "11-222 - Mia Muster - Mar 9, 2026 1205 PM/" + FILE],
    "brightspace, Dutch": ["11-222 - Mia van der Muster - 28 februari, 2026 0930/" + FILE,
                           "11-222 - Mia van der Muster - 1 maart, 2026 0815/" + FILE],
    "brightspace, a hyphen": ["11-222 - Mia - Maria Muster-Klein - 2 Jan, 2026 900 AM/" + FILE,
                              "11-222 - Mia - Maria Muster-Klein - 10 Jan, 2026 100 AM/" + FILE],
    "brightspace, without folders": ["11-222 - Mia Muster - 3 March, 2026 1015 AM - " + FILE,
                                     "11-222 - Mia Muster - 5 March, 2026 430 PM - " + FILE],
    "blackboard": ["Lab 0_mmuster_attempt_2026-03-03-10-15-00_" + FILE, "Lab 0_mmuster_attempt_2026-03-05-16-30-00_" + FILE],
    "blackboard, underscores": ["Lab_0_x_mmuster_attempt_2026-03-03-10-15-00_" + FILE,
                                "Lab_0_x_mmuster_attempt_2026-03-03-10-15-01_work.ipynb"],
    "canvas": ["mustermia_4711_9_" + FILE, "mustermia_LATE_4711_10_00_start_here-1.ipynb"],
    "canvas, another name": ["mustermia_4711_9_00_start_here-3.ipynb", "mustermia_4711_10_" + FILE],
    "canvas, anonymous": ["anon_aB3dE_9_" + FILE, "anon_LATE_aB3dE_10_" + FILE],
    "teams": ["Mia Muster/Lab 0/Version 2/" + FILE, "Mia Muster/Lab 0/Version 10/" + FILE],
}


@pytest.mark.parametrize("name", ATTEMPTS)
def test_of_two_attempts_the_later_counts_and_the_earlier_is_named(tmp_path, name):
    earlier, later = ATTEMPTS[name]
    found, notes = collected(tmp_path, earlier, later)
    assert list(found.values()) == [later] and f"{earlier} is replaced by the later {later}" in notes


def test_gradescope_says_in_a_file_who_handed_in_what(tmp_path):
    (tmp_path / "submission_metadata.yml").write_text("""---
submission_11:
  :submitters:
  - :name: Mia Muster
    :sid: '4711'
    :email: mia@example.org
  :created_at: 2026-03-05 16:30:00.000000000 Z
submission_12:
  :submitters:
  - :name: Mia Muster
    :sid: '4711'
  :created_at: 2026-03-03 10:15:00.000000000 Z
submission_13:
  :submitters:
  - :name: Mia Muster
    :sid: '4712'
  - :name: Ben Bitdiddle
    :email: ben@example.org
  :created_at: 2026-03-03 10:15:00.000000000 Z
""")
    found, notes = collected(tmp_path, *(f"submission_{number}/{FILE}" for number in (12, 11, 13, 14)))
    assert found == {"Mia Muster_4711": f"submission_11/{FILE}", "Mia Muster_4712, Ben Bitdiddle_ben@example.org":
                     f"submission_13/{FILE}", "submission_14": f"submission_14/{FILE}"}
    assert "submission_14 names no learner" in notes and "no notebook: left out" not in notes


@pytest.mark.parametrize("paths", [
    ["11-222 - Mia Muster - 3 March, 2026 1015 AM/" + FILE, "33-222 - Mia Muster - 5 March, 2026 430 PM/" + FILE],
    ["Lab_0_a_muster_attempt_2026-03-03-10-15-00_" + FILE, "Lab_0_b_muster_attempt_2026-03-05-16-30-00_" + FILE],
    ["mustermia_4711_9_" + FILE, "mustermia_4712_10_" + FILE],
    ["Mia Muster_12_assignsubmission_file_/" + FILE, "Mia Muster_13_assignsubmission_file_/" + FILE],
    ["student_1/" + FILE, "student_2/" + FILE], ["mia/" + FILE, "mia2/" + FILE],
])
def test_two_learners_are_never_joined(tmp_path, paths):
    assert sorted(collected(tmp_path, *paths)[0].values()) == sorted(paths)


def test_a_number_that_all_share_is_the_assignments(tmp_path):
    """The learner is the same in the next lesson, where the assignment has another number."""
    found, _ = collected(tmp_path / "a", *(f"3970-2557 - {name} - Sep 24, 2024 926 PM/{FILE}" for name in ("Mia M", "Ben B")))
    assert sorted(found) == ["Ben B", "Mia M"]
    found, _ = collected(tmp_path / "b", f"1-9 - Mia M - Sep 24, 2024 926 PM/{FILE}", f"2-9 - Ben B - Sep 24, 2024 926 PM/{FILE}")
    assert sorted(found) == ["Ben B_2", "Mia M_1"]
    found, _ = collected(tmp_path / "c", f"9-1 - Mia M - Sep 24, 2024 926 PM/{FILE}", f"9-2 - Ben B - Sep 24, 2024 926 PM/{FILE}")
    assert sorted(found) == ["Ben B_2", "Mia M_1"]


@pytest.mark.parametrize("text, expected", [
    ("3 March, 2026 1015 AM", (2026, 3, 3, 10, 15)), ("Mar 3, 2026 10:15 PM", (2026, 3, 3, 22, 15)),
    ("2026-03-03-10-15-59", (2026, 3, 3, 10, 15, 59)), ("14 september, 2020 1219 PM", (2020, 9, 14, 12, 19)),
    ("1 July, 2026 1200 AM", (2026, 7, 1, 0, 0)), ("1 juin 2026 0905", (2026, 6, 1, 9, 5)),
    ("2. März 2026 14:07", (2026, 3, 2, 14, 7)),
    ("2026-03-03 10:15:00.000000000 Z", (2026, 3, 3, 10, 15)),
    ("sometime in 2026", None), ("31 February, 2026 1015 AM", None), ("", None)])
def test_dates_are_read(text, expected):
    assert platforms.parse_date(text) == (datetime(*expected).timestamp() if expected else 0.0)


def test_the_date_in_a_name_counts_between_runs_too(tmp_path):
    """Whatever the dates of the unpacked files are."""
    found, _ = collect_submissions(tmp_path) if classroom.hand_in(tmp_path / ATTEMPTS["brightspace"][1],
                                                                  classroom.notebook("00")) else (0, 0)
    assert found[0].date == datetime(2026, 3, 5, 16, 30).timestamp()


@pytest.mark.parametrize("name", ["brightspace", "blackboard", "canvas"])
def test_the_result_file_that_counts_is_that_of_the_later_attempt(tmp_path, name):
    learner, = collected(tmp_path, *ATTEMPTS[name])[0]
    paths = [tmp_path / path.replace(".ipynb", ".result.json") for path in ATTEMPTS[name]]
    for number, path in enumerate(paths):
        path.write_text("{}")
        os.utime(path, (2e9 - number, 2e9 - number))
    assert on_cluster.result_files(tmp_path)[learner, "00"] == paths


@pytest.mark.slow
def test_names_of_any_encoding_are_right_in_the_gradebook(tmp_path):
    """Folders as unpacked by tools of Linux, Windows and macOS; a locale without the letters."""
    raw = os.fsencode(tmp_path)
    for name in ("M\u00fcller".encode(), "Stra\u00dfe".encode("latin-1"), "Zoe\u0308".encode(), "\u674e".encode()):
        os.mkdir(raw + b"/" + name)
        with open(raw + b"/" + name + b"/" + FILE.encode(), "w", encoding="utf-8") as file:
            file.write(classroom.nbformat.writes(classroom.notebook("00")))
    assert sorted(one.learner for one in collect_submissions(tmp_path)[0]) == ["M\u00fcller", "Stra\u00dfe", "Zo\u00eb", "\u674e"]
    code = ("import sys, pathlib; from course.lab.grading.submissions import collect_submissions; "
            "print(ascii(sorted(one.learner for one in collect_submissions(pathlib.Path(sys.argv[1]))[0])))")
    locale = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, env=os.environ | locale)
    assert done.stdout.strip() == ascii(["M\u00fcller", "Stra\u00dfe", "Zo\u00eb", "\u674e"]), done.stderr


MIA = "submission_11:\n  :submitters:\n  - :name: {}\n    :sid: '4711'\n  :created_at: {}\n"


@pytest.mark.parametrize(("text", "learner"), [
    ("a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\n" + MIA.format("*c", "2026-03-05"), ""),
    ("a: " + "[" * 100_000, ""), (MIA.format("[Mia, [Mia]]", "2026-03-05"), "_4711"), ("[]", ""), ("\0", ""),
    (MIA.format("&m Mia", "2026-03-05") + MIA.format("*m", "*m").replace("11:", "12:", 1), "Mia_4711")])     # as Ruby writes them
def test_of_gradescopes_file_texts_and_numbers_alone_count(tmp_path, text, learner):
    classroom.hand_in(tmp_path / "submission_11" / FILE, classroom.notebook("00"))
    (tmp_path / "submission_metadata.yml").write_text(text)
    found, notes = collect_submissions(tmp_path)
    assert [one.learner for one in found] == [learner or "submission_11"]
    told = [note for note in notes if "submission_metadata.yml cannot be used: it is not a Gradescope export" in note]
    assert bool(told) != bool(learner)


BLACK, LATE = "Lab 0_{}_attempt_2026-03-03-10-1{}-00_", "attempt_9998-01-01-00-00-00"
NAMED_BY_LEARNERS = {
    "blackboard": (BLACK.format("bob", 6) + FILE, f"{BLACK.format('evil', 5)}x_bob_{LATE}_homework.ipynb", "evil"),
    "blackboard, the lesson": (BLACK.format("bob", 6) + FILE, f"{BLACK.format('evil', 5)}x_bob_{LATE}_{FILE}", "evil"),
    "blackboard, a line": (BLACK.format("bob", 6) + FILE, f"{BLACK.format('evil', 5)}\n_bob_{LATE}_{FILE}", "evil"),
    "blackboard, words": ("Lab_0_attempt_bob_attempt_2026-03-03-10-15-00_" + FILE,
                          f"Lab_0_attempt_evil_attempt_2026-03-03-10-15-00_bob_{LATE}_{FILE}", "evil"),
    "blackboard, like moodle": (BLACK.format("bob", 6) + FILE,
                                f"{BLACK.format('evil', 5)}_1_assignsubmission_file_{FILE}", "evil"),
    "moodle": ("Bob B_123_assignsubmission_file_" + FILE,
               "Evil E_124_assignsubmission_file_Bob B_123_assignsubmission_file_" + FILE, "Evil E_124"),
    "moodle, a ghost": ("Bob B_123_assignsubmission_file_" + FILE,
                        "Evil E_124_assignsubmission_file_G_90_assignsubmission_file_" + FILE, "Evil E_124"),
    "moodle, like blackboard": ("Bob B_123_assignsubmission_file_" + FILE,
                                f"Evil E_124_assignsubmission_file_x_Bob B_123_{LATE}_{FILE}", "Evil E_124"),
    "canvas": ("bob_4711_815_" + FILE, f"evil_4712_816_x_bob_4711_{LATE}_{FILE}", "evil_4712"),
    "canvas, like moodle": ("bob_4711_815_" + FILE, "evil_4712_816_bob_4711_assignsubmission_file_" + FILE, "evil_4712"),
    "brightspace": ("1-222 - Bob - 3 March, 2026 1015 AM - " + FILE,
                    "3-222 - Evil - 3 March, 2026 1015 AM - Bob - 3 March, 2030 1015 AM - " + FILE, "Evil_3"),
    "brightspace, one number": ("9-9 - Bob - 3 March, 2026 1015 AM - " + FILE,
                                "9-9 - Evil - 3 March, 2026 1015 AM - Bob - 3 March, 2030 1015 AM - " + FILE, "Evil"),
    "none": ("bob_" + FILE, f"evil_x_bob_{LATE}_{FILE}", "evil_x_bob_" + LATE),
}


@pytest.mark.parametrize("name", NAMED_BY_LEARNERS)
def test_a_files_name_never_makes_it_anothers(tmp_path, name):
    honest, hostile, evil = NAMED_BY_LEARNERS[name]
    found, _ = collected(tmp_path, honest, hostile, dates=(1e9, 2e9))
    assert found.pop(evil) == hostile and list(found.values()) == [honest]


def test_many_files_of_one_learner_make_no_platform_of_a_folder(tmp_path):
    """They outnumber the others' and look like Blackboard's: whose they are is not certain, so they are left out."""
    hostile = [f"evil_x_bob_{LATE}_{number}_{FILE}" for number in range(3)]
    found, notes = collected(tmp_path, "bob_" + FILE, *hostile)
    assert found == {"bob": "bob_" + FILE} and all(f"{path} is left out" in notes for path in hostile)


def test_a_display_name_like_anothers_file_is_left_out(tmp_path):
    bob, evil = (f"Bob B_123_assignsubmission_file_{more}{FILE}" for more in ("", "666_assignsubmission_file_"))
    found, notes = collected(tmp_path / "files", bob, evil, dates=(1e9, 2e9))
    assert found == {"Bob B_123": bob} and f"{evil} is left out" in notes
    evil = "Bob B_123_assignsubmission_file_666_assignsubmission_file_/" + FILE
    assert len(collected(tmp_path / "folders", "Bob B_123_assignsubmission_file_/" + FILE, evil)[0]) == 2


def test_users_alike_after_an_underscore_stay_two_whatever_their_files_names(tmp_path):
    names = ["Lab_0_a_muster_attempt_2026-03-03-10-15-00_" + FILE, "Lab_0_b_muster_attempt_2026-03-05-16-30-00_homework.ipynb"]
    assert collected(tmp_path, *names)[0] == {"Lab_0_a_muster": names[0], "Lab_0_b_muster": names[1]}


def test_an_odd_name_leaves_the_numbers_of_others_be(tmp_path):
    """Without folders, two of the same name stay two."""
    odd = "3-222 - Evil - 3 March, 2026 1017 AM - a - Evil - 3 March, 2026 1015 AM - " + FILE
    found, _ = collected(tmp_path, *(f"{number}-222 - {name} - 3 March, 2026 1015 AM - {FILE}"
                                     for number, name in ((1, "Mia Muster"), (2, "Mia Muster"), (3, "Evil"))), odd)
    assert sorted(found) == ["Evil_3", "Mia Muster_1", "Mia Muster_2"] and found["Evil_3"] == odd


def test_a_year_in_a_name_is_no_date(tmp_path):
    name = "1-222 - Mia - Class 2026 - 3 March, 2026 1015 AM - notes 2026.ipynb"
    assert list(collected(tmp_path, name)[0]) == ["Mia - Class 2026_1"]


def test_a_date_in_the_future_does_not_count(tmp_path):
    honest, future = BLACK.format("mia", 5) + FILE, "Lab 0_mia_attempt_9998-01-01-00-00-00_" + FILE
    assert collected(tmp_path, future, honest)[0] == {"mia": honest}


def test_a_file_added_by_hand_leaves_the_platforms_be(tmp_path):
    names = [BLACK.format(name, 5) + FILE for name in ("mia", "ben")] + ["zoe_" + FILE]
    assert collected(tmp_path, *names)[0] == dict(zip(("mia", "ben", "zoe"), names, strict=True))


def test_names_in_different_encodings_that_become_one_are_told(tmp_path):
    raw = os.fsencode(tmp_path)
    for name in ("J\u00f6rg".encode(), "Jo\u0308rg".encode(), "J\u00f6rg".encode("latin-1"), b"Mia"):
        os.mkdir(raw + b"/" + name)
        with open(raw + b"/" + name + b"/" + FILE.encode(), "w", encoding="utf-8") as file:
            file.write(classroom.nbformat.writes(classroom.notebook("00")))
    told = [note for note in collect_submissions(tmp_path)[1] if "in different encodings" in note]
    assert len(told) == 1 and r"'J\udcf6rg' and 'J\xf6rg' and 'Jo\u0308rg' are the name Jörg" in told[0]


def test_a_folder_by_hand_beside_blackboards_files_keeps_its_name(tmp_path):
    names = [BLACK.format("mia", 5) + FILE, "mia/" + FILE]
    assert collected(tmp_path, *names)[0] == {"Lab 0_mia": names[0], "mia": names[1]}


def test_a_name_of_a_platforms_in_a_folder_of_none_is_told(tmp_path):
    odd = f"Lab 0_evil_{LATE}_{FILE}"
    assert f"{odd} looks like a learning platform's file" in collected(tmp_path, "bob_" + FILE, "mia_" + FILE, odd)[1]
