"""Tests of the house start as unit tests do."""

from tests.command import command  # noqa: F401
from tests.unit.conftest import (  # noqa: F401
    cache_folder_of_its_own,
    cache_folders,
    log_as_at_the_start,
    no_modules_of_earlier_tests,
    pytest_collection_finish,
    run,
    runs_folder_of_its_own,
    tmp_path,
)
