"""TLS of the gRPC endpoint: a real server with certificates made here, asked by the command line and by clients."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import pytest
import tritonclient.grpc as grpc_client
from click.testing import CliRunner, Result

from hotrow.command_line import cli
from inference_session.errors import ConfigurationError, UnavailableError
from tests.testing.certificates import Authority, new_authority, tls_flags
from tests.testing.served import Serve, Served
from tests.testing.servers import wait_until
from tests.testing.triton_models import write_ctr
from triton_backend.client.tls import ClientTls, ServerTls


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one model."""
    write_ctr(tmp_path / "repository" / "ctr" / "1")
    return tmp_path / "repository"


def ask(served: Served, *options: object, host: str = "localhost") -> Result:
    """`hotrow versions ctr` of a server by its host's name. A name may have several addresses, and an error may be
    about one without a listener: tests that check the reason call an address.
    """
    port = served.grpc.rpartition(":")[2]
    return CliRunner().invoke(cli, ["versions", "ctr", "--url", f"{host}:{port}", *map(str, options)])


def is_refused(served: Served, options: tuple[object, ...], reason: str) -> bool:
    """Whether a question to 127.0.0.1 is an UnavailableError that gives this reason."""
    refused = ask(served, *options, host="127.0.0.1").exception
    assert isinstance(refused, UnavailableError)
    return reason in str(refused)


def is_ready(served: Served) -> bool:
    """Whether the HTTP endpoint says that the model is."""
    try:
        with urllib.request.urlopen(f"http://{served.http}/v2/models/ctr/ready") as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def lose_backend_process(served: Served) -> None:
    """Kill it, and wait until the launcher has loaded its model again."""
    served.stub("ctr").kill()
    wait_until(lambda: any("serves again" in line for line in served.errors), f"the model again: {served.errors}")


@pytest.mark.triton
def test_a_server_with_tls_answers_those_who_know_its_authority(
    serve: Serve, repository: Path, authority: Authority, tmp_path: Path
) -> None:
    """Only TLS is spoken over gRPC, HTTP stays on this machine, and refused clients get the reason."""
    served = serve(repository, "--host", "0.0.0.0", *tls_flags(authority.issue("localhost")))  # noqa: S104  of this test
    stranger = new_authority(tmp_path / "stranger")

    wait_until(lambda: "serves" in ask(served, "--tls-ca", authority.file).output, "an answer")
    for options, reason in (
        ((), "it requires TLS (--tls-ca"),
        (("--tls-ca", stranger.file), "not signed by the authority"),
        (("--tls-ca", authority.file), "another host name"),
    ):
        # On a busy machine the answer may come too late, which is a different reason.
        wait_until(
            lambda options=options, reason=reason: is_refused(served, options, reason),  # type: ignore[misc]
            f"the reason {reason!r}",
        )
    assert served.http.startswith("127.0.0.1:")
    assert served.metrics.startswith("http://0.0.0.0:")
    warning = "other machines that reach the gRPC port may load"
    wait_until(lambda: any(warning in line for line in served.errors), "the warning of an open port")
    _, _, port = served.grpc.rpartition(":")
    with grpc_client.InferenceServerClient(
        f"localhost:{port}", ssl=True, root_certificates=str(authority.file)
    ) as client:
        assert client.is_model_ready("ctr")


@pytest.mark.triton
def test_a_server_with_mutual_tls_wants_a_certificate_and_heals_itself(
    serve: Serve, repository: Path, authority: Authority
) -> None:
    """Clients need a certificate of the authority's; the launcher has one, and reloads a model whose process died."""
    known = tls_flags(authority.issue("client.example.org"))
    served = serve(repository, *tls_flags(authority.issue("localhost")), "--tls-client-ca", str(authority.file))

    assert isinstance(ask(served, "--tls-ca", authority.file).exception, UnavailableError)
    wait_until(lambda: "serves" in ask(served, "--tls-ca", authority.file, *known).output, "an answer")
    lose_backend_process(served)
    health = ["health", "--model", "ctr", "--url", served.grpc.replace("127.0.0.1", "localhost")]
    asking = [*health, "--tls-ca", str(authority.file), *known]
    wait_until(lambda: "answers" in CliRunner().invoke(cli, asking).output, "the model to answer")
    assert not any("could not be loaded again" in line for line in served.errors)


@pytest.mark.triton
def test_the_launcher_is_not_locked_out_by_an_authority_of_clients_only(
    serve: Serve, repository: Path, authority: Authority, tmp_path: Path
) -> None:
    """Where clients' certificates come from elsewhere than the server's, the launcher takes its own HTTP endpoint."""
    of_clients = new_authority(tmp_path / "clients")
    served = serve(repository, *tls_flags(authority.issue("127.0.0.1")), "--tls-client-ca", str(of_clients.file))

    lose_backend_process(served)
    wait_until(lambda: is_ready(served), "the model to be ready")


def test_what_cannot_be_used_is_said_before_the_start(authority: Authority, tmp_path: Path) -> None:
    """A key of another certificate, a file that is none, and half of a pair are errors that name the file."""
    one, other = authority.issue("one.example.org"), authority.issue("other.example.org")
    text = tmp_path / "text.pem"
    text.write_text("no certificate", encoding="utf-8")

    with pytest.raises(ConfigurationError, match=r"one.example.org.pem.*other.example.org.key.*cannot be used"):
        ServerTls(one.file, other.key)
    with pytest.raises(ConfigurationError, match=r"text.pem' cannot be used"):
        ServerTls(one.file, one.key, client_ca=text)
    with pytest.raises(ConfigurationError, match="needs its key"):
        ClientTls(authority.file, one.file)
    serving = CliRunner().invoke(cli, ["serve", "--repository", str(tmp_path), "--tls-certificate", str(one.file)])
    assert "both --tls-certificate and --tls-key" in str(serving.exception)
    asking = CliRunner().invoke(cli, ["versions", "ctr", *tls_flags(one)])
    assert "need --tls-ca" in str(asking.exception)


@pytest.mark.parametrize("name", ["localhost", "*.example.org", "127.0.0.1"])
def test_the_launcher_knows_a_name_that_its_certificate_is_good_for(authority: Authority, name: str) -> None:
    """The launcher's own client expects the certificate's name, not the address that it calls."""
    issued = authority.ca.issue_cert(name)
    certificate, key = authority.folder / "certificate.pem", authority.folder / "key.pem"
    certificate.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    key.write_bytes(issued.private_key_pem.bytes())

    assert ServerTls(certificate, key).own_client().server_name == name.replace("*", "hotrow")
