"""Files of tensors: those of safetensors, byte by byte, and nothing allocated on a file's word."""

from __future__ import annotations

import json
import warnings

import pytest
import safetensors.torch
import torch

from eventloop.checkpoint import safetensors_files as tensor_file
from eventloop.errors import CheckpointError
from eventloop.files.disk import CorruptFileError, NewFile, OldFile

# The library writes this one, but doesn't read it.
UNREAD = {torch.float8_e8m0fnu}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.safetensors"


def write(tensors, path):
    draft = tensor_file.NewTensors(tensors, path.name)
    with NewFile(path) as file:
        draft.write(file)
    assert path.stat().st_size == draft.num_bytes == file.num_bytes


def read(path):
    with OldFile(path) as file:
        return tensor_file.read(file)


def of_every_kind():
    """Returns tensors of every dtype with every bit pattern of a byte in it, and of every shape."""
    raw = torch.arange(256, dtype=torch.uint8)
    tensors = {}
    for name, dtype in tensor_file.dtypes().items():
        of = raw % 2 if dtype is torch.bool else raw
        tensors |= {f"{name}.all": of.view(dtype), f"{name}.grid": of.view(dtype).view(2, -1)}
        tensors |= {
            f"{name}.none": of[:0].view(dtype).view(3, 0, 2),
            f"{name}.one": of.view(dtype)[1],
        }
    return tensors


def test_tensors_of_every_kind_come_back(same, path):
    """Odd bit patterns of floats, too; in the order in which they were given."""
    tensors = of_every_kind()

    write(tensors, path)

    assert same(read(path), {name: one.clone() for name, one in tensors.items()})


def test_the_library_reads_what_is_written(same, path):
    """The file is for everybody."""
    tensors = {name: one for name, one in of_every_kind().items() if one.dtype not in UNREAD}

    write(tensors, path)
    loaded = safetensors.torch.load_file(path)
    with safetensors.safe_open(path, "pt") as file:
        metadata = file.metadata()

    assert same({name: loaded[name] for name in tensors}, tensors)
    assert metadata == {"format": "pt"}


def test_what_the_library_writes_is_read(same, path):
    """Weights from elsewhere."""
    tensors = {name: one.clone() for name, one in of_every_kind().items()}

    safetensors.torch.save_file(tensors, path, metadata={"any": "thing"})
    loaded = read(path)

    assert same({name: loaded[name] for name in tensors}, tensors)


def test_an_empty_file_of_tensors_is_one(path):
    """The library thinks so."""
    safetensors.torch.save_file({}, path)

    assert read(path) == {}


def test_tensors_are_written_as_they_look(same, path):
    """Views, transposed, expanded, conjugated, shared, with gradients: each on its own."""
    base = torch.arange(12.0).view(3, 4)
    complex_ = torch.tensor([1 + 2j])
    tensors = {
        "t": base.T,
        "row": base[1],
        "step": base[:, ::2],
        "wide": base[0, 0].expand(5),
        "last": torch.randn(1, 2, 3, 3).to(memory_format=torch.channels_last),
        "conj": complex_.conj(),
        "neg": complex_.conj().imag,
        "grad": torch.ones(2, requires_grad=True) * 2,
    }

    write(tensors, path)
    loaded = read(path)
    loaded["t"].zero_()

    expected = {name: one.detach().resolve_conj().resolve_neg() for name, one in tensors.items()}
    assert same(loaded | {"t": base.T}, expected)
    assert loaded["row"].tolist() == [4, 5, 6, 7]


def test_tensors_that_were_read_are_aligned_and_their_own(path):
    """As if torch had made them: to use one writes into no other, and keeps no other alive."""
    write({"a": torch.ones(1, dtype=torch.uint8), "b": torch.ones(3), "c": torch.ones(1)}, path)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = read(path)

    for tensor in loaded.values():
        assert tensor.data_ptr() % 16 == 0
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


@pytest.mark.parametrize("dtype", [torch.complex128, torch.float4_e2m1fn_x2])
def test_a_dtype_that_safetensors_lacks_is_refused(dtype):
    """Before anything is written, with its path."""
    with pytest.raises(CheckpointError, match=r"'m.safetensors: a.b' can't .*complex|float4"):
        tensor_file.NewTensors({"a.b": torch.empty(2, dtype=dtype)}, "m.safetensors")


