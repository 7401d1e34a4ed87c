"""Folders of strangers: refused quickly and in little memory, and nothing in them ever runs."""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import eventloop
from eventloop.checkpoint import checkpoint_files, manifest, verifying
from eventloop.files.disk import NewFile

TERABYTE = 2**40
MAX_S = 2.0
MAX_BYTES = 300 * 2**20

# Reads folders one by one with the memory for it limited; prints what came of each.
READER = f"""
import json, resource, sys, time
from pathlib import Path
import torch
from eventloop.checkpoint import checkpoint_files
from eventloop.checkpoint.store import Store
from eventloop.errors import CheckpointError

def size():
    pages = Path("/proc/self/statm").read_text().split()[0]
    return int(pages) * resource.getpagesize()

def outcome(function, *arguments):
    start = time.process_time()
    try:
        function(*arguments)
        found = "read"
    except CheckpointError as error:
        found = error.what
    except BaseException as error:
        found = f"{{type(error).__name__}}: {{error}}"[:500]
    return found, time.process_time() - start

def scan(path):
    latest, refused = Store(path.parent).latest()
    if latest is None:
        raise CheckpointError("refused: " + refused[0][1])

resource.setrlimit(resource.RLIMIT_AS, (size() + {MAX_BYTES},) * 2)
outcomes = {{}}
for path in map(Path, sys.stdin.read().splitlines()):
    for function in (checkpoint_files.read_checkpoint, scan):
        outcomes[f"{{path.parent.name}} {{function.__name__}}"] = outcome(function, path)
outcomes["too much"] = outcome(bytearray, {MAX_BYTES} + 2**20)
print(json.dumps(outcomes))
"""


class Code:
    """Runs a command when it is unpickled."""

    def __init__(self, marker):
        self.command = f"touch '{marker}'"

    def __reduce__(self):
        return os.system, (self.command,)


def nested(levels, inside="0"):
    return f"{'[' * levels}{inside}{']' * levels}".encode()


