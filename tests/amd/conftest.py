import os

import pytest

from tests.amd.setup_gate import GateUnavailable, find_gate


@pytest.fixture(scope="session")
def gate():
    """The gate's environment. `make gate` builds it; CI does so first: its absence is an error there."""
    try:
        return find_gate()
    except GateUnavailable as reason:
        if os.environ.get("CI") == "true":
            raise
        pytest.skip(str(reason))
