"""Keeps ranks of a single machine on the loopback interface, which other machines can't reach.

By default torch's store and backends listen on all interfaces, or on the interface of the host's
name, and don't authenticate peers (torch 2.13).
"""

from __future__ import annotations

import functools
import os
import socket

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not in __all__

ADDRESS = "127.0.0.1"
_INTERFACES = ("lo", "lo0")  # of Linux, and of BSD and macOS
_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def loopback_store(port: int = 0, *, multi_tenant: bool = False) -> TCPStore:
    """Hosts a store that only this machine can reach.

    Args:
        port: 0 for any free port.
        multi_tenant: whether other stores of this process on this port share its server.

    Raises:
        OSError: the port is taken.
    """
    listener = socket.create_server((ADDRESS, port))
    port = listener.getsockname()[1]
    return TCPStore(
        ADDRESS,
        port,
        is_master=True,
        wait_for_workers=False,
        multi_tenant=multi_tenant,
        master_listen_fd=listener.detach(),
    )


def host_on_loopback(host: str, port: int) -> None:
    """Lets the store that this process is about to host listen on loopback, if `host` is there.

    It starts a server that multi-tenant stores of this process on the same port then share: torch has
    no option for the address on which its own server listens (torch 2.13).
    """
    if host == "localhost" or host.startswith("127."):
        _server(os.getpid(), port)


@functools.cache
def _server(_pid: int, port: int) -> TCPStore:
    """Returns a store that keeps the server of a port running.

    Cached by process: a fork inherits the cache, but not the server.
    """
    return loopback_store(port, multi_tenant=True)


def stay_on_loopback() -> None:
    """Lets torch's backends listen on loopback, if all ranks are on this machine.

    Environment variables that the user has set aren't changed.
    """
    world_size = os.environ.get("WORLD_SIZE")
    if world_size is None or os.environ.get("LOCAL_WORLD_SIZE") != world_size:
        return
    if not hasattr(socket, "if_nameindex"):
        return
    names = {name for _, name in socket.if_nameindex()}
    interface = next((name for name in _INTERFACES if name in names), None)
    if interface is not None:
        for variable in _VARIABLES:
            os.environ.setdefault(variable, interface)
