"""What comes to nothing elsewhere works where nothing is secret: the attackers do what they say."""

from ...store.stores import JOB, open_store
from .attacking import NOTHING_RECORDED

IN_VAIN = {"replay", "malformed", "huge", "pickles"}
KINDS = [
    "join as rank 1",
    "join as a watcher",
    "count the keys",
    "write a key",
    "delete a key",
    "false notice",
    *IN_VAIN,
]


def test_attackers_get_in_where_nothing_is_secret(scene):
    with open_store("tcp", secret=None) as store:
        member = store.client()
        public = {"url": f"tcp://127.0.0.1:{store.address[1]}", "job": JOB, "recorded": NOTHING_RECORDED}
        with scene.attackers(([], scene.settings(public, kinds=KINDS, tries=1))) as results:
            pass
        assert member.check([b"distman/failure"])
    (found,) = results
    assert set(found["results"]) == set(KINDS)
    assert all(reached for reached, _ in found["results"].values())
    assert {kind for kind, (_, gains) in found["results"].items() if not gains} == IN_VAIN
