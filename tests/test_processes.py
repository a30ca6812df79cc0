"""How the tests are spread over processes."""

import os

import pytest


@pytest.mark.skipif("PYTEST_XDIST_WORKER" not in os.environ, reason="one process runs all")
def test_the_tests_of_a_file_are_kept_together(request):
    """pytest 9.2 has no place for the group that xdist 3.8 writes into a test's name, and then xdist spreads single tests, which
    make the same fixtures and ranks again in each process."""
    assert request.node.nodeid.endswith("@tests/test_processes.py")
