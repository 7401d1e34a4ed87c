"""The lease on a run at a URL: who has it, who gets it, and who has lost it."""

from __future__ import annotations

import json
import subprocess

import pytest

from eventloop import CheckpointError, ResumeError
from eventloop.checkpoint.run_lock import RunLock
from eventloop.storage import Url, this_machine
from eventloop_remote import lease as module
from eventloop_remote.lease import NUM_LOOKS, RENEW_S, Lease

URL = "flaky://run"
PATH = "/run/.lease.json"


@pytest.fixture
def lease_of(bucket, tmp_path):
    """Makes leases on one run, each for a folder of its own, as on another machine."""
    made = []

    def lease_of(folder, pause=bucket.pauses_s.append):
        made.append(Lease(Url(URL), bucket.objects(URL), RunLock(tmp_path / folder), pause=pause))
        return made[-1]

    yield lease_of
    bucket.fail = lambda name, path: None
    for one in made:
        one.release()


def content(bucket):
    return json.loads(bucket.kind.store[PATH].getvalue())


def left_by(bucket, **changes):
    """Writes a lease as another machine's process would."""
    there = {"process": 7, "host": "node-3", "place": "0" * 8, "id": "1" * 16, "renewed": "x"}
    bucket.kind("").pipe_file(PATH, json.dumps(there | changes).encode())


@pytest.fixture
def dead():
    """Returns the id of a process that has ended."""
    process = subprocess.Popen(["true"])
    process.wait()
    return process.pid


def test_a_lease_is_there_while_it_is_held(bucket, lease_of):
    """With what a person wants to know."""
    lease = lease_of("a")

    lease.acquire()
    lease.acquire()
    lease.require()

    assert {"process", "host", "renewed"} <= content(bucket).keys()
    lease.release()
    lease.release()
    assert bucket.paths == []
    lease_of("b").acquire()


def test_the_second_of_one_process_is_refused(lease_of):
    """A trainer that wasn't closed, say."""
    lease_of("a").acquire()

    with pytest.raises(ResumeError, match="another process trains at flaky://run\n  by   process"):
        lease_of("b").acquire()


def test_the_second_of_one_folder_is_refused_by_its_lock(lease_of):
    """Which ends with its process, and says more."""
    lease_of("a").acquire()

    with pytest.raises(ResumeError, match="another Trainer of this process trains in"):
        lease_of("a").acquire()


def test_one_that_is_renewed_is_refused(bucket, lease_of):
    """Nobody's clock is asked: it changes, so that its process trains."""
    left_by(bucket)
    lease = lease_of("a", pause=lambda pause_s: left_by(bucket, renewed="later"))

    with pytest.warns(UserWarning, match="process 7 on 'node-3' trained at flaky://run last"):
        with pytest.raises(ResumeError, match="by   process 7 on 'node-3'"):
            lease.acquire()
    assert content(bucket)["renewed"] == "later"
    RunLock(lease._local._run_dir).acquire()  # the folder's lock wasn't kept


def test_one_that_is_not_renewed_is_taken_over(bucket, lease_of):
    """Its machine has failed, most probably."""
    left_by(bucket)

    with pytest.warns(UserWarning, match="waiting up to 120 s"):
        lease_of("a").acquire()

    assert bucket.pauses_s == [RENEW_S] * NUM_LOOKS
    assert content(bucket)["id"] != "1" * 16


def test_one_that_is_given_back_meanwhile_is_free(bucket, lease_of):
    """At once."""
    left_by(bucket)

    with pytest.warns(UserWarning, match="waiting"):
        lease_of("a", pause=lambda pause_s: bucket.empty()).acquire()


def test_one_of_a_process_that_has_ended_is_free(bucket, lease_of, dead):
    """A killed run goes on at once on the same machine."""
    left_by(bucket, place=this_machine(), process=dead)

    lease_of("a").acquire()

    assert bucket.pauses_s == []


def test_one_of_an_earlier_process_with_this_number_is_free(bucket, lease_of):
    """Containers count from 1 again."""
    left_by(bucket, place=this_machine(), process=module.os.getpid())

    lease_of("a").acquire()

    assert bucket.pauses_s == []


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[" * 900, b'{"process": "\x1b[2J", "host": 3}', b"[1]", b"\xff" * 5000]
)
def test_nonsense_is_waited_for(data, bucket, lease_of):
    """A stranger's, or half written; nothing of it reaches the terminal."""
    bucket.kind("").pipe_file(PATH, data)

    with pytest.warns(UserWarning, match="a process that didn't record its id trained"):
        lease_of("a").acquire()


def test_who_has_lost_it_notices(bucket, lease_of):
    """Its machine slept, and another one took over; that one's isn't removed."""
    lease = lease_of("a")
    lease.acquire()
    left_by(bucket)

    with pytest.raises(ResumeError, match="another process trains at flaky://run now"):
        lease.require()
    assert not lease.renew()
    lease.release()
    assert content(bucket)["process"] == 7


def test_a_renewal_changes_it(bucket, lease_of):
    """So that whoever waits sees it."""
    lease = lease_of("a")
    lease.acquire()
    before = content(bucket)

    assert lease.renew()

    assert content(bucket)["renewed"] > before["renewed"]
    lease.release()
    assert not lease.renew()
    assert bucket.paths == []


def test_a_renewal_that_fails_is_tried_again_later(bucket, lease_of):
    """Training goes on meanwhile; a save would tell."""
    lease = lease_of("a")
    lease.acquire()

    def fail(name, path):
        raise OSError("the connection was reset")

    bucket.fail = fail

    assert lease.renew()
    with pytest.raises(CheckpointError, match="the connection was reset"):
        lease.require()
    bucket.fail = lambda name, path: None
    lease.require()
