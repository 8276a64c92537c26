"""What every test and doctest stands on: one thread, no network, quiet libraries, repeatable examples."""

import os
import socket

# Before torch and transformers are imported, which read these once; children of a test inherit them.
os.environ.update(
    OMP_NUM_THREADS="1",
    MKL_NUM_THREADS="1",
    TOKENIZERS_PARALLELISM="false",
    HF_HUB_OFFLINE="1",
    HF_DATASETS_OFFLINE="1",
    HF_HUB_DISABLE_TELEMETRY="1",
    HF_HUB_DISABLE_PROGRESS_BARS="1",
    TRANSFORMERS_VERBOSITY="error",
    TRANSFORMERS_NO_ADVISORY_WARNINGS="1",
    MPLBACKEND="agg",
    CUBLAS_WORKSPACE_CONFIG=":4096:8",
    NO_COLOR="1",
    COLUMNS="120",
)

from importlib.util import find_spec

import pytest
from hypothesis import settings

# The server of the explorer is an extra: without starlette it cannot be read for doctests.
collect_ignore = [] if find_spec("starlette") else ["src/support_tokens/explorer/server.py"]

settings.register_profile("local", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True, database=None, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    connect = socket.socket.connect

    def local_only(self: socket.socket, address):
        if self.family == socket.AF_UNIX or str(address[0]) in {"127.0.0.1", "::1", "localhost"}:
            return connect(self, address)
        raise OSError(f"a test may not reach the network, and {address!r} is outside of this machine")

    monkeypatch.setattr(socket.socket, "connect", local_only)
