"""The copy of a collection: whatever a server sends, a reader of the change sets knows the server's
objects."""

from hypothesis import given
from hypothesis import strategies as st

from fairlead.kube.object_cache import ObjectCache
from fairlead.kube.objects import ObjectKey, Service, ServiceMeta
from fairlead.kube.watch_events import Item

KEYS = [ObjectKey("default", name) for name in "abc"]


def item(key: ObjectKey, label: int, version: int, *, gone: bool = False) -> Item[Service]:
    metadata = ServiceMeta(
        key.name, key.namespace, resource_version=str(version), labels={"is": str(label)}
    )
    return Item(key, str(version), Service(metadata), gone)


ITEMS = st.tuples(st.sampled_from(KEYS), st.integers(0, 2), st.booleans())
STEPS = st.lists(
    st.one_of(
        ITEMS.map(lambda told: ("item", told)),
        st.just(("begin", None)),
        st.just(("complete", None)),
        st.just(("drop", None)),
        st.just(("take", None)),
    ),
    max_size=40,
)


@given(STEPS)
def test_the_change_sets_add_up_to_the_servers_objects(
    steps: list[tuple[str, tuple[ObjectKey, int, bool] | None]],
) -> None:
    cache: ObjectCache[Service] = ObjectCache()
    truth: dict[ObjectKey, int] = {}
    listed: dict[ObjectKey, int] | None = None
    view: dict[ObjectKey, int] = {}
    for version, (step, told) in enumerate([*steps, ("take", None)]):
        if step == "item":
            assert told is not None
            key, label, gone = told
            cache.process(item(key, label, version, gone=gone))
            target = truth if listed is None else listed
            if gone:
                target.pop(key, None)
            else:
                target[key] = label
        elif step == "begin":
            cache.begin_list()
            listed = {}
        elif step == "drop":
            cache.drop_list()
            listed = None
        elif step == "complete" and listed is not None:
            cache.complete_list()
            truth, listed = listed, None
        elif step == "take":
            for key, value in cache.take().items():
                if value is None:
                    del view[key]  # a KeyError if an unknown object is reported as deleted
                else:
                    view[key] = int(value.metadata.labels["is"])
            assert view == truth
            assert {
                key: int(value.metadata.labels["is"]) for key, value in cache.objects.items()
            } == truth


def test_only_differences_are_reported() -> None:
    cache: ObjectCache[Service] = ObjectCache()
    cache.process(item(KEYS[0], 1, 1))
    cache.take()
    cache.process(item(KEYS[0], 1, 2))
    assert cache.take() == {}
    assert cache.objects[KEYS[0]].metadata.resource_version == "2"
    cache.begin_list()
    cache.process(item(KEYS[0], 1, 3))
    cache.process(item(KEYS[1], 1, 4))
    cache.complete_list()
    assert cache.take().keys() == {KEYS[1]}
