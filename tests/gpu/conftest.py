"""What tests on a GPU share."""

from collections.abc import Iterator

import pytest

from course.ops import attention


@pytest.fixture(autouse=True)
def any_attention_backend() -> Iterator[None]:
    """A test that chooses a backend of attention, process-wide, leaves the others on for the tests after it."""
    yield
    for switch in attention.SWITCHES.values():
        switch(True)
