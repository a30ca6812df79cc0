"""What pyproject.toml cannot say: a wheel carries what learners get beside the library, for `course lessons copy`.

An editable installation takes nothing along: there the command finds the clone.
"""

import runpy
import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

HERE = Path(__file__).parent


class WithLessons(build_py):
    """Copies to course/given what course/lab/grading/shipped_files.py names."""

    def run(self) -> None:
        if self.editable_mode:
            super().run()
            return
        package = Path(self.build_lib, "course")
        shutil.rmtree(package, ignore_errors=True)   # an earlier build's, whose files may be gone here
        super().run()
        for name in runpy.run_path(str(HERE / "course/lab/grading/shipped_files.py"))["list_files"](HERE):
            (package / "given" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(HERE / name, package / "given" / name)


setup(cmdclass={"build_py": WithLessons})
