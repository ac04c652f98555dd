"""The directory over an etcd that speaks TLS and asks who one is: certificates and passwords."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import etcd_server
from rendezvous_records import engine, rank
from waiting import wait_for

if etcd_server.missing() or etcd_server.missing_tls():  # pragma: no cover
    why = etcd_server.missing() or etcd_server.missing_tls()
    pytest.skip(why, allow_module_level=True)

from aetcd import rpc

from pdkv.errors import ConfigError
from pdkv.rendezvous import Known, RendezvousLimits, RouteQuery
from pdkv.rendezvous.etcd import EtcdDirectory
from pdkv.rendezvous.etcd_client import EtcdClient
from pdkv.rendezvous.etcd_security import EtcdSecurity

LIMITS = RendezvousLimits(beat_s=0.3, slow_s=0.9, lease_s=2, ask_s=0.2)
Open = Callable[[EtcdSecurity | None], EtcdDirectory]


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> etcd_server.Certificates:
    return etcd_server.Certificates(tmp_path_factory.mktemp("ca"))


@pytest.fixture(scope="module")
def etcd(
    tmp_path_factory: pytest.TempPathFactory, certificates: etcd_server.Certificates
) -> Iterator[etcd_server.EtcdServer]:
    server = etcd_server.EtcdServer(tmp_path_factory.mktemp("etcd"), certificates)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def open_directory(etcd: etcd_server.EtcdServer) -> Iterator[Open]:
    opened: list[EtcdDirectory] = []

    def make(security: EtcdSecurity | None) -> EtcdDirectory:
        opened.append(EtcdDirectory(port=etcd.port, limits=LIMITS, security=security))
        return opened[-1]

    yield make
    for directory in opened:
        directory.close()


def member(certificates: etcd_server.Certificates, user: str = "") -> EtcdSecurity:
    certificate, key = certificates.sign("member")
    return EtcdSecurity.load(
        certificates.ca, certificate=certificate, key=key, user=user, password=user and "secret"
    )


def finds(directory: EtcdDirectory) -> object:
    (answer,) = directory.resolve([RouteQuery("p", 1)])
    return answer.record if isinstance(answer, Known) else None


@pytest.mark.slow
def test_two_with_certificates_find_each_other_over_tls(
    certificates: etcd_server.Certificates, open_directory: Open
) -> None:
    security = member(certificates)
    publishing, looking = open_directory(security), open_directory(security)
    publishing.publish(rank())
    wait_for(lambda: finds(looking) == engine())
    assert not looking.problems()
    publishing.withdraw()
    wait_for(lambda: finds(looking) is None)


@pytest.mark.slow
def test_who_has_no_certificate_or_trusts_another_authority_is_told_so(
    certificates: etcd_server.Certificates, open_directory: Open, tmp_path: Path
) -> None:
    strange = member(etcd_server.Certificates(tmp_path))
    outsiders = {
        "in the clear": open_directory(None),
        "without a certificate": open_directory(EtcdSecurity.load(certificates.ca)),
        "of another authority": open_directory(strange),
    }
    for directory in outsiders.values():
        directory.publish(rank())
    for what, directory in outsiders.items():
        wait_for(lambda directory=directory: len(directory.problems()) >= 2)  # type: ignore[misc]
        assert not directory.is_registered, what
    said = " ".join(outsiders["of another authority"].problems())
    assert "CERTIFICATE_VERIFY_FAILED" in said, said


async def ask_for_passwords(port: int, security: EtcdSecurity) -> None:
    """What an operator does with etcdctl: root, a user for pdkv's keys alone, `auth enable`."""
    client = EtcdClient("127.0.0.1", port, security)
    await client.connect()
    stub = rpc.AuthStub(client.channel)
    await stub.UserAdd(rpc.AuthUserAddRequest(name="root", password="root"))
    await stub.RoleAdd(rpc.AuthRoleAddRequest(name="root"))
    await stub.UserGrantRole(rpc.AuthUserGrantRoleRequest(user="root", role="root"))
    await stub.UserAdd(rpc.AuthUserAddRequest(name="pdkv", password="secret"))
    await stub.RoleAdd(rpc.AuthRoleAddRequest(name="pdkv"))
    keys = rpc.Permission(permType=2, key=b"/pdkv/", range_end=b"/pdkv0")  # 2: to read and write
    await stub.RoleGrantPermission(rpc.AuthRoleGrantPermissionRequest(name="pdkv", perm=keys))
    await stub.UserGrantRole(rpc.AuthUserGrantRoleRequest(user="pdkv", role="pdkv"))
    await stub.AuthEnable(rpc.AuthEnableRequest())
    await client.close()


@pytest.mark.slow
def test_a_user_with_a_password_is_let_in_also_by_an_etcd_that_was_restarted(
    tmp_path: Path, certificates: etcd_server.Certificates
) -> None:
    etcd = etcd_server.EtcdServer(tmp_path, certificates)
    etcd.start()
    asyncio.run(ask_for_passwords(etcd.port, member(certificates)))
    security, nobody = member(certificates, "pdkv"), member(certificates)
    make = {"port": etcd.port, "limits": LIMITS}
    with (
        EtcdDirectory(**make, security=security) as publishing,  # type: ignore[arg-type]
        EtcdDirectory(**make, security=security) as looking,  # type: ignore[arg-type]
        EtcdDirectory(**make, security=nobody) as outside,  # type: ignore[arg-type]
    ):
        publishing.publish(rank())
        wait_for(lambda: finds(looking) == engine())
        publishing.claim([7])
        wait_for(lambda: bool(outside.problems()))
        etcd.stop()
        wait_for(lambda: bool(looking.problems()) and bool(publishing.problems()))
        etcd.start()  # it has forgotten all tokens
        wait_for(lambda: not looking.problems() and not publishing.problems(), 30)
        assert finds(looking) == engine()
        assert outside.problems()
        assert finds(outside) is None
    etcd.stop()


def test_half_a_certificate_and_a_password_in_the_clear_are_refused(
    tmp_path: Path, certificates: etcd_server.Certificates
) -> None:
    certificate, key = certificates.sign("half")
    with pytest.raises(ConfigError, match="go together"):
        EtcdSecurity.load(certificates.ca, certificate=certificate)
    with pytest.raises(ConfigError, match="go together"):
        EtcdSecurity(user="pdkv")
    with pytest.raises(ConfigError, match="no TLS"):
        EtcdSecurity(server_name="etcd")
    with pytest.raises(ConfigError, match="no PEM"):
        EtcdSecurity(ca=b"/etc/ca.pem")
    with pytest.raises(ConfigError, match="can't read"):
        EtcdSecurity.load(tmp_path / "missing")
    with pytest.raises(ConfigError, match="in the clear"):
        EtcdDirectory("10.0.0.1", security=EtcdSecurity(user="pdkv", password="secret"))
    key.chmod(0o644)
    with pytest.raises(ConfigError, match="mode 644"):
        EtcdSecurity.load(certificates.ca, certificate=certificate, key=key)
    shown = repr(EtcdSecurity(ca=b"-----BEGIN ", user="pdkv", password="secret"))
    assert "secret" not in shown