def entry(**changes):
    return {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | changes


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        ([], "isn't a JSON object"),
        ({"a": []}, "invalid header entry for tensor 'a'"),
        ({"a": {"dtype": "F32", "shape": [2]}}, "invalid header entry"),
        ({"a": entry(dtype="O")}, "invalid header entry"),
        ({"a": entry(dtype=["F32"])}, "invalid header entry"),
        ({"a": entry(shape=[3])}, "invalid header entry"),
        ({"a": entry(shape=[-2])}, "invalid header entry"),
        ({"a": entry(shape=[2.0])}, "invalid header entry"),
        ({"a": entry(shape=[True, 2])}, "invalid header entry"),
        ({"a": entry(shape=[2] + [1] * 64)}, "invalid header entry"),
        ({"a": entry(shape=[0, 2**62, 4], data_offsets=[0, 0])}, "invalid header entry"),
        ({"a": entry(shape=[2**40], data_offsets=[0, 2**42])}, r"need 4,398,046,511,104 bytes"),
        ({"a": entry(data_offsets=[8, 0])}, "invalid header entry"),
        ({"a": entry(data_offsets=[0, 8, 16])}, "invalid header entry"),
        ({"a": entry(data_offsets=[-8, 0])}, "invalid header entry"),
        ({"a": entry(data_offsets=[8, 16])}, "doesn't start where"),
        ({"a": entry(), "b": entry()}, "doesn't start where"),
        ({"a": entry(shape=[1], data_offsets=[0, 4])}, "need 4 bytes, but it has 8"),
        ({}, "need 0 bytes, but it has 8"),
    ],
)
def test_a_header_is_compared_with_the_file(header, reason, path):
    """Before memory is taken for what it claims."""
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(8))

    for function in (tensor_file.read, tensor_file.read_entries):
        with OldFile(path) as file, pytest.raises(CorruptFileError, match=reason):
            function(file)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "ends after 0 bytes"),
        (b"1234567", "ends after 7 bytes"),
        ((2**63).to_bytes(8, "little"), "header claims 9,223,372,036,854,775,808 bytes"),
        ((10).to_bytes(8, "little") + b"{}", "header claims 10 bytes"),
        ((2).to_bytes(8, "little") + b"\x80\x04", "isn't JSON"),
    ],
)
def test_what_has_no_header_is_damage(data, reason, path):
    """Nothing is guessed."""
    path.write_bytes(data)

    with OldFile(path) as file, pytest.raises(CorruptFileError, match=reason):
        tensor_file.read(file)


MEMORY = """
import resource, sys, torch
from pathlib import Path
from eventloop.checkpoint.checkpoint_files import read_checkpoint, write_checkpoint
from eventloop.checkpoint.verifying import examine

def limit(num_bytes):
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + num_bytes
    resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))

MB = 2**20
folder = Path(sys.argv[1])
weights = {"a": torch.ones(64 * MB), "b": torch.ones(8, MB).T}  # 256 MB, and 32 MB to be copied
limit(32 * MB + 20 * MB)
write_checkpoint(folder, {"model": weights}, {})
examine(folder)
limit(288 * MB + 20 * MB)
assert torch.equal(read_checkpoint(folder).parts["model"]["a"], weights["a"])
limit(10 * MB)
try:
    weights["a"].clone()
except RuntimeError:
    print("limited")
"""


@pytest.mark.nightly
def test_no_second_copy_is_made_in_memory(run_python, tmp_path):
    """Weights of half the memory can be saved: one tensor is copied at a time, if it has to be."""
    done = run_python(f"import sys; sys.argv.append({str(tmp_path / 'a')!r})\n{MEMORY}")

    assert (done.stdout, done.stderr) == ("limited\n", "")


def test_sizes_of_entries_are_those_of_torch():
    """Verifying needs no torch, and must not take a tensor for damaged."""
    for name, dtype in tensor_file.dtypes().items():
        header = {"dtype": name, "shape": [3], "data_offsets": [0, 3 * dtype.itemsize]}

        assert tensor_file._entry("x", header).end == 3 * dtype.itemsize
