"""Connecting to a store that is there, ending, or something else."""

import socket
import struct

import pytest

from distman._store import transport


def test_a_store_that_ends_as_it_is_dialled_has_reset_the_connection():
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as client:
        accepted, _ = listener.accept()
        accepted.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        accepted.close()  # by a reset, after which the connection has no other end
        with pytest.raises(ConnectionResetError, match="ended the connection"):
            transport.other_place(client)