def tensor_file(header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(shape, end):
    return {"w": {"dtype": "U8", "shape": [shape], "data_offsets": [0, end]}}


def many(num_tensors):
    """Returns a header of so many tensors without entries."""
    of = b'"%d":{"dtype":"U8","shape":[0,1],"data_offsets":[0,0]}'
    return b"{%s}" % b",".join(of % idx for idx in range(num_tensors))


class Folder:
    """A checkpoint of one part `model`, in a store of its own, with changes that are vouched for."""

    def __init__(self, root, kind):
        self.path = root / kind / verifying.name_of(3)
        parts = {"model": {"w": torch.ones(4), "more": [1]}}
        checkpoint_files.write_checkpoint(self.path, parts, {}, batch=3)

    def put(self, name, data):
        """Puts bytes in the place of a file, and vouches for them."""
        (self.path / name).unlink(missing_ok=True)
        with NewFile(self.path / name) as file:
            file.write(data)
        self.vouch({name: manifest.FileFacts(file.num_bytes, file.digest())})

    def vouch(self, files):
        """Has the manifest say so of some files."""
        found = manifest.read_manifest(self.path)
        changed = manifest.Manifest(3, {**found.files, **files}, found.facts)
        (self.path / "manifest.json").write_bytes(manifest.manifest_bytes(changed))

    def raw_manifest(self, data):
        """Puts a manifest in place with the digest that it should have."""
        rest = data + b"\n"
        digest = hashlib.sha256(rest).hexdigest().encode()
        (self.path / "manifest.json").write_bytes(b'{"sha256":"%s",\n%s' % (digest, rest))


def pickled(folder, name, code):
    if name == "manifest.json":
        (folder.path / name).write_bytes(code)
    else:
        folder.put(name, code)


def linked(folder, name, outside):
    """Moves a file out and links to it; what it holds is as it should be."""
    target = outside / f"{folder.path.parent.name}-{name}"
    (folder.path / name).rename(target)
    (folder.path / name).symlink_to(target)


def piped(folder, name):
    (folder.path / name).unlink()
    os.mkfifo(folder.path / name)


def sparse(folder, name, header=b""):
    """Makes a file of a terabyte of which hardly anything is stored, and vouches for its size."""
    with (folder.path / name).open("wb") as file:
        file.write(header)
        file.truncate(TERABYTE)
    if name != "manifest.json":
        folder.vouch({name: manifest.FileFacts(TERABYTE, "0" * 64)})


def names_of(folder, name):
    facts = {"bytes": 0, "sha256": "0" * 64}
    body = {"format": manifest.FORMAT, "version": 1, "eventloop": "1", "batch": 3, "facts": {}}
    folder.raw_manifest(json.dumps(body | {"files": {name: facts}}).encode()[1:])


BODY = (
    b'"format":"eventloop checkpoint","version":1,"eventloop":"1","batch":3,"files":%s,"facts":%s}'
)
FILES = ["manifest.json", "model.json", "model.safetensors"]
NAMES = [
    "../x.json",
    "/etc/passwd",
    "a/../../x.json",
    "..",
    "",
    ".x.json",
    "C:\\x.json",
    "x\0.json",
]
NAMES += ["manifest.json", "x.pkl", "x.json/", "X.json", "\u202ex.json", "x" * 5000 + ".json"]
HOSTILE = {
    **{f"pickle {name}": lambda f, o, code, name=name: pickled(f, name, code) for name in FILES},
    **{f"link {name}": lambda f, o, code, name=name: linked(f, name, o) for name in FILES},
    **{f"pipe {name}": lambda f, o, code, name=name: piped(f, name) for name in FILES},
    **{f"holes {name}": lambda f, o, code, name=name: sparse(f, name) for name in FILES},
    **{
        f"folder {name}": lambda f, o, code, name=name: (
            (f.path / name).unlink(),
            (f.path / name).mkdir(),
        )
        for name in FILES
    },
    **{
        f"name {idx}": lambda f, o, code, name=name: names_of(f, name)
        for idx, name in enumerate(NAMES)
    },
    "dcp": lambda f, o, code: [
        *[one.unlink() for one in f.path.iterdir()],
        (f.path / ".metadata").write_bytes(code),
        (f.path / "__0_0.distcp").write_bytes(code),
    ],
    "dcp beside": lambda f, o, code: [
        (f.path / ".metadata").write_bytes(code),
        (f.path / "model.json").unlink(),
    ],
    "levels manifest": lambda f, o, code: f.raw_manifest(nested(10_000)),
    "levels facts": lambda f, o, code: f.raw_manifest(BODY % (b"{}", nested(10_000))),
    "levels few": lambda f, o, code: f.raw_manifest(BODY % (b"{}", b'{"a":%s}' % nested(300))),
    "levels files": lambda f, o, code: f.raw_manifest(BODY % (nested(10_000), b"{}")),
    "levels part": lambda f, o, code: f.put("model.json", nested(10_000)),
    "levels million": lambda f, o, code: f.put("model.json", nested(400_000)),
    "levels open": lambda f, o, code: f.put("model.json", b"[" * 10_000),
    "levels header": lambda f, o, code: f.put("model.safetensors", tensor_file(nested(10_000))),
    "terabyte shape": lambda f, o, code: f.put(
        "model.safetensors", tensor_file(entry(TERABYTE, 8), bytes(8))
    ),
    "terabyte offset": lambda f, o, code: f.put(
        "model.safetensors", tensor_file(entry(TERABYTE, TERABYTE), bytes(8))
    ),
    "terabyte header": lambda f, o, code: f.put(
        "model.safetensors", TERABYTE.to_bytes(8, "little")
    ),
    "terabyte real": lambda f, o, code: sparse(
        f,
        "model.safetensors",
        tensor_file(b"%-120s" % json.dumps(entry(TERABYTE - 128, TERABYTE - 128)).encode()),
    ),
    "terabyte said": lambda f, o, code: f.vouch(
        {"model.safetensors": manifest.FileFacts(TERABYTE, "0" * 64)}
    ),
    "digits": lambda f, o, code: f.put("model.json", b"[%s]" % b",".join([b"9" * 4000] * 2000)),
    "int": lambda f, o, code: f.put("model.json", b'{"$int":"0x%s"}' % (b"f" * 10_000_000)),
    "python": lambda f, o, code: f.put(
        "model.json", b'{"$python/object/apply:os.system":["true"]}'
    ),
    "items lists": lambda f, o, code: f.put("model.json", b"[%s]" % b",".join([b"[]"] * 145_000)),
    "items dicts": lambda f, o, code: f.put(
        "model.json", b"[%s]" % b",".join([b'{"":1.5}'] * 145_000)
    ),
    "items keys": lambda f, o, code: f.put(
        "model.json", json.dumps(dict.fromkeys(map(str, range(290_000)), 0.5)).encode()
    ),
    "items facts": lambda f, o, code: f.raw_manifest(
        BODY % (b"{}", b"{%s}" % b",".join(b'"$%d":1' % idx for idx in range(290_000)))
    ),
    "items tensors": lambda f, o, code: f.put("model.safetensors", tensor_file(many(40_000))),
    "items tensors more": lambda f, o, code: f.put("model.safetensors", tensor_file(many(130_000))),
    "items many": lambda f, o, code: f.put("model.json", b"[%s]" % b",".join([b"0"] * 2_000_000)),
    "text": lambda f, o, code: f.put("model.json", b'["%s"]' % (b"a" * (30 * 2**20))),
    "text escaped": lambda f, o, code: f.put(
        "model.json", b'["%s"]' % (rb"\ud83d\ude00" * (2 * 2**20))
    ),
    "text long": lambda f, o, code: f.put("model.json", b'["%s"]' % (b"a" * (40 * 2**20))),
}


@pytest.fixture(scope="module")
def outside(tmp_path_factory):
    """A folder with the pickles' marker and the files that links lead to."""
    return tmp_path_factory.mktemp("outside")


@pytest.fixture(scope="module")
def outcomes(outside, tmp_path_factory):
    """What came of each kind, by kind and function: a message and seconds of computing.

    Others may keep the processor from it; a wait, at a pipe, say, would last until the time is up.
    """
    root = tmp_path_factory.mktemp("hostile")
    code = pickle.dumps(Code(outside / "marker"))
    paths = [Folder(root, "good").path]
    for kind, spoil in HOSTILE.items():
        folder = Folder(root, kind)
        spoil(folder, outside, code)
        paths.append(folder.path)
    elsewhere = Folder(outside, "whole").path
    (root / "linked folder").mkdir()
    (root / "linked folder" / elsewhere.name).symlink_to(elsewhere)
    paths.append(root / "linked folder" / elsewhere.name)
    done = subprocess.run(
        [sys.executable, "-c", READER],
        input="\n".join(map(str, paths)),
        env=os.environ | {"PYTHONPATH": str(Path(eventloop.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=False,
        timeout=150,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


@pytest.mark.nightly
def test_the_bound_holds(outcomes):
    """A process that took more memory would have been refused it; a good folder is read."""
    assert outcomes["too much"][0].startswith("MemoryError")
    for function in ("read_checkpoint", "scan"):
        assert outcomes[f"good {function}"][0] == "read"


@pytest.mark.parametrize("function", ["read_checkpoint", "scan"])
@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_folder_is_refused(kind, function, outcomes):
    """With a message of ours, in less than 2 s and 300 MB."""
    message, seconds = outcomes[f"{kind} {function}"]

    assert message.startswith(("the checkpoint '", "refused: "))
    assert "\n" not in message
    assert len(message) < 600
    assert message.isprintable()
    assert seconds < MAX_S


def test_a_link_to_a_folder_is_no_checkpoint_of_the_run(outcomes):
    """Whoever names it means it; whoever looks for the latest doesn't follow it."""
    assert outcomes["linked folder scan"][0].startswith("refused: it is a link")
    assert outcomes["linked folder read_checkpoint"][0] == "read"


def test_nothing_ran(outcomes, outside):
    """The marker isn't there; loading one of the pickles would have made it."""
    marker = outside / "marker"

    assert outcomes
    assert not marker.exists()
    pickle.loads(pickle.dumps(Code(marker)))
    assert marker.exists()
