"""One guest for all tests of one host, one pair for all of two: a boot takes long."""

from collections.abc import Iterator

import pytest

from tests.rdma.hosts import Host, free_port, one, two


@pytest.fixture(scope="session", autouse=True)
def _asked_for(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--rdma"):
        pytest.skip("guests take minutes: `make test-rdma` runs them")


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    """One guest, with rxe0 on a network of its own."""
    with one(tmp_path_factory.mktemp("out")) as found:
        yield found


@pytest.fixture(scope="session")
def hosts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Host, Host]]:
    """Two guests on a wire."""
    with two(tmp_path_factory.mktemp("out"), free_port()) as found:
        yield found
