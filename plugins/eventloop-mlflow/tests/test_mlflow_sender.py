"""The process that talks to MLflow: it can die, and never outlives what started it."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from eventloop_mlflow.sender import Sender, SenderError, Surroundings

# Begins a call to a server that never answers.
BUSY = """
import os, signal, socket, sys, threading
from eventloop_mlflow.sender import SENDER, Surroundings

server = socket.create_server(("127.0.0.1", 0))
uri = f"http://127.0.0.1:{server.getsockname()[1]}"
asks = (Surroundings.now(), uri, "id", "set_status", "RUNNING")
threading.Thread(target=SENDER.call, args=asks, daemon=True).start()
connection = server.accept()
"""


@pytest.fixture
def sender():
    made = Sender()
    yield made
    made.stop()


@contextmanager
def asked(sender, **variables):
    """Yields a call to a server that never answers, once the sender waits for it, and the request."""
    here = Surroundings.now()
    here = here._replace(variables={**here.variables, **variables})
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        uri = f"http://127.0.0.1:{server.getsockname()[1]}"
        call = pool.submit(sender.call, here, uri, "id", "set_status", "RUNNING")
        with server.accept()[0] as connection:
            yield call, connection.recv(65536).decode()
            sender.stop()


def answer(sender, method="nothing"):
    """Returns the answer to a call of a method that isn't there."""
    with pytest.raises(SenderError) as raised:
        sender.call(Surroundings.now(), "", None, method)
    return str(raised.value)


def ends(code, folder, status):
    """Runs a script, and waits until none that it started has its standard error."""
    script = folder / "script.py"
    script.write_text(textwrap.dedent(code))
    with subprocess.Popen(
        [sys.executable, script], cwd=folder, stdin=subprocess.PIPE, stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:  # fmt: skip
        with ThreadPoolExecutor(1) as pool:
            read = pool.submit(process.stderr.read)
            told = read.result(120)
        assert process.wait() == status, told
    return told.decode()


@pytest.mark.nightly
def test_a_sender_that_is_killed_is_an_error_and_the_next_call_starts_another(sender):
    """As memory that is full, or a person, may do."""
    with asked(sender) as (call, _):
        sender.start().kill()
        with pytest.raises(SenderError, match=r"its process has ended, with status -?\d+"):
            call.result()

    assert "no attribute 'nothing'" in answer(sender)


@pytest.mark.nightly
def test_a_sender_that_died_between_two_calls_is_replaced(sender):
    """Nothing was lost with it."""
    first = sender.start()
    first.kill()
    first.wait()

    assert "no attribute 'nothing'" in answer(sender)
    assert sender.start().pid != first.pid


@pytest.mark.nightly
@pytest.mark.parametrize("number", ["SIGINT", "SIGTERM"])
def test_a_sender_ignores_what_is_sent_to_all_of_a_group(sender, number):
    """Ctrl-C in a terminal; training ends in its own time, and says so."""
    answer(sender)
    process = sender.start()
    process.send_signal(getattr(signal, number))

    assert "no attribute 'nothing'" in answer(sender)
    assert sender.start() is process


@pytest.mark.nightly
def test_a_sender_has_the_variables_of_the_training(sender):
    """Credentials, say; also those that came when it had started."""
    answer(sender)

    with asked(sender, MLFLOW_TRACKING_TOKEN="a-token") as (_, request):
        assert "Bearer a-token" in request


@pytest.mark.nightly
def test_a_sender_is_where_the_training_is(sender, tmp_path):
    """A relative path means the same in both."""
    here = Surroundings.now()._replace(folder=str(tmp_path))

    sender.call(here, "sqlite:///a.db", None, "begin", "e", "r", tmp_path, 0)

    assert (tmp_path / "a.db").is_file()


@pytest.mark.nightly
def test_what_is_longer_than_a_pipe_comes_whole(sender):
    """There and back."""
    name = "x" * 10**6

    assert answer(sender, name).endswith(f"no attribute '{name}'")


@pytest.mark.nightly
def test_a_fork_waits_for_no_sender(tmp_path):
    """A worker of a data loader: it has no thread that would answer, and nothing of the pipe."""
    code = (
        BUSY
        + """
child = os.fork()
if not child:
    os._exit(SENDER.start().returncode is None and threading.active_count())
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
"""
    )

    ends(code, tmp_path, 0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    "by", ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(0)", "sys.exit()"]
)
def test_a_sender_ends_with_its_process_though_a_fork_lives_on(tmp_path, by):
    """A worker of a data loader may be slow to end; the sender waits for an answer meanwhile."""
    code = (
        BUSY
        + f"""
if not os.fork():
    os.close(2)
    os.read(0, 1)
    os._exit(0)
{by}
"""
    )

    ends(code, tmp_path, -signal.SIGKILL if "SIGKILL" in by else 0)


TASK = """
from eventloop_mlflow.sender import SENDER
raise RuntimeError(f"{SENDER._process is not None and SENDER._process.poll()}")
"""


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("flags", "was_started"), [((), True), (("--dry-run",), False), (("--no-plugins",), False)]
)
def test_a_task_file_that_fails_leaves_no_sender(tmp_path, flags, was_started):
    """It was started before the file was read, where something is to be trained."""
    info = tmp_path / "eventloop_mlflow-0.1.0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: eventloop-mlflow\nVersion: 0.1\n")
    (info / "entry_points.txt").write_text(
        "[eventloop.callbacks]\nmlflow = eventloop_mlflow:Mlflow\n"
    )
    (tmp_path / "task.py").write_text(TASK)
    code = (
        f"import sys; from eventloop.cli import main; sys.exit(main(['fit', 'task.py', *{flags}]))"
    )

    told = ends(code, tmp_path, 1)

    assert f"RuntimeError: {None if was_started else False}" in told
