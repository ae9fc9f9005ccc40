"""What a process needs before it meets the others."""

import resource

import pytest

from distman._rendezvous.join import allow_open_files


@pytest.fixture
def limits():
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_limit_of_open_files_grows_as_far_as_it_may(limits):
    _, hard = limits
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    allow_open_files(700)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (700, hard)
    allow_open_files(300)
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (700, hard)
    allow_open_files(10**12)
    assert hard == resource.RLIM_INFINITY or resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)
