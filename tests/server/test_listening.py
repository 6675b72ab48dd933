"""Where a server listens: all addresses of a name, both families, with and without TLS, health on a port of its own."""

from __future__ import annotations

import http.client
import socket
import ssl
import subprocess
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from server_fakes import FakePolicy, eventually, roboarena_observation, told

from worldkv.client import PolicyClient
from worldkv.errors import ConnectionLost
from worldkv.server import listening
from worldkv.server.config import ServerConfig
from worldkv.server.listening import take_port
from worldkv.server.server import PolicyServer

HAS_IPV6 = socket.has_dualstack_ipv6()


def reached(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=5).close()
    except OSError:
        return False
    return True


def close(sockets: list[socket.socket]) -> None:
    for each in sockets:
        each.close()


@pytest.mark.skipif(not HAS_IPV6, reason="no IPv6 here")
@pytest.mark.parametrize("host", ["::", "localhost"])
def test_both_families_are_listened_on(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "_addresses", lambda name: {"localhost": ["127.0.0.1", "::1"]}.get(name, [name]))
    with PolicyServer(FakePolicy(), ServerConfig(port=0, host=host, api_key="k")) as server:
        for address in ("127.0.0.1", "::1"):
            assert reached(address, server.port), address
            with PolicyClient(address, server.port, api_key="k") as robot:
                assert told(robot.infer(roboarena_observation()))[0] == 1


def test_a_name_of_several_addresses_is_listened_on_at_one_port_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "_addresses", lambda _: ["127.0.0.1", "127.0.0.2", "192.0.2.1"])
    sockets = take_port("arm", 0)  # and the one that is not of this machine is left out
    port = sockets[0].getsockname()[1]
    assert [each.getsockname() for each in sockets] == [("127.0.0.1", port), ("127.0.0.2", port)]
    with pytest.raises(OSError, match=f"cannot listen on arm port {port}"):
        take_port("arm", port)
    close(sockets)
    monkeypatch.undo()
    with pytest.raises(OSError, match=r"cannot listen on no-such-name\.invalid"):
        take_port("no-such-name.invalid", 0)


def test_a_name_that_leads_elsewhere_needs_a_key_though_it_is_called_localhost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listening, "_addresses", lambda _: ["127.0.0.1", "0.0.0.0"])
    with pytest.raises(ValueError, match=r"localhost is 0\.0\.0\.0 here.*set api_key"):
        PolicyServer(FakePolicy(), ServerConfig(port=0, host="localhost")).listen()


def openssl(*arguments: object) -> None:
    done = subprocess.run(["openssl", *map(str, arguments)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def certificate(folder: Path, name: str = "server") -> dict[str, Any]:
    """Signed by itself."""
    files = {"tls_cert": folder / f"{name}.pem", "tls_key": folder / f"{name}.key"}
    openssl(
        *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"),
        *("-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"),
        *("-out", files["tls_cert"], "-keyout", files["tls_key"], "-days", "30"),
    )
    return files


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return certificate(tmp_path_factory.mktemp("tls"))


def test_robots_and_people_reach_it_by_tls_and_nobody_without(files: dict[str, Any]) -> None:
    policy, ca = FakePolicy(), str(files["tls_cert"])
    with PolicyServer(policy, ServerConfig(port=0, api_key="k", silent_s=1.0, **files)) as server:
        trust = ssl.create_default_context(cafile=ca)

        def health() -> int:
            with urllib.request.urlopen(
                f"https://127.0.0.1:{server.port}/healthz", context=trust, timeout=10
            ) as answer:
                return int(answer.status)

        eventually(lambda: health() == 200)
        with PolicyClient(f"wss://127.0.0.1:{server.port}", api_key="k", ca_file=ca) as robot:
            assert robot.infer(roboarena_observation()).shape == (24, 8)
            big = {**roboarena_observation(), "observation/more": np.zeros(10**6, np.uint8)}
            assert told(robot.infer(big))[0] == 2
        with pytest.raises(ConnectionLost, match="CERTIFICATE_VERIFY_FAILED"):
            PolicyClient(f"wss://127.0.0.1:{server.port}", api_key="k", connect_wait=0).metadata  # noqa: B018
        with pytest.raises(ConnectionLost):
            PolicyClient("127.0.0.1", server.port, api_key="k", connect_wait=0).metadata  # noqa: B018
        with socket.create_connection(("127.0.0.1", server.port), timeout=10) as silent:  # no handshake
            assert silent.recv(1) == b"", "a silent socket was kept"
        eventually(lambda: server._gate.num_open == 0)
        assert not server._gate._strangers


def test_the_client_is_told_of_a_file_that_holds_no_certificate(tmp_path: Path) -> None:
    for name in ("none.pem", "empty.pem"):
        (tmp_path / "empty.pem").touch()
        with pytest.raises(ValueError, match="ca_file: expected a PEM file"):
            PolicyClient("wss://gpu-box", ca_file=str(tmp_path / name))


def test_a_certificate_that_nobody_would_trust_is_told_before_anything_starts(
    files: dict[str, Any], tmp_path: Path
) -> None:
    other = certificate(tmp_path, "other")
    past = certificate(tmp_path, "past")
    openssl("x509", "-in", past["tls_cert"], "-signkey", past["tls_key"], "-days", "-1", "-out", past["tls_cert"])
    secret, text, nowhere = tmp_path / "secret.key", tmp_path / "text.pem", tmp_path / "nowhere.pem"
    openssl("pkey", "-in", files["tls_key"], "-aes128", "-passout", "pass:x", "-out", secret)
    text.write_text("not a certificate")
    for wrong, why in [
        (
            {"tls_key": other["tls_key"]},
            f"^tls_key: .*other.key is not the key of the certificate in {files['tls_cert']}",
        ),
        (past, "^tls_cert: no client will trust .*past.pem: certificate has expired"),
        ({"tls_key": secret}, "^tls_key: has a password"),
        ({"tls_cert": text}, "^tls_cert: expected a PEM file"),
        ({"tls_cert": nowhere}, "^tls_cert: .*nowhere.pem cannot be read: No such file"),
        ({"tls_key": files["tls_cert"]}, "^tls_cert, tls_key: "),
    ]:
        with pytest.raises(ValueError, match=why):
            PolicyServer(FakePolicy(), ServerConfig(port=0, **{**files, **wrong}))


def get(port: int | None, path: str, **headers: str) -> tuple[int, str]:
    assert port is not None
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    try:
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_a_taken_health_port_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1 port {port}"):
            PolicyServer(FakePolicy(), ServerConfig(port=0, health_port=port))
