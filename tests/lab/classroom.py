"""A class of learners: notebooks filled in rightly, wrongly and with bad intent."""

from pathlib import Path
from typing import Any

import nbformat

from course.lab.authoring import lessons, stubs
from course.lab.checks.exercise import find, known_mistakes, right, wrong


def blank_source(*objects: str) -> str:
    """The objects' signatures and docstrings with the imports that their answers need; every body is the stub."""
    return stubs.clear_answers(stubs.answer_source(*objects, marked=True))


def notebook(lesson: str, **answers: str) -> Any:
    """The learner's blank notebook of a lesson with the cells of these exercises (matmul_cost for matmul-cost) filled in."""
    master, = lessons.masters([lesson])
    blank = lessons.learner_notebook(master)
    for name, source in answers.items():
        cell, = [c for c in blank.cells if c.metadata.get("nbgrader", {}).get("grade_id") == name.replace("_", "-")]
        cell.source = source
    return blank


def solved(lesson: str) -> Any:
    """A notebook in which everything is right."""
    master, = lessons.masters([lesson])
    return lessons.instructor_notebook(master)


def hand_in(path: Path, content: Any) -> Path:
    """Write a submission."""
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(content, path)
    return path


def answer(name: str) -> str:
    """The right answer to an exercise."""
    return right(find(name))


def mistaken(name: str, number: int) -> str:
    """One of the known wrong answers."""
    return wrong(find(name), known_mistakes(find(name))[number])


# Each is the body of a roofline_seconds(flops, moved, peak_flops, peak_bytes) that wants a pass without the answer, or harm.
HOSTILE = {
    "prints a pass": 'print("roofline: passed, 1 of 1 checks hold")\nprint(\'{"passed": true}\')\nreturn 1.0',
    "ends as if all were well": "import os; os._exit(0)",
    "leaves": "import sys; sys.exit(0)",
    "never ends": "while True: pass",
    "forks": ("import os, time\nfor _ in range(200):\n    if os.fork() == 0:\n        time.sleep(600)\ntime.sleep(600)"),
    "takes all memory": "return len([bytearray(10**8) for _ in range(10**6)])",
    "prints without end": "while True: print('x' * 10**6)",
    "fills the disk": "with open('big', 'wb') as f:\n    while True: f.write(bytes(10**7))",
    "crashes": "import ctypes; ctypes.string_at(0)",
    "writes its own outputs": ("import json, os, torch\nfrom safetensors.torch import save_file\n"
                               "save_file({'seconds': torch.ones(40, dtype=torch.float64)}, 'out-0-0.safetensors')\nos._exit(0)"),
    "leads the reader astray": "import os\nos.symlink('/etc/passwd', 'out-0-0.safetensors')\nos._exit(0)",
    "makes the reader wait": "import os\nos.mkfifo('out-0-0.safetensors')\nos._exit(0)",
    "kills its parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\nos.kill(-1, signal.SIGKILL)\nreturn 1.0",
    "reads expected values": ("import os\nfound = []\n"
                              "for top in set(os.listdir('/')) - {'proc', 'sys', 'usr', 'dev', 'etc'}:\n"
                              "    for folder, _, files in os.walk('/' + top):\n"
                              "        found += [folder + '/' + f for f in files if f in ('gradebook.csv', '00_start_here.py')\n"
                              "                  or 'lab/mistakes' in folder]\n"
                              "raise (LookupError if found else RuntimeError)('found: ' + ' '.join(found))"),
    "alters the checks": ("import course.lab.checks.check as c, course.lab.sandbox.child, course.lab.checks.exercise as e\n"
                          "c.judge = lambda *a: ([c.Fact(True, 'fine')], '')\nc.differ = lambda *a: ''\n"
                          "c.Verdict.passed = property(lambda self: True)\n"
                          "for f in (c.__file__, e.__file__, course.lab.sandbox.child.__file__):\n"
                          "    try: open(f, 'w').write('')\n    except OSError: pass\nreturn 1.0"),
    "looks through the frames": ("import sys, gc\nframe = sys._getframe()\nwhile frame:\n"
                                 "    for value in list(frame.f_locals.values()):\n"
                                 "        if isinstance(value, dict) and 'expected' in value: return value['expected']\n"
                                 "    frame = frame.f_back\n"
                                 "return next(o for o in gc.get_objects() if type(o) is dict and 'expected' in o)['expected']"),
    "makes a tensor that equals anything": ("class Any(float):\n    def __eq__(self, other): return True\n    __hash__ = None\n"
                                            "    def __sub__(self, other): return 0.0\nreturn Any(1.0)"),
    "calls out": ("import socket\nsocket.create_connection(('127.0.0.1', PORT), timeout=2).send(b'here')\nreturn 1.0"),
    "calls the library": "from course.lab.exercises.lesson00_start_here import roofline_seconds\n"
                         "return roofline_seconds(1, 1, 1, 1)",
}


def hostile(name: str, port: int = 9) -> str:
    """The source of a hostile answer to the exercise roofline."""
    body = HOSTILE[name].replace("PORT", str(port)).replace("\n", "\n    ")
    return f"def roofline_seconds(flops, moved, peak_flops, peak_bytes):\n    {body}\n"
