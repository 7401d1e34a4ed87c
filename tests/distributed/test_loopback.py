"""Ranks of one machine listen where no other machine reaches them."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from eventloop.distributed.loopback import host_on_loopback, loopback_store, stay_on_loopback
from eventloop_testing import isolated_trainer, run_ranks, tiny_task

LISTENS = "0A"
ON_LINUX = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's tables")


def listening() -> set[str]:
    """Returns the addresses at which this process listens: "127.0.0.1", or "everywhere"."""
    own = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            own.add(str(descriptor.readlink()))
        except OSError:
            continue
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/net", table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTENS and f"socket:[{words[9]}]" in own:
                is_loopback = words[1].startswith("0100007F:")
                addresses.add("127.0.0.1" if is_loopback else "everywhere")
    return addresses


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


@ON_LINUX
def test_a_store_listens_on_loopback():
    """Torch's own listens on all interfaces."""
    before = listening()
    store = loopback_store()
    store.set("a", "b")
    client = TCPStore("127.0.0.1", store.port, is_master=False)

    assert listening() == before | {"127.0.0.1"}
    assert client.get("a") == b"b"


@ON_LINUX
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_store_of_rank_0_at_loopback_listens_there(host):
    """Torch's rendezvous shares the server of this process."""
    before, port = listening(), free_port()
    host_on_loopback(host, port)
    host_on_loopback(host, port)

    store = TCPStore(host, port, is_master=True, multi_tenant=True, wait_for_workers=False)

    store.set("a", "b")
    assert listening() == before | {"127.0.0.1"}


def test_a_store_at_another_address_is_left_to_torch():
    """Ranks of other machines have to reach it."""
    port = free_port()

    host_on_loopback("192.0.2.1", port)

    socket.create_server(("127.0.0.1", port)).close()


def train(folder: Path, variables: dict[str, str]) -> set[str]:
    """Returns where a rank listens after it has trained."""
    os.environ |= variables
    with isolated_trainer(folder / os.environ["RANK"], tiny_task(), max_duration="2ba") as trainer:
        trainer.fit()
        return listening()


@ON_LINUX
@pytest.mark.parametrize("host", ["a launcher", "rank 0"])
def test_ranks_that_train_listen_on_loopback_alone(tmp_path, host):
    """Store and backends, whoever hosts the store; the host's name may mean another interface."""
    variables = {}
    if host == "rank 0":
        os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)
        variables = {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": str(free_port())}

    places = run_ranks(train, tmp_path, variables)

    assert places == [{"127.0.0.1"}] * 2


def interfaces(local_world_size: str | None) -> str | None:
    os.environ.pop("GLOO_SOCKET_IFNAME", None)
    os.environ.pop("LOCAL_WORLD_SIZE", None)
    if local_world_size is not None:
        os.environ["LOCAL_WORLD_SIZE"] = local_world_size
    stay_on_loopback()
    return os.environ.get("GLOO_SOCKET_IFNAME")


def test_ranks_of_several_machines_listen_where_torch_does():
    """They have to reach each other; a launcher that doesn't say how many are here counts so, too."""
    assert run_ranks(interfaces, "1") == [None, None]
    assert run_ranks(interfaces, None) == [None, None]
    assert run_ranks(interfaces, "2")[0] in ("lo", "lo0")


def chosen() -> str | None:
    os.environ["NCCL_SOCKET_IFNAME"] = "eth7"
    stay_on_loopback()
    return os.environ["NCCL_SOCKET_IFNAME"]


def test_an_interface_that_the_user_names_stays():
    """They know their network."""
    assert run_ranks(chosen) == ["eth7", "eth7"]
